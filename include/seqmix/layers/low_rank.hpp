#pragma once

#include <seqmix/concepts/gate.hpp>
#include <seqmix/kernels/cpu/activations.hpp>
#include <seqmix/layers/projection.hpp>

namespace seqmix::inline v0 {

/// y = W_up f(h) + b: the second half of a low-rank projection; h [R,rank] are columns that a projection made.
/// Source: Hu et al. (arXiv 2106.09685), equation 3, with f and b of the layers that use it (GLA, KDA, RWKV-6, -7).
class low_rank {
 public:
  low_rank() = default;
  low_rank(parameter_room& room, std::string_view name, index_t rows, index_t rank, hidden inside, bool bias,
           initialiser up)
      : inside_(inside), up_(room.matrix(name, rows, rank, up)) {
    if (bias) bias_ = column_bias(room, std::string(name) + ".bias", rows, init::constant(0.0));
  }

  template <class Device, class T>
  void forward(Device dev, T const* base, view2<same<T> const> h_rc, view2<same<T>> y_rc, arena& ws) const {
    arena_scope const scope(ws);
    kernels::linear_forward(dev, inner<T>(dev, h_rc, ws), up_.of(base), y_rc, false, ws);
    bias_.add(dev, base, y_rc);
  }
  /// dh is written.
  template <class Device, class T>
  void backward(Device dev, T const* base, view2<same<T> const> h_rc, view2<same<T> const> dy_rc,
                view2<same<T>> dh_rc, same<T>* d_base, arena& ws) const {
    arena_scope const scope(ws);
    kernels::linear_backward_weight(dev, dy_rc, inner<T>(dev, h_rc, ws), up_.of(d_base), ws);
    kernels::linear_backward_input(dev, dy_rc, up_.of(base), dh_rc, false, ws);
    if (inside_ != hidden::identity) kernels::activate_backward(dev, map(), h_rc, dh_rc, dh_rc, false);
    bias_.backward(dev, dy_rc, d_base, ws);
  }

 private:
  kernels::activation map() const noexcept {
    return inside_ == hidden::tanh ? kernels::activation::tanh : kernels::activation::sigmoid;
  }
  template <class T, class Device>
  view2<T const> inner(Device dev, view2<T const> h_rc, arena& ws) const {
    if (inside_ == hidden::identity) return h_rc;
    auto const f = ws.take_view<T, 2>(h_rc.extent);
    kernels::activate(dev, map(), h_rc, f);
    return f;
  }
  hidden inside_ = hidden::identity;
  weight up_;
  column_bias bias_;
};

}  // namespace seqmix::inline v0
