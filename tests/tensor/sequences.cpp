#include <array>

#include <doctest/doctest.h>

#include <seqmix/tensor/sequences.hpp>

using namespace seqmix;

DOCTEST_TEST_CASE("sequences: a batch divides the rows evenly") {
  auto const s = sequences::batch(3, 4);
  DOCTEST_CHECK(s.count() == 3);
  DOCTEST_CHECK(s.rows() == 12);
  DOCTEST_CHECK(s.begin(2) == 8);
  DOCTEST_CHECK(s.end(2) == 12);
  DOCTEST_CHECK(s.longest() == 4);
}

DOCTEST_TEST_CASE("sequences: packed ones follow their offsets, empty ones included") {
  std::array<index_t, 5> const offsets{0, 3, 3, 10, 10};
  auto const s = sequences::packed(offsets);
  DOCTEST_CHECK(s.count() == 4);
  DOCTEST_CHECK(s.rows() == 10);
  DOCTEST_CHECK(s.length(0) == 3);
  DOCTEST_CHECK(s.length(1) == 0);
  DOCTEST_CHECK(s.begin(2) == 3);
  DOCTEST_CHECK(s.end(2) == 10);
  DOCTEST_CHECK(s.length(3) == 0);
  DOCTEST_CHECK(s.longest() == 7);
}

DOCTEST_TEST_CASE("sequences: none at all, and only empty ones") {
  std::array<index_t, 1> const none{0};
  DOCTEST_CHECK(sequences::packed(none).count() == 0);
  DOCTEST_CHECK(sequences::packed(none).rows() == 0);
  DOCTEST_CHECK(sequences::batch(0, 5).rows() == 0);
  DOCTEST_CHECK(sequences::batch(0, 5).longest() == 0);
  DOCTEST_CHECK(sequences::batch(2, 0).rows() == 0);
  DOCTEST_CHECK(sequences().count() == 0);
}

DOCTEST_TEST_CASE("sequences: bad offsets and sizes are named") {
  std::array<index_t, 3> const late{1, 2, 3};
  std::array<index_t, 3> const back{0, 5, 4};
  DOCTEST_CHECK_THROWS_WITH_AS(sequences::packed({}), "seqmix: sequences: offsets must start with 0", shape_error);
  DOCTEST_CHECK_THROWS_WITH_AS(sequences::packed(late), "seqmix: sequences: offsets must start with 0",
                               shape_error);
  DOCTEST_CHECK_THROWS_WITH_AS(sequences::packed(back),
                               "seqmix: sequences: offset 2 is 4, less than the one before, 5", shape_error);
  DOCTEST_CHECK_THROWS_WITH_AS(sequences::batch(-1, 2),
                               "seqmix: sequences: count and length must not be negative, got -1 and 2",
                               shape_error);
}
