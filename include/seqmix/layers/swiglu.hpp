#pragma once

#include <seqmix/layers/norm.hpp>
#include <seqmix/layers/pass.hpp>
#include <seqmix/layers/projection.hpp>

namespace seqmix::inline v0 {

struct swiglu_options {
  index_t width = 0;  ///< hidden channels
  double norm_eps = 1e-6;
  initialiser in = init::normal(0.02), out = init::normal(0.02);
};
template <class Add>
void each_option(swiglu_options const& o, Add const& add) {
  add("width", o.width);
  add("norm_eps", o.norm_eps);
}

/// x + W_down (silu(W_gate n) W_up n), n = norm(x): the feed-forward half of a block; keeps nothing along time.
/// Saved: the projections, 2 width numbers a row. Source: Shazeer (arXiv 2002.05202), section 2.
template <norm_kind Norm = norm_kind::rms>
class swiglu {
 public:
  using options = swiglu_options;
  static std::string name() {
    return Norm == norm_kind::rms     ? "swiglu"
           : Norm == norm_kind::layer ? "swiglu[norm=layer]"
                                      : "swiglu[norm=none]";
  }

  swiglu(options const& o, index_t d_model, parameter_room room) : width_(o.width) {
    auto in_room = room.inner("mlp");
    norm_ = norm<Norm>(in_room.inner("norm"), d_model, o.norm_eps);
    in_.add(in_room, "gate", o.width, d_model, o.in);
    in_.add(in_room, "up", o.width, d_model, o.in);
    out_ = in_room.matrix("down", d_model, o.width, o.out);
  }

  template <class T>
  struct state {
    static index_t elements() { return 0; }
    void clear() {}
  };
  template <class T, class Device>
  state<T> carve_state(arena&, pass<Device, T> const&) const {
    return {};
  }
  index_t state_elements(index_t, index_t) const { return 0; }

  template <class T>
  struct saved {
    typename norm<Norm>::template saved<T> norm;
    view2<T> p_rc;
  };
  template <class T, class Device>
  saved<T> carve_saved(arena& a, pass<Device, T> const& run) const {
    return {norm<Norm>::template saved<T>::carve(a, run.rows()), a.take_view<T, 2>({run.rows(), 2 * width_})};
  }

  template <class Device, class T>
  void forward(pass<Device, T> const& run, view2<same<T> const> x_rd, view2<same<T>> y_rd,
               saved<same<T>> const& keep, state<same<T>> const*, state<same<T>>*, arena& ws) const {
    arena_scope const scope(ws);
    auto const n = ws.take_view<T, 2>({run.rows(), x_rd.extent[1]});
    auto const h = ws.take_view<T, 2>({run.rows(), width_});
    norm_.forward(run.device, run.parameters, x_rd, n, keep.norm);
    in_.forward(run.device, run.parameters, n, keep.p_rc, ws);
    kernels::swiglu_forward(run.device, view2<T const>(gate(keep.p_rc)), up(keep.p_rc), h);
    kernels::detail::add_linear(run.device, x_rd, view2<T const>(h), out_.of(run.parameters), y_rd, ws);
  }

  template <class Device, class T>
  void backward(pass<Device, T> const& run, view2<same<T> const> x_rd, saved<same<T>> const& keep,
                view2<same<T> const> dy_rd, view2<same<T>> dx_rd, state<same<T>> const*, state<same<T>> const*,
                state<same<T>>*, same<T>* d_base, arena& ws) const {
    arena_scope const scope(ws);
    auto const n = ws.take_view<T, 2>({run.rows(), x_rd.extent[1]});
    auto const dn = ws.take_view<T, 2>({run.rows(), x_rd.extent[1]});
    auto const h = ws.take_view<T, 2>({run.rows(), width_});
    auto const dh = ws.take_view<T, 2>({run.rows(), width_});
    auto const dp = ws.take_view<T, 2>({run.rows(), 2 * width_});
    kernels::linear_backward_input(run.device, view2<T const>(dy_rd), out_.of(run.parameters), dh, false, ws);
    kernels::swiglu_backward(run.device, view2<T const>(gate(keep.p_rc)), up(keep.p_rc), dh, gate(dp), up(dp), h);
    kernels::linear_backward_weight(run.device, view2<T const>(dy_rd), h, out_.of(d_base), ws);
    norm_.forward(run.device, run.parameters, x_rd, n, keep.norm);
    in_.backward(run.device, run.parameters, n, dp, dn, d_base, ws);
    kernels::detail::copy(run.device, dy_rd, dx_rd);
    norm_.backward(run.device, run.parameters, x_rd, keep.norm, dn, dx_rd, true, d_base, ws);
  }

 private:
  template <class T>
  view2<T> gate(view2<T> p_rc) const {
    return p_rc.slice(1, 0, width_);
  }
  template <class T>
  view2<T> up(view2<T> p_rc) const {
    return p_rc.slice(1, width_, width_);
  }
  index_t width_;
  norm<Norm> norm_;
  projection in_;
  weight out_;
};

}  // namespace seqmix::inline v0
