#pragma once

#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include <doctest/doctest.h>

#include "random_numbers.hpp"
#include <seqmix/concepts/mixer.hpp>

/// Drives any mixer on the CPU and on the reference. All memory the library gets is planned by a dry run and filled
/// with NaN before every call, so that nothing unwritten is ever read unseen.
namespace seqmix::testing {

using cpu_device = device::cpu;

/// f(the same array of each), for every array of mixer_numbers.
template <class F, class... Numbers>
void each_array(F const& f, Numbers&... x) {
  f(x.q...), f(x.k...), f(x.v...), f(x.g...), f(x.write...), f(x.beta...), f(x.a...), f(x.b...), f(x.rate...);
  f(x.sink...), f(x.bonus...), f(x.mix...);
}
/// The arrays a mixer reads, or their derivatives, rows of heads of channels; unused ones are empty.
template <class T>
struct mixer_numbers {
  std::vector<T> q, k, v, g, write, beta;
  std::vector<T> a{}, b{};
  std::vector<T> rate{}, sink{}, bonus{};  ///< without rows
  std::vector<T> mix{};                    ///< the weights of a gated sum, rows of heads of members

  /// Whether an array of this has one entry a token, for a gate that has (`token_gate`) or has not.
  bool has_rows(std::vector<T> const& x, bool token_gate) const noexcept {
    return !x.empty() && &x != &rate && &x != &sink && &x != &bonus && (&x != &g || token_gate);
  }
  template <class U, class F>
  mixer_numbers<U> map(F const& f) const {
    mixer_numbers<U> to;
    each_array(
        [&](std::vector<U>& y, std::vector<T> const& x) {
          for (auto const& e : x) y.push_back(f(e));
        },
        to, *this);
    return to;
  }
  template <class U>
  mixer_numbers<U> as() const {
    return map<U>([](T const& x) { return U(x); });
  }
};

/// Which arrays a mixer's policies ask for.
template <class M>
struct mixer_needs {
  using state_type = typename M::state_type;
  static constexpr bool gate = M::gate_type::spec.decays;
  static constexpr bool constant = M::gate_type::spec.constant();
  static constexpr bool write = M::gate_type::spec.writes;
  static constexpr bool rate = gate && M::gate_type::spec.factored;
  static constexpr bool beta = state_type::spec.reads_beta;
  static constexpr bool low_rank = state_type::spec.reads_low_rank;
  static constexpr bool history = state_type::spec.kind == state_kind::history;
  static constexpr bool stabilised = state_type::spec.kind == state_kind::stabilised;
  static constexpr bool bonus = stabilised && state_type::spec.read == read_order::exclusive;
  /// Whether keys and queries address the state.
  static constexpr bool keyed = [] {
    if constexpr (stabilised) return state_type::stabilised.keyed;
    return state_type::spec.kind != state_kind::elementwise;
  }();
  static index_t gate_channels(mixer_shape const& s) {
    return !gate ? 0 : M::gate_type::spec.decay == axis::head_key && !rate ? s.key_dim : 1;
  }
  static index_t gate_rows(mixer_shape const& s) { return constant ? 1 : s.seq.rows(); }
};

template <class M, class T>
mixer_input<T> input_of(mixer_shape const& s, mixer_numbers<T> const& x) {
  index_t const R = s.seq.rows();
  using needs = mixer_needs<M>;
  mixer_input<T> in;
  if constexpr (needs::keyed) {
    in.q_rhk = {x.q.data(), {R, s.query_heads, s.key_dim}};
    in.k_rhk = {x.k.data(), {R, s.key_heads, s.key_dim}};
  }
  in.v_rhv = {x.v.data(), {R, s.value_heads, s.value_dim}};
  if constexpr (needs::gate) {
    in.g_rhk = {x.g.data(), {R, s.gate_heads, needs::gate_channels(s)}};
    if (needs::constant) in.g_rhk.stride[0] = 0;
  }
  if constexpr (needs::write) in.write_rh = {x.write.data(), {R, s.gate_heads}};
  if constexpr (needs::beta) in.beta_rh = {x.beta.data(), {R, s.gate_heads}};
  if constexpr (needs::low_rank) {
    in.a_rhk = {x.a.data(), {R, s.key_heads, s.key_dim}};
    in.b_rhk = {x.b.data(), {R, s.key_heads, s.key_dim}};
  }
  if constexpr (needs::rate) in.rate_hk = {x.rate.data(), {s.gate_heads, s.key_dim}};
  if constexpr (needs::bonus) in.bonus_hk = {x.bonus.data(), {s.heads, s.key_dim}};
  if (!x.sink.empty()) in.sink_h = {x.sink.data(), {s.heads}};
  if (!x.mix.empty()) in.mix_rhn = {x.mix.data(), {R, s.heads, index_t(x.mix.size()) / (R * s.heads)}};
  return in;
}

template <class M, class T>
mixer_gradient<T> gradient_of(mixer_shape const& s, mixer_numbers<T>& x) {
  auto const in = input_of<M>(s, static_cast<mixer_numbers<T> const&>(x));
  auto const open = []<std::size_t Rank>(view<T const, Rank> const& v, std::vector<T>& to) {
    return view<T, Rank>(v ? to.data() : nullptr, v.extent, v.stride);
  };
  mixer_gradient<T> d;
  d.q_rhk = open(in.q_rhk, x.q), d.k_rhk = open(in.k_rhk, x.k), d.v_rhv = open(in.v_rhv, x.v);
  d.g_rhk = open(in.g_rhk, x.g), d.write_rh = open(in.write_rh, x.write), d.beta_rh = open(in.beta_rh, x.beta);
  d.a_rhk = open(in.a_rhk, x.a), d.b_rhk = open(in.b_rhk, x.b), d.rate_hk = open(in.rate_hk, x.rate);
  d.bonus_hk = open(in.bonus_hk, x.bonus), d.sink_h = open(in.sink_h, x.sink), d.mix_rhn = open(in.mix_rhn, x.mix);
  return d;
}

template <class M>
mixer_numbers<double> random_mixer_numbers(mixer_shape const& s, std::uint64_t seed, double gate_size = 0.3) {
  using needs = mixer_needs<M>;
  random_numbers random(seed);
  auto const draw = [&](index_t n, double size) {
    std::vector<double> x(static_cast<std::size_t>(n));
    for (auto& e : x) e = size * random.normal();
    return x;
  };
  index_t const R = s.seq.rows();
  // What erases along longer keys grows with every token.
  double const key_size = M::state_type::spec.low_rank ? 1.0 / std::sqrt(double(s.key_dim)) : 1.0;
  mixer_numbers<double> x;
  if (needs::keyed) {
    x.q = draw(R * s.query_heads * s.key_dim, 1.0);
    x.k = draw(R * s.key_heads * s.key_dim, key_size);
  }
  x.v = draw(R * s.value_heads * s.value_dim, 1.0);
  x.g = draw(needs::gate_rows(s) * s.gate_heads * needs::gate_channels(s), gate_size);
  for (auto& g : x.g) g = -std::abs(g);
  if (needs::write) x.write = draw(R * s.gate_heads, 1.0);
  if (needs::beta) {
    x.beta = draw(R * s.gate_heads, 1.0);
    for (auto& b : x.beta) b = sigmoid(b);
  }
  if (needs::low_rank) {
    x.a = draw(R * s.key_heads * s.key_dim, key_size);
    x.b = draw(R * s.key_heads * s.key_dim, 0.5 * key_size);
  }
  if (needs::rate) {
    x.rate = draw(s.gate_heads * s.key_dim, 1.0);
    for (auto& e : x.rate) e = std::abs(e);
  }
  if (needs::bonus) x.bonus = draw(s.heads * s.key_dim, 1.0);
  return x;
}

/// A mixer's state with its memory.
template <class M, class T>
class mixer_memory {
 public:
  using state_type = typename M::template state<T>;
  explicit mixer_memory(mixer_shape const& s) {
    auto plan = arena::measure();
    state_type::carve(plan, s);
    block_ = buffer<std::byte>(plan.used());
    arena pieces(block_);
    state = state_type::carve(pieces, s);
    state.clear();
  }
  state_type state;

