#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <vector>

#include <seqmix/kernels/attention_shape.hpp>

/// How a routed selector finds its chunks, in plain loops: scores of the chunks, probabilities, the choice.
/// Part of the reference attention.
namespace seqmix::inline v0::kernels::reference_detail {

/// The tokens of one head of one sequence without gaps: those of the past, then the rows of the call.
template <scalar T>
struct head_tokens {
  index_t past = 0;    ///< tokens before the first row
  index_t length = 0;  ///< tokens in all
  index_t key_dim = 0, value_dim = 0;
  index_t decay_dim = 0;             ///< 0: no gate, 1: one per head, key_dim: one per channel
  std::vector<T> query;              ///< [length - past, key_dim]
  std::vector<T> key, value, decay;  ///< [length, dim]
  std::vector<T> sink;               ///< one number, or none

  T const* query_at(index_t position) const noexcept { return query.data() + (position - past) * key_dim; }
  T const* key_at(index_t position) const noexcept { return key.data() + position * key_dim; }
  T const* value_at(index_t position) const noexcept { return value.data() + position * value_dim; }
  T const* decay_at(index_t position) const noexcept { return decay.data() + position * decay_dim; }
};

/// scale q.k of the query at `position` with every key up to its own, and what its gate adds to each.
template <scalar T>
struct score_row {
  index_t position = 0;
  std::vector<T> raw;
  std::vector<T> bias;  ///< empty: none

