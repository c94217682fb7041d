#pragma once

#include <seqmix/kernels/cpu/activations.hpp>
#include <seqmix/kernels/cpu/feature_maps.hpp>
#include <seqmix/kernels/cpu/head_norm.hpp>
#include <seqmix/layers/extras.hpp>
#include <seqmix/layers/pass.hpp>

namespace seqmix::inline v0 {

/// From projected queries or keys to those that meet in a score: activation, feature map, norm over each head.
template <extras E, activation Map>
class address_map {
 public:
  static constexpr bool mapped =
      Map != activation::identity || E.features != feature_map::none || E.qk_norm != key_norm::none;

  address_map() = default;
  /// `width`: channels of all heads behind the map.
  address_map(parameter_room room, std::string_view name, index_t width, index_t feature_order, double eps)
      : order_(feature_order), eps_(eps) {
    if constexpr (E.qk_norm == key_norm::rms)
      gain_ = room.vector(std::string(name) + "_norm.weight", width, init::constant(1.0));
  }

  /// [R,H,dim] of projected [R,H,in]. `saved` as `carve_saved` made it.
  template <class T>
  T* carve_saved(arena& a, index_t rows, index_t heads) const {
    return a.take<T>(E.qk_norm == key_norm::none ? 0 : kernels::head_norm_saved(norm(), rows, heads));
  }
  template <class Device, class T>
  void forward(Device dev, T const* base, view3<same<T>> x_rhk, view3<same<T>> y_rhk, T* saved, arena& ws) const {
    arena_scope const scope(ws);
    auto const a = activated(dev, x_rhk, ws);
    auto const f = featured(dev, a, y_rhk, ws);
    if constexpr (E.qk_norm != key_norm::none)
      kernels::head_norm_forward(dev, norm(), view3<T const>(f), gain_.data(base), nullptr, y_rhk, saved);
  }
  /// dx is written; dy is destroyed.
  template <class Device, class T>
  void backward(Device dev, T const* base, view3<same<T>> x_rhk, T* saved, view3<same<T>> dy_rhk,
                view3<same<T>> dx_rhk, same<T>* d_base, arena& ws) const {
    arena_scope const scope(ws);
    auto const a = activated(dev, x_rhk, ws);
    bool constexpr wide = E.features != feature_map::none;
    auto d = dy_rhk;
    if constexpr (E.qk_norm != key_norm::none) {
      auto const f = wide ? ws.take_view<T, 3>(dy_rhk.extent) : a;
      if constexpr (wide) kernels::feature_map_forward(dev, E.features, order_, view3<T const>(a), f, ws);
      kernels::head_norm_backward(dev, norm(), view3<T const>(f), gain_.data(base), saved, view3<T const>(d), d,
                                  false, gain_.data(d_base), nullptr, ws);
      if constexpr (wide)
        kernels::feature_map_backward(dev, E.features, order_, view3<T const>(a), view3<T const>(f),
                                      view3<T const>(d), dx_rhk, ws);
    } else if constexpr (wide) {
      auto const f = ws.take_view<T, 3>(dy_rhk.extent);
      kernels::feature_map_forward(dev, E.features, order_, view3<T const>(a), f, ws);
      kernels::feature_map_backward(dev, E.features, order_, view3<T const>(a), view3<T const>(f),
                                    view3<T const>(d), dx_rhk, ws);
    }
    if constexpr (!wide) kernels::detail::copy(dev, view2<T const>(flat(d)), flat(dx_rhk));
    if constexpr (Map != activation::identity)
      kernels::activate_backward(dev, Map, view2<T const>(flat(x_rhk)), flat(dx_rhk), flat(dx_rhk), false);
  }

 private:
  kernels::head_norm norm() const noexcept {
    return {.over = E.qk_norm == key_norm::l1   ? kernels::norm_over::l1
                    : E.qk_norm == key_norm::l2 ? kernels::norm_over::l2
                                                : kernels::norm_over::rms,
            .eps = eps_,
            .per_head = true};
  }
  /// Heads lie behind one another in a row.
  template <class T>
  static view2<T> flat(view3<T> x_rhk) {
    return {x_rhk.data, {x_rhk.extent[0], x_rhk.extent[1] * x_rhk.extent[2]}, {x_rhk.stride[0], 1}};
  }
  template <class Device, class T>
  view3<T> activated(Device dev, view3<T> x_rhk, arena& ws) const {
    if constexpr (Map == activation::identity) return x_rhk;
    auto const a = ws.take_view<T, 3>(x_rhk.extent);
    kernels::activate(dev, Map, view2<T const>(flat(x_rhk)), flat(a));
    return a;
  }
  /// The features, in y when no norm follows.
  template <class Device, class T>
  view3<T> featured(Device dev, view3<T> a, view3<T> y, arena& ws) const {
    bool constexpr last = E.qk_norm == key_norm::none;
    if constexpr (E.features == feature_map::none) {
      if constexpr (last) kernels::detail::copy(dev, view2<T const>(flat(a)), flat(y));
      return a;
    } else {
      auto const f = last ? y : ws.take_view<T, 3>(y.extent);
      kernels::feature_map_forward(dev, E.features, order_, view3<T const>(a), f, ws);
      return f;
    }
  }

  index_t order_ = 4;
  double eps_ = 1e-6;
  weight gain_;
};

}  // namespace seqmix::inline v0
