#pragma once

#include <seqmix/layers/extras.hpp>
#include <seqmix/layers/pass.hpp>
#include <seqmix/layers/projection.hpp>

namespace seqmix::inline v0 {

struct mlp_options {
  index_t width = 0;  ///< hidden channels
  double norm_eps = 1e-5;
  initialiser in = init::normal(0.02), out = init::normal(0.02);
};
template <class Add>
void each_option(mlp_options const& o, Add const& add) {
  add("width", o.width);
  add("norm_eps", o.norm_eps);
}

/// x + W_down f(W_up n + b) + b, n = norm(x): the plain feed-forward layer; GPT-NeoX's with LayerNorm, erf-GELU and
/// biases. `Residual` false: without x, for branches that are summed elsewhere. Saved: the projection, width
/// numbers a row. Source: Vaswani et al. (arXiv 1706.03762), equation 2.
template <activation Map = activation::gelu, norm_kind Norm = norm_kind::layer, bool Bias = true,
          bool Residual = true>
class mlp {
 public:
  using options = mlp_options;
  static std::string name() {
    return std::string("mlp[map=") + map_name(Map) +
           (Norm == norm_kind::rms     ? ",norm=rms"
            : Norm == norm_kind::layer ? ",norm=layer"
                                       : ",norm=none") +
           (Bias ? ",bias" : "") + (Residual ? "" : ",branch") + "]";
  }

  mlp(options const& o, index_t d_model, parameter_room room) : width_(o.width) {
    auto in_room = room.inner("mlp");
    norm_ = norm<Norm>(in_room.inner("norm"), d_model, o.norm_eps);
    in_.add(in_room, "up", o.width, d_model, {o.in, Bias});
    out_ = in_room.matrix("down", d_model, o.width, o.out);
    if constexpr (Bias) out_bias_ = column_bias(in_room, "down.bias", d_model, init::constant(0.0));
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
    typename norm<Norm>::template saved<T> norm;
    view2<T> p_rc;
  };
  template <class T, class Device>
  saved<T> carve_saved(arena& a, pass<Device, T> const& run) const {
    return {norm<Norm>::template saved<T>::carve(a, run.rows()), a.take_view<T, 2>({run.rows(), width_})};
  }

  template <class Device, class T>
  void forward(pass<Device, T> const& run, view2<same<T> const> x_rd, view2<same<T>> y_rd,
               saved<same<T>> const& keep, state<same<T>> const*, state<same<T>>*, arena& ws) const {
    arena_scope const scope(ws);
    auto const n = ws.take_view<T, 2>({run.rows(), x_rd.extent[1]});
    auto const h = ws.take_view<T, 2>({run.rows(), width_});
    norm_.forward(run.device, run.parameters, x_rd, n, keep.norm);
    in_.forward(run.device, run.parameters, n, keep.p_rc, ws);
    kernels::activate(run.device, Map, view2<T const>(keep.p_rc), h);
    if constexpr (Residual)
      kernels::detail::add_linear(run.device, x_rd, view2<T const>(h), out_.of(run.parameters), y_rd, ws);
    else
      kernels::linear_forward(run.device, view2<T const>(h), out_.of(run.parameters), y_rd, false, ws);
    out_bias_.add(run.device, run.parameters, y_rd);
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
    kernels::activate(run.device, Map, view2<T const>(keep.p_rc), h);
    kernels::linear_backward_input(run.device, view2<T const>(dy_rd), out_.of(run.parameters), dh, false, ws);
    kernels::linear_backward_weight(run.device, view2<T const>(dy_rd), h, out_.of(d_base), ws);
    out_bias_.backward(run.device, view2<T const>(dy_rd), d_base, ws);
    kernels::activate_backward(run.device, Map, view2<T const>(keep.p_rc), dh, dh, false);
    norm_.forward(run.device, run.parameters, x_rd, n, keep.norm);
    in_.backward(run.device, run.parameters, n, dh, dn, d_base, ws);
    if constexpr (Residual) kernels::detail::copy(run.device, view2<T const>(dy_rd), dx_rd);
    norm_.backward(run.device, run.parameters, x_rd, keep.norm, dn, dx_rd, Residual, d_base, ws);
  }

 private:
  index_t width_;
  norm<Norm> norm_;
  projection in_;
  weight out_;
  column_bias out_bias_;
};

}  // namespace seqmix::inline v0
