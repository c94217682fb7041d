#pragma once

#include <string>
#include <vector>

#include <seqmix/kernels/reference/routing.hpp>
#include <seqmix/tensor/device.hpp>

/// The reference attention: plain loops for any selector and any scalar, dual numbers among them. It is what the
/// fast kernels are compared with, and run on dual numbers it is the gradient of every selector's surrogate.
namespace seqmix::inline v0::kernels {

namespace reference_detail {

/// The functions of a selector, so that the loops are compiled once per scalar instead of once per selector.
template <scalar T>
struct selector_functions {
  which_spec which;
  how_spec how;
  key_ranges (*blocks)(index_t query, index_t choice, selection const& select);
  void (*weights)(T const* raw, T const* bias, index_t n, selector_knobs const& knobs, T* on_values, T* on_stopped);
  index_t (*choose)(T const* raw, T const* bias, index_t n, selector_knobs const& knobs);  ///< null unless hard
};

template <class Which, class How, scalar T>
selector_functions<T> functions_of() {
  static_assert(
      !Which::spec.routed || (!How::spec.hard && !How::spec.multiplies_decay),
      "seqmix selector: a selector that chooses chunks reads them with softmax weights; take selectors::softmax, "
      "or selectors::all for linear and top1 weights");
  selector_functions<T> f{Which::spec, How::spec, &Which::blocks, &How::template weights<T>, nullptr};
  if constexpr (How::spec.hard) f.choose = &How::template choose<T>;
  return f;
}

/// A gate whose decay does not depend on the token.
template <class T>
bool constant_gate(attention_input<T> const& in) noexcept {
  return in.g_rhk && in.g_rhk.stride[0] == 0;
}

template <class T>
void expect_past(attention_shape const& s, attention_input<T> const& in) {
  index_t longest = 0;
  for (index_t n = 0; n < s.seq.count(); ++n) {
    if (in.past(n) < 0)
      throw shape_error("seqmix: attention: past_length of sequence " + std::to_string(n) +
                        " must not be negative, got " + std::to_string(in.past(n)));
    longest = in.past(n) > longest ? in.past(n) : longest;
  }
  if (longest == 0) return;
  auto const held = [&](char const* what, auto const& past, index_t heads, index_t dim) {
    expect_shape(what, past, {s.seq.count(), -1, heads, dim});
    if (past.extent[1] < longest)
      throw shape_error(std::string("seqmix: ") + what + ": expected room for " + std::to_string(longest) +
                        " tokens, got " + std::to_string(past.extent[1]));
  };
  held("attention past_k", in.past_k_nlhk, s.key_heads, s.key_dim);
  held("attention past_v", in.past_v_nlhv, s.value_heads, s.value_dim);
  if (in.g_rhk && !constant_gate(in)) held("attention past_g", in.past_g_nlhk, s.gate_heads, in.g_rhk.extent[2]);
}

template <class T>
void expect_shapes(attention_shape const& s, how_spec const& how, attention_input<T> const& in, view3<T> o_rhv,
                   attention_record const& record) {
  index_t const rows = s.seq.rows();
  expect_shape<T const, 3>("attention q", in.q_rhk, {rows, s.heads, s.key_dim});
  if (in.queries_alone) throw value_error("seqmix: attention: the reference reads rows that bring their own keys");
  expect_shape<T const, 3>("attention k", in.k_rhk, {rows, s.key_heads, s.key_dim});
  expect_shape<T const, 3>("attention v", in.v_rhv, {rows, s.value_heads, s.value_dim});
  expect_shape<T, 3>("attention o", o_rhv, {rows, s.heads, s.value_dim});
  if (record.choice_rh) expect_shape<index_t, 2>("attention choice", record.choice_rh, {rows, s.heads});
  if (record.lse_rh) expect_shape<double, 2>("attention lse", record.lse_rh, {rows, s.heads});
  if (in.g_rhk) {
    bool const one_row = constant_gate(in) && in.g_rhk.extent[0] == 1;
    bool const per_channel = how.multiplies_decay && !in.rate_hk && in.g_rhk.extent[2] != 1;
    expect_shape<T const, 3>("attention g", in.g_rhk,
                             {one_row ? 1 : rows, s.gate_heads, per_channel ? s.key_dim : 1});
  }
  if (in.rate_hk && !how.multiplies_decay)
    throw value_error("seqmix: attention: decay rates are for a gate per key channel under linear weights");
  if (in.rate_hk) expect_shape<T const, 2>("attention decay rate", in.rate_hk, {s.gate_heads, s.key_dim});
  if (record.choices_rhk) expect_shape<index_t, 3>("attention choices", record.choices_rhk, {rows, s.heads, -1});
  validate_sink(s, how, in.sink_h);
  expect_past(s, in);
}

/// Log-decays are bounded token by token, so that every sum of them is finite; the derivative is 0 where the bound
/// acts.
template <scalar T>
T bounded_decay(T const& g, how_spec const& how) {
  if (how.multiplies_decay) return bounded_log_decay(g);
  constexpr auto bound = real_of<T>(-1e4);
  return value_of(g) < bound ? T(bound) : g;
}

/// Complete chunks in place of their tokens: the means of keys and values.
template <scalar T>
void compress(head_tokens<T>& head, index_t chunk) {
  index_t const count = head.length / chunk;
  auto const average = [&](std::vector<T>& x, index_t dim) {
    std::vector<T> means;
    for (index_t c = 0; c < count; ++c)
      for (index_t i = 0; i < dim; ++i) {
        T sum(0);
        for (index_t j = c * chunk; j < (c + 1) * chunk; ++j) sum += x[std::size_t(j * dim + i)];
        means.push_back(sum / T(double(chunk)));
      }
    x = means;
  };
  average(head.key, head.key_dim);
  average(head.value, head.value_dim);
  head.length = count;
}

/// A decay per key channel from one step per token: the products with the channels' rates.
template <scalar T>
void multiply_rates(head_tokens<T>& head, view2<T const> rate_hk, index_t h) {
  std::vector<T> products;
  for (auto const& step : head.decay)
    for (index_t c = 0; c < head.key_dim; ++c) products.push_back(step * rate_hk(h, c));
  head.decay = products;
  head.decay_dim = head.key_dim;
}

/// Everything query head h of sequence n reads.
template <scalar T>
head_tokens<T> gather_head(attention_shape const& s, which_spec const& which, how_spec const& how,
                           attention_input<T> const& in, index_t n, index_t h) {
  head_tokens<T> head;
  head.past = in.past(n);
  head.length = head.past + s.seq.length(n);
  head.key_dim = s.key_dim;
  head.value_dim = s.value_dim;
  head.decay_dim = in.g_rhk ? in.g_rhk.extent[2] : 0;
  auto const copy = [&](std::vector<T>& to, view3<T const> rows, view4<T const> past, index_t heads, index_t dim,
                        bool constant) {
    index_t const from = h / (s.heads / heads);
    for (index_t j = 0; j < head.length; ++j)
      for (index_t c = 0; c < dim; ++c) {
        if (constant)
          to.push_back(rows(0, from, c));
        else if (j < head.past)
          to.push_back(past(n, j, from, c));
        else
          to.push_back(rows(s.seq.begin(n) + j - head.past, from, c));
      }
  };
  copy(head.key, in.k_rhk, in.past_k_nlhk, s.key_heads, s.key_dim, false);
  copy(head.value, in.v_rhv, in.past_v_nlhv, s.value_heads, s.value_dim, false);
  copy(head.decay, in.g_rhk, in.past_g_nlhk, s.gate_heads, head.decay_dim, constant_gate(in));
  if (in.rate_hk) multiply_rates(head, in.rate_hk, h / (s.heads / s.gate_heads));
  for (auto& g : head.decay) g = bounded_decay(g, how);
  for (index_t r = s.seq.begin(n); r < s.seq.end(n); ++r)
    for (index_t c = 0; c < s.key_dim; ++c) head.query.push_back(in.q_rhk(r, h, c));
  if (in.sink_h) head.sink.push_back(in.sink_h(h));
  if (which.compressed) compress(head, s.select.chunk);
  return head;
}

/// The scores of one query. A gate per head gives the bias G_t - G_j = sum of g over (j, t]; a gate per channel
/// decays each product inside the dot product instead. Sums of g start at the query, so that near keys lose no
/// digits.
template <scalar T>
score_row<T> score(attention_shape const& s, head_tokens<T> const& head, index_t position) {
  bool const per_channel = head.decay_dim > 1;
  score_row<T> row;
  row.position = position;
  index_t const keys = (std::min)(position + 1, head.length);
  row.raw.resize(std::size_t(keys));
  if (head.decay_dim == 1) row.bias.resize(row.raw.size());
  std::vector<T> decay(std::size_t(head.decay_dim), T(0));
  std::vector<T> query(head.query_at(position), head.query_at(position) + head.key_dim);
  for (index_t j = keys - 1; j >= 0; --j) {
    if (per_channel)
      for (std::size_t c = 0; c < query.size(); ++c) query[c] = head.query_at(position)[c] * exp(decay[c]);
    row.raw[std::size_t(j)] = T(s.scale) * dot(query.data(), head.key_at(j), head.key_dim);
    if (!row.bias.empty()) row.bias[std::size_t(j)] = decay[0];
    for (std::size_t c = 0; c < decay.size(); ++c) decay[c] += head.decay_at(j)[c];
  }
  return row;
}

/// What one query reads from the keys it sees.
template <scalar T>
struct reading {
  std::vector<T> o;
  index_t key = -1;  ///< the choice of a hard selector
};

template <scalar T>
bool is_zero(T const& x) noexcept {
  bool zero = value_of(x) == 0;
  if constexpr (is_dual<T>)
    for (auto const& slope : x.slope) zero = zero && slope == 0;
  return zero;
}

/// A choice made by a NaN must show.
template <scalar T>
void spoil(std::vector<T>& o) {
  for (auto& x : o) x = T(std::numeric_limits<real_of<T>>::quiet_NaN());
}

/// The keys that a query sees with its choices, ascending.
template <scalar T>
std::vector<index_t> visible_keys(selector_functions<T> const& selector, attention_shape const& s,
                                  score_row<T> const& row, std::vector<index_t> const& chunks) {
  std::vector<bool> seen(row.raw.size(), false);
  auto const see = [&](index_t choice) {
    auto const ranges = selector.blocks(row.position, choice, s.select);
    for (int i = 0; i < ranges.count; ++i)
      for (index_t j = ranges.range[std::size_t(i)].begin; j < ranges.range[std::size_t(i)].end; ++j)
        seen[std::size_t(j)] = true;
  };
  see(-1);
  for (index_t c : chunks) see(c);
  std::vector<index_t> keys;
  for (std::size_t j = 0; j < seen.size(); ++j)
    if (seen[j]) keys.push_back(index_t(j));
  return keys;
}

/// o = sum_j w_j v_j + sum_j c_j stop(v_j) over the visible keys; zero when there are none. A hard choice gathers:
/// values it does not take cannot spoil it, infinite or NaN. A sink is one more score, behind the others, without a
/// value: neither temperature nor gate touches it.
template <scalar T>
reading<T> read(selector_functions<T> const& selector, attention_shape const& s, head_tokens<T> const& head,
                score_row<T> const& row, std::vector<index_t> const& keys) {
  std::vector<T> raw, bias;
  for (index_t j : keys) {
    raw.push_back(row.raw[std::size_t(j)]);
    if (!row.bias.empty()) bias.push_back(row.bias[std::size_t(j)]);
  }
  if (!head.sink.empty()) {
    bias.resize(raw.size(), T(0));
    raw.push_back(T(0));
    bias.push_back(head.sink.front());
  }
  auto const n = index_t(raw.size());
  T const* const bias_or_none = bias.empty() ? nullptr : bias.data();
  std::vector<T> on_values(raw.size()), on_stopped(raw.size());
  selector.weights(raw.data(), bias_or_none, n, s.knobs, on_values.data(), on_stopped.data());

  reading<T> result;
  result.o.assign(std::size_t(s.value_dim), T(0));
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (selector.how.hard && is_zero(on_values[i]) && is_zero(on_stopped[i])) continue;
    T const* const value = head.value_at(keys[i]);
    for (std::size_t c = 0; c < result.o.size(); ++c)
      result.o[c] += on_values[i] * value[c] + on_stopped[i] * stop(value[c]);
  }
  if (selector.choose && n > 0) {
    result.key = keys[std::size_t(selector.choose(raw.data(), bias_or_none, n, s.knobs))];
    auto const chosen = value_of(row.score(result.key, s.knobs.forward()));
    if (chosen != chosen) spoil(result.o);
  }
  return result;
}

/// The output of a routed selector given its choice, as a surrogate whose derivative is the selector's gradient.
/// O is what the query reads with its choices S, O_c what it would read had it chosen c alone, P the softmax over
/// the candidates:
///   index_constant          O
///   chunk_straight_through  O + sum_c (P_c - stop(P_c)) stop(O_c), where there are more candidates than choices
///   gated                   (sum of P_c over S) O
template <scalar T>
std::vector<T> routed_output(selector_functions<T> const& selector, attention_shape const& s,
                             head_tokens<T> const& head, score_row<T> const& row, chunk_choice const& choice) {
  auto const& which = selector.which;
  auto const output_of = [&](std::vector<index_t> const& chunks) {
    return read(selector, s, head, row, visible_keys(selector, s, row, chunks)).o;
  };
  auto o = output_of(choice.chunks);
  if (choice.chunks.empty()) return o;
  if (choice.is_nan) {
    spoil(o);
    return o;
  }
  auto const count = candidate_count(which, row.position, s.select.chunk);
  if (which.gradient == chunk_gradient::gated) {
    auto const p = probabilities(chunk_scores(which.score, s, head, row, count));
    T weight(0);
    for (index_t c : choice.chunks) weight += p[std::size_t(c)];
    for (auto& x : o) x *= weight;
  }
  bool const was_open = count > index_t(choice.chunks.size());
  if (which.gradient == chunk_gradient::chunk_straight_through && is_dual<T> && was_open) {
    bool const by_mass = which.probability == chunk_probability::mass;
    auto const p =
        probabilities(chunk_scores(by_mass ? chunk_score::exact_mass : which.score, s, head, row, count));
    for (index_t c = 0; c < count; ++c) {
      auto const other = output_of({c});
      T const moved = p[std::size_t(c)] - stop(p[std::size_t(c)]);
      for (std::size_t i = 0; i < o.size(); ++i) o[i] += moved * stop(other[i]);
    }
  }
  return o;
}

template <scalar T>
double visible_lse(attention_shape const& s, head_tokens<T> const& head, score_row<T> const& row,
                   std::vector<index_t> const& keys) {
  std::vector<double> scores;
  for (index_t j : keys) scores.push_back(double(value_of(row.score(j, s.knobs.temperature))));
  for (auto const& sink : head.sink) scores.push_back(double(value_of(sink)));
  return log_sum_exp(scores);
}

inline void record_choices(attention_record const& record, index_t r, index_t h, chunk_choice const& choice) {
  for (index_t i = 0; i < record.choices_rhk.extent[2] && record.choices_rhk; ++i)
    record.choices_rhk(r, h, i) = i < index_t(choice.chunks.size()) ? choice.chunks[std::size_t(i)] : -1;
}

template <scalar T>
void attend(selector_functions<T> const& selector, attention_shape const& s, attention_input<T> const& in,
            view3<T> o_rhv, attention_record const& record) {
  validate(s, selector.which);
  expect_shapes(s, selector.how, in, o_rhv, record);
  std::vector<head_tokens<T>> heads(std::size_t(s.heads));
  std::vector<score_row<T>> rows(heads.size());
  for (index_t n = 0; n < s.seq.count(); ++n) {
    for (index_t h = 0; h < s.heads; ++h)
      heads[std::size_t(h)] = gather_head(s, selector.which, selector.how, in, n, h);
    for (index_t local = 0; local < s.seq.length(n); ++local) {
      index_t const position = in.past(n) + local;
      for (std::size_t h = 0; h < heads.size(); ++h) rows[h] = score(s, heads[h], position);
      for (index_t h = 0; h < s.heads; ++h) {
        auto const& head = heads[std::size_t(h)];
        auto const& row = rows[std::size_t(h)];
        chunk_choice choice;
        reading<T> result;
        if (selector.which.routed) {
          choice = choose_chunks(selector.which, s, heads, rows, h);
          result.o = routed_output(selector, s, head, row, choice);
        } else {
          result = read(selector, s, head, row, visible_keys(selector, s, row, {}));
        }
        index_t const r = s.seq.begin(n) + local;
        for (index_t c = 0; c < s.value_dim; ++c) o_rhv(r, h, c) = result.o[std::size_t(c)];
        if (record.choice_rh) record.choice_rh(r, h) = selector.which.routed ? choice.best() : result.key;
        record_choices(record, r, h, choice);
        if (record.lse_rh)
          record.lse_rh(r, h) = visible_lse(s, head, row, visible_keys(selector, s, row, choice.chunks));
      }
    }
  }
}

}  // namespace reference_detail

