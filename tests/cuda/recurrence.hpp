#pragma once

#include <functional>
#include <memory>

#include "support/device_test.hpp"
#include <seqmix/kernels/cuda_kernels.hpp>
#include <seqmix/kernels/reference/recurrence.hpp>

/// One recurrence on the device and on the CPU in double, from the same stored numbers.
namespace seqmix::testing {

enum class decay { none, per_head, constant_head, per_channel, constant_channel, factored, constant_factored };

struct recurrence_setting {
  std::string name;
  std::vector<index_t> offsets{};  ///< packed sequences; empty: a batch
  index_t count = 1, length = 1;   ///< of a batch
  index_t heads = 1, query_heads = 1, key_heads = 1, value_heads = 1, gate_heads = 1, key_dim = 8, value_dim = 8;
  decay gate = decay::none;
  bool write = false, beta = false, state = false;  ///< state: begins from one, and its derivative is asked for
  index_t padding = 0;                              ///< numbers between rows
  double gate_size = 0.2, key_size = 1.0;
  std::uint32_t seed = 1;

  recurrence_shape shape() const {
    recurrence_shape s;
    s.seq = offsets.empty() ? sequences::batch(count, length) : sequences::packed(offsets);
    s.heads = heads;
    s.query_heads = query_heads;
    s.key_heads = key_heads;
    s.value_heads = value_heads;
    s.gate_heads = gate_heads;
    s.key_dim = key_dim;
    s.value_dim = value_dim;
    s.scale = std::sqrt(1.0 / double(key_dim));
    s.chunk = 16;
    return s;
  }
  bool constant() const {
    return gate == decay::constant_head || gate == decay::constant_channel || gate == decay::constant_factored;
  }
  bool factored() const { return gate == decay::factored || gate == decay::constant_factored; }
  index_t decays() const {
    if (gate == decay::none) return 0;
    return gate == decay::per_channel || gate == decay::constant_channel ? key_dim : 1;
  }
};

/// Numbers in [-1, 1), the same on every machine.
class recurrence_random {
 public:
  explicit recurrence_random(std::uint32_t seed) : state_(seed * 2654435769U + 1U) {}
  double next() {
    state_ = state_ * 1664525U + 1013904223U;
    return double(state_ >> 8) / 8388608.0 - 1.0;
  }
  std::vector<double> many(index_t n, double size = 1.0) {
    std::vector<double> x(static_cast<std::size_t>(n));
    for (auto& v : x) v = size * next();
    return x;
  }

 private:
  std::uint32_t state_;
};

/// Everything that is read, dense, as doubles.
struct recurrence_numbers {
  std::vector<double> q, k, v, d_o, g, rate, write, beta, initial, d_final;

  explicit recurrence_numbers(recurrence_setting const& c) {
    auto const s = c.shape();
    index_t const R = s.seq.rows(), gates = (c.constant() ? 1 : R) * s.gate_heads,
                  states = c.state ? s.seq.count() * s.heads * s.key_dim * s.value_dim : 0;
    recurrence_random random(c.seed);
    q = random.many(R * s.query_heads * s.key_dim);
    // Keys about as long as the delta rule has them, so that its states stay small.
    k = random.many(R * s.key_heads * s.key_dim, c.key_size * std::sqrt(3.0 / double(s.key_dim)));
    v = random.many(R * s.value_heads * s.value_dim);
    d_o = random.many(R * s.heads * s.value_dim);
    auto const between_0_and_1 = [&](index_t n) {
      auto x = random.many(n);
      for (auto& y : x) y = (y + 1) / 2;
      return x;
    };
    g = between_0_and_1(gates * c.decays());
    for (auto& x : g) x *= -c.gate_size;
    if (c.factored()) rate = between_0_and_1(s.gate_heads * s.key_dim);
    for (auto& x : rate) x *= 2;
    if (c.write) write = between_0_and_1(R * s.gate_heads);
    if (c.beta) beta = between_0_and_1(R * s.gate_heads);
    initial = random.many(states);
    d_final = random.many(states);
  }
  /// As they are stored.
  template <class T>
  recurrence_numbers rounded() const {
    auto x = *this;
    for (auto* part : {&x.q, &x.k, &x.v, &x.d_o}) *part = as_double(stored<T>(*part));
    for (auto* part : {&x.g, &x.rate, &x.write, &x.beta, &x.initial, &x.d_final})
      *part = as_double(stored<accumulator_t<T>>(*part));
    return x;
  }
};

/// What comes out, dense.
struct recurrence_results {
  std::vector<double> o, final, d_q, d_k, d_v, d_g, d_rate, d_write, d_beta, d_initial;

