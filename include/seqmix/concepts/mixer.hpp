#pragma once

#include <concepts>
#include <string>

#include <seqmix/concepts/gate.hpp>
#include <seqmix/concepts/selector.hpp>
#include <seqmix/concepts/state.hpp>
#include <seqmix/tensor/arena.hpp>
#include <seqmix/tensor/sequences.hpp>
#include <seqmix/tensor/storage.hpp>

namespace seqmix::inline v0 {

/// Sizes and numbers of a mixer. H = `heads` is the number of states; queries, keys, values and gates each have a
/// head count that divides H, index h / (H / count): grouped queries, grouped values and Mamba's groups are all of
/// this kind.
struct mixer_shape {
  sequences seq{};
  index_t heads = 1, query_heads = 1, key_heads = 1, value_heads = 1, gate_heads = 1;
  index_t key_dim = 1, value_dim = 1;
  double scale = 1.0;    ///< multiplies q.k
  index_t chunk = 32;    ///< tokens a recurrence computes together; changes rounding only
  index_t capacity = 0;  ///< tokens a `history` state can hold
  selection select{};
  selector_knobs knobs{};
};

/// What a mixer reads, rows R = batch x time or packed. g <= 0 are log-decays [R,Hg,1|K], row stride 0 when
/// constant. Activations are stored as T; decays, strengths and parameters in the type sums are kept in (float where
/// T has sixteen bits, else T). With `rate` [Hg,K] >= 0 the log-decay of key channel k is the bounded g rate_k and g is [R,Hg,1].
template <class T>
struct mixer_input {
  using number = accumulator_t<T>;
  view3<T const> q_rhk{}, k_rhk{}, v_rhv{};
  view3<number const> g_rhk{};
  view2<number const> write_rh{};   ///< scales what is written; empty: 1
  view2<number const> beta_rh{};    ///< the delta rule's strength [R,Hg]; empty: 1
  view3<T const> a_rhk{}, b_rhk{};  ///< of states that read them [R,Hk,K]
  view2<number const> rate_hk{};    ///< empty: 1
  /// Of stabilised states that are read before they are written: joins the own token's log-weight [H,K].
  view2<number const> bonus_hk{};
  view<number const, 1> sink_h{};  ///< of softmax: e^sink joins the denominator [H]; empty: nothing does
  view3<number const> mix_rhn{};   ///< of gated sums: the weight of each member's output [R,H,members]
};

/// Where the derivatives of a mixer's input go; written, not added.
template <class T>
struct mixer_gradient {
  using number = accumulator_t<T>;
  view3<T> q_rhk{}, k_rhk{}, v_rhv{};
  view3<number> g_rhk{};
  view2<number> write_rh{}, beta_rh{};
  view3<T> a_rhk{}, b_rhk{};
  view2<number> rate_hk{}, bonus_hk{};
  view<number, 1> sink_h{};
  view3<number> mix_rhn{};
};

namespace mixer_detail {
template <class M>
concept has_name = requires {
  { M::name() } -> std::convertible_to<std::string>;
};
template <class M>
concept has_policies =
    state<typename M::state_type> && gate<typename M::gate_type> && selector<typename M::selector_type>;
template <class M, class T>
concept has_state = requires(arena& a, mixer_shape const& s) {
  { M::template state<T>::carve(a, s) } -> std::same_as<typename M::template state<T>>;
  { M::template state<T>::elements(s) } -> std::same_as<index_t>;
};
template <class M, class Device, class T>
concept has_forward_on = requires(Device dev, mixer_shape const& s, mixer_input<T> const& in, view3<T> o,
                                  typename M::template state<T> const* before, typename M::template state<T>* after,
                                  arena& a) {
  { M::forward(dev, s, in, o, before, after, nullptr, a) } -> std::same_as<void>;
};
template <class M, class Device, class T>
concept has_backward_on = requires(Device dev, mixer_shape const& s, mixer_input<T> const& in, view3<T const> o,
                                   mixer_gradient<T> const& d, typename M::template saved<T> const& saved,
                                   typename M::template state<T> const* before,
                                   typename M::template state<T>* d_before, arena& a) {
  { M::backward(dev, s, in, o, saved, o, before, before, d, d_before, a) } -> std::same_as<void>;
};
}  // namespace mixer_detail

/// How is it computed over a sequence? A stateless type with `name()`, its three policies, `state<T>`, `saved<T>`
/// and `forward`, `backward` on views; no allocation, no virtual call.
template <class M>
concept mixer_type = mixer_detail::has_name<M> && mixer_detail::has_policies<M> &&
    mixer_detail::has_state<M, float> && mixer_detail::has_forward_on<M, device::reference, dual<double, 1>>;

/// A mixer that has kernels for a device.
template <class M, class Device, class T = float>
concept mixer_on =
    mixer_type<M> && mixer_detail::has_forward_on<M, Device, T> && mixer_detail::has_backward_on<M, Device, T>;

}  // namespace seqmix::inline v0
