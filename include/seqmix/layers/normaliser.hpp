#pragma once

#include <seqmix/kernels/cpu/activations.hpp>
#include <seqmix/kernels/cpu/rows.hpp>

/// Normalised linear attention as the plain one on values with a column of ones behind them, and a division: the
/// last channel of the mixer's output is the sum of the weights. Source: Katharopoulos et al. (arXiv 2006.16236),
/// equation 4.
namespace seqmix::inline v0 {

/// to [R,H,V+1] = [map(v), 1]
template <class Device, class T>
void append_ones(Device dev, kernels::activation map, view3<T const> v_rhv, view3<same<T>> to_rhw) {
  index_t const V = v_rhv.extent[2];
  kernels::detail::for_row_blocks(dev, v_rhv.extent[0], [&](index_t, index_t begin, index_t end) {
    for (index_t r = begin; r < end; ++r)
      for (index_t h = 0; h < v_rhv.extent[1]; ++h) {
        for (index_t c = 0; c < V; ++c) to_rhw(r, h, c) = kernels::activated(map, v_rhv(r, h, c));
        to_rhw(r, h, V) = T(1);
      }
  });
}
/// Channels [0, C) of head h as rows.
template <class T>
view2<T> head_rows(view3<T> x_rhc, index_t h, index_t C) {
  return {x_rhc.data + h * x_rhc.stride[1], {x_rhc.extent[0], C}, {x_rhc.stride[0], 1}};
}
/// dv = slope of the map at v times the first V channels of d; written.
template <class Device, class T>
void drop_ones(Device dev, kernels::activation map, view3<T const> v_rhv, view3<same<T> const> d_rhw,
               view3<same<T>> dv_rhv) {
  index_t const V = v_rhv.extent[2];
  for (index_t h = 0; h < v_rhv.extent[1]; ++h)
    kernels::activate_backward(dev, map, head_rows(v_rhv, h, V), head_rows(d_rhw, h, V), head_rows(dv_rhv, h, V),
                               false);
}

/// o [R,H,V] = m[..V] / (m[V] + eps) of m [R,H,V+1].
template <class Device, class T>
void normaliser_forward(Device dev, view3<T const> m_rhw, double eps, view3<same<T>> o_rhv) {
  index_t const V = o_rhv.extent[2];
  kernels::detail::for_row_blocks(dev, o_rhv.extent[0], [&](index_t, index_t begin, index_t end) {
    for (index_t r = begin; r < end; ++r)
      for (index_t h = 0; h < o_rhv.extent[1]; ++h) {
        T const scale = T(1) / (m_rhw(r, h, V) + T(eps));
        for (index_t c = 0; c < V; ++c) o_rhv(r, h, c) = m_rhw(r, h, c) * scale;
      }
  });
}
/// dm is written.
template <class Device, class T>
void normaliser_backward(Device dev, view3<T const> m_rhw, double eps, view3<same<T> const> d_o_rhv,
                         view3<same<T>> dm_rhw) {
  index_t const V = d_o_rhv.extent[2];
  kernels::detail::for_row_blocks(dev, d_o_rhv.extent[0], [&](index_t, index_t begin, index_t end) {
    for (index_t r = begin; r < end; ++r)
      for (index_t h = 0; h < d_o_rhv.extent[1]; ++h) {
        T const scale = T(1) / (m_rhw(r, h, V) + T(eps));
        T inner(0);
        for (index_t c = 0; c < V; ++c) {
          dm_rhw(r, h, c) = d_o_rhv(r, h, c) * scale;
          inner += d_o_rhv(r, h, c) * m_rhw(r, h, c);
        }
        dm_rhw(r, h, V) = -inner * scale * scale;
      }
  });
}

}  // namespace seqmix::inline v0
