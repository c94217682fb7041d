#pragma once

#include <Eigen/Core>

#include <seqmix/kernels/cpu/simd.hpp>
#include <seqmix/tensor/arena.hpp>
#include <seqmix/tensor/parallel_for.hpp>

/// The big matrix products, the only place that touches Eigen: one single-threaded call per block whose size depends on
/// the shape alone.
namespace seqmix::inline v0::kernels {

namespace detail {
template <class T>
using row_major = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
template <class T>
using const_map = Eigen::Map<row_major<T> const, Eigen::Unaligned, Eigen::OuterStride<>>;
template <class T>
using map = Eigen::Map<row_major<T>, Eigen::Unaligned, Eigen::OuterStride<>>;

template <class T>
const_map<T> as_matrix(view2<T const> x) noexcept {
  return {x.data, x.extent[0], x.extent[1], Eigen::OuterStride<>(x.stride[0])};
}
template <class T>
map<T> as_matrix(view2<T> x) noexcept {
  return {x.data, x.extent[0], x.extent[1], Eigen::OuterStride<>(x.stride[0])};
}

inline constexpr index_t linear_rows = 256;   ///< tokens per block
inline constexpr index_t linear_strip = 64;   ///< output channels per block of a weight gradient

constexpr index_t blocks(index_t n, index_t block) noexcept { return (n + block - 1) / block; }
template <class T>
view2<T> row_block(view2<T> x, index_t block, index_t size) noexcept {
  index_t const begin = block * size;
  return x.slice(0, begin, (std::min)(size, x.extent[0] - begin));
}
}  // namespace detail

/// y [R,O] (+)= x [R,I] w [O,I]'. Work: 2 R I O flops.
template <class Isa, class Threads, class T>
void linear_forward(device::basic_cpu<Isa, Threads> dev, view2<T const> x_ri, view2<same<T> const> w_oi,
                    view2<same<T>> y_ro, bool add, arena&) {
  if (x_ri.extent[0] == 0) return;
  parallel_for(dev, detail::blocks(x_ri.extent[0], detail::linear_rows), [&](index_t b, int) {
    auto const x = detail::as_matrix(detail::row_block(x_ri, b, detail::linear_rows));
    auto y = detail::as_matrix(detail::row_block(y_ro, b, detail::linear_rows));
    auto const w = detail::as_matrix(w_oi);
    if (add)
      y.noalias() += x * w.transpose();
    else
      y.noalias() = x * w.transpose();
  });
}

/// dx [R,I] (+)= dy [R,O] w [O,I]
template <class Isa, class Threads, class T>
void linear_backward_input(device::basic_cpu<Isa, Threads> dev, view2<T const> dy_ro, view2<same<T> const> w_oi,
                           view2<same<T>> dx_ri, bool add, arena&) {
  if (dy_ro.extent[0] == 0) return;
  parallel_for(dev, detail::blocks(dy_ro.extent[0], detail::linear_rows), [&](index_t b, int) {
    auto const dy = detail::as_matrix(detail::row_block(dy_ro, b, detail::linear_rows));
    auto dx = detail::as_matrix(detail::row_block(dx_ri, b, detail::linear_rows));
    auto const w = detail::as_matrix(w_oi);
    if (add)
      dx.noalias() += dy * w;
    else
      dx.noalias() = dy * w;
  });
}

/// dw [O,I] += dy [R,O]' x [R,I]; cut by output channels, so that every sum over tokens is one call.
template <class Isa, class Threads, class T>
void linear_backward_weight(device::basic_cpu<Isa, Threads> dev, view2<T const> dy_ro, view2<same<T> const> x_ri,
                            view2<same<T>> dw_oi, arena&) {
  if (dy_ro.extent[0] == 0) return;
  parallel_for(dev, detail::blocks(dw_oi.extent[0], detail::linear_strip), [&](index_t b, int) {
    auto dw = detail::as_matrix(detail::row_block(dw_oi, b, detail::linear_strip));
    auto const dy = detail::as_matrix(dy_ro.slice(1, b * detail::linear_strip, dw.rows()));
    dw.noalias() += dy.transpose() * detail::as_matrix(x_ri);
  });
}

}  // namespace seqmix::inline v0::kernels