  /// f(name, numbers of this, numbers of the other, whether they are derivatives)
  template <class F>
  void with(recurrence_results const& other, F const& f) const {
    f("o", o, other.o, false), f("final state", final, other.final, false);
    f("d_q", d_q, other.d_q, true), f("d_k", d_k, other.d_k, true), f("d_v", d_v, other.d_v, true);
    f("d_g", d_g, other.d_g, true), f("d_rate", d_rate, other.d_rate, true);
    f("d_write", d_write, other.d_write, true), f("d_beta", d_beta, other.d_beta, true);
    f("d_initial", d_initial, other.d_initial, true);
  }
};
inline constexpr double untouched = 77.0;

/// Memory of one kind for a recurrence: T in host or device memory, rows with padding between them.
template <class T, template <class> class Memory>
class recurrence_memory {
 public:
  using number = accumulator_t<T>;

  recurrence_memory(recurrence_setting const& c, recurrence_numbers const& x, index_t padding)
      : c_(c), s_(c.shape()), padding_(padding), q_(rows(x.q, s_.query_heads * s_.key_dim)),
        k_(rows(x.k, s_.key_heads * s_.key_dim)), v_(rows(x.v, s_.value_heads * s_.value_dim)),
        d_o_(rows(x.d_o, s_.heads * s_.value_dim)), o_(blank(s_.heads * s_.value_dim)),
        d_q_(blank(s_.query_heads * s_.key_dim)), d_k_(blank(s_.key_heads * s_.key_dim)),
        d_v_(blank(s_.value_heads * s_.value_dim)), g_(stored<number>(x.g)), rate_(stored<number>(x.rate)),
        write_(stored<number>(x.write)), beta_(stored<number>(x.beta)), initial_(stored<number>(x.initial)),
        d_final_(stored<number>(x.d_final)), final_(like(std::size_t(states()))), d_g_(like(x.g.size())),
        d_rate_(like(x.rate.size())), d_write_(like(x.write.size())), d_beta_(like(x.beta.size())),
        d_initial_(like(x.initial.size())), offsets_(c.offsets) {}

  recurrence_shape const& shape() const { return s_; }
  index_t const* offsets() const { return c_.offsets.empty() ? nullptr : offsets_.data(); }
  recurrence_input<T> input() const {
    recurrence_input<T> in;
    in.q_rhk = heads(q_, s_.query_heads, s_.key_dim);
    in.k_rhk = heads(k_, s_.key_heads, s_.key_dim);
    in.v_rhv = heads(v_, s_.value_heads, s_.value_dim);
    if (c_.gate != decay::none) in.g_rhk = gates(g_);
    if (c_.factored()) in.rate_hk = {rate_.data(), {s_.gate_heads, s_.key_dim}};
    if (c_.write) in.write_rh = {write_.data(), {s_.seq.rows(), s_.gate_heads}};
    if (c_.beta) in.beta_rh = {beta_.data(), {s_.seq.rows(), s_.gate_heads}};
    if (c_.state) in.initial_nhkv = state(initial_);
    return in;
  }
  view3<T> output() const { return heads(o_, s_.heads, s_.value_dim); }
  view4<number> final() const { return state(final_); }
  view3<T const> upstream() const { return heads(d_o_, s_.heads, s_.value_dim); }
  view4<number const> d_final() const {
    return c_.state ? view4<number const>(state(d_final_)) : view4<number const>();
  }
  recurrence_gradient<T> gradient() const {
    recurrence_gradient<T> d;
    d.q_rhk = heads(d_q_, s_.query_heads, s_.key_dim);
    d.k_rhk = heads(d_k_, s_.key_heads, s_.key_dim);
    d.v_rhv = heads(d_v_, s_.value_heads, s_.value_dim);
    if (c_.gate != decay::none) d.g_rhk = gates(d_g_);
    if (c_.factored()) d.rate_hk = {d_rate_.data(), {s_.gate_heads, s_.key_dim}};
    if (c_.write) d.write_rh = {d_write_.data(), {s_.seq.rows(), s_.gate_heads}};
    if (c_.beta) d.beta_rh = {d_beta_.data(), {s_.seq.rows(), s_.gate_heads}};
    if (c_.state) d.initial_nhkv = state(d_initial_);
    return d;
  }
  recurrence_results results() const {
    return {without_padding(o_, s_.heads * s_.value_dim),
            as_double(final_.download()),
            without_padding(d_q_, s_.query_heads * s_.key_dim),
            without_padding(d_k_, s_.key_heads * s_.key_dim),
            without_padding(d_v_, s_.value_heads * s_.value_dim),
            as_double(d_g_.download()),
            as_double(d_rate_.download()),
            as_double(d_write_.download()),
            as_double(d_beta_.download()),
            as_double(d_initial_.download())};
  }

