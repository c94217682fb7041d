#pragma once

#include <seqmix/kernels/cpu/activations.hpp>
#include <seqmix/kernels/cpu/block_diagonal.hpp>
#include <seqmix/kernels/cpu/feature_maps.hpp>
#include <seqmix/kernels/cpu/head_norm.hpp>
#include <seqmix/layers/extras.hpp>
#include <seqmix/layers/pass.hpp>
#include <seqmix/layers/projection.hpp>

namespace seqmix::inline v0 {

/// From projected queries or keys to those that meet in a score: activation, weights of each head, feature map,
/// norm over each head.
template <extras E, activation Map>
class address_map {
 public:
  static constexpr bool mapped =
      Map != activation::identity || E.features != feature_map::none || E.qk_norm != key_norm::none;

  address_map() = default;
  /// `width`: channels of a head behind the map.
  address_map(parameter_room room, std::string name, index_t heads, index_t width, layer_options const& o)
      : heads_(heads), order_(o.feature_order), eps_(o.qk_norm_eps) {
    if constexpr (E.feature_weights) {
      index_t const rows = heads * kernels::feature_input(E.features, o.key_dim);
      weights_ = room.matrix(name + "_features.weight", rows, o.key_dim, feature_start(o.start.features));
      bias_ = column_bias(room, name + "_features.bias", rows, bias_start(o.key_dim));
    }
    if constexpr (E.qk_norm == key_norm::rms)
      gain_ = room.vector(name + "_norm.weight", heads * width, init::constant(1.0));
  }

  /// [R,H,dim] of projected [R,H,in]. `saved` as `carve_saved` made it.
  template <class T>
  T* carve_saved(arena& a, index_t rows, index_t heads) const {
    return a.take<T>(E.qk_norm == key_norm::none ? 0 : kernels::head_norm_saved(norm(), rows, heads));
  }
  template <class Device, class T>
  void forward(Device dev, T const* base, view3<same<T>> x_rhk, view3<same<T>> y_rhk, T* saved, arena& ws) const {
    arena_scope const scope(ws);
    auto const f = featured(dev, weighted(dev, base, activated(dev, x_rhk, ws), ws), y_rhk, ws);
    if constexpr (E.qk_norm != key_norm::none)
      kernels::head_norm_forward(dev, norm(), view3<T const>(f), gain_.data(base), nullptr, y_rhk, saved);
  }
  /// dx is written; dy is destroyed.
  template <class Device, class T>
  void backward(Device dev, T const* base, view3<same<T>> x_rhk, T* saved, view3<same<T>> dy_rhk,
                view3<same<T>> dx_rhk, same<T>* d_base, arena& ws) const {
    arena_scope const scope(ws);
    auto const a = activated(dev, x_rhk, ws), u = weighted(dev, base, a, ws);
    if constexpr (E.features == feature_map::none) {
      norm_backward(dev, base, a, saved, dy_rhk, d_base, ws);
      kernels::detail::copy(dev, view2<T const>(flat(dy_rhk)), flat(dx_rhk));
    } else {
      auto const f = ws.take_view<T, 3>(dy_rhk.extent);
      auto const du = E.feature_weights ? ws.take_view<T, 3>(u.extent) : dx_rhk;
      kernels::feature_map_forward(dev, E.features, order_, view3<T const>(u), f, ws);
      norm_backward(dev, base, f, saved, dy_rhk, d_base, ws);
      kernels::feature_map_backward(dev, E.features, order_, view3<T const>(u), view3<T const>(f),
                                    view3<T const>(dy_rhk), du, ws);
      if constexpr (E.feature_weights) weights_backward(dev, base, a, du, dx_rhk, d_base, ws);
    }
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
  /// Hedgehog's weights start at the identity. Two equal images would stay equal in training, so those of
  /// `hadamard` start as linear layers do.
  static initialiser feature_start(initialiser const& given) {
    if (given) return given;
    return E.features == feature_map::hadamard ? init::fan_in() : init::identity();
  }
  static initialiser bias_start(index_t columns) {
    double const bound = 1.0 / std::sqrt(double(columns));
    return E.features == feature_map::hadamard ? init::uniform(-bound, bound) : init::constant(0.0);
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
  /// What the feature map reads.
  template <class Device, class T>
  view3<T> weighted(Device dev, T const* base, view3<T> a, arena& ws) const {
    if constexpr (!E.feature_weights) {
      return a;
    } else {
      auto const u = ws.take_view<T, 3>({a.extent[0], heads_, weights_.rows / heads_});
      kernels::block_diagonal_forward(dev, view2<T const>(flat(a)), blocks(base), flat(u), false, ws);
      bias_.add(dev, base, flat(u));
      return u;
    }
  }
  template <class Device, class T>
  void weights_backward(Device dev, T const* base, view3<T> a, view3<T> du, view3<T> dx_rhk, T* d_base,
                        arena& ws) const {
    auto const d = view2<T const>(flat(du));
    kernels::block_diagonal_backward_weight(dev, d, flat(a), blocks(d_base), ws);
    kernels::block_diagonal_backward_input(dev, d, blocks(base), flat(dx_rhk), false, ws);
    bias_.backward(dev, d, d_base, ws);
  }
  /// The matrices of the heads [H,I,K].
  template <class T>
  view3<T> blocks(T* base) const {
    return {weights_.data(base), {heads_, weights_.rows / heads_, weights_.columns}};
  }
  /// d becomes the derivative of what is normalised.
  template <class Device, class T>
  void norm_backward(Device dev, T const* base, view3<T> f, T* saved, view3<T> d, T* d_base, arena& ws) const {
    if constexpr (E.qk_norm != key_norm::none)
      kernels::head_norm_backward(dev, norm(), view3<T const>(f), gain_.data(base), saved, view3<T const>(d), d,
                                  false, gain_.data(d_base), nullptr, ws);
  }
  /// The features, in y when no norm follows.
  template <class Device, class T>
  view3<T> featured(Device dev, view3<T> u, view3<T> y, arena& ws) const {
    bool constexpr last = E.qk_norm == key_norm::none;
    if constexpr (E.features == feature_map::none) {
      if constexpr (last) kernels::detail::copy(dev, view2<T const>(flat(u)), flat(y));
      return u;
    } else {
      auto const f = last ? y : ws.take_view<T, 3>(y.extent);
      kernels::feature_map_forward(dev, E.features, order_, view3<T const>(u), f, ws);
      return f;
    }
  }

  index_t heads_ = 1, order_ = 4;
  double eps_ = 1e-6;
  weight weights_, gain_;
  column_bias bias_;
};

}  // namespace seqmix::inline v0
