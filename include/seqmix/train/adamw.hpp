#pragma once

#include <bit>
#include <cmath>
#include <limits>
#include <string>

#include <seqmix/kernels/cpu/simd.hpp>
#include <seqmix/tensor/buffer.hpp>
#include <seqmix/tensor/parallel_for.hpp>
#include <seqmix/train/number_text.hpp>
#include <seqmix/train/trained_blocks.hpp>

namespace seqmix::inline v0::train {

struct adamw_options {
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1;
};

namespace detail {
/// The square root within two units in the last place for 0 and normal numbers; infinity and NaN stay. std::sqrt
/// sets errno, which keeps compilers from making vectors of it. Newton's method on 1/sqrt(x), the last step on the
/// root.
template <class Isa, class T>
SEQMIX_INLINE simd::vec<Isa, T> root(simd::vec<Isa, T> const& x) noexcept {
  using V = simd::vec<Isa, T>;
  using I = simd::ivec<Isa, T>;
  constexpr bool single = sizeof(T) == 4;
  constexpr auto halved_bits = simd::integer_of<T>(single ? 0x5f3759df : 0x5fe6eb50c7b537a9);
  V const half = x * T(0.5);
  V r = std::bit_cast<V>(halved_bits - (std::bit_cast<I>(x) >> 1));
  // The order of the products keeps 0 from meeting an infinite r * r.
  for (int i = 0; i < (single ? 3 : 4); ++i) r = r * (T(1.5) - half * r * r);
  V const s = x * r;
  V const refined = s + T(0.5) * r * (x - s * s);
  return x < std::numeric_limits<T>::infinity() ? refined : x;
}
}  // namespace detail

/// Adam with decoupled weight decay and bias correction. With learning rate a and the corrected moments m', v':
///     w <- w - a weight_decay w - a m' / (sqrt(v') + eps)
/// The decay is left out for the tensors of `parameter_list::without_weight_decay()`; tensors that are not trained
/// keep their bits. The same bits for any number of threads. Memory: two numbers a parameter.
/// Source: Loshchilov, Hutter (arXiv 1711.05101), algorithm 2.
template <class T>
class adamw {
 public:
  adamw(parameter_list const& list, adamw_options const& o)
      : o_(o), blocks_(list), m_(list.size()), v_(list.size()) {
    auto const require = [](bool good, char const* what, double got) {
      if (!good) throw option_error(std::string("seqmix: adamw: ") + what + ", got " + detail::number_text(got));
    };
    require(o.beta1 >= 0 && o.beta1 < 1, "beta1 must be in [0, 1)", o.beta1);
    require(o.beta2 >= 0 && o.beta2 < 1, "beta2 must be in [0, 1)", o.beta2);
    require(o.eps > 0, "eps must be positive", o.eps);
    require(o.weight_decay >= 0, "weight_decay must not be negative", o.weight_decay);
  }

  adamw_options const& settings() const noexcept { return o_; }

  /// One update of the parameters; all three buffers have the layout of the parameter list.
  template <class Device>
  void step(Device dev, T* parameters, T const* gradients, double learning_rate) {
    ++updates_;
    double const n = double(updates_);
    numbers const x{.keep1 = T(o_.beta1),
                    .take1 = T(1.0 - o_.beta1),
                    .keep2 = T(o_.beta2),
                    .take2 = T(1.0 - o_.beta2),
                    .rate = T(learning_rate / (1.0 - std::pow(o_.beta1, n))),
                    .root_scale = T(1.0 / std::sqrt(1.0 - std::pow(o_.beta2, n))),
                    .eps = T(o_.eps),
                    .shrink = T(1.0 - learning_rate * o_.weight_decay)};
    parallel_for(dev, blocks_.count(), [&](index_t b, int) {
      auto const& part = blocks_[b];
      update<typename detail::isa_of<Device>::type>(x, part, parameters + part.offset, gradients + part.offset);
    });
  }

  /// Updates so far: the exponent of the bias correction.
  index_t updates() const noexcept { return updates_; }
  /// First and second moments in the parameters' layout; a checkpoint reads and restores them with `updates`.
  buffer<T>& first_moment() noexcept { return m_; }
  buffer<T> const& first_moment() const noexcept { return m_; }
  buffer<T>& second_moment() noexcept { return v_; }
  buffer<T> const& second_moment() const noexcept { return v_; }
  void set_updates(index_t updates) noexcept { updates_ = updates; }

 private:
  struct numbers {
    T keep1, take1, keep2, take2, rate, root_scale, eps, shrink;
  };

  template <class Isa>
  void update(numbers const x, trained_blocks::block const& part, T* w, T const* g) noexcept {
    T *const m = m_.data() + part.offset, *const v = v_.data() + part.offset;
    T const shrink = part.weight_decay ? x.shrink : T(1);
    simd::map<Isa>(
        part.size, [=](auto const& m1, auto const& g1) { return m1 * x.keep1 + g1 * x.take1; }, m, m, g);
    simd::map<Isa>(
        part.size, [=](auto const& v1, auto const& g1) { return v1 * x.keep2 + g1 * g1 * x.take2; }, v, v, g);
    simd::map<Isa>(
        part.size,
        [=](auto const& w1, auto const& m1, auto const& v1) {
          return w1 * shrink - m1 * x.rate / (detail::root<Isa, T>(v1) * x.root_scale + x.eps);
        },
        w, w, m, v);
  }

  adamw_options o_;
  trained_blocks blocks_;
  buffer<T> m_, v_;
  index_t updates_ = 0;
};

}  // namespace seqmix::inline v0::train
