#pragma once

#include <functional>
#include <memory>

#include "support/device_test.hpp"
#include <seqmix/kernels/cuda_kernels.hpp>
#include <seqmix/kernels/reference/attention.hpp>
#include <seqmix/selectors/all.hpp>
#include <seqmix/selectors/window.hpp>

/// One attention on the device and on the CPU in double, from the same stored numbers.
namespace seqmix::testing {

enum class gate_kind { none, per_token, constant };

struct attention_setting {
  std::string name;
  std::vector<index_t> offsets{};  ///< packed sequences; empty: a batch
  index_t count = 1, length = 1;   ///< of a batch
  index_t heads = 1, key_heads = 1, value_heads = 1, gate_heads = 1, key_dim = 8, value_dim = 8;
  gate_kind gate = gate_kind::none;
  bool sink = false, alone = false;
  index_t capacity = 0;  ///< room for past tokens
  std::vector<index_t> past{}, position{};
  index_t window = 0, padding = 0;  ///< numbers between rows
  double temperature = 1.0, score_size = 2.0, gate_size = 0.3;
  std::uint32_t seed = 1;

  attention_shape shape() const {
    attention_shape s;
    s.seq = offsets.empty() ? sequences::batch(count, length) : sequences::packed(offsets);
    s.heads = heads;
    s.key_heads = key_heads;
    s.value_heads = value_heads;
    s.gate_heads = gate_heads;
    s.key_dim = key_dim;
    s.value_dim = value_dim;
    s.scale = score_size * std::sqrt(1.0 / double(key_dim));
    s.select.window = window;
    s.knobs.temperature = temperature;
    return s;
  }
};

/// Numbers in [-1, 1), the same on every machine.
class attention_random {
 public:
  explicit attention_random(std::uint32_t seed) : state_(seed * 2654435769U + 1U) {}
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
struct attention_numbers {
  std::vector<double> q, k, v, d_o, past_k, past_v, g, past_g, sink;

  explicit attention_numbers(attention_setting const& c) {
    auto const s = c.shape();
    index_t const R = s.seq.rows(), P = s.seq.count() * c.capacity;
    attention_random random(c.seed);
    q = random.many(R * s.heads * s.key_dim);
    k = random.many(R * s.key_heads * s.key_dim);
    v = random.many(R * s.value_heads * s.value_dim);
    d_o = random.many(R * s.heads * s.value_dim);
    past_k = random.many(P * s.key_heads * s.key_dim);
    past_v = random.many(P * s.value_heads * s.value_dim);
    auto const decay = [&](index_t n) {
      auto x = random.many(n);
      for (auto& y : x) y = -c.gate_size * (y + 1) / 2;
      return x;
    };
    if (c.gate == gate_kind::per_token) {
      g = decay(R * s.gate_heads);
      past_g = decay(P * s.gate_heads);
    }
    if (c.gate == gate_kind::constant) g = decay(s.gate_heads);
    if (c.sink) sink = random.many(s.heads);
  }
  /// As they are stored.
  template <class T>
  attention_numbers rounded() const {
    auto x = *this;
    for (auto* part : {&x.q, &x.k, &x.v, &x.d_o, &x.past_k, &x.past_v}) *part = as_double(stored<T>(*part));
    for (auto* part : {&x.g, &x.past_g, &x.sink}) *part = as_double(stored<accumulator_t<T>>(*part));
    return x;
  }
};

/// What comes out, dense.
struct attention_results {
  std::vector<double> o, lse, d_q, d_k, d_v, d_past_k, d_past_v, d_g, d_past_g, d_sink;
};
inline constexpr double untouched = 77.0;

/// Memory of one kind for an attention: T in host or device memory, rows with padding between them.
template <class T, template <class> class Memory>
class attention_memory {
 public:
  using number = accumulator_t<T>;

  attention_memory(attention_setting const& c, attention_numbers const& x, index_t padding)
      : c_(c), s_(c.shape()), padding_(padding), q_(rows(x.q, s_.heads * s_.key_dim)),
        k_(rows(x.k, s_.key_heads * s_.key_dim)), v_(rows(x.v, s_.value_heads * s_.value_dim)),
        d_o_(rows(x.d_o, s_.heads * s_.value_dim)), past_k_(stored<T>(x.past_k)), past_v_(stored<T>(x.past_v)),
        g_(stored<number>(x.g)), past_g_(stored<number>(x.past_g)), sink_(stored<number>(x.sink)), past_(c.past),
        position_(c.position), offsets_(c.offsets), o_(blank(s_.heads * s_.value_dim)),
        d_q_(blank(s_.heads * s_.key_dim)), d_k_(blank(s_.key_heads * s_.key_dim)),
        d_v_(blank(s_.value_heads * s_.value_dim)), d_past_k_(like<T>(x.past_k)), d_past_v_(like<T>(x.past_v)),
        d_g_(like<number>(x.g)), d_past_g_(like<number>(x.past_g)), d_sink_(like<number>(x.sink)),
        lse_(std::vector<double>(static_cast<std::size_t>(s_.seq.rows() * s_.heads), untouched)) {}

