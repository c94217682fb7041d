#pragma once

#include <seqmix/kernels/cpu/attention.hpp>
#include <seqmix/kernels/cpu/recurrence.hpp>
#include <seqmix/kernels/cpu/routed_attention.hpp>
#include <seqmix/kernels/selective_scan.hpp>
#include <seqmix/states/delta_rule.hpp>
#include <seqmix/states/elementwise.hpp>
#include <seqmix/states/outer_product.hpp>

/// What the CUDA kernels offer, as host code sees it: declarations without a CUDA header. kernels/cuda/*.cuh
/// defines them; a program that calls them is compiled by nvcc with those headers, or linked with a .cu file that
/// instantiates them (`template struct seqmix::cuda_instance<Mixer, T>;`).
///
/// Common to all: T is float, bfloat16 or float16, sums are float. Views, states and the arena lie in device
/// memory, past_length and position too; `sequences` and shapes are read on the host. Sizes and views are checked,
/// values are not. Nothing synchronises, every launch is checked (device_error). No floating-point atomics: the
/// same bits in every run. `saved` is nullptr when no backward follows.
namespace seqmix::inline v0::kernels {

/// Which cells of the product have CUDA kernels. Own states and weights have formulas that no kernel knows.
template <class Which, class How>
inline constexpr bool on_cuda_softmax =
    !Which::spec.routed && !Which::spec.compressed && std::is_same_v<How, selectors::softmax>;
template <class Which, class How>
inline constexpr bool on_cuda_top1 = !Which::spec.routed && !Which::spec.compressed && How::spec.hard;
template <class Which, class How>
inline constexpr bool on_cuda_routed =
    Which::spec.routed && !Which::spec.by_compression && Which::spec.forced == forced_chunks::none &&
    std::is_same_v<How, selectors::softmax>;
template <class State>
inline constexpr bool on_cuda_scan =
    std::is_same_v<State, states::elementwise> || std::is_same_v<State, states::outer_product>;
template <class State>
inline constexpr bool on_cuda_chunks =
    std::is_same_v<State, states::outer_product> || std::is_same_v<State, states::delta_rule>;

/// Softmax attention over all keys or a window, with a gate per head as bias, a sink, shared heads and past keys.
template <class Which, class T>
struct cuda_attention {
  using number = accumulator_t<T>;
  using saved = attention_saved<selectors::softmax, number>;
  static void forward(device::cuda const& dev, attention_shape const& s, attention_input<T> const& in,
                      view3<T> o_rhv, saved const* keep, attention_record const& record, arena& ws);
  static void backward(device::cuda const& dev, attention_shape const& s, attention_input<T> const& in,
                       view3<T const> o_rhv, saved const& keep, view3<T const> d_o_rhv,
                       attention_gradient<T> const& d, arena& ws);
};

/// One key per query; ties take the lowest index.
template <class Which, class How, class T>
struct cuda_top1 {
  using number = accumulator_t<T>;
  using saved = attention_saved<How, number>;
  static void forward(device::cuda const& dev, attention_shape const& s, attention_input<T> const& in,
                      view3<T> o_rhv, saved const* keep, attention_record const& record, arena& ws);
  static void backward(device::cuda const& dev, attention_shape const& s, attention_input<T> const& in,
                       view3<T const> o_rhv, saved const& keep, view3<T const> d_o_rhv,
                       attention_gradient<T> const& d, arena& ws);
};

/// Softmax attention over the keys that a query sees with the chunks it chooses.
template <class Which, class T>
struct cuda_routed_attention {
  using number = accumulator_t<T>;
  using saved = routed_saved<Which, number>;
  static void forward(device::cuda const& dev, attention_shape const& s, attention_input<T> const& in,
                      view3<T> o_rhv, saved const* keep, attention_record const& record, arena& ws);
  static void backward(device::cuda const& dev, attention_shape const& s, attention_input<T> const& in,
                       view3<T const> o_rhv, saved const& keep, view3<T const> d_o_rhv,
                       attention_gradient<T> const& d, arena& ws);
};

/// The kernels of attention with a selector's halves; void: there are none.
template <class Which, class How, class T>
struct cuda_attention_of {
  using type = void;
};
template <class Which, class How, class T>
requires on_cuda_softmax<Which, How>
struct cuda_attention_of<Which, How, T> {
  using type = cuda_attention<Which, T>;
};
template <class Which, class How, class T>
requires on_cuda_top1<Which, How>
struct cuda_attention_of<Which, How, T> {
  using type = cuda_top1<Which, How, T>;
};
template <class Which, class How, class T>
requires on_cuda_routed<Which, How>
struct cuda_attention_of<Which, How, T> {
  using type = cuda_routed_attention<Which, T>;
};

/// The additive recurrence with a decay of its own for every number of the state,
///   S[k][h,v] = e^(g_h rate_hk) S[k][h,v] + write_h k_k v_(h,v),    o_(h,v) = scale sum over k of q_k S[k][h,v],
/// as a scan over time: small K (elementwise states, Mamba-1). Final and initial states [N,H,K,V].
template <class T>
struct cuda_affine_scan {
  using number = accumulator_t<T>;
  using saved = recurrence_saved<number>;
  static saved carve(arena& a, recurrence_shape const& s);
  static void forward(device::cuda const& dev, recurrence_shape const& s, recurrence_input<T> const& in,
                      view3<T> o_rhv, saved const* keep, view4<number> final_nhkv, arena& ws);
  static void backward(device::cuda const& dev, recurrence_shape const& s, recurrence_input<T> const& in,
                       saved const& keep, view3<T const> d_o_rhv, view4<number const> d_final_nhkv,
                       recurrence_gradient<T> const& d, arena& ws);
};

/// The linear family chunk by chunk: outer_product and delta_rule, at most one decay per head or one per key
/// channel.
template <class State, bool PerChannel, class T>
struct cuda_recurrence {
  using number = accumulator_t<T>;
  using saved = recurrence_saved<number>;
  static saved carve(arena& a, recurrence_shape const& s);
  static void forward(device::cuda const& dev, recurrence_shape const& s, recurrence_input<T> const& in,
                      view3<T> o_rhv, saved const* keep, view4<number> final_nhkv, arena& ws);
  static void backward(device::cuda const& dev, recurrence_shape const& s, recurrence_input<T> const& in,
                       saved const& keep, view3<T const> d_o_rhv, view4<number const> d_final_nhkv,
                       recurrence_gradient<T> const& d, arena& ws);
};

/// The kernels of a recurrence: a scan where the CPU takes channels as lanes, else chunks; void: there are none.
template <recurrence_form Form, class State, class T>
struct cuda_recurrence_of {
  using type = void;
};
template <class State, class T>
requires on_cuda_scan<State>
struct cuda_recurrence_of<recurrence_form::channels, State, T> {
  using type = cuda_affine_scan<T>;
};
template <class State, class T>
requires on_cuda_chunks<State>
struct cuda_recurrence_of<recurrence_form::chunkwise, State, T> {
  using type = cuda_recurrence<State, false, T>;
};
template <class State, class T>
requires on_cuda_chunks<State>
struct cuda_recurrence_of<recurrence_form::chunkwise_per_channel, State, T> {
  using type = cuda_recurrence<State, true, T>;
};

/// Mamba-1's scan with all that surrounds it in one pass (kernels/selective_scan.hpp).
template <class T>
struct cuda_selective_scan {
  using number = accumulator_t<T>;
  static selective_scan_saved<number> carve(arena& a, selective_scan_shape const& s);
  static void forward(device::cuda const& dev, selective_scan_shape const& s, selective_scan_input<T> const& in,
                      view2<T> y_rd, selective_scan_saved<number> const* keep, view3<number> final_ndk, arena& ws);
  static void backward(device::cuda const& dev, selective_scan_shape const& s, selective_scan_input<T> const& in,
                       selective_scan_saved<number> const& keep, view2<T const> d_y_rd,
                       view3<number const> d_final_ndk, selective_scan_gradient<T> const& d, arena& ws);
};

/// Keys, values and log-decays of the past, kept in device memory.
template <class T>
struct cuda_history {
  using number = accumulator_t<T>;
  /// The cache after a call: the tokens of `before` (empty views: none) and the call's own, oldest first, at most
  /// the capacity of `after`: of a window the last ones; where `windowed` is false and they are more, the
  /// sequence's cache is not changed and its row of outputs becomes NaN. `before` and `after` may be the same
  /// memory.
  static void remember(device::cuda const& dev, attention_shape const& s, attention_input<T> const& in,
                       bool windowed, view4<T> k_nlhk, view4<T> v_nlhv, view4<number> g_nlhk, index_t* length,
                       view3<T> o_rhv);
  /// Adds the derivative of that cache to the tokens that were put into it.
  static void add_remembered(device::cuda const& dev, attention_shape const& s, attention_input<T> const& in,
                             bool windowed, view4<T const> d_k_nlhk, view4<T const> d_v_nlhv,
                             view4<number const> d_g_nlhk, attention_gradient<T> const& d);
};

}  // namespace seqmix::inline v0::kernels
