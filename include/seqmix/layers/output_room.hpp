#pragma once

#include <seqmix/kernels/cpu/head_norm.hpp>
#include <seqmix/kernels/cpu/output_gate.hpp>
#include <seqmix/layers/extras.hpp>
#include <seqmix/layers/pass.hpp>

namespace seqmix::inline v0 {

/// Between a mixer's output and the last projection: norm, what is added behind it, gate. RMS norms with a SiLU
/// gate run as one fused kernel, everything else as norm, addition and gate one after another.
template <extras E>
class output_room {
  static_assert(E.output_gate || !E.gate_before_norm,
                "seqmix layer: gate_before_norm orders an output gate that is not there; set extras::output_gate");
  static_assert(!E.gate_before_norm || (E.gate_map == activation::silu && E.head_norm != output_norm::group &&
                                        E.own != own_token::bonus_after_norm),
                "seqmix layer: gate_before_norm is Mamba-2's order: a SiLU gate in front of an RMS norm");
  static constexpr bool grouped = E.head_norm == output_norm::group;
  static constexpr bool added = E.own == own_token::bonus_after_norm;

 public:
  static constexpr bool fused = !grouped && !added && (!E.output_gate || E.gate_map == activation::silu);

  output_room() = default;
  output_room(parameter_room room, layer_options const& o)
      : heads_(o.heads), dim_(o.value_dim), groups_(o.norm_groups), eps_(o.head_norm_eps) {
    if constexpr (E.head_norm == output_norm::none) return;
    index_t const width = E.head_norm == output_norm::per_head ? dim_ : heads_ * dim_;
    gain_ = room.vector("weight", width, o.start.head_gain);
    if constexpr (grouped) shift_ = room.vector("bias", width, init::constant(0.0));
  }

  template <class T>
  T* carve_saved(arena& a, index_t rows) const {
    return a.take<T>(fused ? rows * (E.head_norm == output_norm::per_head ? heads_ : groups_)
                           : kernels::head_norm_saved(norm(), rows, norm_heads()));
  }

  /// y of o; `add(t)` adds to the normed output t [R,H,V] what comes behind the norm.
  template <class Device, class T, class Add>
  void forward(Device dev, T const* base, view3<same<T>> o_rhv, view2<same<T>> z_rc, view2<same<T>> y_rc, T* saved,
               Add const& add) const {
    if constexpr (fused) {
      for (index_t g = 0; g < groups_; ++g)
        kernels::output_stage_forward(dev, stage(), group(flat<T const>(o_rhv), g), group(z_rc, g),
                                      gain_of(base, g), group(y_rc, g), saved_of(saved, y_rc, g));
    } else {
      normed(dev, base, o_rhv, as_heads(y_rc, heads_, dim_), saved);
      add(as_heads(y_rc, heads_, dim_));
      if constexpr (E.output_gate) kernels::output_gate_forward(dev, E.gate_map, view2<T const>(y_rc), z_rc, y_rc);
    }
  }
  /// d_o and dz are written; y is the output once more; `add_backward(d)` takes the derivative of what was added.
  template <class Device, class T, class Add, class AddBackward>
  void backward(Device dev, T const* base, view3<same<T>> o_rhv, view2<same<T>> z_rc, T* saved,
                view2<same<T> const> dy_rc, view3<same<T>> d_o_rhv, view2<same<T>> dz_rc, same<T>* d_base,
                view2<same<T>> y_rc, Add const& add, AddBackward const& add_backward, arena& ws) const {
    if constexpr (fused) {
      for (index_t g = 0; g < groups_; ++g)
        kernels::output_stage_backward(dev, stage(), group(flat<T const>(o_rhv), g), group(z_rc, g),
                                       gain_of(base, g), saved_of(saved, y_rc, g), group(dy_rc, g),
                                       group(flat<T>(d_o_rhv), g), group(dz_rc, g), gain_of(d_base, g), ws,
                                       group(y_rc, g));
    } else {
      arena_scope const scope(ws);
      auto const t = ws.take_view<T, 2>(y_rc.extent), dt = ws.take_view<T, 2>(y_rc.extent);
      normed(dev, base, o_rhv, as_heads(t, heads_, dim_), saved);
      add(as_heads(t, heads_, dim_));
      if constexpr (E.output_gate) {
        kernels::output_gate_backward(dev, E.gate_map, view2<T const>(t), z_rc, dy_rc, dt, dz_rc, y_rc);
      } else {
        kernels::detail::copy(dev, view2<T const>(t), y_rc);
        kernels::detail::copy(dev, dy_rc, dt);
      }
      add_backward(view3<T const>(as_heads(dt, heads_, dim_)));
      if constexpr (E.head_norm == output_norm::none)
        kernels::detail::copy(dev, view2<T const>(dt), flat<T>(d_o_rhv));
      else
        kernels::head_norm_backward(dev, norm(), view3<T const>(split(o_rhv)), gain_.data(base), saved,
                                    split(as_heads(dt, heads_, dim_)), split(d_o_rhv), false, gain_.data(d_base),
                                    shift_.data(d_base), ws);
    }
  }

 private:
  index_t norm_heads() const noexcept { return E.head_norm == output_norm::full_width ? groups_ : heads_; }
  kernels::head_norm norm() const noexcept {
    return {.over = grouped ? kernels::norm_over::layer : kernels::norm_over::rms,
            .eps = eps_,
            .per_head = E.head_norm != output_norm::per_head};
  }
  kernels::output_stage stage() const noexcept {
    index_t const width = E.head_norm == output_norm::none       ? 0
                          : E.head_norm == output_norm::per_head ? dim_
                                                                 : heads_ * dim_ / groups_;
    return {width, width, E.output_gate, E.gate_before_norm, eps_};
  }
  // The groups of a norm over the full width, one call each: columns, gains and what is saved.
  template <class T>
  view2<T> group(view2<T> x_rc, index_t g) const {
    return groups_ == 1 ? x_rc : x_rc.slice(1, g * (x_rc.extent[1] / groups_), x_rc.extent[1] / groups_);
  }
  template <class T>
  T* gain_of(T* base, index_t g) const noexcept {
    return g == 0 ? gain_.data(base) : gain_.data(base) + g * (gain_.rows / groups_);
  }
  template <class T>
  static T* saved_of(T* saved, view2<T> y_rc, index_t g) noexcept {
    return g == 0 ? saved : saved + g * y_rc.extent[0];
  }
  /// [R,H,V] as the heads that are normalised together.
  template <class T>
  view3<T> split(view3<T> x_rhv) const {
    index_t const heads = norm_heads(), dim = heads_ * dim_ / heads;
    return {x_rhv.data, {x_rhv.extent[0], heads, dim}, {x_rhv.stride[0], dim, 1}};
  }
  template <class T>
  view2<T> flat(view3<std::remove_const_t<T>> o_rhv) const {
    return {o_rhv.data, {o_rhv.extent[0], heads_ * dim_}, {o_rhv.stride[0], 1}};
  }
  template <class Device, class T>
  void normed(Device dev, T const* base, view3<T> o_rhv, view3<T> t_rhv, T* saved) const {
    if constexpr (E.head_norm == output_norm::none)
      kernels::detail::copy(dev, flat<T const>(o_rhv), flat<T>(t_rhv));
    else
      kernels::head_norm_forward(dev, norm(), view3<T const>(split(o_rhv)), gain_.data(base), shift_.data(base),
                                 split(t_rhv), saved);
  }

  index_t heads_ = 1, dim_ = 1, groups_ = 1;
  double eps_ = 1e-5;
  weight gain_, shift_;
};

}  // namespace seqmix::inline v0
