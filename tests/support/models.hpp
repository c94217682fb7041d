#pragma once

#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "random_numbers.hpp"
#include <seqmix/models/language_model.hpp>

/// Whole models under test: two layers of one kind, and the laws and gradient oracles on them. A user's own layer
/// is checked the same way: `check_model_laws<my_layer>(options)`.
namespace seqmix::testing {

inline std::vector<index_t> const& model_offsets() {
  static std::vector<index_t> const offsets{0, 0, 5, 9, 26};
  return offsets;
}

/// What two layers of one kind, or one pattern of several kinds, make.
template <class Layer>
struct tested {
  using pattern_type = pattern<Layer>;
  using options = typename Layer::options;
  static std::string name() { return Layer::name(); }
  static std::tuple<options> all(options const& o) { return {o}; }
  static constexpr index_t layers = 2;
};
template <class... Layers>
struct tested<pattern<Layers...>> {
  using pattern_type = pattern<Layers...>;
  using options = std::tuple<typename Layers::options...>;
  static std::string name() { return language_model<pattern<Layers...>>::name(); }
  static options const& all(options const& o) { return o; }
  static constexpr index_t layers = index_t(sizeof...(Layers));
};
template <class Layer>
using tested_options = typename tested<Layer>::options;

/// A small model, its parameters at a size where the loss is moderate, tokens and labels.
template <class Layer, class T = double>
struct small_model {
  using model_type = language_model<typename tested<Layer>::pattern_type>;
  static constexpr index_t vocabulary = 11, d_model = 16;

  model_type model;
  buffer<T> parameters;
  std::vector<std::int32_t> tokens, labels;

