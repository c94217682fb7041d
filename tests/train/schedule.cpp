#include <doctest/doctest.h>

#include <seqmix/train/schedule.hpp>

using doctest::Approx;
using seqmix::index_t;
using seqmix::train::warmup_cosine;

DOCTEST_TEST_CASE("schedule: rises linearly to the peak, falls along a cosine to the floor and stays there") {
  warmup_cosine const rate{.peak = 2.0, .warmup = 3, .total = 11, .floor = 0.1};
  DOCTEST_CHECK(rate.at(0) == 0.5);
  DOCTEST_CHECK(rate.at(1) == 1.0);
  DOCTEST_CHECK(rate.at(2) == 1.5);
  DOCTEST_CHECK(rate.at(3) == 2.0);
  DOCTEST_CHECK(rate.at(5) == Approx(2.0 * (0.1 + 0.9 * 0.8535533905932737)).epsilon(1e-14));
  DOCTEST_CHECK(rate.at(7) == Approx(1.1).epsilon(1e-14));
  DOCTEST_CHECK(rate.at(11) == 0.2);
  DOCTEST_CHECK(rate.at(1000) == 0.2);
  for (index_t step = 3; step < 11; ++step) DOCTEST_CHECK(rate.at(step + 1) < rate.at(step));
}

DOCTEST_TEST_CASE("schedule: without warm-up it begins at the peak, with nothing else it ends below it") {
  DOCTEST_CHECK(warmup_cosine{.peak = 2.0, .warmup = 0, .total = 10, .floor = 0.0}.at(0) == 2.0);
  warmup_cosine const rising{.peak = 2.0, .warmup = 4, .total = 4, .floor = 0.5};
  DOCTEST_CHECK(rising.at(3) == Approx(1.6).epsilon(1e-14));
  DOCTEST_CHECK(rising.at(4) == 1.0);
}
