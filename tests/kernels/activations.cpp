#include "../support/spaced.hpp"
#include <seqmix/kernels/cpu/activations.hpp>
#include <seqmix/kernels/cpu/output_gate.hpp>

// Activations and output gates: the fast ones against the reference, backward against dual numbers through it.

namespace {

using namespace seqmix;
using namespace seqmix::testing;
using kernels::activation;
using number = dual<double, 1>;

constexpr std::array<activation, 10> all_activations{
    activation::identity,     activation::silu,   activation::relu,      activation::sigmoid,
    activation::tanh,         activation::gelu,   activation::gelu_tanh, activation::elu_plus_one,
    activation::squared_relu, activation::min_gru};

template <class T>
view2<T const> matrix(std::vector<T> const& x, index_t columns) {
  return {x.data(), {index_t(x.size()) / columns, columns}};
}
template <class T>
view2<T> matrix(std::vector<T>& x, index_t columns) {
  return {x.data(), {index_t(x.size()) / columns, columns}};
}

/// Large and small sizes of both signs.
std::vector<double> numbers_of_all_sizes(index_t n, std::uint64_t seed) {
  auto x = normals(n, seed);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] *= std::pow(10.0, double(i % 5) - 3.0);
  return rounded(x);
}

template <class T>
struct results {
  std::vector<double> y, dx, gated, d_o, dz, again;
  friend bool operator==(results const&, results const&) = default;
};
template <class T>
results<T> run(device::cpu dev, activation f, index_t rows, index_t columns, std::vector<double> const& x,
               std::vector<double> const& o, std::vector<double> const& dy) {
  std::array<index_t, 2> const shape{rows, columns};
  spaced<T, 2> in(shape, x), out(shape), other(shape, o), up(shape, dy), dx(shape), gated(shape), d_o(shape),
      dz(shape), again(shape);
  kernels::activate(dev, f, in(), out.view_of());
  kernels::activate_backward(dev, f, in(), up(), dx.view_of(), false);
  kernels::output_gate_forward(dev, f, other(), in(), gated.view_of());
  kernels::output_gate_backward(dev, f, other(), in(), up(), d_o.view_of(), dz.view_of(), again.view_of());
  for (auto const* a : {&out, &dx, &gated, &d_o, &dz, &again}) DOCTEST_CHECK(a->intact());
  return {out.values(), dx.values(), gated.values(), d_o.values(), dz.values(), again.values()};
}

template <class T>
void check_against_reference() {
  for (auto f : all_activations)
    for (index_t R : {0, 1, 63, 65}) {
      index_t const C = R == 63 ? 16 : 21;
      DOCTEST_CAPTURE(int(f));
      DOCTEST_CAPTURE(R);
      auto const x = numbers_of_all_sizes(R * C, 1), o = rounded(normals(R * C, 2)),
                 dy = rounded(normals(R * C, 3));
      std::vector<number> in, y(x.size()), ones(x.size(), number(1)), gated(x.size());
      for (double e : x) in.emplace_back(e), in.back().slope[0] = 1;
      kernels::activate(device::reference{}, f, matrix(std::as_const(in), C), matrix(y, C));
      results<double> expected;
      for (std::size_t i = 0; i < x.size(); ++i) {
        expected.y.push_back(y[i].value);
        expected.dx.push_back(y[i].slope[0] * dy[i]);
        expected.gated.push_back(y[i].value * o[i]);
        expected.d_o.push_back(y[i].value * dy[i]);
        expected.dz.push_back(y[i].slope[0] * o[i] * dy[i]);
      }
      auto const found = run<T>(device::cpu{1}, f, R, C, x, o, dy);
      check_close({found.y, found.dx, found.gated, found.d_o, found.dz},
                  {expected.y, expected.dx, expected.gated, expected.d_o, expected.dz}, row_tolerance<T>);
      for (std::size_t i = 0; i < found.y.size(); ++i)  // with the relative digits of small results too
        DOCTEST_CHECK(std::abs(found.y[i] - expected.y[i]) <=
                      100 * row_tolerance<T> * std::abs(expected.y[i]) + 1e-37);
      DOCTEST_CHECK(found.again == found.gated);
      DOCTEST_CHECK(run<T>(device::cpu{3}, f, R, C, x, o, dy) == found);
    }
}

}  // namespace

