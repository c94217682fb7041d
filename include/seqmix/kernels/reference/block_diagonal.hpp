#pragma once

#include <seqmix/tensor/arena.hpp>
#include <seqmix/tensor/device.hpp>
#include <seqmix/tensor/formulas.hpp>

namespace seqmix::inline v0::kernels {

namespace detail {

/// Throws unless x [R, B I] and y [R, B O] fit the weight [B,O,I].
template <class T>
void check_block_diagonal(view2<T const> x_rc, view3<T const> w_boi, view2<T const> y_rc) {
  index_t const B = w_boi.extent[0];
  expect_shape("block_diagonal: inputs", x_rc, {x_rc.extent[0], B * w_boi.extent[2]});
  expect_shape("block_diagonal: outputs", y_rc, {x_rc.extent[0], B * w_boi.extent[1]});
}

}  // namespace detail

/// y [R, B O] (+)= x [R, B I] times the blocks of w [B,O,I]: channel b O + o reads the inputs b I .. b I + I - 1.
/// Source: De et al. (arXiv 2402.19427), section 2.4.
template <class T>
void block_diagonal_forward(device::reference, view2<T const> x_rc, view3<same<T> const> w_boi, view2<same<T>> y_rc,
                            bool add, arena&) {
  detail::check_block_diagonal(x_rc, w_boi, view2<T const>(y_rc));
  index_t const O = w_boi.extent[1], I = w_boi.extent[2];
  for (index_t r = 0; r < x_rc.extent[0]; ++r)
    for (index_t b = 0; b < w_boi.extent[0]; ++b)
      for (index_t o = 0; o < O; ++o) {
        T sum(0);
        for (index_t i = 0; i < I; ++i) sum += w_boi(b, o, i) * x_rc(r, b * I + i);
        y_rc(r, b * O + o) = add ? y_rc(r, b * O + o) + sum : sum;
      }
}

}  // namespace seqmix::inline v0::kernels
