#pragma once

#include <algorithm>

#include <seqmix/tensor/arena.hpp>
#include <seqmix/tensor/device.hpp>
#include <seqmix/tensor/formulas.hpp>

namespace seqmix::inline v0::kernels {

/// What the D numbers of a head are divided by.
enum class norm_over {
  l1,      ///< sum |x| + eps: sum normalisation of features, for signed ones too
  l2,      ///< sqrt(sum x^2 + eps): fla's delta rules, eps 1e-6. Shrinks vectors of length sqrt(eps) and below
  l2_max,  ///< max(sqrt(sum x^2), eps): RWKV-7, eps 1e-12. Keeps tiny vectors at length 1
  rms,     ///< sqrt(mean x^2 + eps). Source: Zhang, Sennrich (arXiv 1910.07467), equation 4
  layer    ///< the same of x - mean: group norm of RWKV, head norm of mLSTM. Source: Wu, He (arXiv 1803.08494)
};

/// A normalisation of every head of [R,H,D] on its own, y = hat gain + shift.
struct head_norm {
  norm_over over = norm_over::rms;
  double eps = 1e-5;
  bool per_head = false;  ///< weight and bias are [H,D], else [D] for all heads
  bool one_plus = false;  ///< the gain is 1 + weight (mLSTM)
};

/// Numbers that forward keeps for backward: 1 / divisor [R,H] and, of `layer`, the means [R,H] behind them.
constexpr index_t head_norm_saved(head_norm const& s, index_t rows, index_t heads) noexcept {
  return (s.over == norm_over::layer ? 2 : 1) * rows * heads;
}

namespace detail {

/// 1 / divisor of a head from the sum of |x|, of x^2 or of (x - mean)^2.
template <class T>
T head_norm_unit(head_norm const& s, T const& sum, index_t D) noexcept {
  switch (s.over) {
  case norm_over::l1:
    return T(1) / (sum + T(s.eps));
  case norm_over::l2:
    return T(1) / sqrt(sum + T(s.eps));
  case norm_over::l2_max:
    return T(1) / (sum <= T(s.eps * s.eps) ? T(s.eps) : sqrt(sum));
  case norm_over::rms:
  case norm_over::layer:
    break;
  }
  return T(1) / sqrt(sum / T(double(D)) + T(s.eps));
}

}  // namespace detail

/// `w` nullptr: gain 1; `b` nullptr: no shift. y may be x where no backward follows.
template <class T>
void head_norm_forward(device::reference, head_norm const& s, view3<T const> x_rhd, same<T> const* w,
                       same<T> const* b, view3<same<T>> y_rhd, same<T>* saved) {
  expect_shape("head_norm: y", y_rhd, x_rhd.extent);
  index_t const R = x_rhd.extent[0], H = x_rhd.extent[1], D = x_rhd.extent[2];
  for (index_t r = 0; r < R; ++r)
    for (index_t h = 0; h < H; ++h) {
      T mean(0), sum(0);
      if (s.over == norm_over::layer) {
        for (index_t d = 0; d < D; ++d) mean += x_rhd(r, h, d);
        mean = mean / T(double(D));
        saved[(R + r) * H + h] = mean;
      }
      for (index_t d = 0; d < D; ++d) {
        T const x = x_rhd(r, h, d) - mean;
        sum += s.over == norm_over::l1 ? (x > T(0) ? x : x < T(0) ? -x : stop(x)) : x * x;
      }
      T const unit = detail::head_norm_unit(s, sum, D);
      saved[r * H + h] = unit;
      for (index_t d = 0; d < D; ++d) {
        index_t const at = (s.per_head ? h * D : 0) + d;
        T const hat = (x_rhd(r, h, d) - mean) * unit;
        y_rhd(r, h, d) = (w ? hat * (s.one_plus ? T(1) + w[at] : w[at]) : hat) + (b ? b[at] : T(0));
      }
    }
}

}  // namespace seqmix::inline v0::kernels
