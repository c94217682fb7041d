#pragma once

#include <tuple>

#include "law_mixer.hpp"
#include <seqmix/mixers/gated_sum.hpp>

/// What the laws need beyond a plain mixer: several chosen chunks, sinks, and gated sums. It stands in front of
/// laws.hpp, whose functions then find the numbers that are drawn here.
namespace seqmix::testing {

/// M with a top_k of its own, whatever the shape says, and a sink.
template <class M, index_t TopK = 1>
struct choosing : M {
  static constexpr bool has_sink = true;
  static std::string name() { return M::name() + ", top_k=" + std::to_string(TopK) + ", with a sink"; }
  static mixer_shape with_top_k(mixer_shape s) {
    s.select.top_k = TopK;
    return s;
  }
  template <class T>
  struct saved : M::template saved<T> {
    template <class Isa>
    static saved carve(arena& a, mixer_shape const& s) {
      return {M::template saved<T>::template carve<Isa>(a, with_top_k(s))};
    }
  };
  template <class Device, class T, class... Rest>
  static void forward(Device dev, mixer_shape const& s, mixer_input<T> const& in, Rest&&... rest) {
    M::forward(dev, with_top_k(s), in, rest...);
  }
  template <class Device, class T, class... Rest>
  static void backward(Device dev, mixer_shape const& s, mixer_input<T> const& in, Rest&&... rest) {
    M::backward(dev, with_top_k(s), in, rest...);
  }
};

template <class M>
concept sum_of_mixers = requires {
  typename M::members;
};

/// The states of all members.
template <sum_of_mixers M, class T>
class mixer_memory<M, T> {
 public:
  using members_type = typename M::template state<T>;
  struct state_type : members_type {
    index_t capacity() const { return std::get<0>(this->member).capacity(); }
  };
  explicit mixer_memory(mixer_shape const& s) : count_(s.seq.count()) {
    auto plan = arena::measure();
    members_type::carve(plan, s);
    block_ = buffer<std::byte>(plan.used());
    arena pieces(block_);
    static_cast<members_type&>(state) = members_type::carve(pieces, s);
    state.clear();
  }
  state_type state;

  template <class F>
  void each(F const& f) {
    auto const tokens = [&](view4<T> x, index_t const* length) {
      for (index_t n = 0; n < x.extent[0] && x; ++n)
        for (index_t l = 0; l < length[n]; ++l)
          for (index_t h = 0; h < x.extent[2]; ++h)
            for (index_t c = 0; c < x.extent[3]; ++c) f(x(n, l, h, c));
    };
    for_members([&](auto& m) {
      if constexpr (requires { m.length; })
        tokens(m.k_nlhk, m.length), tokens(m.v_nlhv, m.length), tokens(m.g_nlhk, m.length);
      else
        for (index_t i = 0; i < m.S_nhkv.size(); ++i) f(m.S_nhkv.data[i]);
    });
  }
  std::vector<T> numbers() {
    std::vector<T> x;
    each([&](T const& e) { x.push_back(e); });
    return x;
  }
  template <class U>
  void take_lengths(mixer_memory<M, U> const& from) {
    M::for_each([&]<std::size_t I, class>() {
      auto& to = std::get<I>(state.member);
      if constexpr (requires { to.length; }) std::copy_n(std::get<I>(from.state.member).length, count_, to.length);
    });
  }
  void assign(mixer_memory& from) {
    take_lengths(from);
    auto const values = from.numbers();
    std::size_t i = 0;
    each([&](T& e) { e = values[i++]; });
  }
  void randomise(mixer_memory const& like, std::uint64_t seed) {
    take_lengths(like);
    random_numbers random(seed);
    each([&](T& e) { e = T(random.normal()); });
  }

 private:
  template <class F>
  void for_members(F const& f) {
    std::apply([&](auto&... m) { (f(m), ...); }, state.member);
  }
  buffer<std::byte> block_;
  index_t count_;
};

template <sum_of_mixers M, class T>
mixer_input<T> input_of(mixer_shape const& s, mixer_numbers<T> const& x) {
  auto in = input_of<typename M::telling>(s, x);
  in.mix_rhn = {x.mix.data(), {s.seq.rows(), s.heads, index_t(M::count)}};
  return in;
}
template <sum_of_mixers M, class T>
mixer_gradient<T> gradient_of(mixer_shape const& s, mixer_numbers<T>& x) {
  auto d = gradient_of<typename M::telling>(s, x);
  d.mix_rhn = {x.mix.data(), {s.seq.rows(), s.heads, index_t(M::count)}};
  return d;
}
template <class M>
requires sum_of_mixers<M> ||
    (M::has_sink)mixer_numbers<double> random_mixer_numbers(mixer_shape const& s, std::uint64_t seed,
                                                            double gate_size = 0.3) {
  mixer_numbers<double> x;
  random_numbers random(seed + 1000);
  auto const draw = [&](index_t n) {
    std::vector<double> y(static_cast<std::size_t>(n));
    for (auto& e : y) e = random.normal();
    return y;
  };
  if constexpr (sum_of_mixers<M>) {
    x = random_mixer_numbers<typename M::telling>(s, seed, gate_size);
    x.mix = draw(s.seq.rows() * s.heads * index_t(M::count));
  } else {
    x = random_mixer_numbers<mixer<typename M::state_type, typename M::gate_type, typename M::selector_type>>(
        s, seed, gate_size);
  }
  if constexpr (requires { M::has_sink; }) x.sink = draw(s.heads);
  return x;
}

}  // namespace seqmix::testing

#include "laws.hpp"
