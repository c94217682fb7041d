#pragma once

#include <seqmix/kernels/cpu/output_gate.hpp>
#include <seqmix/layers/mlp.hpp>
#include <seqmix/layers/shift_room.hpp>

namespace seqmix::inline v0 {

struct channel_mix_options {
  index_t width = 0;  ///< hidden channels
  double norm_eps = 1e-5;
  initialiser in = init::normal(0.02), out = init::constant(0.0), receptance = init::constant(0.0);
  initialiser shift_key = init::constant(0.5), shift_receptance = init::constant(0.5);
};
template <class Add>
void each_option(channel_mix_options const& o, Add const& add) {
  add("width", o.width);
  add("norm_eps", o.norm_eps);
}

/// RWKV's feed-forward layer: x + sigmoid(W_r x_r) W_v relu(W_k x_k)^2 with token-shifted x_k, x_r of norm(x);
/// `Receptance` false: without the sigmoid (RWKV-7). Carries one normed row along time. Saved: the projections.
/// Source: Peng et al. (arXiv 2305.13048), equations 18-20; RWKV-7 (arXiv 2503.14456), equation 25.
template <bool Receptance = true, norm_kind Norm = norm_kind::layer>
class channel_mix {
  using shift_type = shift_room<token_shift::fixed>;

 public:
  using options = channel_mix_options;
  static std::string name() {
    return std::string("channel_mix[") + (Receptance ? "receptance" : "plain") +
           (Norm == norm_kind::layer ? ""
            : Norm == norm_kind::rms ? ",norm=rms"
                                     : ",norm=none") +
           "]";
  }

  channel_mix(options const& o, index_t d_model, parameter_room room) : width_(o.width), d_(d_model) {
    auto in_room = room.inner("channel");
    norm_ = norm<Norm>(in_room.inner("norm"), d_model, o.norm_eps);
    std::array<typename shift_type::entry, targets> list{};
    list[to_key] = {"key", true, o.shift_key};
    list[to_query] = {"receptance", Receptance, o.shift_receptance};
    shift_ = shift_type(in_room.inner("shift"), d_model, list, 0, {}, {}, {});
    in_.add(in_room, "key", o.width, d_model, {o.in, false, to_key});
    if constexpr (Receptance) in_.add(in_room, "receptance", d_model, d_model, {o.receptance, false, to_query});
    out_ = in_room.matrix("value", d_model, o.width, o.out);
  }

  template <class T>
  struct state {
    view2<T> shifted_nd;
    void clear() { std::fill_n(shifted_nd.data, shifted_nd.size(), T(0)); }
  };
  template <class T, class Device>
  state<T> carve_state(arena& a, pass<Device, T> const& run) const {
    return {a.take_view<T, 2>({run.seq.count(), d_})};
  }
  index_t state_elements(index_t sequences_count, index_t) const { return sequences_count * d_; }

  template <class T>
  struct saved {
    typename norm<Norm>::template saved<T> norm;
    view2<T> p_rc;
  };
  template <class T, class Device>
  saved<T> carve_saved(arena& a, pass<Device, T> const& run) const {
    return {norm<Norm>::template saved<T>::carve(a, run.rows()), a.take_view<T, 2>({run.rows(), in_.width()})};
  }

  template <class Device, class T>
  void forward(pass<Device, T> const& run, view2<same<T> const> x_rd, view2<same<T>> y_rd,
               saved<same<T>> const& keep, state<same<T>> const* before, state<same<T>>* after, arena& ws) const {
    arena_scope const scope(ws);
    auto const n = ws.take_view<T, 2>(x_rd.extent), f = ws.take_view<T, 2>(x_rd.extent);
    norm_.forward(run.device, run.parameters, x_rd, n, keep.norm);
    in_.forward(run.device, run.parameters,
                shift_.forward(run, n, before ? before->shifted_nd : view2<T>{},
                               after ? after->shifted_nd : view2<T>{}, ws),
                keep.p_rc, ws);
    values(run, keep, f, ws);
    if constexpr (Receptance) gate(run, view2<T const>(receptance(keep.p_rc)), f);
    kernels::detail::copy(run.device, x_rd, y_rd);
    kernels::detail::copy_or_add(run.device, view2<T const>(f), y_rd, true);
  }