  attention_shape const& shape() const { return s_; }
  index_t const* offsets() const { return c_.offsets.empty() ? nullptr : offsets_.data(); }
  attention_input<T> input() const {
    attention_input<T> in;
    in.q_rhk = heads(q_, s_.heads, s_.key_dim);
    in.k_rhk = heads(k_, s_.key_heads, s_.key_dim);
    in.v_rhv = heads(v_, s_.value_heads, s_.value_dim);
    if (c_.gate == gate_kind::per_token) in.g_rhk = dense(g_);
    if (c_.gate == gate_kind::constant) in.g_rhk = constant(g_);
    if (!c_.past.empty()) {
      in.past_length = past_.data();
      in.past_k_nlhk = past(past_k_, s_.key_heads, s_.key_dim);
      in.past_v_nlhv = past(past_v_, s_.value_heads, s_.value_dim);
      if (c_.gate == gate_kind::per_token) in.past_g_nlhk = past(past_g_, s_.gate_heads, 1);
    }
    if (c_.sink) in.sink_h = {sink_.data(), {s_.heads}};
    in.queries_alone = c_.alone;
    in.position = c_.alone ? position_.data() : nullptr;
    return in;
  }
  view3<T> output() const { return heads(o_, s_.heads, s_.value_dim); }
  view3<T const> upstream() const { return heads(d_o_, s_.heads, s_.value_dim); }
  attention_record record() const {
    attention_record r;
    r.lse_rh = {lse_.data(), {s_.seq.rows(), s_.heads}};
    return r;
  }
  attention_gradient<T> gradient() const {
    attention_gradient<T> d;
    d.q_rhk = heads(d_q_, s_.heads, s_.key_dim);
    d.k_rhk = heads(d_k_, s_.key_heads, s_.key_dim);
    d.v_rhv = heads(d_v_, s_.value_heads, s_.value_dim);
    if (c_.gate == gate_kind::per_token) d.g_rhk = dense(d_g_);
    if (c_.gate == gate_kind::constant) d.g_rhk = constant(d_g_);
    if (!c_.past.empty()) {
      d.past_k_nlhk = past(d_past_k_, s_.key_heads, s_.key_dim);
      d.past_v_nlhv = past(d_past_v_, s_.value_heads, s_.value_dim);
      if (c_.gate == gate_kind::per_token) d.past_g_nlhk = past(d_past_g_, s_.gate_heads, 1);
    }
    if (c_.sink) d.sink_h = {d_sink_.data(), {s_.heads}};
    return d;
  }
  attention_results results() const {
    return {without_padding(o_, s_.heads * s_.value_dim),
            lse_.download(),
            without_padding(d_q_, s_.heads * s_.key_dim),
            without_padding(d_k_, s_.key_heads * s_.key_dim),
            without_padding(d_v_, s_.value_heads * s_.value_dim),
            as_double(d_past_k_.download()),
            as_double(d_past_v_.download()),
            as_double(d_g_.download()),
            as_double(d_past_g_.download()),
            as_double(d_sink_.download())};
  }