  explicit small_model(tested_options<Layer> const& o, index_t rows = model_offsets().back())
      : model(settings(o)), parameters(model.parameters().size()) {
    model.parameters().initialise(3, parameters.data());
    for (auto const& p : model.parameters().all())
      for (index_t i = 0; p.weight_decay && i < p.size(); ++i)
        parameters[p.offset + i] *= T(p.layers > 0 && p.name.starts_with("layers") ? 8 : 1);
    random_numbers random(5);
    for (index_t r = 0; r < rows; ++r) {
      tokens.push_back(std::int32_t(random.below(vocabulary)));
      labels.push_back(r % 7 == 3 ? -100 : std::int32_t(random.below(vocabulary)));
    }
  }
  static typename model_type::options settings(tested_options<Layer> const& o) {
    typename model_type::options m{.vocabulary = vocabulary, .d_model = d_model, .layers = tested<Layer>::layers};
    m.embedding = init::normal(0.4);
    m.layer = tested<Layer>::all(o);
    return m;
  }
  index_t size() const { return parameters.size(); }
};

template <class T, class Model>
std::vector<T> logits_of(Model& m, sequences seq, T const* parameters, std::int32_t const* tokens,
                         int threads = 2) {
  auto mem = m.template make_memory<T>(device::cpu{threads}, seq, {});
  m.forward(mem, parameters, tokens);
  return {mem.logits_rv.data, mem.logits_rv.data + mem.logits_rv.size()};
}

/// Backward of the mean loss, its value and how many labels counted.
template <class T>
struct model_gradient {
  buffer<T> d;
  double loss = 0.0;
  index_t counted = 0;
};
template <class Layer, class T>
model_gradient<T> gradient_of(small_model<Layer, T> const& m, sequences seq, int threads = 2) {
  auto mem = m.model.template make_memory<T>(device::cpu{threads}, seq, {.training = true});
  model_gradient<T> g{buffer<T>(m.size())};
  m.model.forward(mem, m.parameters.data(), m.tokens.data());
  auto const sum = m.model.loss(mem, m.labels.data(), 1.0);
  g.loss = sum.loss;
  g.counted = sum.counted;
  m.model.backward(mem, m.parameters.data(), m.tokens.data(), g.d.data());
  return g;
}

/// First oracle: forward on dual numbers gives the exact directional derivative of the surrogate; five random
/// directions over all parameters, two layers, packed sequences with an empty one among them.
template <class Layer>
void check_model_gradients(tested_options<Layer> const& o, double tolerance = 1e-10) {
  using number = dual<double, 1>;
  DOCTEST_CAPTURE(tested<Layer>::name());
  small_model<Layer> const m(o);
  auto const seq = sequences::packed(model_offsets());
  auto const g = gradient_of(m, seq);
  double const mean = g.loss / double(g.counted);
  DOCTEST_CHECK_MESSAGE((mean > 1.0 && mean < 6.0), "loss a label ", mean);
  auto mem = m.model.template make_memory<number>(device::reference{}, seq, {});
  random_numbers random(6);
  for (int direction = 0; direction < 5; ++direction) {
    buffer<number> p(m.size());
    double got = 0, absolute = 0;
    for (auto const& q : m.model.parameters().all())
      for (index_t i = q.offset; i < q.offset + q.size(); ++i) {
        p[i] = number(m.parameters[i]);
        p[i].slope[0] = q.trained ? random.normal() : 0.0;  // a fixed tensor need not have a derivative
        got += p[i].slope[0] * g.d[i];
        absolute += std::abs(p[i].slope[0] * g.d[i]);
      }
    m.model.forward(mem, p.data(), m.tokens.data());
    number loss;
    kernels::cross_entropy_forward(device::reference{}, view2<number const>(mem.logits_rv), m.labels.data(), &loss);
    DOCTEST_CHECK(std::abs(loss.value - g.loss) <= 1e-11 * g.loss);
    DOCTEST_CHECK_MESSAGE(std::abs(loss.slope[0] - got) <= tolerance * absolute, "direction ", direction,
                          ": backward gives ", got, ", dual numbers ", loss.slope[0], ", terms ", absolute);
  }
  // Every trained tensor is reached.
  for (auto const& q : m.model.parameters().all()) {
    if (!q.trained) continue;
    double most = 0;
    for (index_t i = q.offset; i < q.offset + q.size(); ++i) most = std::max(most, std::abs(g.d[i]));
    DOCTEST_CHECK_MESSAGE(most > 0, q.name, " has no gradient");
  }
}

/// Second oracle, for smooth layers: one central difference along a random direction.
template <class Layer>
void check_model_difference(tested_options<Layer> const& o, double tolerance = 1e-6) {
  DOCTEST_CAPTURE(tested<Layer>::name());
  small_model<Layer> const m(o);
  auto const seq = sequences::packed(model_offsets());
  auto const g = gradient_of(m, seq);
  random_numbers random(7);
  buffer<double> direction(m.size());
  double got = 0, length = 0;
  for (auto const& q : m.model.parameters().all())
    for (index_t i = q.offset; i < q.offset + q.size(); ++i) {
      direction[i] = q.trained ? random.normal() : 0.0;
      length += direction[i] * direction[i];
      got += direction[i] * g.d[i];
    }
  double const step = 1e-5 / std::sqrt(length);
  auto const loss_at = [&](double sign) {
    small_model<Layer> moved(o);
    for (index_t i = 0; i < moved.size(); ++i) moved.parameters[i] += sign * step * direction[i];
    return gradient_of(moved, seq).loss;
  };
  double const difference = (loss_at(1) - loss_at(-1)) / (2 * step);
  DOCTEST_CHECK_MESSAGE(std::abs(got - difference) <= tolerance * std::abs(difference), "backward gives ", got,
                        ", a central difference ", difference);
}

/// Training over chained pieces: with the state carried forward and its derivative handed back, the gradient is
/// that of one pass over the whole.
template <class Layer>
void check_model_pieces(tested_options<Layer> const& o, std::vector<index_t> const& pieces) {
  DOCTEST_CAPTURE(tested<Layer>::name());
  index_t length = 0;
  for (index_t count : pieces) length += count;
  small_model<Layer> const m(o, 2 * length);
  auto const whole = gradient_of(m, sequences::batch(2, length));
  using model_type = typename small_model<Layer>::model_type;
  struct piece {
    typename model_type::template memory<device::cpu, double> mem;
    std::vector<std::int32_t> tokens;
  };
  std::vector<piece> done;
  std::vector<typename model_type::template state<double>> states;
  auto const new_state = [&] { return m.model.template make_state<double>(2, length); };
  states.push_back(new_state());
  double loss = 0;
  for (index_t begin = 0; index_t count : pieces) {
    piece p{m.model.template make_memory<double>(device::cpu{2}, sequences::batch(2, count),
                                                 {.training = true, .capacity = length}),
            {}};
    std::vector<std::int32_t> labels;
    for (index_t n = 0; n < 2; ++n)
      for (index_t t = begin; t < begin + count; ++t) {
        p.tokens.push_back(m.tokens[std::size_t(n * length + t)]);
        labels.push_back(m.labels[std::size_t(n * length + t)]);
      }
    states.push_back(new_state());
    m.model.forward(p.mem, m.parameters.data(), p.tokens.data(), &states[states.size() - 2], &states.back());
    loss += m.model.loss(p.mem, labels.data(), 1.0).loss;
    done.push_back(std::move(p));
    begin += count;
  }
  DOCTEST_CHECK(std::abs(loss - whole.loss) <= 1e-12 * whole.loss);
  buffer<double> d(m.size());
  auto d_final = new_state();
  d_final.zero();
  for (std::size_t i = done.size(); i-- > 0;) {
    auto d_initial = new_state();
    d_initial.zero();
    m.model.backward(done[i].mem, m.parameters.data(), done[i].tokens.data(), d.data(), &states[i], &d_final,
                     &d_initial);
    d_final = std::move(d_initial);
  }
  double most = 0, size = 0;
  for (index_t i = 0; i < d.size(); ++i) {
    double const difference = std::abs(d[i] - whole.d[i]);
    if (!(difference <= most)) most = difference;
    size = std::max(size, std::abs(whole.d[i]));
  }
  DOCTEST_CHECK_MESSAGE(most <= 1e-12 * size, pieces.size(), " pieces: gradient off by ", most, " of ", size);
}

/// The laws of a whole model: causality, steps and cuts with a carried state, packed sequences, exchanged
/// sequences, threads. `exact` asks for equal bits where the arithmetic is the same.
template <class Layer, class T>
void check_model_laws(tested_options<Layer> const& o) {
  DOCTEST_CAPTURE(tested<Layer>::name());
  constexpr double tolerance = std::is_same_v<T, double> ? 1e-12 : 2e-5;
  constexpr index_t V = small_model<Layer, T>::vocabulary, length = 13;
  small_model<Layer, T> m(o, 2 * length);
  auto const difference = [](std::vector<T> const& a, std::vector<T> const& b) {
    double most = 0, size = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
      double const d = std::abs(double(a[i]) - double(b[i]));
      if (!(d <= most)) most = d;
      size = std::max(size, std::abs(double(b[i])));
    }
    return a.size() == b.size() ? most / size : 1.0;
  };
  auto const rows = [](std::vector<T> const& x, index_t begin, index_t count) {
    return std::vector<T>(x.begin() + begin * V, x.begin() + (begin + count) * V);
  };
  auto const pair = sequences::batch(2, length);
  auto const all = logits_of(m.model, pair, m.parameters.data(), m.tokens.data());

