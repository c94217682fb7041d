#pragma once

#include <string>

#include <seqmix/kernels/cpu/output_gate.hpp>
#include <seqmix/layers/centred_norm.hpp>
#include <seqmix/layers/detail/xlstm_start.hpp>
#include <seqmix/layers/extras.hpp>
#include <seqmix/layers/pass.hpp>
#include <seqmix/layers/projection.hpp>

namespace seqmix::inline v0 {

struct gated_mlp_options {
  double expand = 1.3;
  index_t width = 0;  ///< hidden channels; 0: expand d_model, rounded up to a multiple of 64
  double norm_eps = 1e-5;
  initialiser in{}, out{};  ///< none: the rules of xLSTM's code
};
template <class Add>
void each_option(gated_mlp_options const& o, Add const& add) {
  add("expand", o.expand);
  add("width", o.width);
  add("norm_eps", o.norm_eps);
}

/// x + W_down (f(W_gate n) W_up n), n = norm(x) (layer: without a shift): what stands behind sLSTM in its block.
/// Saved: the projections, 2 width numbers a row. Source: Shazeer (arXiv 2002.05202), section 2; defaults of the
/// code of Beck et al. (arXiv 2405.04517).
template <activation Map = activation::gelu, norm_kind Norm = norm_kind::layer>
class gated_mlp {
 public:
  using options = gated_mlp_options;
  static std::string name() {
    return std::string("gated_mlp[map=") + map_name(Map) +
           (Norm == norm_kind::rms     ? ",norm=rms]"
            : Norm == norm_kind::layer ? "]"
                                       : ",norm=none]");
  }

  gated_mlp(options const& o, index_t d_model, parameter_room room)
      : width_(o.width > 0 ? o.width : detail::expanded_width(o.expand, d_model)) {
    auto in = room.inner("mlp");
    norm_ = front_norm<Norm>(in.inner("norm"), d_model, o.norm_eps);
    auto const start = detail::start_or(o.in, detail::small_start(d_model));
    in_.add(in, "gate", width_, d_model, start);
    in_.add(in, "up", width_, d_model, start);
    out_ = in.matrix("down", d_model, width_, detail::start_or(o.out, detail::output_start(d_model)));
  }

  template <class T>
  struct state {
    void clear() {}
  };
  template <class T, class Device>
  state<T> carve_state(arena&, pass<Device, T> const&) const {
    return {};
  }
  index_t state_elements(index_t, index_t) const { return 0; }

  template <class T>
  struct saved {
    typename front_norm<Norm>::template saved<T> norm;
    view2<T> p_rc;
  };
  template <class T, class Device>
  saved<T> carve_saved(arena& a, pass<Device, T> const& run) const {
    return {front_norm<Norm>::template saved<T>::carve(a, run.rows()), a.take_view<T, 2>({run.rows(), 2 * width_})};
  }

  template <class Device, class T>
  void forward(pass<Device, T> const& run, view2<same<T> const> x_rd, view2<same<T>> y_rd,
               saved<same<T>> const& keep, state<same<T>> const*, state<same<T>>*, arena& ws) const {
    arena_scope const scope(ws);
    auto const n = ws.take_view<T, 2>(x_rd.extent), h = ws.take_view<T, 2>({run.rows(), width_});
    norm_.forward(run.device, run.parameters, x_rd, n, keep.norm);
    in_.forward(run.device, run.parameters, n, keep.p_rc, ws);
    kernels::output_gate_forward(run.device, Map, view2<T const>(up(keep.p_rc)), gate(keep.p_rc), h);
    kernels::detail::add_linear(run.device, x_rd, view2<T const>(h), out_.of(run.parameters), y_rd, ws);
  }

  template <class Device, class T>
  void backward(pass<Device, T> const& run, view2<same<T> const> x_rd, saved<same<T>> const& keep,
                view2<same<T> const> dy_rd, view2<same<T>> dx_rd, state<same<T>> const*, state<same<T>> const*,
                state<same<T>>*, same<T>* d_base, arena& ws) const {
    arena_scope const scope(ws);
    auto const n = ws.take_view<T, 2>(x_rd.extent), dn = ws.take_view<T, 2>(x_rd.extent);
    auto const h = ws.take_view<T, 2>({run.rows(), width_}), dh = ws.take_view<T, 2>(h.extent);
    auto const dp = ws.take_view<T, 2>(keep.p_rc.extent);
    kernels::linear_backward_input(run.device, view2<T const>(dy_rd), out_.of(run.parameters), dh, false, ws);
    kernels::output_gate_backward(run.device, Map, view2<T const>(up(keep.p_rc)), gate(keep.p_rc), dh, up(dp),
                                  gate(dp), h);
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
  front_norm<Norm> norm_;
  projection in_;
  weight out_;
};

}  // namespace seqmix::inline v0