 private:
  std::vector<T> rows(std::vector<double> const& dense_rows, index_t columns) const {
    auto const x = stored<T>(dense_rows);
    std::vector<T> y(std::size_t(s_.seq.rows() * (columns + padding_)), T(accumulator_t<T>(untouched)));
    for (index_t r = 0; r < s_.seq.rows(); ++r)
      for (index_t i = 0; i < columns; ++i)
        y[std::size_t(r * (columns + padding_) + i)] = x[std::size_t(r * columns + i)];
    return y;
  }
  std::vector<T> blank(index_t columns) const {
    return std::vector<T>(std::size_t(s_.seq.rows() * (columns + padding_)), T(accumulator_t<T>(untouched)));
  }
  template <class U>
  static std::vector<U> like(std::vector<double> const& x) {
    return std::vector<U>(x.size(), U(accumulator_t<U>(untouched)));
  }
  view3<T> heads(Memory<T> const& m, index_t count, index_t channels) const {
    return {m.data(), {s_.seq.rows(), count, channels}, {count * channels + padding_, channels, 1}};
  }
  view3<number> dense(Memory<number> const& m) const { return {m.data(), {s_.seq.rows(), s_.gate_heads, 1}}; }
  view3<number> constant(Memory<number> const& m) const { return {m.data(), {1, s_.gate_heads, 1}, {0, 1, 1}}; }
  template <class U>
  view4<U> past(Memory<U> const& m, index_t count, index_t channels) const {
    return {m.data(), {s_.seq.count(), c_.capacity, count, channels}};
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

  attention_setting c_;
  attention_shape s_;
  index_t padding_;
  Memory<T> q_, k_, v_, d_o_, past_k_, past_v_;
  Memory<number> g_, past_g_, sink_;
  Memory<index_t> past_, position_, offsets_;
  Memory<T> o_, d_q_, d_k_, d_v_, d_past_k_, d_past_v_;
  Memory<number> d_g_, d_past_g_, d_sink_;
  Memory<double> lse_;
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

/// The CPU's kernels in double, whose derivatives are held by dual numbers elsewhere.
template <class Which>
attention_results oracle(attention_setting const& c, attention_numbers const& x, bool backward = true) {
  using How = selectors::softmax;
  attention_memory<double, host_array> const m(c, x, 0);
  auto const& s = m.shape();
  device::cpu const dev{};
  arena ws = arena::growing();
  auto const saved = kernels::attention_saved<How, double>::carve(ws, s);
  kernels::attention_forward<Which, How>(dev, s, m.input(), m.output(), &saved, m.record(), ws);
  if (backward)
    kernels::attention_backward<Which, How>(dev, s, m.input(), m.output(), saved, m.upstream(), m.gradient(), ws);
  return m.results();
}

/// The device's kernels. Their scratch is planned by a dry run; a plan that is too small throws, one that is too
/// large is reported.
template <class Which, class T>
attention_results on_device(attention_setting const& c, attention_numbers const& x, bool backward = true,
                            std::function<void(attention_gradient<T>&)> const& drop = {}) {
  using kernel = kernels::cuda_attention<Which, T>;
  attention_memory<T, device_array> const m(c, x, c.padding);
  auto const& s = m.shape();
  device::cuda dev, dry;
  dev.offsets = m.offsets();
  dry.dry = true;
  auto const forward = [&](device::cuda const& d, typename kernel::saved const* keep, arena& ws) {
    kernel::forward(d, s, m.input(), m.output(), keep, m.record(), ws);
  };
  auto const pull_back = [&](device::cuda const& d, typename kernel::saved const& keep, arena& ws) {
    auto gradient = m.gradient();
    if (drop) drop(gradient);
    kernel::backward(d, s, m.input(), m.output(), keep, m.upstream(), gradient, ws);
  };
  auto const run = [&](arena& a, device::cuda const& d) {
    auto const saved = kernel::saved::carve(a, s);
    forward(d, backward ? &saved : nullptr, a);
    if (backward) pull_back(d, saved, a);
  };
  arena measured = arena::measure();
  run(measured, dry);
  device_arena real([&](arena& a) { run(a, dry); });
  run(real.pieces(), dev);
  check(real.pieces().peak() == measured.peak(), c.name + ": a dry run plans what is used");
  return m.results();
}

/// Tolerances in units of the greatest number of each result.
struct attention_tolerance {
  double output, gradient;
};

template <class Which, class T>
void compare_attention(attention_setting const& c, attention_tolerance const& tolerance,
                       std::function<void(attention_numbers&)> const& change = {}, bool backward = true,
                       bool twice = false) {
  attention_numbers raw(c);
  if (change) change(raw);
  auto const x = raw.rounded<T>();
  auto const want = oracle<Which>(c, x, backward);
  auto const got = on_device<Which, T>(c, x, backward);
  check_close(c.name + ": o", got.o, want.o, tolerance.output);
  // The log-sum-exp itself is float everywhere.
  check_close(c.name + ": lse", got.lse, want.lse, 1e-6 * (c.score_size + 2));
  if (backward) {
    check_close(c.name + ": d_q", got.d_q, want.d_q, tolerance.gradient);
    if (!c.alone) check_close(c.name + ": d_k", got.d_k, want.d_k, tolerance.gradient);
    if (!c.alone) check_close(c.name + ": d_v", got.d_v, want.d_v, tolerance.gradient);
    check_close(c.name + ": d_past_k", got.d_past_k, want.d_past_k, tolerance.gradient);
    check_close(c.name + ": d_past_v", got.d_past_v, want.d_past_v, tolerance.gradient);
    // Sums over all later tokens: those of the past, where there are more, set the size of what is rounded.
    auto const together = [](std::vector<double> a, std::vector<double> const& b) {
      a.insert(a.end(), b.begin(), b.end());
      return a;
    };
    check_close(c.name + ": d_g and d_past_g", together(got.d_g, got.d_past_g), together(want.d_g, want.d_past_g),
                tolerance.gradient);
    check_close(c.name + ": d_sink", got.d_sink, want.d_sink, tolerance.gradient);
  }
  if (!twice) return;
  auto const again = on_device<Which, T>(c, x, backward);
  auto const same = [](std::vector<double> const& a, std::vector<double> const& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0);
  };
  check(same(got.o, again.o) && same(got.lse, again.lse) && same(got.d_q, again.d_q) && same(got.d_k, again.d_k) &&
            same(got.d_v, again.d_v) && same(got.d_past_k, again.d_past_k) && same(got.d_past_v, again.d_past_v) &&
            same(got.d_g, again.d_g) && same(got.d_past_g, again.d_past_g) && same(got.d_sink, again.d_sink),
        c.name + ": a second run gives the same bits");
}

}  // namespace seqmix::testing
