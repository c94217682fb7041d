#pragma once

#include <seqmix/kernels/cpu/rows.hpp>
#include <seqmix/layers/parameters.hpp>

namespace seqmix::inline v0 {

enum class norm_kind { none, rms, layer };

/// The norm in front of a layer or behind the last one.
template <norm_kind Kind>
class norm {
 public:
  norm() = default;
  norm(parameter_room room, index_t channels, double eps) : eps_(eps) {
    if constexpr (Kind == norm_kind::none) return;
    gain_ = room.vector("weight", channels, init::constant(1.0));
    if constexpr (Kind == norm_kind::layer) shift_ = room.vector("bias", channels, init::constant(0.0));
  }

  template <class T>
  struct saved {
    T *mean_r = nullptr, *rstd_r = nullptr;
    static saved carve(arena& a, index_t rows) {
      return {a.take<T>(Kind == norm_kind::layer ? rows : 0), a.take<T>(Kind == norm_kind::none ? 0 : rows)};
    }
  };

  template <class Device, class T>
  void forward(Device dev, T const* base, view2<same<T> const> x_rd, view2<same<T>> y_rd,
               saved<same<T>> const& keep) const {
    if constexpr (Kind == norm_kind::none)
      kernels::detail::copy(dev, view2<T const>(x_rd), y_rd);
    else if constexpr (Kind == norm_kind::rms)
      kernels::rms_norm_forward(dev, x_rd, gain_.data(base), eps_, y_rd, keep.rstd_r);
    else
      kernels::layer_norm_forward(dev, x_rd, gain_.data(base), shift_.data(base), eps_, y_rd, keep.mean_r,
                                  keep.rstd_r);
  }
  /// dx (+)=, parameters +=
  template <class Device, class T>
  void backward(Device dev, T const* base, view2<same<T> const> x_rd, saved<same<T>> const& keep,
                view2<same<T> const> dy_rd, view2<same<T>> dx_rd, bool add, same<T>* d_base, arena& ws) const {
    if constexpr (Kind == norm_kind::none)
      kernels::detail::copy_or_add(dev, view2<T const>(dy_rd), dx_rd, add);
    else if constexpr (Kind == norm_kind::rms)
      kernels::rms_norm_backward(dev, x_rd, gain_.data(base), keep.rstd_r, dy_rd, dx_rd, add, gain_.data(d_base),
                                 ws);
    else
      kernels::layer_norm_backward(dev, x_rd, gain_.data(base), keep.mean_r, keep.rstd_r, dy_rd, dx_rd, add,
                                   gain_.data(d_base), shift_.data(d_base), ws);
  }

 private:
  double eps_ = 1e-5;
  weight gain_, shift_;
};

}  // namespace seqmix::inline v0