  T score(index_t key, double temperature) const {
    auto const j = std::size_t(key);
    return raw[j] / T(temperature) + (bias.empty() ? T(0) : bias[j]);
  }
};

template <scalar T>
using real_of = decltype(value_of(T{}));

template <scalar T>
T dot(T const* a, T const* b, index_t n) noexcept {
  T sum(0);
  for (index_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

/// log sum_j exp(s_j): -inf where every s_j is, NaN where one is.
template <scalar T>
T log_sum_exp(std::vector<T> const& s) {
  constexpr auto lowest = -std::numeric_limits<real_of<T>>::infinity();
  auto most = lowest;
  for (auto const& x : s) most = value_of(x) > most ? value_of(x) : most;
  T sum(0);
  for (auto const& x : s) sum += value_of(x) == lowest ? T(0) : exp(x - T(most));
  return value_of(sum) == real_of<T>(0) ? T(lowest) : T(most) + log(sum);
}

/// Softmax over the candidates; all zero where every score is -inf.
template <scalar T>
std::vector<T> probabilities(std::vector<T> p) {
  constexpr auto lowest = -std::numeric_limits<real_of<T>>::infinity();
  auto most = lowest;
  for (auto const& x : p) most = value_of(x) > most ? value_of(x) : most;
  T sum(0);
  for (auto& x : p) {
    x = value_of(x) == lowest ? T(0) : exp(x - T(most));
    sum += x;
  }
  if (value_of(sum) != real_of<T>(0))
    for (auto& x : p) x /= sum;
  return p;
}

/// Chunks 0 .. count-1 compete for a query: all before its own, and its own where that is a candidate.
inline index_t candidate_count(which_spec const& which, index_t position, index_t chunk) noexcept {
  return position / chunk + (which.own_competes ? 1 : 0);
}

/// The keys of a chunk that the query may see.
inline key_range visible_chunk(index_t c, index_t position, index_t chunk) noexcept {
  index_t const end = (c + 1) * chunk;
  return {c * chunk, end < position + 1 ? end : position + 1};
}

/// scale q.(mean of the keys) / temperature, without the position bias unless select.router_bias adds its mean over
/// the keys. The mean is a sum and one true division, so that equal keys keep their bits.
template <scalar T>
T mean_key_score(attention_shape const& shape, head_tokens<T> const& head, score_row<T> const& row,
                 key_range keys) {
  std::vector<T> mean(std::size_t(head.key_dim), T(0));
  for (index_t j = keys.begin; j < keys.end; ++j)
    for (index_t c = 0; c < head.key_dim; ++c) mean[std::size_t(c)] += head.key_at(j)[c];
  for (auto& m : mean) m /= T(double(keys.size()));
  T const score =
      T(shape.scale) * dot(head.query_at(row.position), mean.data(), head.key_dim) / T(shape.knobs.temperature);
  if (!shape.select.router_bias || row.bias.empty()) return score;
  T bias(0);
  for (index_t j = keys.begin; j < keys.end; ++j) bias += row.bias[std::size_t(j)];
  return score + bias / T(double(keys.size()));
}

/// L = log sum exp of the scores, position bias included.
template <scalar T>
T mass_score(attention_shape const& shape, score_row<T> const& row, key_range keys) {
  std::vector<T> scores;
  for (index_t j = keys.begin; j < keys.end; ++j) scores.push_back(row.score(j, shape.knobs.temperature));
  return log_sum_exp(scores);
}

/// The greatest score; its derivative is that of the lowest index among equals. NaN when one is.
template <scalar T>
T max_score(attention_shape const& shape, score_row<T> const& row, key_range keys) {
  T most = row.score(keys.begin, shape.knobs.temperature);
  for (index_t j = keys.begin + 1; j < keys.end; ++j) {
    T const s = row.score(j, shape.knobs.temperature);
    bool const is_nan = value_of(s) != value_of(s);
    if (value_of(s) > value_of(most) || is_nan) most = s;
    if (is_nan) break;
  }
  return most;
}

/// The router scores of `count` chunks.
template <scalar T>
std::vector<T> chunk_scores(chunk_score kind, attention_shape const& shape, head_tokens<T> const& head,
                            score_row<T> const& row, index_t count) {
  std::vector<T> scores;
  for (index_t c = 0; c < count; ++c) {
    auto const keys = visible_chunk(c, row.position, shape.select.chunk);
    switch (kind) {
    case chunk_score::mean_key:
    case chunk_score::mean_key_prefix:
      scores.push_back(mean_key_score(shape, head, row, keys));
      break;
    case chunk_score::exact_mass:
      scores.push_back(mass_score(shape, row, keys));
      break;
    case chunk_score::exact_max:
      scores.push_back(max_score(shape, row, keys));
      break;
    }
  }
  return scores;
}

/// The chosen chunks, the best first; none without candidates. A NaN among the scores is chosen alone, so that the
/// row can show it.
struct chunk_choice {
  std::vector<index_t> chunks;
  bool is_nan = false;

  index_t best() const noexcept { return chunks.empty() ? -1 : chunks.front(); }
  bool contains(index_t c) const noexcept { return std::find(chunks.begin(), chunks.end(), c) != chunks.end(); }
};

/// The `most` greatest values, the lowest index first among equals.
template <scalar T>
chunk_choice first_greatest(std::vector<T> const& values, index_t most) {
  chunk_choice choice;
  for (std::size_t c = 0; c < values.size(); ++c) {
    if (value_of(values[c]) != value_of(values[c])) return {{index_t(c)}, true};
    choice.chunks.push_back(index_t(c));
  }
  std::stable_sort(choice.chunks.begin(), choice.chunks.end(), [&](index_t a, index_t b) {
    return value_of(values[std::size_t(a)]) > value_of(values[std::size_t(b)]);
  });
  if (index_t(choice.chunks.size()) > most) choice.chunks.resize(std::size_t(most));
  return choice;
}

inline bool is_forced(which_spec const& which, index_t c, index_t own) noexcept {
  return which.forced == forced_chunks::first_and_previous && (c == 0 || c == own - 1);
}

/// The weight of every candidate in the choice of query head h: its score, or with a shared choice the sum of
/// softmax(scores) over all heads that read the same key head.
template <scalar T>
std::vector<T> choice_values(which_spec const& which, attention_shape const& shape,
                             std::vector<head_tokens<T>> const& heads, std::vector<score_row<T>> const& rows,
                             index_t h) {
  index_t const position = rows[std::size_t(h)].position;
  auto const count = candidate_count(which, position, shape.select.chunk);
  auto const scored = which.by_compression ? (position + 1) / shape.select.chunk : count;
  auto const scores_of = [&](index_t head) {
    return chunk_scores(which.score, shape, heads[std::size_t(head)], rows[std::size_t(head)], scored);
  };
  if (!choose_together(which, shape.select)) return scores_of(h);
  index_t const group = shape.heads / shape.key_heads;
  index_t const first = h / group * group;
  std::vector<T> sum(std::size_t(count), T(0));
  for (index_t head = first; head < first + group; ++head) {
    auto const p = probabilities(scores_of(head));
    for (std::size_t c = 0; c < sum.size(); ++c) sum[c] += p[c];
  }
  return sum;
}

template <scalar T>
chunk_choice choose_chunks(which_spec const& which, attention_shape const& shape,
                           std::vector<head_tokens<T>> const& heads, std::vector<score_row<T>> const& rows,
                           index_t h) {
  auto values = choice_values(which, shape, heads, rows, h);
  for (std::size_t c = 0; c < values.size(); ++c)
    if (is_forced(which, index_t(c), index_t(values.size())) && value_of(values[c]) == value_of(values[c]))
      values[c] = T(std::numeric_limits<real_of<T>>::infinity());
  return first_greatest(values, choices_per_query(which, shape.select));
}

}  // namespace seqmix::inline v0::kernels::reference_detail
