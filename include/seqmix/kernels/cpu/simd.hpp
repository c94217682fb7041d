#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include <seqmix/tensor/device.hpp>

/// Vectors by the compilers' own extension: one portable source for SSE2, AVX2, AVX-512 and NEON. Everything is
/// inlined into kernels whose symbols carry the instruction set.
namespace seqmix::inline v0::simd {

template <class T, int Lanes>
struct vector_of {
  typedef T type __attribute__((vector_size(sizeof(T) * std::size_t(Lanes))));
};
template <class Isa, class T>
using vec = typename vector_of<T, Isa::template lanes<T>>::type;

template <class T>
using integer_of = std::conditional_t<sizeof(T) == 4, std::int32_t, std::int64_t>;
template <class Isa, class T>
using ivec = typename vector_of<integer_of<T>, Isa::template lanes<T>>::type;

#define SEQMIX_INLINE [[gnu::always_inline]] inline
#if defined(__CUDACC__)
#define SEQMIX_UNROLL(n)  // nvcc's front end does not know the pragma, and runs no CPU kernel
#else
#define SEQMIX_PRAGMA(text) _Pragma(#text)
#define SEQMIX_UNROLL(n) SEQMIX_PRAGMA(GCC unroll n)
#endif

template <class Isa, class T>
SEQMIX_INLINE vec<Isa, T> load(T const* p) noexcept {
  vec<Isa, T> v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class Isa, class T>
SEQMIX_INLINE void store(T* p, vec<Isa, T> const& v) noexcept {
  std::memcpy(p, &v, sizeof v);
}
/// A hint that p[ahead] will be used soon, from the first cache (3), the second (2) or the third one (1). It need
/// not exist.
template <int Level = 3, class T>
SEQMIX_INLINE void prefetch(T const* p, index_t ahead) noexcept {
  __builtin_prefetch(
      reinterpret_cast<void const*>(reinterpret_cast<std::uintptr_t>(p) + std::uintptr_t(ahead) * sizeof(T)), 0, Level);
}
/// All lanes x; minus zero stays minus zero.
template <class Isa, class T>
SEQMIX_INLINE vec<Isa, T> broadcast(T x) noexcept {
  return x - vec<Isa, T>{};
}
template <class Isa, class T>
SEQMIX_INLINE vec<Isa, T> larger(vec<Isa, T> const& a, vec<Isa, T> const& b) noexcept {
  return a > b ? a : b;
}
/// The lanes `Lane` of a and b, b's counted after a's.
template <int... Lane, class V>
SEQMIX_INLINE V shuffle(V const& a, V const& b) noexcept {
#if defined(__CUDACC__)
  // nvcc's front end expands no pack inside the builtin.
  constexpr int n = sizeof...(Lane), lane[] = {Lane...};
  V out{};
  for (int i = 0; i < n; ++i) out[i] = lane[i] < n ? a[lane[i]] : b[lane[i] - n];
  return out;
#else
  return __builtin_shufflevector(a, b, Lane...);
#endif
}
/// Lanes moved down by `Step`, the lowest ones coming in again at the top.
template <int Step, class V, std::size_t... I>
SEQMIX_INLINE V rotate(V const& v, std::index_sequence<I...>) noexcept {
  return shuffle<int((I + std::size_t(Step)) % sizeof...(I))...>(v, v);
}
/// Lane 0 of f over all lanes in a fixed tree: halves, quarters, ...
template <class Isa, class T, int Width = Isa::template lanes<T> / 2, class F>
SEQMIX_INLINE T fold(vec<Isa, T> const& v, F const& f) noexcept {
  if constexpr (Width == 0)
    return v[0];
  else
    return fold<Isa, T, Width / 2>(
        f(v, rotate<Width>(v, std::make_index_sequence<std::size_t(Isa::template lanes<T>)>{})), f);
}
template <class Isa, class T>
SEQMIX_INLINE T sum(vec<Isa, T> const& v) noexcept {
  return fold<Isa, T>(v, [](auto const& a, auto const& b) { return a + b; });
}
template <class Isa, class T>
SEQMIX_INLINE T greatest(vec<Isa, T> const& v) noexcept {
  return fold<Isa, T>(v, [](auto const& a, auto const& b) { return larger<Isa, T>(a, b); });
}
/// Lane numbers 0, 1, 2, ...
template <class Isa, class T>
SEQMIX_INLINE ivec<Isa, T> lane_index() noexcept {
  ivec<Isa, T> v{};
  for (int i = 0; i < Isa::template lanes<T>; ++i) v[i] = integer_of<T>(i);
  return v;
}

/// The first n lanes of x (n may be negative, or more than there are), 0 in the others.
template <class Isa, class T>
SEQMIX_INLINE vec<Isa, T> first_lanes(vec<Isa, T> const& x, index_t n) noexcept {
  constexpr index_t lanes = Isa::template lanes<T>;
  return lane_index<Isa, T>() < integer_of<T>(n < lanes ? n : lanes) ? x : vec<Isa, T>{};
}

/// Lanes 0, 1, ... of a and b in turn: of their first halves, or of their second ones.
template <bool Second, class V, std::size_t... I>
SEQMIX_INLINE V interleave(V const& a, V const& b, std::index_sequence<I...>) noexcept {
  constexpr std::size_t n = sizeof...(I), from = Second ? n / 2 : 0;
  return shuffle<int(I % 2 * n + I / 2 + from)...>(a, b);
}
/// Transposes as many vectors as one has lanes: interleaving rows i and i + n/2 for all i, log2(n) times.
template <class Isa, class T>
SEQMIX_INLINE void transpose_square(vec<Isa, T>* rows) noexcept {
  constexpr int n = Isa::template lanes<T>;
  constexpr auto lanes = std::make_index_sequence<std::size_t(n)>{};
  for (int done = 1; done < n; done *= 2) {
    vec<Isa, T> next[std::size_t(n)];
    for (int i = 0; i < n / 2; ++i) {
      next[2 * i] = interleave<false>(rows[i], rows[i + n / 2], lanes);
      next[2 * i + 1] = interleave<true>(rows[i], rows[i + n / 2], lanes);
    }
    for (int i = 0; i < n; ++i) rows[i] = next[i];
  }
}

/// What e^x is made of: x = n log 2 + r, exact to two words, and e^r by a polynomial.
template <class T>
struct exp_constants {
  static constexpr bool single = sizeof(T) == 4;
  static constexpr T lowest = single ? T(-87.33654) : T(-708.3964185322641);
  static constexpr T vanishing = single ? T(-88.02969) : T(-709.0895657128241);  ///< -bias log 2
  static constexpr T highest = single ? T(88.37626) : T(709.782712893384);
  static constexpr T magic = single ? T(12582912.0) : T(6755399441055744.0);
  static constexpr T high = single ? T(0.693359375) : T(0.6931471803691238);
  static constexpr T low = single ? T(-2.12194440e-4) : T(1.9082149292705877e-10);
  static constexpr int mantissa = single ? 23 : 52;
  static constexpr int bias = single ? 127 : 1023;
};
/// e^r for |r| <= log(2) / 2, and 1 for 0: the best polynomial of degree 6 in float (error 0.06 of half a unit in
/// the last place), the Taylor series in double.
template <class Isa, class T>
SEQMIX_INLINE vec<Isa, T> exp_of_remainder(vec<Isa, T> const& r) noexcept {
  vec<Isa, T> p;
  if constexpr (sizeof(T) == 4) {
    p = broadcast<Isa, T>(T(0.0013814573176205158));
    p = p * r + T(0.008368724025785923);
    p = p * r + T(0.04166838899254799);
    p = p * r + T(0.1666652113199234);
    p = p * r + T(0.4999999403953552);
  } else {
    p = broadcast<Isa, T>(T(1.0 / 6227020800.0));
    p = p * r + T(1.0 / 479001600.0);
    p = p * r + T(1.0 / 39916800.0);
    p = p * r + T(1.0 / 3628800.0);
    p = p * r + T(1.0 / 362880.0);
    p = p * r + T(1.0 / 40320.0);
    p = p * r + T(1.0 / 5040);
    p = p * r + T(1.0 / 720);
    p = p * r + T(1.0 / 120);
    p = p * r + T(1.0 / 24);
    p = p * r + T(1.0 / 6);
    p = p * r + T(0.5);
  }
  p = p * r + T(1);
  return p * r + T(1);
}

/// e^x, relative error below 2 units in the last place; 0 below the smallest normal result (also for -inf), inf
/// above the largest, NaN stays NaN.
template <class Isa, class T>
SEQMIX_INLINE vec<Isa, T> exp(vec<Isa, T> const& x) noexcept {
  using V = vec<Isa, T>;
  using I = ivec<Isa, T>;
  using c = exp_constants<T>;
  V const zero{};
  V const bounded =
      x < c::lowest ? broadcast<Isa, T>(c::lowest) : (x > c::highest ? broadcast<Isa, T>(c::highest) : x);
  V const shifted = bounded * T(1.4426950408889634) + c::magic;
  V const n = shifted - c::magic;
  V const p = exp_of_remainder<Isa, T>((bounded - n * c::high) - n * c::low);
  // The integer n sits in the low bits of `shifted`; two factors keep 2^n representable at both ends.
  I const whole = std::bit_cast<I>(shifted) - std::bit_cast<I>(zero + c::magic);
  I const half = whole >> 1;
  V const first = std::bit_cast<V>((half + c::bias) << c::mantissa);
  V const second = std::bit_cast<V>((whole - half + c::bias) << c::mantissa);
  V const result = p * first * second;
  V const top = x > c::highest ? zero + std::numeric_limits<T>::infinity() : result;
  return x < c::lowest ? zero : (x == x ? top : x);
}

/// The same for x <= 1, the weights and decays that most exponentials are, in half the instructions: where the
/// result would be below half the smallest normal number its power of two is 0.
template <class Isa, class T>
SEQMIX_INLINE vec<Isa, T> exp_of_weight(vec<Isa, T> const& x) noexcept {
  using V = vec<Isa, T>;
  using I = ivec<Isa, T>;
  using c = exp_constants<T>;
  V const bounded = larger<Isa, T>(broadcast<Isa, T>(c::vanishing), x);  // NaN stays NaN
  V const shifted = bounded * T(1.4426950408889634) + c::magic;
  V const n = shifted - c::magic;
  V const p = exp_of_remainder<Isa, T>((bounded - n * c::high) - n * c::low);
  // Of the magic number nothing is left behind the shift, so this is 2^n, and 0 for n = -bias.
  I const power = (std::bit_cast<I>(shifted) << c::mantissa) + (integer_of<T>(c::bias) << c::mantissa);
  return p * std::bit_cast<V>(power);
}

/// 1 / (1 + e^-x)
template <class Isa, class T>
SEQMIX_INLINE vec<Isa, T> sigmoid(vec<Isa, T> const& x) noexcept {
  return T(1) / (T(1) + exp<Isa, T>(-x));
}

/// Rounds a count up to whole vectors.
template <class Isa, class T>
constexpr index_t padded(index_t n) noexcept {
  constexpr index_t w = Isa::template lanes<T>;
  return (n + w - 1) / w * w;
}

/// All lanes of a vector are elements.
template <class Isa, class T>
struct whole_vector {
  SEQMIX_INLINE vec<Isa, T> load(T const* p) const noexcept { return simd::load<Isa>(p); }
  SEQMIX_INLINE void store(T* p, vec<Isa, T> const& v) const noexcept { simd::store<Isa>(p, v); }
};
/// The first `count` lanes are elements, the others are loaded as zero and not stored.
template <class Isa, class T>
struct part_of_vector {
  index_t count;
  SEQMIX_INLINE vec<Isa, T> load(T const* p) const noexcept {
    vec<Isa, T> v{};
    std::memcpy(&v, p, std::size_t(count) * sizeof(T));
    return v;
  }
  SEQMIX_INLINE void store(T* p, vec<Isa, T> const& v) const noexcept {
    std::memcpy(p, &v, std::size_t(count) * sizeof(T));
  }
};
/// body(first element, lanes) for n elements a vector at a time; lanes.load and lanes.store reach the elements of
/// one. The last vector is computed like the others, so that an element's result does not depend on where it
/// stands.
template <class Isa, class T, class Body>
SEQMIX_INLINE void for_vectors(index_t n, Body const& body) noexcept {
  constexpr index_t w = Isa::template lanes<T>;
  index_t i = 0;
  for (; i + w <= n; i += w) body(i, whole_vector<Isa, T>{});
  if (i < n) body(i, part_of_vector<Isa, T>{n - i});
}

/// of(0), of(w), ... for n > 0 elements, all vectors whole, combined as four chains that do not wait for each
/// other.
template <class Isa, class T, class Combine, class Of>
SEQMIX_INLINE vec<Isa, T> fold_vectors(index_t n, Combine const& combine, Of const& of) noexcept {
  constexpr index_t w = Isa::template lanes<T>;
  auto first = of(0);
  index_t j = w;
  if (n >= 4 * w) {
    auto second = of(w), third = of(2 * w), fourth = of(3 * w);
    for (j = 4 * w; j + 4 * w <= n; j += 4 * w) {
      first = combine(first, of(j)), second = combine(second, of(j + w));
      third = combine(third, of(j + 2 * w)), fourth = combine(fourth, of(j + 3 * w));
    }
    first = combine(combine(first, second), combine(third, fourth));
  }
  for (; j < n; j += w) first = combine(first, of(j));
  return first;
}

/// Whether one of n > 0 numbers, whole vectors, is NaN or infinite: a quick question that is mostly answered with
/// no.
template <class Isa, class T>
SEQMIX_INLINE bool may_hold_nan(T const* x, index_t n) noexcept {
  T const total = sum<Isa, T>(fold_vectors<Isa, T>(
      n, [](auto const& a, auto const& b) { return a + b; }, [&](index_t j) { return load<Isa>(x + j) * T(0); }));
  return total != total;
}

/// As many vectors as one has lanes, combined as a tree.
template <class Isa, class T, class Combine>
SEQMIX_INLINE vec<Isa, T> fold_array(vec<Isa, T>* x, Combine const& combine) noexcept {
  for (int half = Isa::template lanes<T> / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) x[i] = combine(x[i], x[i + half]);
  return x[0];
}

/// out = f(in...) for n elements. `out` may be one of the inputs.
template <class Isa, class T, class F, class... In>
SEQMIX_INLINE void map(index_t n, F const& f, T* out, In const*... in) noexcept {
  for_vectors<Isa, T>(n, [&](index_t i, auto const& lanes) { lanes.store(out + i, f(lanes.load(in + i)...)); });
}

/// The sum of f over n elements: lanes first; f(0, ...) must be 0.
template <class Isa, class T, class F, class... In>
SEQMIX_INLINE T map_sum(index_t n, F const& f, In const*... in) noexcept {
  vec<Isa, T> total{};
  for_vectors<Isa, T>(n, [&](index_t i, auto const& lanes) { total += f(lanes.load(in + i)...); });
  return sum<Isa, T>(total);
}

/// The sum of e^(x - shift) over n elements.
template <class Isa, class T>
SEQMIX_INLINE T map_sum_shifted(index_t n, T shift, T const* x) noexcept {
  constexpr index_t w = Isa::template lanes<T>;
  vec<Isa, T> total{};
  index_t i = 0;
  for (; i + w <= n; i += w) total += exp<Isa, T>(load<Isa>(x + i) - shift);
  if (i < n) {
    auto tail = broadcast<Isa, T>(-std::numeric_limits<T>::infinity());
    std::memcpy(&tail, x + i, std::size_t(n - i) * sizeof(T));
    total += exp<Isa, T>(tail - shift);
  }
  return sum<Isa, T>(total);
}

}  // namespace seqmix::inline v0::simd
