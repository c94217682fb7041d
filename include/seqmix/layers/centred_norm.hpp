#pragma once

#include <type_traits>

#include <seqmix/kernels/cpu/head_norm.hpp>
#include <seqmix/layers/norm.hpp>

namespace seqmix::inline v0 {

/// LayerNorm over each of `groups` equal parts of a row with gain 1 + w and no shift, w starting at 0. Source: Ba,
/// Kiros, Hinton (arXiv 1607.06450), equation 4, as xLSTM's code has it.
class centred_norm {
 public:
  centred_norm() = default;
  centred_norm(parameter_room room, index_t channels, double eps, index_t groups = 1)
      : groups_(groups), eps_(eps), gain_(room.vector("weight", channels, init::constant(0.0))) {}

  template <class T>
  struct saved {
    T* numbers = nullptr;
    static saved carve(arena& a, index_t rows, index_t groups = 1) { return {a.take<T>(2 * rows * groups)}; }
  };

  template <class Device, class T>
  void forward(Device dev, T const* base, view2<same<T> const> x_rc, view2<same<T>> y_rc,
               saved<same<T>> const& keep) const {
    kernels::head_norm_forward(dev, norm(), parts(x_rc), gain_.data(base), nullptr, parts(y_rc), keep.numbers);
  }
  /// dx (+)=, the gain's derivative +=. dx may be dy without `add`.
  template <class Device, class T>
  void backward(Device dev, T const* base, view2<same<T> const> x_rc, saved<same<T>> const& keep,
                view2<same<T> const> dy_rc, view2<same<T>> dx_rc, bool add, same<T>* d_base, arena& ws) const {
    kernels::head_norm_backward(dev, norm(), parts(x_rc), gain_.data(base), keep.numbers, parts(dy_rc),
                                parts(dx_rc), add, gain_.data(d_base), nullptr, ws);
  }

 private:
  kernels::head_norm norm() const noexcept {
    return {.over = kernels::norm_over::layer, .eps = eps_, .per_head = true, .one_plus = true};
  }
  template <class T>
  view3<T> parts(view2<T> x_rc) const {
    return as_heads(x_rc, groups_, x_rc.extent[1] / groups_);
  }

  index_t groups_ = 1;
  double eps_ = 1e-5;
  weight gain_;
};

/// The norm in front of a layer where `layer` is the one without a shift.
template <norm_kind Kind>
using front_norm = std::conditional_t<Kind == norm_kind::layer, centred_norm, norm<Kind>>;

}  // namespace seqmix::inline v0
