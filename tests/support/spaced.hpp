#pragma once

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include "law_rows.hpp"

namespace seqmix::testing {

/// An array whose rows, heads, ... lie apart as slices of a wider one do, NaN in between: a kernel that reads or
/// writes beside its view is found out.
template <class T, std::size_t Rank>
class spaced {
 public:
  explicit spaced(std::array<index_t, Rank> extent, std::vector<double> const& values = {}) {
    index_t step = 1;
    for (std::size_t axis = Rank; axis-- > 0;) {
      view_.stride[axis] = step;
      step = step * extent[axis] + index_t(Rank - axis);
    }
    view_.extent = extent;
    numbers_.assign(std::size_t(step) + 1, std::numeric_limits<T>::quiet_NaN());
    if (values.empty()) return;
    DOCTEST_REQUIRE(index_t(values.size()) == view_.size());
    for_elements([&](index_t dense, index_t at) { numbers_[std::size_t(at)] = T(values[std::size_t(dense)]); });
  }
  view<T, Rank> view_of() noexcept {
    auto v = view_;
    v.data = numbers_.data();
    return v;
  }
  view<T const, Rank> operator()() noexcept { return view_of(); }
  std::vector<double> values() const {
    std::vector<double> x(std::size_t(view_.size()), 0.0);
    for_elements([&](index_t dense, index_t at) { x[std::size_t(dense)] = double(numbers_[std::size_t(at)]); });
    return x;
  }
  /// Nothing was written beside the view.
  bool intact() const {
    auto left = numbers_;
    for_elements([&](index_t, index_t at) { left[std::size_t(at)] = std::numeric_limits<T>::quiet_NaN(); });
    return std::all_of(left.begin(), left.end(), [](T x) { return x != x; });
  }

 private:
  template <class F>
  void for_elements(F const& f) const {
    std::array<index_t, Rank> at{};
    for (index_t dense = 0; dense < view_.size(); ++dense) {
      index_t offset = 0;
      for (std::size_t axis = 0; axis < Rank; ++axis) offset += at[axis] * view_.stride[axis];
      f(dense, offset);
      for (std::size_t axis = Rank; axis-- > 0;) {
        if (++at[axis] < view_.extent[axis]) break;
        at[axis] = 0;
      }
    }
  }
  std::vector<T> numbers_;
  view<T, Rank> view_;
};

/// What rounding may do to a row kernel, relative to the greatest number.
template <class T>
inline constexpr double row_tolerance = sizeof(T) == 4 ? 2e-6 : 2e-14;

/// Each array of `found` is within `tolerance` of its greatest number from `expected`.
inline void check_close(arrays<double> const& found, arrays<double> const& expected, double tolerance) {
  DOCTEST_REQUIRE(found.size() == expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    double most = 1e-300;
    for (double x : expected[i]) most = std::max(most, std::abs(x));
    DOCTEST_CAPTURE(i);
    DOCTEST_CHECK(greatest_error(found[i], expected[i]) <= tolerance * most);
  }
}

/// The numbers rounded to float, so that both precisions start from the same ones.
inline std::vector<double> rounded(std::vector<double> x) {
  for (auto& e : x) e = double(float(e));
  return x;
}

}  // namespace seqmix::testing
