#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include <doctest/doctest.h>

#include "train/small_models.hpp"
#include <seqmix/train/clip.hpp>

using namespace seqmix;
using doctest::Approx;

namespace {

struct case_of {
  parameter_list list;
  buffer<float> g;
  index_t a, b, fixed;
  explicit case_of(index_t size = 1) {
    parameter_room room(list, "room", {0, 1});
    a = room.vector("a", size, init::constant(0.0)).offset;
    b = room.matrix("b", 2, size, init::constant(0.0)).offset;
    fixed = room.vector("fixed", 3, init::constant(0.0), false, false).offset;
    g = buffer<float>(list.size());
    g[a] = 3.0f;
    g[b] = 4.0f;
    g[fixed] = 100.0f;
  }
  double clip(double limit, int threads = 1) {
    auto ws = arena::growing();
    return train::clip_global_norm(device::cpu{.threads = threads}, list, g.data(), limit, ws);
  }
};

}  // namespace

DOCTEST_TEST_CASE("clip: the norm counts all trained tensors, and they alone are scaled to the limit") {
  case_of c;
  DOCTEST_CHECK(c.clip(1.0) == 5.0);
  DOCTEST_CHECK(c.g[c.a] == Approx(0.6));
  DOCTEST_CHECK(c.g[c.b] == Approx(0.8));
  DOCTEST_CHECK(c.g[c.fixed] == 100.0f);
  DOCTEST_CHECK(c.clip(1.0) == Approx(1.0));
}

DOCTEST_TEST_CASE("clip: a norm up to the limit changes nothing, a limit of 0 only measures") {
  for (double limit : {5.0, 7.0, 0.0}) {
    case_of c;
    auto const before = small::bits(c.g);
    DOCTEST_CHECK(c.clip(limit) == 5.0);
    DOCTEST_CHECK(before == small::bits(c.g));
  }
}

DOCTEST_TEST_CASE("clip: squares that float cannot hold are summed right") {
  for (float factor : {1e25f, 1e-25f}) {
    case_of c;
    c.g[c.a] *= factor;
    c.g[c.b] *= factor;
    DOCTEST_CHECK(c.clip(0.0) == Approx(5.0 * double(factor)).epsilon(1e-6));
  }
}

DOCTEST_TEST_CASE("clip: NaN and infinity come out as the norm and the gradients stay") {
  for (float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    case_of c(5000);
    c.g[c.b + 9999] = bad;
    auto const before = small::bits(c.g);
    DOCTEST_CHECK_FALSE(std::isfinite(c.clip(1.0)));
    DOCTEST_CHECK(before == small::bits(c.g));
  }
  case_of c;
  c.g[c.fixed] = std::numeric_limits<float>::quiet_NaN();
  DOCTEST_CHECK(c.clip(1.0) == 5.0);
}

DOCTEST_TEST_CASE("clip: many numbers, the same bits for any number of threads") {
  random_stream const random(1, "clip");
  auto const run = [&](int threads) {
    case_of c(20003);
    for (index_t i = 0; i < 20003; ++i) c.g[c.a + i] = float(random.normal(std::uint64_t(i)));
    double const norm = c.clip(1.0, threads);
    DOCTEST_CHECK(norm == Approx(std::sqrt(20003.0)).epsilon(0.02));
    return small::bits(c.g) + std::to_string(norm);
  };
  auto const one = run(1);
  DOCTEST_CHECK(one == run(2));
  DOCTEST_CHECK(one == run(3));
}
