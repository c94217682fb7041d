#pragma once

#include <algorithm>
#include <cmath>

#include <seqmix/tensor/buffer.hpp>
#include <seqmix/tensor/view.hpp>

namespace seqmix::inline v0::detail {

/// Makes the rows of x [count, n], count <= n, orthonormal: Q' of the factorisation x' = Q R whose R has a positive
/// diagonal, so that there is one answer, and for Gaussian numbers all such Q are equally likely. Modified
/// Gram-Schmidt with every row taken through twice, which leaves products of 1e-15. Work: 4 count^2 n flops.
inline void make_rows_orthonormal(double* x, index_t count, index_t n) {
  auto const dot = [n](double const* a, double const* b) {
    double sum = 0.0;
    for (index_t i = 0; i < n; ++i) sum += a[i] * b[i];
    return sum;
  };
  for (index_t r = 0; r < count; ++r) {
    double* const row = x + r * n;
    for (index_t before = 0; before < 2 * r; ++before) {
      double const* const other = x + before % r * n;
      double const along = dot(row, other);
      for (index_t i = 0; i < n; ++i) row[i] -= along * other[i];
    }
    double const length = std::sqrt(dot(row, row));
    for (index_t i = 0; i < n; ++i) row[i] /= length;
  }
}

/// to [rows, columns] = gain times a matrix whose rows or columns, whichever are fewer, are orthonormal, made of
/// the Gaussian numbers that `to` holds.
inline void make_orthogonal(double* to, index_t rows, index_t columns, double gain) {
  if (rows <= columns) {
    make_rows_orthonormal(to, rows, columns);
    for (index_t i = 0; i < rows * columns; ++i) to[i] *= gain;
    return;
  }
  buffer<double> transposed(rows * columns);
  for (index_t i = 0; i < rows * columns; ++i) transposed[i % columns * rows + i / columns] = to[i];
  make_rows_orthonormal(transposed.data(), columns, rows);
  for (index_t i = 0; i < rows * columns; ++i) to[i] = gain * transposed[i % columns * rows + i / columns];
}

}  // namespace seqmix::inline v0::detail