  template <class Device, class T>
  void backward(pass<Device, T> const& run, view2<same<T> const> x_rd, saved<same<T>> const& keep,
                view2<same<T> const> dy_rd, view2<same<T>> dx_rd, state<same<T>> const* before,
                state<same<T>> const* d_after, state<same<T>>* d_before, same<T>* d_base, arena& ws) const {
    arena_scope const scope(ws);
    auto const n = ws.take_view<T, 2>(x_rd.extent), dn = ws.take_view<T, 2>(x_rd.extent),
               df = ws.take_view<T, 2>(x_rd.extent);
    auto const dp = ws.take_view<T, 2>(keep.p_rc.extent);
    auto const h = ws.take_view<T, 2>({run.rows(), width_});
    kernels::detail::copy(run.device, dy_rd, df);
    if constexpr (Receptance) {
      auto const f = ws.take_view<T, 2>(x_rd.extent);
      values(run, keep, f, ws);
      kernels::output_gate_backward(run.device, activation::sigmoid, view2<T const>(f), receptance(keep.p_rc),
                                    view2<T const>(dy_rd), df, receptance(dp));
    }
    auto const key = keep.p_rc.slice(1, 0, width_), d_key = dp.slice(1, 0, width_);
    kernels::activate(run.device, activation::squared_relu, view2<T const>(key), h);
    kernels::linear_backward_weight(run.device, view2<T const>(df), h, out_.of(d_base), ws);
    kernels::linear_backward_input(run.device, view2<T const>(df), out_.of(run.parameters), d_key, false, ws);
    kernels::activate_backward(run.device, activation::squared_relu, view2<T const>(key), d_key, d_key, false);
    norm_.forward(run.device, run.parameters, x_rd, n, keep.norm);
    auto const carried = before ? before->shifted_nd : view2<T>{};
    auto const d_inputs = shift_.template carve_inputs<T>(run.rows(), x_rd.extent[1], ws);
    in_.backward(run.device, run.parameters, shift_.forward(run, n, carried, view2<T>{}, ws), dp, d_inputs, d_base,
                 ws);
    shift_.backward(run, n, carried, d_inputs, d_after ? d_after->shifted_nd : view2<T>{}, dn,
                    d_before ? d_before->shifted_nd : view2<T>{}, d_base, ws);
    kernels::detail::copy(run.device, view2<T const>(dy_rd), dx_rd);
    norm_.backward(run.device, run.parameters, x_rd, keep.norm, dn, dx_rd, true, d_base, ws);
  }

 private:
  template <class T>
  view2<T> receptance(view2<T> p_rc) const {
    return p_rc.slice(1, width_, d_);
  }
  /// W_v relu(W_k x_k)^2
  template <class Device, class T>
  void values(pass<Device, T> const& run, saved<T> const& keep, view2<T> f, arena& ws) const {
    arena_scope const scope(ws);
    auto const h = ws.take_view<T, 2>({run.rows(), width_});
    kernels::activate(run.device, activation::squared_relu, view2<T const>(keep.p_rc.slice(1, 0, width_)), h);
    kernels::linear_forward(run.device, view2<T const>(h), out_.of(run.parameters), f, false, ws);
  }
  template <class Device, class T>
  static void gate(pass<Device, T> const& run, view2<T const> z, view2<T> f) {
    kernels::output_gate_forward(run.device, activation::sigmoid, view2<T const>(f), z, f);
  }
  index_t width_, d_;
  norm<Norm> norm_;
  shift_type shift_;
  projection in_;
  weight out_;
};

}  // namespace seqmix::inline v0
