#pragma once

#include <seqmix/kernels/cpu/recurrence.hpp>
#include <seqmix/kernels/cuda_kernels.hpp>
#include <seqmix/kernels/reference/recurrence.hpp>
#include <seqmix/mixers/mixer.hpp>

namespace seqmix::inline v0 {

namespace mixer_detail {

/// Small additive states take the channels of many heads together; others go chunk by chunk, but for elementwise
/// ones that erase or are read before they are written.
template <class State, class Gate>
inline constexpr kernels::recurrence_form form_of = [] {
  using enum kernels::recurrence_form;
  constexpr bool elementwise = State::spec.kind == state_kind::elementwise;
  constexpr bool additive = !State::spec.low_rank && State::spec.read == read_order::inclusive;
  if (additive && (elementwise || Gate::spec.factored)) return channels;
  if (elementwise) return sequential;
  return Gate::spec.decays && Gate::spec.decay == axis::head_key ? chunkwise_per_channel : chunkwise;
}();

/// void where there are no CUDA kernels.
template <class State, class Gate, class T>
using cuda_recurrence = typename kernels::cuda_recurrence_of<form_of<State, Gate>, State, T>::type;

}  // namespace mixer_detail

/// A bounded state read linearly: K x V numbers per head whatever the length, or one per head and value channel.
/// State: S [N,H,K,V]. Saved: one state a chunk. Deterministic on the CPU for any number of threads.
template <class State, class Gate, class Selector>
requires(State::spec.kind == state_kind::matrix ||
         State::spec.kind == state_kind::elementwise) struct mixer<State, Gate, Selector> {
  static_assert(explain_pairing<State, Gate, Selector>());
  using state_type = State;
  using gate_type = Gate;
  using selector_type = Selector;

  static constexpr kernels::recurrence_form form = mixer_detail::form_of<State, Gate>;
  /// What walks over tokens do between two states that are kept must stay in the caches.
  static constexpr index_t longest_chunk = kernels::detail::walks_tokens<form, State> ? 32 : 1 << 20;

  static std::string name() {
    return "recurrence[state=" + std::string(State::name) + ",gate=" + std::string(Gate::name) + "]";
  }

  template <class T>
  struct state {
    using number = accumulator_t<T>;
    view4<number> S_nhkv;
    static state carve(arena& a, mixer_shape const& s) {
      return {a.take_view<number, 4>({s.seq.count(), s.heads, s.key_dim, s.value_dim})};
    }
    static index_t elements(mixer_shape const& s) { return s.seq.count() * s.heads * s.key_dim * s.value_dim; }
    void clear() { std::fill_n(S_nhkv.data, S_nhkv.size(), number(0)); }
  };
  template <class T>
  struct saved {
    kernels::recurrence_saved<accumulator_t<T>> kernel;
    template <class Isa>
    static saved carve(arena& a, mixer_shape const& s) {
      if constexpr (std::is_same_v<Isa, device::cuda::isa>)
        return {mixer_detail::cuda_recurrence<State, Gate, T>::carve(a, kernel_shape(s))};
      else if constexpr (form == kernels::recurrence_form::channels)
        return {kernels::detail::channel_saved<Isa, T>(a, kernel_shape(s))};
      else
        return {kernels::recurrence_saved<T>::template carve<Isa>(a, kernel_shape(s), State::spec)};
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

  /// On a device: all views lie in its memory (kernels/cuda_kernels.hpp).
  template <class T>
  static void forward(device::cuda const& dev, mixer_shape const& s, mixer_input<T> const& in, view3<same<T>> o_rhv,
                      state<same<T>> const* before, state<same<T>>* after, saved<same<T>> const* keep,
                      arena& ws) requires(!std::is_void_v<mixer_detail::cuda_recurrence<State, Gate, T>>) {
    mixer_detail::cuda_recurrence<State, Gate, T>::forward(dev, kernel_shape(s), kernel_input(in, before), o_rhv,
                                                           keep ? &keep->kernel : nullptr,
                                                           after ? after->S_nhkv : view4<accumulator_t<T>>{}, ws);
  }

  /// `d_after` is the derivative of the final state, nullptr for none; `d_before` takes that of the initial one.
  template <class Isa, class Threads, class T>
  static void backward(device::basic_cpu<Isa, Threads> dev, mixer_shape const& s, mixer_input<T> const& in,
                       view3<same<T> const>, saved<same<T>> const& keep, view3<same<T> const> d_o_rhv,
                       state<same<T>> const* before, state<same<T>> const* d_after,
                       mixer_gradient<same<T>> const& d, state<same<T>>* d_before, arena& ws) {
    kernels::recurrence_backward<form, State>(dev, kernel_shape(s), kernel_input(in, before), keep.kernel, d_o_rhv,
                                              d_after ? d_after->S_nhkv : view4<T>{}, kernel_gradient(d, d_before),
                                              ws);
  }
  template <class T>
  static void backward(device::cuda const& dev, mixer_shape const& s, mixer_input<T> const& in,
                       view3<same<T> const>, saved<same<T>> const& keep, view3<same<T> const> d_o_rhv,
                       state<same<T>> const* before, state<same<T>> const* d_after,
                       mixer_gradient<same<T>> const& d, state<same<T>>* d_before,
                       arena& ws) requires(!std::is_void_v<mixer_detail::cuda_recurrence<State, Gate, T>>) {
    using number = accumulator_t<T>;
    mixer_detail::cuda_recurrence<State, Gate, T>::backward(
        dev, kernel_shape(s), kernel_input(in, before), keep.kernel, d_o_rhv,
        d_after ? view4<number const>(d_after->S_nhkv) : view4<number const>{}, kernel_gradient(d, d_before), ws);
  }

 private:
  static recurrence_shape kernel_shape(mixer_shape const& s) {
    return {s.seq,        s.heads,   s.query_heads, s.key_heads, s.value_heads,
            s.gate_heads, s.key_dim, s.value_dim,   s.scale,     (std::min)(s.chunk, longest_chunk)};
  }
  template <class T>
  static recurrence_input<T> kernel_input(mixer_input<T> const& in, state<same<T>> const* before) {
    return {in.q_rhk,
            in.k_rhk,
            in.v_rhv,
            in.g_rhk,
            in.write_rh,
            in.beta_rh,
            before ? view4<accumulator_t<T> const>(before->S_nhkv) : view4<accumulator_t<T> const>{},
            in.a_rhk,
            in.b_rhk,
            in.rate_hk};
  }
  template <class T>
  static recurrence_gradient<T> kernel_gradient(mixer_gradient<T> const& d, state<same<T>> const* d_before) {
    return {d.q_rhk,
            d.k_rhk,
            d.v_rhv,
            d.g_rhk,
            d.write_rh,
            d.beta_rh,
            d_before ? d_before->S_nhkv : view4<accumulator_t<T>>{},
            d.a_rhk,
            d.b_rhk,
            d.rate_hk};
  }
};

/// A recurrence over a bounded state.
template <class State, class Gate>
using recurrence = mixer<State, Gate, selectors::as_selector<selectors::linear>>;

}  // namespace seqmix::inline v0
