#pragma once

#include <array>

#include <seqmix/tensor/view.hpp>

namespace seqmix::inline v0::states::detail {

/// x'y of n numbers for any scalar, as sixteen interleaved sums: compilers keep those in vectors.
template <class T>
T dot(index_t n, T const* x, T const* y) noexcept {
  constexpr index_t lanes = 16;
  std::array<T, std::size_t(lanes)> part{};
  index_t i = 0;
  for (; i + lanes <= n; i += lanes)
    for (index_t l = 0; l < lanes; ++l) part[std::size_t(l)] += x[i + l] * y[i + l];
  for (; i < n; ++i) part[0] += x[i] * y[i];
  T sum(0);
  for (T const& p : part) sum += p;
  return sum;
}

}  // namespace seqmix::inline v0::states::detail
