#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>

#include <doctest/doctest.h>

#include "train/small_models.hpp"

using namespace seqmix;

namespace {

template <class Model>
train::trainer<Model> built(std::uint64_t seed, int threads = 1) {
  auto options = small::run_options(10, threads);
  options.seed = seed;
  return {small::model<Model>(), options};
}

template <class T>
bool all_equal(T const* x, index_t n) {
  return std::all_of(x, x + n, [&](T y) { return y == x[0]; });
}

}  // namespace

DOCTEST_TEST_CASE("P-I1: in the whole model Mamba-2's gate and skip keep their own start values") {
  auto options = small::options<small::mamba>();
  options.layers = 7;
  std::get<0>(options.layer).heads = 24;
  for (std::uint64_t seed : {1u, 2u, 3u}) {
    train::trainer<small::mamba> const t(small::mamba(options), {.seed = seed});
    auto const each = [&](std::string const& name, auto const& holds) {
      for (int l = 0; l < 7; ++l) {
        auto const& p = t.model().parameters().at("layers." + std::to_string(l) + ".mixer." + name);
        auto const* const x = t.parameters().data() + p.offset;
        DOCTEST_CHECK(p.size() == 24);
        DOCTEST_CHECK_MESSAGE(std::all_of(x, x + p.size(), holds), p.name);
        DOCTEST_CHECK_MESSAGE(all_equal(x, p.size()) == (name == "skip"), p.name);
      }
    };
    each("gate.dt_bias", [](float b) {
      double const step = std::log1p(std::exp(double(b)));
      return step >= 1e-4 && step <= 1e-1 * (1 + 1e-5);
    });
    each("gate.A_log", [](float a) { return a >= 0.0f && std::exp(double(a)) <= 16.0 * (1 + 1e-6); });
    each("skip", [](float d) { return d == 1.0f; });
  }
}

DOCTEST_TEST_CASE_TEMPLATE("P-I2: one seed gives the same bits, other seeds differ in every random tensor", Model,
                           small::transformer, small::mamba) {
  auto const first = built<Model>(7);
  auto const other = built<Model>(8);
  DOCTEST_SUBCASE("built again, after another model, with four threads") {
    DOCTEST_CHECK(small::bits(first.parameters()) == small::bits(built<Model>(7).parameters()));
    DOCTEST_CHECK(small::bits(first.parameters()) == small::bits(built<Model>(7, 4).parameters()));
  }
  DOCTEST_SUBCASE("another seed") {
    index_t random = 0;
    for (auto const& p : first.model().parameters().all()) {
      auto const *const x = first.parameters().data() + p.offset, *const y = other.parameters().data() + p.offset;
      if (all_equal(x, p.size())) continue;
      ++random;
      DOCTEST_CHECK_MESSAGE(std::memcmp(x, y, std::size_t(p.size()) * sizeof *x) != 0, p.name);
    }
    DOCTEST_CHECK(random > 6);
  }
  DOCTEST_SUBCASE("no two rows of a matrix are equal") {
    for (auto const& p : first.model().parameters().all()) {
      if (p.group != optimiser_group::matrix) continue;
      auto const columns = std::size_t(p.columns());
      auto const* const x = first.parameters().data() + p.offset;
      bool twins = false;
      for (index_t i = 0; i < p.rows(); ++i)
        for (index_t j = 0; j < i; ++j)
          twins = twins || std::memcmp(x + i * p.columns(), x + j * p.columns(), columns * sizeof *x) == 0;
      DOCTEST_CHECK_MESSAGE(!twins, p.name);
    }
  }
}
