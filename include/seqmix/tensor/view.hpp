#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <type_traits>

#include <seqmix/tensor/error.hpp>

namespace seqmix::inline v0 {

using index_t = std::ptrdiff_t;

/// A strided window on somebody else's numbers. The axes stand in the variable's name, outermost first:
/// R rows (tokens: batch x time, or packed sequences), N sequences, H heads, K key channels, V value channels,
/// D model width, C any channels: `q_rhk` has extents [R,H,K]. Strides count elements and may be 0 (broadcast).
template <class T, std::size_t Rank>
struct view {
  static_assert(Rank >= 1 && Rank <= 4);
  using value_type = std::remove_const_t<T>;

  T* data = nullptr;
  std::array<index_t, Rank> extent{};
  std::array<index_t, Rank> stride{};

  view() = default;
  constexpr view(T* p, std::array<index_t, Rank> e, std::array<index_t, Rank> s) : data(p), extent(e), stride(s) {}

  /// Row-major and dense.
  constexpr view(T* p, std::array<index_t, Rank> e) : data(p), extent(e) {
    index_t step = 1;
    for (std::size_t axis = Rank; axis-- > 0;) {
      stride[axis] = step;
      step *= e[axis];
    }
  }

  /// Read-only sight of what may be written.
  template <class U>
  requires(!std::is_const_v<U> && std::is_same_v<T, U const>) constexpr view(view<U, Rank> const& x)
      : data(x.data), extent(x.extent), stride(x.stride) {}

  template <class... Index>
  requires(sizeof...(Index) == Rank) constexpr T& operator()(Index... index) const noexcept {
    return data[offset(index_t(index)...)];
  }

  /// The address of the element whose leading indices are given and whose others are 0.
  template <class... Index>
  requires(sizeof...(Index) <= Rank) constexpr T* at(Index... index) const noexcept {
    return data + offset(index_t(index)...);
  }

  constexpr explicit operator bool() const noexcept { return data != nullptr; }

  constexpr index_t size() const noexcept {
    index_t n = 1;
    for (auto e : extent) n *= e;
    return n;
  }

  /// [begin, begin + count) of one axis.
  constexpr view slice(int axis, index_t begin, index_t count) const noexcept {
    auto part = *this;
    part.data += begin * stride[std::size_t(axis)];
    part.extent[std::size_t(axis)] = count;
    return part;
  }

  /// True when neighbours of the last axis are neighbours in memory, which the fast kernels ask for.
  constexpr bool unit_inner_stride() const noexcept { return extent[Rank - 1] <= 1 || stride[Rank - 1] == 1; }

 private:
  template <class... Index>
  constexpr index_t offset(Index... index) const noexcept {
    index_t at = 0;
    std::size_t axis = 0;
    ((at += index * stride[axis++]), ...);
    return at;
  }
};

template <class T>
using view1 = view<T, 1>;
template <class T>
using view2 = view<T, 2>;
template <class T>
using view3 = view<T, 3>;
template <class T>
using view4 = view<T, 4>;

/// T in a place that does not deduce it, so that a view<float> passes where a view<float const> is asked for.
template <class T>
using same = std::type_identity_t<T>;

/// [R, H*C] seen as [R,H,C], keeping the row stride: a slice of a projection becomes heads without a copy.
template <class T>
constexpr view3<T> as_heads(view2<T> x_rc, index_t heads, index_t channels) noexcept {
  return {x_rc.data, {x_rc.extent[0], heads, channels}, {x_rc.stride[0], channels, 1}};
}

namespace detail {
template <std::size_t Rank>
std::string shape_text(std::array<index_t, Rank> const& extent) {
  std::string text = "[";
  for (std::size_t i = 0; i < Rank; ++i) {
    if (i > 0) text += ',';
    text += std::to_string(extent[i]);
  }
  text += ']';
  return text;
}
}  // namespace detail

/// Throws shape_error "<what>: expected [..], got [..]" unless the extents agree; -1 allows any extent.
template <class T, std::size_t Rank>
void expect_shape(char const* what, view<T, Rank> const& actual, std::array<index_t, Rank> const& expected) {
  bool good = true;
  for (std::size_t i = 0; i < Rank; ++i) good = good && (expected[i] < 0 || expected[i] == actual.extent[i]);
  if (good) return;
  throw shape_error(std::string("seqmix: ") + what + ": expected " + detail::shape_text(expected) + ", got " +
                    detail::shape_text(actual.extent));
}

/// Throws shape_error unless the last axis is contiguous.
template <class T, std::size_t Rank>
void expect_contiguous(char const* what, view<T, Rank> const& actual) {
  if (actual.data == nullptr || actual.unit_inner_stride()) return;
  throw shape_error(std::string("seqmix: ") + what + ": the last axis must be contiguous, its stride is " +
                    std::to_string(actual.stride[Rank - 1]) + "; copy it first");
}

}  // namespace seqmix::inline v0
