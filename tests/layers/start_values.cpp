#include <array>
#include <cmath>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <seqmix/layers/parameters.hpp>

// The rules for start values that concern a whole tensor.

namespace {

using namespace seqmix;

/// One matrix of a model.
template <class T>
std::vector<T> started(initialiser const& rule, index_t rows, index_t columns, std::uint64_t seed = 5,
                       char const* name = "w") {
  parameter_list list;
  parameter_room(list, "m", {}).matrix(name, rows, columns, rule);
  buffer<T> x(list.size());
  list.initialise(seed, x.data());
  return {x.begin(), x.begin() + rows * columns};
}

/// The greatest distance of W W' or W' W, whichever is smaller, from gain^2 I.
template <class T>
double off_orthogonal(std::vector<T> const& w, index_t rows, index_t columns, double gain) {
  bool const wide = rows <= columns;
  index_t const n = wide ? rows : columns, m = wide ? columns : rows;
  double most = 0;
  for (index_t i = 0; i < n; ++i)
    for (index_t j = 0; j < n; ++j) {
      double sum = 0;
      for (index_t k = 0; k < m; ++k)
        sum += wide ? double(w[std::size_t(i * columns + k)]) * double(w[std::size_t(j * columns + k)])
                    : double(w[std::size_t(k * columns + i)]) * double(w[std::size_t(k * columns + j)]);
      double const d = std::abs(sum - (i == j ? gain * gain : 0.0));
      if (!(d <= most)) most = d;
    }
  return most;
}

}  // namespace

DOCTEST_TEST_CASE("orthogonal start values: the rows or the columns are orthonormal times the gain") {
  for (auto const& shape : std::vector<std::array<index_t, 2>>{
           {1, 1}, {1, 7}, {7, 1}, {64, 16}, {16, 64}, {48, 48}, {200, 200}, {3, 1000}})
    for (double gain : {1.0, 0.1, 3.0}) {
      index_t const rows = shape[0], columns = shape[1];
      DOCTEST_CAPTURE(rows);
      DOCTEST_CAPTURE(columns);
      DOCTEST_CAPTURE(gain);
      auto const rule = init::orthogonal(gain);
      double const size = gain * gain;
      DOCTEST_CHECK(off_orthogonal(started<double>(rule, rows, columns), rows, columns, gain) <= 1e-12 * size);
      DOCTEST_CHECK(off_orthogonal(started<float>(rule, rows, columns), rows, columns, gain) <= 1e-6 * size);
    }
}

DOCTEST_TEST_CASE("orthogonal start values are a function of seed and name") {
  auto const rule = init::orthogonal();
  auto const w = started<double>(rule, 12, 5);
  DOCTEST_CHECK(started<double>(rule, 12, 5) == w);
  DOCTEST_CHECK(started<double>(rule, 12, 5, 6) != w);
  DOCTEST_CHECK(started<double>(rule, 12, 5, 5, "v") != w);
  auto const single = started<float>(rule, 12, 5);
  for (std::size_t i = 0; i < w.size(); ++i) DOCTEST_CHECK(single[i] == float(w[i]));
}

// Q' G = R: upper triangular with a positive diagonal, so the sign of every column is settled.
DOCTEST_TEST_CASE("orthogonal start values are the factor Q of the Gaussian numbers that a normal rule gives") {
  index_t const rows = 9, columns = 4;
  auto const q = started<double>(init::orthogonal(), rows, columns),
             g = started<double>(init::normal(1.0), rows, columns);
  for (index_t i = 0; i < columns; ++i)
    for (index_t j = 0; j < columns; ++j) {
      double r = 0;
      for (index_t k = 0; k < rows; ++k) r += q[std::size_t(k * columns + i)] * g[std::size_t(k * columns + j)];
      if (i > j) DOCTEST_CHECK(std::abs(r) <= 1e-14);
      if (i == j) DOCTEST_CHECK(r > 0.1);
    }
}

DOCTEST_TEST_CASE("numbers that are nearly dependent become orthonormal all the same") {
  index_t const n = 9;  // Hilbert's matrix: condition 5e11
  std::vector<double> w;
  for (index_t i = 0; i < n * n; ++i) w.push_back(1.0 / double(i / n + i % n + 1));
  detail::make_orthogonal(w.data(), n, n, 1.0);
  DOCTEST_CHECK(off_orthogonal(w, n, n, 1.0) <= 1e-14);
}

DOCTEST_TEST_CASE("identity start values repeat below one another") {
  auto const w = started<double>(init::identity(), 6, 3);
  for (std::size_t i = 0; i < w.size(); ++i) DOCTEST_CHECK(w[i] == (i % 9 % 4 == 0 ? 1.0 : 0.0));
}

DOCTEST_TEST_CASE("a rule of the user may fill a whole tensor from its random numbers") {
  initialiser const centred{.a = 2.0, .matrix = [](initial_matrix const& m) {
                              double mean = 0;
                              for (index_t i = 0; i < m.rows * m.columns; ++i) mean += m.to[i];
                              mean /= double(m.rows * m.columns);
                              for (index_t i = 0; i < m.rows * m.columns; ++i) m.to[i] = m.a * (m.to[i] - mean);
                            }};
  DOCTEST_CHECK(bool(centred));
  DOCTEST_CHECK(!initialiser{});
  auto const w = started<double>(centred, 5, 8);
  double sum = 0, square = 0;
  for (double e : w) sum += e, square += e * e;
  DOCTEST_CHECK(std::abs(sum) <= 1e-13);
  DOCTEST_CHECK(square > 40.0);
}