 private:
  index_t states() const { return s_.seq.count() * s_.heads * s_.key_dim * s_.value_dim; }
  std::vector<T> rows(std::vector<double> const& dense_rows, index_t columns) const {
    auto const x = stored<T>(dense_rows);
    auto y = blank(columns);
    for (index_t r = 0; r < s_.seq.rows(); ++r)
      for (index_t i = 0; i < columns; ++i)
        y[std::size_t(r * (columns + padding_) + i)] = x[std::size_t(r * columns + i)];
    return y;
  }
  std::vector<T> blank(index_t columns) const {
    return std::vector<T>(std::size_t(s_.seq.rows() * (columns + padding_)), T(number(untouched)));
  }
  static std::vector<number> like(std::size_t n) { return std::vector<number>(n, number(untouched)); }
  view3<T> heads(Memory<T> const& m, index_t count, index_t channels) const {
    return {m.data(), {s_.seq.rows(), count, channels}, {count * channels + padding_, channels, 1}};
  }
  view3<number> gates(Memory<number> const& m) const {
    index_t const n = c_.decays();
    return {m.data(),
            {c_.constant() ? 1 : s_.seq.rows(), s_.gate_heads, n},
            {c_.constant() ? 0 : s_.gate_heads * n, n, 1}};
  }
  view4<number> state(Memory<number> const& m) const {
    return {m.data(), {s_.seq.count(), s_.heads, s_.key_dim, s_.value_dim}};
  }
  std::vector<double> without_padding(Memory<T> const& m, index_t columns) const {
    auto const x = as_double(m.download());
    std::vector<double> y;
    bool whole = true;
    for (index_t r = 0; r < s_.seq.rows(); ++r)
      for (index_t i = 0; i < columns + padding_; ++i) {
        double const value = x[std::size_t(r * (columns + padding_) + i)];
        if (i < columns)
          y.push_back(value);
        else
          whole = whole && value == untouched;
      }
    check(whole, c_.name + ": numbers between rows are changed");
    return y;
  }

  recurrence_setting c_;
  recurrence_shape s_;
  index_t padding_;
  Memory<T> q_, k_, v_, d_o_, o_, d_q_, d_k_, d_v_;
  Memory<number> g_, rate_, write_, beta_, initial_, d_final_, final_, d_g_, d_rate_, d_write_, d_beta_, d_initial_;
  Memory<index_t> offsets_;
};

template <class T>
class host_array {
 public:
  explicit host_array(std::vector<T> values) : values_(std::make_shared<std::vector<T>>(std::move(values))) {}
  T* data() const { return values_->data(); }
  std::vector<T> download() const { return *values_; }

