#pragma once

#include <array>
#include <cmath>

#include <seqmix/kernels/cpu/simd.hpp>
#include <seqmix/tensor/arena.hpp>
#include <seqmix/tensor/parallel_for.hpp>
#include <seqmix/train/trained_blocks.hpp>

namespace seqmix::inline v0::train {

namespace detail {
/// In double, eight sums side by side added in a fixed order.
template <class T>
double square_sum(T const* x, index_t n) noexcept {
  constexpr index_t lanes = 8;
  std::array<double, lanes> sum{};
  index_t i = 0;
  for (; i + lanes <= n; i += lanes)
    for (index_t l = 0; l < lanes; ++l) sum[std::size_t(l)] += double(x[i + l]) * double(x[i + l]);
  for (; i < n; ++i) sum[std::size_t(i % lanes)] += double(x[i]) * double(x[i]);
  double total = 0.0;
  for (double s : sum) total += s;
  return total;
}
}  // namespace detail

/// The Euclidean norm over the gradients of all trained tensors, before clipping. Above `limit` they are scaled so
/// that their norm becomes the limit; a limit of 0 only measures. A NaN or infinite norm is returned and the
/// gradients are left as they are. A `parameter_list` may stand for its blocks. The same bits for any number of
/// threads.
template <class Device, class T>
double clip_global_norm(Device dev, trained_blocks const& blocks, T* gradients, double limit, arena& ws) {
  arena_scope const scope(ws);
  double* const partial = ws.take<double>(blocks.count());
  if (ws.measuring()) return 0.0;
  parallel_for(dev, blocks.count(), [&](index_t b, int) {
    partial[b] = detail::square_sum(gradients + blocks[b].offset, blocks[b].size);
  });
  double total = 0.0;
  for (index_t b = 0; b < blocks.count(); ++b) total += partial[b];
  double const norm = std::sqrt(total);
  if (limit <= 0.0 || !std::isfinite(norm) || norm <= limit) return norm;
  T const scale = T(limit / norm);
  parallel_for(dev, blocks.count(), [&](index_t b, int) {
    T* const g = gradients + blocks[b].offset;
    simd::map<typename detail::isa_of<Device>::type>(
        blocks[b].size, [=](auto const& x) { return x * scale; }, g, g);
  });
  return norm;
}

}  // namespace seqmix::inline v0::train