  /// f(number) for every number that means something: the tokens held, or the whole matrices.
  template <class F>
  void each(F const& f) {
    if constexpr (mixer_needs<M>::history) {
      auto const tokens = [&](view4<T> x) {
        for (index_t n = 0; n < x.extent[0] && x; ++n)
          for (index_t l = 0; l < state.length[n]; ++l)
            for (index_t h = 0; h < x.extent[2]; ++h)
              for (index_t c = 0; c < x.extent[3]; ++c) f(x(n, l, h, c));
      };
      tokens(state.k_nlhk), tokens(state.v_nlhv), tokens(state.g_nlhk);
    } else {
      for (index_t i = 0; i < state.S_nhkv.size(); ++i) f(state.S_nhkv.data[i]);
      if constexpr (mixer_needs<M>::stabilised) {
        for (index_t i = 0; i < state.n_nhk.size(); ++i) f(state.n_nhk.data[i]);
        for (index_t i = 0; i < state.m_nh.size(); ++i) f(state.m_nh.data[i]);
      }
    }
  }
  std::vector<T> numbers() {
    std::vector<T> x;
    each([&](T const& e) { x.push_back(e); });
    return x;
  }
  /// As many tokens as the other holds; for derivatives, whose lengths are those of the values.
  template <class U>
  void take_lengths(mixer_memory<M, U> const& from) {
    if constexpr (mixer_needs<M>::history) std::copy_n(from.state.length, state.k_nlhk.extent[0], state.length);
  }
  /// A copy of a state of the same shape.
  void assign(mixer_memory& from) {
    take_lengths(from);
    auto const values = from.numbers();
    std::size_t i = 0;
    each([&](T& e) { e = values[i++]; });
  }
  /// Random numbers where the other state holds any: a state, or a cotangent of it. What outputs are divided by is
  /// positive.
  void randomise(mixer_memory const& like, std::uint64_t seed) {
    take_lengths(like);
    random_numbers random(seed);
    each([&](T& e) { e = T(random.normal()); });
    if constexpr (mixer_needs<M>::stabilised && !mixer_needs<M>::keyed)
      for (index_t i = 0; i < state.n_nhk.size(); ++i) state.n_nhk.data[i] = std::abs(state.n_nhk.data[i]) + T(0.5);
  }

