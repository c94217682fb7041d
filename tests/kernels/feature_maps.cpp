#include "../support/spaced.hpp"
#include <seqmix/kernels/cpu/feature_maps.hpp>

// Feature maps of linear attention: against the reference, its dual numbers, and what they are by definition.

namespace {

using namespace seqmix;
using namespace seqmix::testing;
using kernels::feature_map;
using number = dual<double, 1>;

struct features_case {
  feature_map map;
  index_t nu;
};
constexpr std::array<features_case, 9> all_maps{{{feature_map::none, 1},
                                                 {feature_map::elu_plus_one, 1},
                                                 {feature_map::relu, 1},
                                                 {feature_map::hedgehog, 1},
                                                 {feature_map::dpfp, 1},
                                                 {feature_map::dpfp, 4},
                                                 {feature_map::dpfp, 11},
                                                 {feature_map::taylor, 1},
                                                 {feature_map::hadamard, 1}}};

struct sizes {
  index_t R, H, K;
  std::array<index_t, 3> in(features_case c) const { return {R, H, kernels::feature_input(c.map, K)}; }
  std::array<index_t, 3> out(features_case c) const { return {R, H, kernels::feature_width(c.map, K, c.nu)}; }
};
index_t product(std::array<index_t, 3> const& e) { return e[0] * e[1] * e[2]; }

template <class S>
std::vector<S> reference(features_case c, sizes const& s, std::vector<S> const& u) {
  std::vector<S> y(std::size_t(product(s.out(c))), S{});
  auto ws = arena::growing();
  kernels::feature_map_forward(device::reference{}, c.map, c.nu, view3<S const>(u.data(), s.in(c)),
                               view3<S>(y.data(), s.out(c)), ws);
  return y;
}
template <class T>
arrays<double> fast(int threads, features_case c, sizes const& s, std::vector<double> const& u,
                    std::vector<double> const& dy) {
  spaced<T, 3> in(s.in(c), u), y(s.out(c)), up(s.out(c), dy), du(s.in(c));
  with_planned_memory(threads, [&](device::cpu dev, arena& ws) {
    kernels::feature_map_forward(dev, c.map, c.nu, in(), y.view_of(), ws);
    kernels::feature_map_backward(dev, c.map, c.nu, in(), y(), up(), du.view_of(), ws);
  });
  DOCTEST_CHECK(y.intact());
  DOCTEST_CHECK(du.intact());
  return {y.values(), du.values()};
}
std::vector<double> features(feature_map m, index_t nu, std::vector<double> const& u) {
  index_t const I = index_t(u.size());
  return reference<double>({m, nu}, {1, 1, m == feature_map::hadamard ? I / 2 : I}, u);
}

}  // namespace

DOCTEST_TEST_CASE("every feature map and its backward agree with the reference, for any number of threads") {
  for (auto c : all_maps)
    for (sizes s : {sizes{0, 2, 3}, sizes{1, 1, 1}, sizes{63, 2, 5}, sizes{65, 3, 18}}) {
      DOCTEST_CAPTURE(int(c.map));
      DOCTEST_CAPTURE(s.K);
      auto const u = rounded(normals(product(s.in(c)), 1)), dy = rounded(normals(product(s.out(c)), 2));
      auto const expected = reference(c, s, u);
      auto const found = fast<double>(1, c, s, u, dy), single = fast<float>(1, c, s, u, dy);
      check_close({found[0]}, {expected}, row_tolerance<double>);
      check_close({single[0]}, {expected}, row_tolerance<float>);
      check_close({single[1]}, {found[1]}, 4 * row_tolerance<float>);
      DOCTEST_CHECK(fast<double>(3, c, s, u, dy) == found);
      DOCTEST_CHECK(fast<float>(3, c, s, u, dy) == single);
      if (s.R == 0) continue;
      check_pullback(
          {u}, [&](arrays<number> const& in) { return reference(c, s, in[0]); },
          [&](std::vector<double> const& d) { return arrays<double>{fast<double>(2, c, s, u, d)[1]}; });
    }
}

DOCTEST_TEST_CASE("feature maps are what they are by definition") {
  double const e4 = std::exp(4.0), e2 = std::exp(2.0), sum = e2 + 1 / e2 + e4 + 1 / e4;
  check_close({features(feature_map::hedgehog, 1, {1, -2})}, {{e2 / sum, 1 / e4 / sum, 1 / e2 / sum, e4 / sum}},
              1e-14);
  // relu and -relu of [1, -2, 3] are [1, 0, 3 | -1, 0, -3]; then times itself moved by one and by two.
  DOCTEST_CHECK(features(feature_map::dpfp, 2, {1, -2, 3}) ==
                std::vector<double>{-3, 0, 0, -3, 0, 0, 0, 0, 3, 0, 0, 3});
  double const r = std::sqrt(2.0);
  check_close({features(feature_map::taylor, 1, {3, 5})},
              {{1, 3 / std::sqrt(r), 5 / std::sqrt(r), 9 / 2.0, 25 / 2.0, 15 / r}}, 1e-14);
  DOCTEST_CHECK(features(feature_map::hadamard, 1, {1, 2, 3, 4}) == std::vector<double>{3, 8});
  DOCTEST_CHECK(features(feature_map::elu_plus_one, 1, {1, 0}) == std::vector<double>{2, 1});
}

DOCTEST_TEST_CASE("the Taylor features' product is the exponential to second order") {
  auto const a = normals(7, 3, 0.1), b = normals(7, 4, 0.1);
  auto const x = features(feature_map::taylor, 1, a), y = features(feature_map::taylor, 1, b);
  double score = 0, found = 0;
  for (std::size_t i = 0; i < a.size(); ++i) score += a[i] * b[i];
  for (std::size_t i = 0; i < x.size(); ++i) found += x[i] * y[i];
  score /= std::sqrt(7.0);
  DOCTEST_CHECK(found == doctest::Approx(1 + score + score * score / 2).epsilon(1e-14));
}

DOCTEST_TEST_CASE("hedgehog features of large numbers stay finite") {
  auto const y = fast<float>(1, {feature_map::hedgehog, 1}, {1, 1, 2}, {3e4, -3e4}, {0, 0, 0, 0})[0];
  DOCTEST_CHECK(y == std::vector<double>{0.5, 0, 0, 0.5});
}

DOCTEST_TEST_CASE("features of the wrong width are named") {
  std::vector<double> u(6), y(7);
  auto ws = arena::growing();
  DOCTEST_CHECK_THROWS_WITH_AS(kernels::feature_map_forward(device::cpu{}, feature_map::hedgehog, 1,
                                                            view3<double const>(u.data(), {1, 2, 3}),
                                                            view3<double>(y.data(), {1, 1, 7}), ws),
                               "seqmix: feature_map: features: expected [1,2,6], got [1,1,7]", shape_error);
  DOCTEST_CHECK_THROWS_AS(kernels::feature_map_forward(device::cpu{}, feature_map::hadamard, 1,
                                                       view3<double const>(u.data(), {1, 2, 3}),
                                                       view3<double>(y.data(), {1, 2, 1}), ws),
                          shape_error);
}