DOCTEST_TEST_CASE(
    "activations and output gates agree with the reference, slopes included, for any number of threads") {
  check_against_reference<double>();
  check_against_reference<float>();
}

DOCTEST_TEST_CASE("an activation may work in place and its backward may add") {
  auto const x = normals(70 * 9, 4), dy = normals(70 * 9, 5);
  for (auto f : all_activations) {
    std::vector<double> y(x.size()), dx(x.size()), in_place = x, added(x.size(), 0.5), over = dy;
    kernels::activate(device::cpu{2}, f, matrix(x, 9), matrix(y, 9));
    kernels::activate(device::cpu{2}, f, matrix(std::as_const(in_place), 9), matrix(in_place, 9));
    DOCTEST_CHECK(in_place == y);
    kernels::activate_backward(device::cpu{2}, f, matrix(x, 9), matrix(dy, 9), matrix(dx, 9), false);
    kernels::activate_backward(device::cpu{2}, f, matrix(x, 9), matrix(dy, 9), matrix(added, 9), true);
    kernels::activate_backward(device::cpu{2}, f, matrix(x, 9), matrix(std::as_const(over), 9), matrix(over, 9),
                               false);
    DOCTEST_CHECK(over == dx);
    for (auto& e : added) e -= 0.5;
    DOCTEST_CHECK(greatest_error(added, dx) <= 1e-15);
  }
}

DOCTEST_TEST_CASE("activations at their kinks, far out and at NaN") {
  double const nan = std::numeric_limits<double>::quiet_NaN();
  for (auto f : all_activations) {
    std::vector<double> const x{0.0, -0.0, 600.0, -600.0, nan}, ones(5, 1.0);
    std::vector<double> y(5), d(5);
    kernels::activate(device::cpu{}, f, matrix(x, 5), matrix(y, 5));
    kernels::activate_backward(device::cpu{}, f, matrix(x, 5), matrix(ones, 5), matrix(d, 5), false);
    DOCTEST_CAPTURE(int(f));
    for (std::size_t i = 0; i < 4; ++i) {
      number at(x[i]);
      at.slope[0] = 1;
      auto const expected = kernels::activated(f, at);
      DOCTEST_CHECK(y[i] == doctest::Approx(expected.value).epsilon(1e-12));
      DOCTEST_CHECK(d[i] == doctest::Approx(expected.slope[0]).epsilon(1e-12));
    }
    DOCTEST_CHECK(y[4] != y[4]);
    DOCTEST_CHECK(kernels::activated(f, nan) != kernels::activated(f, nan));
  }
  DOCTEST_CHECK(kernels::activated(activation::min_gru, 0.0) == 0.5);
  DOCTEST_CHECK(kernels::activated(activation::min_gru, 2.0) == 2.5);
  DOCTEST_CHECK(kernels::activated(activation::gelu, 1.0) == doctest::Approx(0.8413447460685429).epsilon(1e-15));
  DOCTEST_CHECK(kernels::activated(activation::gelu_tanh, 1.0) ==
                doctest::Approx(0.8411919906082768).epsilon(1e-15));
}

DOCTEST_TEST_CASE("an output gate whose sizes do not fit is named") {
  std::vector<double> a(6), b(8);
  DOCTEST_CHECK_THROWS_WITH_AS(kernels::output_gate_forward(device::cpu{}, activation::silu,
                                                            matrix(std::as_const(a), 3),
                                                            matrix(std::as_const(b), 4), matrix(a, 3)),
                               "seqmix: output_gate: z: expected [2,3], got [2,4]", shape_error);
}