 private:
  buffer<std::byte> block_;
};

/// Forward and backward of one mixer over one shape.
template <class M, class T>
class mixer_machine {
 public:
  using memory = mixer_memory<M, T>;
  explicit mixer_machine(mixer_shape const& s, int threads = 2) : s_(s), device_{threads} {}

  std::vector<T> forward(mixer_numbers<T> const& x, memory const* before = nullptr, memory* after = nullptr,
                         bool training = true) {
    index_t const R = s_.seq.rows();
    o_.assign(static_cast<std::size_t>(R * s_.heads * s_.value_dim), nan);
    view3<T> const o(o_.data(), {R, s_.heads, s_.value_dim});
    auto const in = input_of<M>(s_, x);
    auto const* const b = before ? &before->state : nullptr;
    auto* const a = after ? &after->state : nullptr;
    auto plan = arena::measure();
    saved::template carve<cpu_device::isa>(plan, s_);
    saved_block_ = poisoned(plan.used());
    arena pieces(saved_block_);
    keep_ = saved::template carve<cpu_device::isa>(pieces, s_);
    planned([&](cpu_device dev, arena& ws) { M::forward(dev, s_, in, o, b, a, training ? &keep_ : nullptr, ws); });
    return o_;
  }
  /// After a training forward with the same numbers.
  mixer_numbers<T> backward(mixer_numbers<T> const& x, std::vector<T> const& d_o, memory const* before = nullptr,
                            memory const* d_after = nullptr, memory* d_before = nullptr) {
    index_t const R = s_.seq.rows();
    auto d = x.template map<T>([](T const&) { return nan; });
    auto const in = input_of<M>(s_, x);
    auto const dx = gradient_of<M>(s_, d);
    std::array<index_t, 3> const shape{R, s_.heads, s_.value_dim};
    planned([&](cpu_device dev, arena& ws) {
      M::backward(dev, s_, in, view3<T const>(o_.data(), shape), keep_, view3<T const>(d_o.data(), shape),
                  before ? &before->state : nullptr, d_after ? &d_after->state : nullptr, dx,
                  d_before ? &d_before->state : nullptr, ws);
    });
    return d;
  }

