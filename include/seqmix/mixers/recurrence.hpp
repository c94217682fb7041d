#pragma once

#include <seqmix/kernels/cpu/recurrence.hpp>
#include <seqmix/kernels/reference/recurrence.hpp>
#include <seqmix/mixers/mixer.hpp>

namespace seqmix::inline v0 {

/// A bounded state read linearly: K x V numbers per head whatever the length.
/// State: S [N,H,K,V]. Saved: one state a chunk. Deterministic on the CPU for any number of threads.
template <class State, class Gate, class Selector>
requires(State::spec.kind == state_kind::matrix) struct mixer<State, Gate, Selector> {
  static_assert(mixer_detail::pairs<State, Gate, Selector>());
  using state_type = State;
  using gate_type = Gate;
  using selector_type = Selector;

  /// Additive states with at most one decay per head are computed chunk by chunk.
  static constexpr auto form = !State::spec.low_rank && Gate::spec.decay == axis::head
                                   ? kernels::recurrence_form::chunkwise
                                   : kernels::recurrence_form::sequential;

  static std::string name() {
    return "recurrence[state=" + std::string(State::name) + ",gate=" + std::string(Gate::name) + "]";
  }

  template <class T>
  struct state {
    view4<T> S_nhkv;
    static state carve(arena& a, mixer_shape const& s) {
      return {a.take_view<T, 4>({s.seq.count(), s.heads, s.key_dim, s.value_dim})};
    }
    static index_t elements(mixer_shape const& s) { return s.seq.count() * s.heads * s.key_dim * s.value_dim; }
    void clear() { std::fill_n(S_nhkv.data, S_nhkv.size(), T(0)); }
  };
  template <class T>
  struct saved {
    kernels::recurrence_saved<T> kernel;
    template <class Isa>
    static saved carve(arena& a, mixer_shape const& s) {
      return {kernels::recurrence_saved<T>::template carve<Isa>(a, kernel_shape(s))};
    }
  };

  template <class Isa, class Threads, class T>
  static void forward(device::basic_cpu<Isa, Threads> dev, mixer_shape const& s, mixer_input<T> const& in,
                      view3<same<T>> o_rhv, state<same<T>> const* before, state<same<T>>* after,
                      saved<same<T>> const* keep, arena& ws) {
    kernels::recurrence_forward<form, State>(dev, kernel_shape(s), kernel_input(in, before), o_rhv,
                                             keep ? &keep->kernel : nullptr, after ? after->S_nhkv : view4<T>{},
                                             ws);
  }
  template <class T>
  static void forward(device::reference dev, mixer_shape const& s, mixer_input<T> const& in, view3<same<T>> o_rhv,
                      state<same<T>> const* before, state<same<T>>* after, saved<same<T>> const*, arena&) {
    kernels::recurrence_forward<State>(dev, kernel_shape(s), kernel_input(in, before), o_rhv,
                                       after ? after->S_nhkv : view4<T>{});
  }

  /// `d_after` is the derivative of the final state, nullptr for none; `d_before` takes that of the initial one.
  template <class Isa, class Threads, class T>
  static void backward(device::basic_cpu<Isa, Threads> dev, mixer_shape const& s, mixer_input<T> const& in,
                       view3<same<T> const>, saved<same<T>> const& keep, view3<same<T> const> d_o_rhv,
                       state<same<T>> const* before, state<same<T>> const* d_after,
                       mixer_gradient<same<T>> const& d, state<same<T>>* d_before, arena& ws) {
    kernels::recurrence_backward<form, State>(dev, kernel_shape(s), kernel_input(in, before), keep.kernel, d_o_rhv,
                                              d_after ? d_after->S_nhkv : view4<T>{},
                                              recurrence_gradient<T>{d.q_rhk, d.k_rhk, d.v_rhv, d.g_rhk, d.write_rh,
                                                                     d.beta_rh,
                                                                     d_before ? d_before->S_nhkv : view4<T>{}},
                                              ws);
  }

 private:
  static recurrence_shape kernel_shape(mixer_shape const& s) {
    return {s.seq,        s.heads,   s.query_heads, s.key_heads, s.value_heads,
            s.gate_heads, s.key_dim, s.value_dim,   s.scale,     s.chunk};
  }
  template <class T>
  static recurrence_input<T> kernel_input(mixer_input<T> const& in, state<same<T>> const* before) {
    return {in.q_rhk,
            in.k_rhk,
            in.v_rhv,
            in.g_rhk,
            in.write_rh,
            in.beta_rh,
            before ? view4<T const>(before->S_nhkv) : view4<T const>{}};
  }
};

/// A recurrence over a bounded state.
template <class State, class Gate>
using recurrence = mixer<State, Gate, selectors::as_selector<selectors::linear>>;

}  // namespace seqmix::inline v0