  {  // causality: equal bits before the changed token
    auto changed = m.tokens;
    for (index_t t : {1, 6, 12}) {
      changed[std::size_t(t)] = (m.tokens[std::size_t(t)] + 1) % std::int32_t(V);
      auto const now = logits_of(m.model, pair, m.parameters.data(), changed.data());
      DOCTEST_CHECK(rows(now, 0, t) == rows(all, 0, t));
      DOCTEST_CHECK(rows(now, t, 1) != rows(all, t, 1));
      DOCTEST_CHECK(rows(now, length, length) == rows(all, length, length));
      changed = m.tokens;
    }
  }
  for (auto const& cut :
       std::vector<std::vector<index_t>>{{13}, std::vector<index_t>(13, 1), {3, 10}, {6, 7}, {0, 13}, {12, 1}}) {
    auto state = m.model.template make_state<T>(2, length);
    std::vector<T> joined(all.size());
    index_t begin = 0;
    for (index_t count : cut) {
      auto mem = m.model.template make_memory<T>(device::cpu{2}, sequences::batch(2, count), {.capacity = length});
      std::vector<std::int32_t> piece;
      for (index_t n = 0; n < 2; ++n)
        for (index_t t = begin; t < begin + count; ++t) piece.push_back(m.tokens[std::size_t(n * length + t)]);
      m.model.forward(mem, m.parameters.data(), piece.data(), &state, &state);
      for (index_t n = 0; n < 2; ++n)
        std::copy_n(mem.logits_rv.data + n * count * V, count * V, joined.begin() + (n * length + begin) * V);
      begin += count;
    }
    DOCTEST_CHECK_MESSAGE(difference(joined, all) <= tolerance, cut.size(), " pieces, the first of ", cut[0],
                          " tokens");
    DOCTEST_CHECK(state.position == std::vector<index_t>{length, length});
  }
  {  // packed, with empty sequences, equals each alone
    std::vector<index_t> const offsets{0, 4, 4, 5, 13, 26};
    auto const packed = logits_of(m.model, sequences::packed(offsets), m.parameters.data(), m.tokens.data());
    for (std::size_t n = 0; n + 1 < offsets.size(); ++n) {
      index_t const count = offsets[n + 1] - offsets[n];
      auto const alone =
          logits_of(m.model, sequences::batch(1, count), m.parameters.data(), m.tokens.data() + offsets[n]);
      if (count > 0) DOCTEST_CHECK(difference(alone, rows(packed, offsets[n], count)) <= tolerance);
    }
  }
  {  // left padding: boundaries that begin behind it keep it out of convolution, shift, state and positions
    std::vector<index_t> const offsets{0, 4, 13, 20, 26};  // pads of 4 and 7 in front of two rows of 13
    auto const padded = logits_of(m.model, sequences::packed(offsets), m.parameters.data(), m.tokens.data());
    for (std::size_t n : {std::size_t(1), std::size_t(3)}) {
      index_t const count = offsets[n + 1] - offsets[n];
      auto const alone =
          logits_of(m.model, sequences::batch(1, count), m.parameters.data(), m.tokens.data() + offsets[n]);
      DOCTEST_CHECK(difference(alone, rows(padded, offsets[n], count)) <= tolerance);
    }
  }
  {  // exchanged sequences
    std::vector<std::int32_t> exchanged(m.tokens.begin() + length, m.tokens.end());
    exchanged.insert(exchanged.end(), m.tokens.begin(), m.tokens.begin() + length);
    auto const now = logits_of(m.model, pair, m.parameters.data(), exchanged.data());
    DOCTEST_CHECK(difference(rows(now, 0, length), rows(all, length, length)) <= tolerance);
    DOCTEST_CHECK(difference(rows(now, length, length), rows(all, 0, length)) <= tolerance);
  }
  if constexpr (std::is_same_v<T, double>)
    for (auto const& pieces : std::vector<std::vector<index_t>>{{7, 6}, {1, 0, 3, 9}})
      check_model_pieces<Layer>(o, pieces);
  {  // threads: the same bits, logits and gradients
    auto const one = gradient_of(m, pair, 1);
    for (int threads : {2, 3}) {
      DOCTEST_CHECK(logits_of(m.model, pair, m.parameters.data(), m.tokens.data(), threads) == all);
      auto const now = gradient_of(m, pair, threads);
      DOCTEST_CHECK(now.loss == one.loss);
      DOCTEST_CHECK(std::equal(now.d.begin(), now.d.end(), one.d.begin()));
    }
  }
}

}  // namespace seqmix::testing
