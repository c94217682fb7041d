#pragma once

#include <algorithm>

#include "laws.hpp"
#include <seqmix/mixers/recurrence.hpp>

namespace seqmix::testing {

/// recurrence<State, Gate> computed in a form of the test's choice.
template <kernels::recurrence_form Form, class State, class Gate>
struct recurrence_in_form : recurrence<State, Gate> {
  using base = recurrence<State, Gate>;
  using base::forward;  // the reference
  template <class T>
  using state = typename base::template state<T>;
  template <class T>
  using saved = typename base::template saved<T>;

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
            before ? view4<T const>(before->S_nhkv) : view4<T const>{}};
  }
  template <class T>
  static void forward(device::cpu dev, mixer_shape const& s, mixer_input<T> const& in, view3<same<T>> o,
                      state<same<T>> const* before, state<same<T>>* after, saved<same<T>> const* keep, arena& ws) {
    kernels::recurrence_forward<Form, State>(dev, shape(s), input<T>(in, before), o, keep ? &keep->kernel : nullptr,
                                             after ? after->S_nhkv : view4<T>{}, ws);
  }
  template <class T>
  static void backward(device::cpu dev, mixer_shape const& s, mixer_input<T> const& in, view3<same<T> const>,
                       saved<same<T>> const& keep, view3<same<T> const> d_o, state<same<T>> const* before,
                       state<same<T>> const* d_after, mixer_gradient<same<T>> const& d, state<same<T>>* d_before,
                       arena& ws) {
    kernels::recurrence_backward<Form, State>(
        dev, shape(s), input<T>(in, before), keep.kernel, d_o, d_after ? d_after->S_nhkv : view4<T>{},
        recurrence_gradient<T>{d.q_rhk, d.k_rhk, d.v_rhv, d.g_rhk, d.write_rh, d.beta_rh,
                               d_before ? d_before->S_nhkv : view4<T>{}},
        ws);
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

/// Log-decays drawn from nothing, hardly any, strong, and all the way to the bound, mixed.
template <class T>
void draw_extreme_decays(std::vector<double>& g, std::uint64_t seed) {
  random_numbers random(seed);
  std::array<double, 6> const choices{0.0, -1e-3, -1.0, -30.0, -128.0, double(log_decay_bound<T>)};
  for (auto& x : g) x = choices[std::size_t(random.below(6))];
}

/// A gate for tests whose formula never runs: mixers are handed its log-decays.
template <axis Decay, bool Writes>
struct given_decays {
  static constexpr std::string_view name = "given";
  static constexpr gate_spec spec{.raw = Decay, .raws = 1, .decay = Decay, .from = feed::linear, .writes = Writes};
  static constexpr std::array<gate_parameter, 0> parameters{};
  template <class T>
  static gate_value<T> forward(std::array<T, 1> const& raw, std::array<T, 0> const&) noexcept {
    return {-softplus(raw[0]), T(1)};
  }
};
static_assert(gate<given_decays<axis::head, false>> && gate<given_decays<axis::head_key, false>>);

}  // namespace seqmix::testing
