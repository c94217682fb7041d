#include "../support/law_rows.hpp"

// Matrix products against the plain loops, in every shape of a tail, and the same bits for any number of threads.

namespace {

using namespace seqmix;
using namespace seqmix::testing;

template <class T>
struct product {
  index_t rows, inputs, outputs;
  std::vector<T> x, w, dy;
  product(index_t r, index_t i, index_t o) : rows(r), inputs(i), outputs(o) {
    auto const draw = [](index_t n, std::uint64_t seed) {
      auto const d = normals(n, seed);
      return std::vector<T>(d.begin(), d.end());
    };
    x = draw(r * i, 1), w = draw(o * i, 2), dy = draw(r * o, 3);
  }
  view2<T const> x_ri() const { return {x.data(), {rows, inputs}}; }
  view2<T const> w_oi() const { return {w.data(), {outputs, inputs}}; }
  view2<T const> dy_ro() const { return {dy.data(), {rows, outputs}}; }
  struct result {
    std::vector<T> y, dx, dw;
    friend bool operator==(result const&, result const&) = default;
  };
  /// Everything starts at 1, to see what is added and what is written.
  result run(int threads, bool add) const {
    result r{std::vector<T>(std::size_t(rows * outputs), T(1)), std::vector<T>(x.size(), T(1)),
             std::vector<T>(w.size(), T(1))};
    with_planned_memory(threads, [&](device::cpu dev, arena& ws) {
      kernels::linear_forward(dev, x_ri(), w_oi(), view2<T>(r.y.data(), {rows, outputs}), add, ws);
      kernels::linear_backward_input(dev, dy_ro(), w_oi(), view2<T>(r.dx.data(), {rows, inputs}), add, ws);
      kernels::linear_backward_weight(dev, dy_ro(), x_ri(), view2<T>(r.dw.data(), {outputs, inputs}), ws);
    });
    return r;
  }
  result plain(bool add) const {
    T const start = add ? T(1) : T(0);
    result r{std::vector<T>(std::size_t(rows * outputs), start), std::vector<T>(x.size(), start),
             std::vector<T>(w.size(), T(1))};
    for (index_t row = 0; row < rows; ++row)
      for (index_t o = 0; o < outputs; ++o)
        for (index_t i = 0; i < inputs; ++i) {
          r.y[std::size_t(row * outputs + o)] += x_ri()(row, i) * w_oi()(o, i);
          r.dx[std::size_t(row * inputs + i)] += dy_ro()(row, o) * w_oi()(o, i);
          r.dw[std::size_t(o * inputs + i)] += dy_ro()(row, o) * x_ri()(row, i);
        }
    return r;
  }
};

}  // namespace

DOCTEST_TEST_CASE("linear layers equal the plain loops, forward and backward, written or added") {
  for (index_t rows : {0, 1, 7, 255, 256, 300})
    for (index_t inputs : {1, 5, 33})
      for (index_t outputs : {1, 3, 64, 70})
        for (bool add : {false, true}) {
          DOCTEST_CAPTURE(rows);
          DOCTEST_CAPTURE(inputs);
          DOCTEST_CAPTURE(outputs);
          product<double> const p(rows, inputs, outputs);
          auto const found = p.run(2, add), expected = p.plain(add);
          DOCTEST_CHECK(greatest_error(found.y, expected.y) <= 1e-12);
          DOCTEST_CHECK(greatest_error(found.dx, expected.dx) <= 1e-12);
          DOCTEST_CHECK(greatest_error(found.dw, expected.dw) <= 1e-12);
        }
}

DOCTEST_TEST_CASE_TEMPLATE("linear layers have the same bits for any number of threads", T, float, double) {
  product<T> const p(1000, 65, 200);
  auto const one = p.run(1, false);
  for (int threads : {2, 3, 8}) DOCTEST_CHECK(p.run(threads, false) == one);
}