 private:
  using saved = typename M::template saved<T>;
  static constexpr T nan = std::numeric_limits<T>::quiet_NaN();
  static buffer<std::byte> poisoned(index_t bytes) {
    buffer<std::byte> block(bytes);
    block.fill(std::byte(0xff));
    return block;
  }
  template <class F>
  void planned(F const& f) {
    auto plan = arena::measure();
    auto dry = device_;
    dry.dry = true;
    f(dry, plan);
    auto block = poisoned(plan.peak());
    arena ws(block);
    f(device_, ws);
  }

  mixer_shape s_;
  cpu_device device_;
  std::vector<T> o_;
  buffer<std::byte> saved_block_;
  saved keep_;
};

/// Outputs and, with `after`, the final state of the reference.
template <class M, class T>
std::vector<T> reference_mixer(mixer_shape const& s, mixer_numbers<T> const& x,
                               mixer_memory<M, T> const* before = nullptr, mixer_memory<M, T>* after = nullptr) {
  index_t const R = s.seq.rows();
  std::vector<T> o(static_cast<std::size_t>(R * s.heads * s.value_dim));
  auto ws = arena::growing();
  M::forward(device::reference{}, s, input_of<M>(s, x), view3<T>(o.data(), {R, s.heads, s.value_dim}),
             before ? &before->state : nullptr, after ? &after->state : nullptr, nullptr, ws);
  return o;
}

/// Greatest |a - b| over the greatest |b|; NaN when anything is.
template <class T, class U>
double relative_difference(std::vector<T> const& a, std::vector<U> const& b) {
  DOCTEST_REQUIRE(a.size() == b.size());
  double most = 0, size = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    double const d = std::abs(double(a[i]) - double(b[i]));
    if (d != d) return d;
    most = std::max(most, d);
    size = std::max(size, std::abs(double(b[i])));
  }
  return most == 0 ? 0 : most / std::max(size, 1e-300);
}
/// Equal numbers, and no NaN on either side.
template <class T>
bool same_bits(std::vector<T> const& a, std::vector<T> const& b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin());
}
template <class T>
bool same_bits(mixer_numbers<T> const& a, mixer_numbers<T> const& b) {
  bool same = true;
  each_array([&](std::vector<T> const& x, std::vector<T> const& y) { same = same && same_bits(x, y); }, a, b);
  return same;
}
/// The greatest of all arrays.
template <class T, class U>
double relative_difference(mixer_numbers<T> const& a, mixer_numbers<U> const& b) {
  double most = 0;
  each_array(
      [&](std::vector<T> const& x, std::vector<U> const& y) {
        double const d = relative_difference(x, y);
        if (!(d <= most)) most = d;  // NaN stays
      },
      a, b);
  return most;
}

}  // namespace seqmix::testing
