#include <array>
#include <numeric>
#include <type_traits>

#include <doctest/doctest.h>

#include <seqmix/tensor/view.hpp>

using namespace seqmix;

DOCTEST_TEST_CASE("view: dense strides are row-major") {
  std::array<int, 24> numbers{};
  std::iota(numbers.begin(), numbers.end(), 0);
  view3<int> const x_rhk(numbers.data(), {2, 3, 4});
  DOCTEST_CHECK(x_rhk.stride == std::array<index_t, 3>{12, 4, 1});
  DOCTEST_CHECK(x_rhk.size() == 24);
  DOCTEST_CHECK(x_rhk(1, 2, 3) == 23);
  DOCTEST_CHECK(x_rhk(1, 0, 2) == 14);
  DOCTEST_CHECK(*x_rhk.at(1) == 12);
  DOCTEST_CHECK(*x_rhk.at(1, 2) == 20);
  DOCTEST_CHECK(x_rhk.at() == numbers.data());
  x_rhk(0, 1, 1) = -5;
  DOCTEST_CHECK(numbers[5] == -5);
}

DOCTEST_TEST_CASE("view: a slice is a window on the same numbers, on any axis") {
  std::array<int, 24> numbers{};
  std::iota(numbers.begin(), numbers.end(), 0);
  view3<int> const x_rhk(numbers.data(), {2, 3, 4});
  auto const heads = x_rhk.slice(1, 1, 2);
  DOCTEST_CHECK(heads.extent == std::array<index_t, 3>{2, 2, 4});
  DOCTEST_CHECK(heads.stride == x_rhk.stride);
  DOCTEST_CHECK(&heads(1, 1, 0) == &x_rhk(1, 2, 0));
  auto const channels = x_rhk.slice(2, 2, 1);
  DOCTEST_CHECK(&channels(0, 1, 0) == &x_rhk(0, 1, 2));
  DOCTEST_CHECK(x_rhk.slice(0, 2, 0).size() == 0);
}

DOCTEST_TEST_CASE("view: stride 0 broadcasts one number") {
  float one = 3;
  view2<float> const d_rc(&one, {4, 5}, {0, 0});
  DOCTEST_CHECK(&d_rc(3, 4) == &one);
  DOCTEST_CHECK(!d_rc.unit_inner_stride());
}

DOCTEST_TEST_CASE("view: heads of a column slice keep the row stride") {
  std::array<int, 2 * 10> numbers{};
  std::iota(numbers.begin(), numbers.end(), 0);
  view2<int> const projected_rc(numbers.data(), {2, 10});
  auto const q_rhk = as_heads(projected_rc.slice(1, 4, 6), 2, 3);
  DOCTEST_CHECK(q_rhk.extent == std::array<index_t, 3>{2, 2, 3});
  DOCTEST_CHECK(q_rhk(0, 0, 0) == 4);
  DOCTEST_CHECK(q_rhk(1, 1, 2) == 19);
  DOCTEST_CHECK(q_rhk.unit_inner_stride());
}

DOCTEST_TEST_CASE("view: numbers become constant by themselves, never the reverse") {
  static_assert(std::is_convertible_v<view2<float>, view2<float const>>);
  static_assert(!std::is_convertible_v<view2<float const>, view2<float>>);
  static_assert(std::is_same_v<view2<float const>::value_type, float>);
  DOCTEST_CHECK(!view1<float>());
  float number = 0;
  DOCTEST_CHECK(bool(view1<float>(&number, {1})));
}

DOCTEST_TEST_CASE("view: expect_shape names the argument, the expected and the actual size") {
  float number = 0;
  view2<float> const x_rc(&number, {3, 4}, {0, 0});
  DOCTEST_CHECK_NOTHROW(expect_shape("x", x_rc, {3, 4}));
  DOCTEST_CHECK_NOTHROW(expect_shape("x", x_rc, {-1, 4}));
  DOCTEST_CHECK_THROWS_WITH_AS(expect_shape("x", x_rc, {-1, 5}), "seqmix: x: expected [-1,5], got [3,4]",
                               shape_error);
  DOCTEST_CHECK_THROWS_AS(expect_shape("x", x_rc, {4, 3}), error);
}

DOCTEST_TEST_CASE("view: expect_contiguous looks at the last axis alone") {
  std::array<float, 12> numbers{};
  view2<float> const x_rc(numbers.data(), {3, 4});
  view2<float> const transposed(numbers.data(), {4, 3}, {1, 4});
  DOCTEST_CHECK_NOTHROW(expect_contiguous("x", x_rc.slice(1, 1, 2)));
  DOCTEST_CHECK_NOTHROW(expect_contiguous("x", transposed.slice(1, 0, 1)));
  DOCTEST_CHECK_NOTHROW(expect_contiguous("x", view2<float>(nullptr, {4, 3}, {1, 4})));
  DOCTEST_CHECK_THROWS_WITH_AS(expect_contiguous("x", transposed),
                               "seqmix: x: the last axis must be contiguous, its stride is 4; copy it first",
                               shape_error);
}
