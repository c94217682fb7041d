#pragma once

#include <seqmix/layers/low_rank.hpp>
#include <seqmix/layers/pass.hpp>

namespace seqmix::inline v0 {

/// RWKV-7's values: the first layer hands its own on along the stream, later ones mix theirs with them,
///   v + (v_first - v) sigmoid(v0 + low rank of x).
/// Source: Peng et al. (arXiv 2503.14456), equation 8; start values of its training code.
class first_value_room {
 public:
  first_value_room() = default;
  /// `first`: this layer's values are the ones that the later layers mix with.
  first_value_room(parameter_room room, index_t width, index_t rank, initialiser up, bool first)
      : width_(width), first_(first) {
    if (first_) return;
    up_ = low_rank(room, "first_value.up", width, rank, hidden::identity, false, up);
    bias_ = room.vector("first_value.bias", width, {[](initial_element const& e) {
                          double const line = double(e.row) / double(e.rows > 1 ? e.rows - 1 : 1) - 0.5;
                          return 0.73 - 0.4 * line;
                        }});
  }
  template <class Device, class T>
  void forward(pass<Device, T> const& run, view2<same<T>> v_rc, view2<same<T> const> down_rc, view2<same<T>> mix_rc,
               view2<same<T>> out_rc, arena& ws) const {
    if (first_) {
      kernels::detail::copy(run.device, view2<T const>(v_rc), run.stream_rc.slice(1, 0, width_));
      kernels::detail::copy(run.device, view2<T const>(v_rc), out_rc);
      return;
    }
    up_.forward(run.device, run.parameters, down_rc, mix_rc, ws);
    T const* const bias = bias_.data(run.parameters);
    kernels::detail::for_row_blocks(run.device, v_rc.extent[0], [&](index_t, index_t begin, index_t end) {
      for (index_t r = begin; r < end; ++r)
        for (index_t c = 0; c < width_; ++c)
          out_rc(r, c) = v_rc(r, c) + (run.stream_rc(r, c) - v_rc(r, c)) * sigmoid(mix_rc(r, c) + bias[c]);
    });
  }
  /// dv and d_down are written; the stream's derivative is added to, and taken by the first layer.
  template <class Device, class T>
  void backward(pass<Device, T> const& run, view2<same<T>> v_rc, view2<same<T> const> down_rc,
                view2<same<T> const> mix_rc, view2<same<T> const> d_out_rc, view2<same<T>> dv_rc,
                view2<same<T>> d_down_rc, same<T>* d_base, arena& ws) const {
    arena_scope const scope(ws);
    index_t const R = v_rc.extent[0];
    if (first_) {
      kernels::detail::copy(run.device, d_out_rc, dv_rc);
      kernels::detail::copy_or_add(run.device, view2<T const>(run.d_stream_rc.slice(1, 0, width_)), dv_rc, true);
      return;
    }
    auto const d_mix = ws.take_view<T, 2>({R, width_});
    index_t const count = kernels::detail::blocks(R, kernels::detail::rows_per_block);
    T* const partial = ws.take<T>(count * width_);
    T const* const bias = bias_.data(run.parameters);
    kernels::detail::for_row_blocks(run.device, R, [&](index_t b, index_t begin, index_t end) {
      T* const sums = partial + b * width_;
      std::fill_n(sums, width_, T(0));
      for (index_t r = begin; r < end; ++r)
        for (index_t c = 0; c < width_; ++c) {
          T const m = sigmoid(mix_rc(r, c) + bias[c]), d = d_out_rc(r, c);
          run.d_stream_rc(r, c) += d * m;
          d_mix(r, c) = d * (run.stream_rc(r, c) - v_rc(r, c)) * m * (T(1) - m);
          sums[c] += d_mix(r, c);
          dv_rc(r, c) = d * (T(1) - m);
        }
    });
    if (!ws.measuring()) kernels::detail::add_partials(partial, count, width_, bias_.data(d_base));
    up_.backward(run.device, run.parameters, down_rc, view2<T const>(d_mix), d_down_rc, d_base, ws);
  }

 private:
  index_t width_ = 0;
  bool first_ = true;
  low_rank up_;
  weight bias_;
};

}  // namespace seqmix::inline v0