 private:
  std::shared_ptr<std::vector<T>> values_;
};

/// The reference, and for derivatives the CPU's kernels in double, which dual numbers hold elsewhere.
template <class State, bool PerChannel>
recurrence_results oracle(recurrence_setting const& c, recurrence_numbers const& x, bool backward) {
  constexpr auto form =
      PerChannel ? kernels::recurrence_form::chunkwise_per_channel : kernels::recurrence_form::chunkwise;
  recurrence_memory<double, host_array> const m(c, x, 0);
  auto const& s = m.shape();
  kernels::recurrence_forward<State>(device::reference{}, s, m.input(), m.output(), m.final());
  if (!backward) return m.results();
  device::cpu const dev{};
  arena ws = arena::growing();
  auto const saved = kernels::recurrence_saved<double>::carve<device::cpu::isa>(ws, s, State::spec);
  recurrence_memory<double, host_array> const scratch(c, x, 0);
  kernels::recurrence_forward<form, State>(dev, s, m.input(), scratch.output(), &saved, {}, ws);
  kernels::recurrence_backward<form, State>(dev, s, m.input(), saved, m.upstream(), m.d_final(), m.gradient(), ws);
  return m.results();
}

enum class directions { forward, both };

/// The device's kernels. Their scratch is planned by a dry run; a plan that is too small throws, one that is too
/// large is reported.
template <class State, bool PerChannel, class T>
recurrence_results on_device(recurrence_setting const& c, recurrence_numbers const& x, bool backward) {
  using kernel = kernels::cuda_recurrence<State, PerChannel, T>;
  recurrence_memory<T, device_array> const m(c, x, c.padding);
  auto const& s = m.shape();
  device::cuda dev, dry;
  dev.offsets = m.offsets();
  dry.dry = true;
  auto const run = [&](arena& a, device::cuda const& d) {
    if (!backward) return kernel::forward(d, s, m.input(), m.output(), nullptr, m.final(), a);
    auto const saved = kernel::carve(a, s);
    kernel::forward(d, s, m.input(), m.output(), &saved, m.final(), a);
    kernel::backward(d, s, m.input(), saved, m.upstream(), m.d_final(), m.gradient(), a);
  };
  arena measured = arena::measure();
  run(measured, dry);
  device_arena real([&](arena& a) { run(a, dry); });
  run(real.pieces(), dev);
  check(real.pieces().peak() == measured.peak(), c.name + ": a dry run plans what is used");
  return m.results();
}

/// Tolerances in units of the greatest number of each result.
struct recurrence_tolerance {
  double output, gradient;
};

template <class State, bool PerChannel, class T>
recurrence_results compare_recurrence(recurrence_setting const& c, recurrence_tolerance const& tolerance,
                                      std::function<void(recurrence_numbers&)> const& change = {},
                                      bool backward = true, bool twice = false) {
  recurrence_numbers raw(c);
  if (change) change(raw);
  auto const x = raw.rounded<T>();
  auto const want = oracle<State, PerChannel>(c, x, backward);
  auto const got = on_device<State, PerChannel, T>(c, x, backward);
  got.with(want, [&](char const* what, auto const& mine, auto const& right, bool derivative) {
    if (backward || !derivative)
      check_close(c.name + ": " + what, mine, right, derivative ? tolerance.gradient : tolerance.output);
  });
  if (!twice) return got;
  on_device<State, PerChannel, T>(c, x, backward)
      .with(got, [&](char const* what, auto const& a, auto const& b, bool) {
        check(a.size() == b.size() &&
                  (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0),
              c.name + ": a second run gives the same bits of " + what);
      });
  return got;
}

/// Row t of every sequence of a batch.
template <class T, std::size_t Rank>
view<T, Rank> token_rows(view<T, Rank> x, index_t t, sequences const& batch) {
  if (x.data == nullptr || x.stride[0] == 0) return x;
  x.data += t * x.stride[0];
  x.extent[0] = batch.count();
  x.stride[0] *= batch.longest();
  return x;
}

/// Token by token on the state that is carried on, in its place, against the reference over the whole sequences.
template <class State, bool PerChannel, class T>
void compare_steps(recurrence_setting const& c, double tolerance) {
  using kernel = kernels::cuda_recurrence<State, PerChannel, T>;
  recurrence_numbers const raw(c);
  auto const x = raw.rounded<T>();
  auto const want = oracle<State, PerChannel>(c, x, false);
  recurrence_memory<T, device_array> const m(c, x, c.padding);
  auto s = m.shape();
  auto const batch = s.seq;
  s.seq = sequences::batch(batch.count(), 1);
  device::cuda const dev{};
  arena none = arena::measure();
  for (index_t t = 0; t < batch.longest(); ++t) {
    auto in = m.input();
    in.q_rhk = token_rows(in.q_rhk, t, batch), in.k_rhk = token_rows(in.k_rhk, t, batch);
    in.v_rhv = token_rows(in.v_rhv, t, batch), in.g_rhk = token_rows(in.g_rhk, t, batch);
    in.write_rh = token_rows(in.write_rh, t, batch), in.beta_rh = token_rows(in.beta_rh, t, batch);
    if (t > 0) in.initial_nhkv = m.final();
    kernel::forward(dev, s, in, token_rows(m.output(), t, batch), nullptr, m.final(), none);
  }
  check(none.peak() == 0, c.name + ": a token needs no memory");
  auto const got = m.results();
  check_close(c.name + ": o token by token", got.o, want.o, tolerance);
  check_close(c.name + ": the state behind the last token", got.final, want.final, tolerance);
}

inline recurrence_setting recurrence_batch(std::string name, index_t count, index_t length, index_t heads,
                                           index_t key_dim, index_t value_dim) {
  recurrence_setting c{std::move(name)};
  c.count = count;
  c.length = length;
  c.heads = c.query_heads = c.key_heads = c.value_heads = c.gate_heads = heads;
  c.key_dim = key_dim;
  c.value_dim = value_dim;
  return c;
}
inline recurrence_setting recurrence_packed(std::string name, std::vector<index_t> offsets, index_t heads,
                                            index_t key_dim, index_t value_dim) {
  auto c = recurrence_batch(std::move(name), 1, 1, heads, key_dim, value_dim);
  c.offsets = std::move(offsets);
  return c;
}

}  // namespace seqmix::testing
