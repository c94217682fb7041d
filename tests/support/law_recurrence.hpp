#pragma once

#include <algorithm>

#include "laws.hpp"
#include <seqmix/mixers/recurrence.hpp>

namespace seqmix::testing {

/// recurrence<State, Gate> computed in a form of the test's choice; chunkwise is per channel where the decays are.
template <kernels::recurrence_form Form, class State, class Gate>
struct recurrence_in_form : recurrence<State, Gate> {
  using base = recurrence<State, Gate>;
  using base::forward;  // the reference
  static constexpr auto form =
      Form == kernels::recurrence_form::chunkwise && Gate::spec.decays && Gate::spec.decay == axis::head_key
          ? kernels::recurrence_form::chunkwise_per_channel
          : Form;
  template <class T>
  using state = typename base::template state<T>;
  template <class T>
  struct saved {
    kernels::recurrence_saved<T> kernel;
    template <class Isa>
    static saved carve(arena& a, mixer_shape const& s) {
      if constexpr (form == kernels::recurrence_form::channels)
        return {kernels::detail::channel_saved<Isa, T>(a, shape(s))};
      else
        return {kernels::recurrence_saved<T>::template carve<Isa>(a, shape(s), State::spec)};
    }
  };

  static recurrence_shape shape(mixer_shape const& s) {
    return {s.seq,        s.heads,   s.query_heads, s.key_heads, s.value_heads,
            s.gate_heads, s.key_dim, s.value_dim,   s.scale,     s.chunk};
  }
  template <class T>
  static recurrence_input<T> input(mixer_input<T> const& in, state<T> const* before) {
    return {in.q_rhk,
            in.k_rhk,
            in.v_rhv,
            in.g_rhk,
            in.write_rh,
            in.beta_rh,
            before ? view4<T const>(before->S_nhkv) : view4<T const>{},
            in.a_rhk,
            in.b_rhk,
            in.rate_hk};
  }
  template <class T>
  static void forward(device::cpu dev, mixer_shape const& s, mixer_input<T> const& in, view3<same<T>> o,
                      state<same<T>> const* before, state<same<T>>* after, saved<same<T>> const* keep, arena& ws) {
    kernels::recurrence_forward<form, State>(dev, shape(s), input<T>(in, before), o, keep ? &keep->kernel : nullptr,
                                             after ? after->S_nhkv : view4<T>{}, ws);
  }
  template <class T>
  static void backward(device::cpu dev, mixer_shape const& s, mixer_input<T> const& in, view3<same<T> const>,
                       saved<same<T>> const& keep, view3<same<T> const> d_o, state<same<T>> const* before,
                       state<same<T>> const* d_after, mixer_gradient<same<T>> const& d, state<same<T>>* d_before,
                       arena& ws) {
    recurrence_gradient<T> const to{
        d.q_rhk, d.k_rhk, d.v_rhv,  d.g_rhk, d.write_rh, d.beta_rh, d_before ? d_before->S_nhkv : view4<T>{},
        d.a_rhk, d.b_rhk, d.rate_hk};
    kernels::recurrence_backward<form, State>(dev, shape(s), input<T>(in, before), keep.kernel, d_o,
                                              d_after ? d_after->S_nhkv : view4<T>{}, to, ws);
  }
};

/// Everything one run gives: outputs, final state, and the derivatives for a fixed loss on both.
template <class T>
struct mixer_outcome {
  std::vector<T> o, state, d_state;
  mixer_numbers<T> d;
};
template <class M, class T>
mixer_outcome<T> outcome_of(mixer_shape const& s, mixer_numbers<T> const& x) {
  mixer_machine<M, T> machine(s);
  mixer_memory<M, T> before(s), after(s), d_after(s), d_before(s);
  before.randomise(before, 21);
  mixer_outcome<T> r;
  r.o = machine.forward(x, &before, &after);
  d_after.randomise(after, 22);
  r.d = machine.backward(x, random_vector<T>(r.o.size(), 23), &before, &d_after, &d_before);
  r.state = after.numbers();
  r.d_state = d_before.numbers();
  return r;
}
template <class T>
double relative_difference(mixer_outcome<T> const& a, mixer_outcome<T> const& b) {
  return std::max({relative_difference(a.o, b.o), relative_difference(a.state, b.state),
                   relative_difference(a.d, b.d), relative_difference(a.d_state, b.d_state)});
}

/// Empty sequences, short ones and one of several chunks.
inline constexpr std::array<index_t, 6> form_offsets{0, 0, 1, 6, 6, 29};

/// Log-decays drawn from nothing, hardly any, strong, and all the way to the bound, mixed.
template <class T>
void draw_extreme_decays(std::vector<double>& g, std::uint64_t seed) {
  random_numbers random(seed);
  std::array<double, 6> const choices{0.0, -1e-3, -1.0, -30.0, -128.0, double(log_decay_bound<T>)};
  for (auto& x : g) x = choices[std::size_t(random.below(6))];
}

/// The same numbers in every chunk size, and token by token, for decays as they come or from nothing to the bound.
template <class State, class Gate>
void check_chunks(bool extreme) {
  using kernels::recurrence_form;
  using chunkwise = recurrence_in_form<recurrence_form::chunkwise, State, Gate>;
  using sequential = recurrence_in_form<recurrence_form::sequential, State, Gate>;
  DOCTEST_CAPTURE(chunkwise::name());
  DOCTEST_CAPTURE(extreme);
  auto s = law_shape<chunkwise>(sequences::packed(form_offsets));
  auto x = random_mixer_numbers<chunkwise>(s, 31);
  if (extreme) draw_extreme_decays<double>(x.g, 32);
  auto const expected = outcome_of<sequential, double>(s, x);
  for (index_t chunk : {1, 2, 3, 4, 5, 8, 64}) {
    DOCTEST_CAPTURE(chunk);
    s.chunk = chunk;
    DOCTEST_CHECK(relative_difference(outcome_of<chunkwise, double>(s, x), expected) <= 1e-12);
    DOCTEST_CHECK(relative_difference(outcome_of<sequential, double>(s, x), expected) <= 1e-12);
  }
}
/// With decays from 1 to e^bound in one chunk, backward is still the derivative of forward.
template <class M>
void check_extreme_gradients(index_t chunk) {
  DOCTEST_CAPTURE(chunk);
  auto s = law_shape<M>(sequences::packed(form_offsets));
  s.chunk = chunk;
  auto x = random_mixer_numbers<M>(s, 33);
  draw_extreme_decays<double>(x.g, 34);
  check_gradients<M>(s, x);
}
/// Such decays in float: finite, and near the double result.
template <class M>
void check_extremes_in_float(double tolerance) {
  DOCTEST_CAPTURE(M::name());
  auto s = law_shape<M>(sequences::packed(form_offsets));
  auto x = random_mixer_numbers<M>(s, 35);
  draw_extreme_decays<float>(x.g, 36);
  x = x.template as<float>().template as<double>();
  auto const expected = outcome_of<M, double>(s, x);
  for (index_t chunk : {1, 2, 3, 5, 64}) {
    DOCTEST_CAPTURE(chunk);
    s.chunk = chunk;
    auto const found = outcome_of<M, float>(s, x.template as<float>());
    DOCTEST_CHECK(relative_difference(found.o, expected.o) <= tolerance);
    DOCTEST_CHECK(relative_difference(found.state, expected.state) <= tolerance);
    DOCTEST_CHECK(relative_difference(found.d, expected.d) <= tolerance);
    DOCTEST_CHECK(relative_difference(found.d_state, expected.d_state) <= tolerance);
  }
}

/// A gate for tests whose formula never runs: mixers are handed its log-decays, or its steps and rates.
template <axis Decay, bool Writes, bool Factored = false>
struct given_decays {
  static constexpr std::string_view name = "given";
  static constexpr gate_spec spec{.raw = Factored ? axis::head : Decay,
                                  .raws = 1,
                                  .decay = Decay,
                                  .from = feed::linear,
                                  .writes = Writes,
                                  .factored = Factored};
  static constexpr std::array<gate_parameter, 0> parameters{};
  template <class T>
  static gate_value<T> forward(std::array<T, 1> const& raw, std::array<T, 0> const&) noexcept {
    return {-softplus(raw[0]), T(1)};
  }
  template <class T>
  static T log_rate(std::array<T, 0> const&) noexcept {
    return T(0);
  }
  template <class T>
  static T log_step(std::array<T, 1> const& raw, std::array<T, 0> const&) noexcept {
    return log_softplus(raw[0]);
  }
};
using decay_per_head = given_decays<axis::head, false>;
using decay_per_channel = given_decays<axis::head_key, false>;
using factored_decays = given_decays<axis::head_key, true, true>;
static_assert(gate<decay_per_head> && gate<decay_per_channel> && gate<factored_decays>);

}  // namespace seqmix::testing