/// Attention of every query over its own sequence, by the selector's definition and nothing else.
/// The query at position t (the past counts) sees keys 0 .. t as Which says; raw_j = scale q.k_j; a gate per head
/// hands How the bias G_t - G_j (0 for j = t), a gate per channel, for weights that multiply decays, sits inside
/// the dot product, its decays as they are or step times rate; of a compressing Which, keys and values are the
/// means of complete chunks. A row that sees nothing is zero; a NaN among the scores it sees, or chooses by, makes
/// it NaN. Shapes:  q, k, v, g and the past as attention_input says -> o [R,H,V]; any strides. Record:  choice =
/// key or best chunk inside the sequence, -1 for none; lse = log-sum-exp over the visible keys at
///          knobs.temperature (of no meaning for linear weights).
/// Grad:    on dual numbers the derivative of o is the selector's documented surrogate.
/// Errors:  shape_error, value_error (see validate).   Work: O(T^2) a head, with allocation; for tests, not for
/// speed.
template <class Which, class How, scalar T>
void attention_forward(device::reference, attention_shape const& shape, attention_input<T> const& in,
                       view3<T> o_rhv, attention_record const& record) {
  reference_detail::attend(reference_detail::functions_of<Which, How, T>(), shape, in, o_rhv, record);
}

}  // namespace seqmix::inline v0::kernels
