#pragma once

#include <seqmix/concepts/mixer.hpp>
#include <seqmix/kernels/cpu/linear.hpp>
#include <seqmix/kernels/reference/rows.hpp>
#include <seqmix/layers/pass.hpp>

namespace seqmix::inline v0 {

namespace layer_detail {
/// Every layer projects.
template <class Device, class T>
concept projects_on = requires(Device dev, view2<T const> x, view2<T> y, arena& ws) {
  kernels::linear_forward(dev, x, x, y, false, ws);
};
template <class L, class Device, class T>
concept has_forward_on = projects_on<Device, T> &&
    requires(L const& l, pass<Device, T> const& run, view2<T> x, typename L::template saved<T> const& keep,
             typename L::template state<T> const* before, typename L::template state<T>* after, arena& ws) {
  l.forward(run, x, x, keep, before, after, ws);
};
template <class L, class Device, class T>
concept has_backward_on = projects_on<Device, T> &&
    requires(L const& l, pass<Device, T> const& run, view2<T> x, typename L::template saved<T> const& keep,
             typename L::template state<T> const* before, typename L::template state<T>* d_before, T* d,
             arena& ws) {
  l.backward(run, x, keep, x, x, before, before, d_before, d, ws);
};
}  // namespace layer_detail

/// A layer that can be trained on a device. Layers say so by the constraints of `forward` and `backward`: the
/// kernels that only they need must be there.
template <class L, class Device, class T = float>
concept layer_on = layer_detail::has_forward_on<L, Device, T> && layer_detail::has_backward_on<L, Device, T>;

/// A layer whose forward runs in plain loops on dual numbers: what its backward is compared with.
template <class L>
concept layer_with_oracle = layer_detail::has_forward_on<L, device::reference, dual<double, 1>>;

}  // namespace seqmix::inline v0
