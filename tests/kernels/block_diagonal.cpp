#include "../support/spaced.hpp"
#include <seqmix/kernels/cpu/block_diagonal.hpp>

// Block-diagonal products, narrow and wide blocks: against the reference and its dual numbers.

namespace {

using namespace seqmix;
using namespace seqmix::testing;
using number = dual<double, 1>;

struct sizes {
  index_t R, B, O, I;
  std::array<index_t, 2> x() const { return {R, B * I}; }
  std::array<index_t, 2> y() const { return {R, B * O}; }
  std::array<index_t, 3> w() const { return {B, O, I}; }
};
template <class S>
std::vector<S> reference(sizes const& z, std::vector<S> const& x, std::vector<S> const& w) {
  std::vector<S> y(std::size_t(z.R * z.B * z.O), S{});
  auto ws = arena::growing();
  kernels::block_diagonal_forward(device::reference{}, view2<S const>(x.data(), z.x()),
                                  view3<S const>(w.data(), z.w()), view2<S>(y.data(), z.y()), false, ws);
  return y;
}
/// y, dx, dw
template <class T>
arrays<double> fast(int threads, sizes const& z, std::vector<double> const& x, std::vector<double> const& w,
                    std::vector<double> const& dy, bool add = false) {
  auto const before = [&](std::array<index_t, 2> e) {
    return std::vector<double>(std::size_t(add ? e[0] * e[1] : 0), 0.5);
  };
  spaced<T, 2> in(z.x(), x), up(z.y(), dy), y(z.y(), before(z.y())), dx(z.x(), before(z.x()));
  spaced<T, 3> weight(z.w(), w), dw(z.w(), std::vector<double>(w.size(), 0.5));
  with_planned_memory(threads, [&](device::cpu dev, arena& ws) {
    kernels::block_diagonal_forward(dev, in(), weight(), y.view_of(), add, ws);
    kernels::block_diagonal_backward_input(dev, up(), weight(), dx.view_of(), add, ws);
    kernels::block_diagonal_backward_weight(dev, up(), in(), dw.view_of(), ws);
  });
  for (auto const* a : {&y, &dx}) DOCTEST_CHECK(a->intact());
  DOCTEST_CHECK(dw.intact());
  arrays<double> all{y.values(), dx.values(), dw.values()};
  for (std::size_t i = 0; i < 3; ++i)
    for (auto& e : all[i]) e -= add || i == 2 ? 0.5 : 0.0;
  return all;
}

}  // namespace

DOCTEST_TEST_CASE("block-diagonal products and gradients agree with the reference, for any number of threads") {
  for (sizes const& z : {sizes{0, 2, 3, 4}, sizes{1, 1, 1, 1}, sizes{63, 35, 4, 4}, sizes{65, 5, 3, 17},
                         sizes{130, 2, 70, 5}, sizes{130, 2, 33, 37}}) {
    DOCTEST_CAPTURE(z.R);
    DOCTEST_CAPTURE(z.O);
    auto const x = rounded(normals(z.R * z.B * z.I, 1)), w = rounded(normals(z.B * z.O * z.I, 2)),
               dy = rounded(normals(z.R * z.B * z.O, 3));
    auto const found = fast<double>(1, z, x, w, dy), single = fast<float>(1, z, x, w, dy);
    check_close({found[0]}, {reference(z, x, w)}, row_tolerance<double>);
    check_close(single, found, 10 * row_tolerance<float>);
    check_close(fast<double>(2, z, x, w, dy, true), found, 1e-13);
    DOCTEST_CHECK(fast<double>(3, z, x, w, dy) == found);
    DOCTEST_CHECK(fast<float>(2, z, x, w, dy) == single);
    check_pullback(
        {x, w}, [&](arrays<number> const& in) { return reference(z, in[0], in[1]); },
        [&](std::vector<double> const& d) {
          auto const all = fast<double>(2, z, x, w, d);
          return arrays<double>{all[1], all[2]};
        });
  }
}

DOCTEST_TEST_CASE("a token gives the same bits wherever it stands") {
  sizes const many{70, 6, 4, 3}, one{1, 6, 4, 3};
  auto const x = normals(70 * 18, 4), w = normals(72, 5);
  auto const y = fast<double>(1, many, x, w, std::vector<double>(70 * 24))[0];
  for (std::size_t r : {0u, 5u, 69u}) {
    std::vector<double> const token(x.begin() + std::ptrdiff_t(r * 18), x.begin() + std::ptrdiff_t(r * 18 + 18));
    auto const alone = fast<double>(1, one, token, w, std::vector<double>(24))[0];
    DOCTEST_CHECK(std::equal(alone.begin(), alone.end(), y.begin() + std::ptrdiff_t(r * 24)));
  }
}

DOCTEST_TEST_CASE("a block-diagonal weight that does not fit is named") {
  std::vector<double> x(12), w(8), y(12);
  auto ws = arena::growing();
  DOCTEST_CHECK_THROWS_WITH_AS(kernels::block_diagonal_forward(device::cpu{}, view2<double const>(x.data(), {2, 6}),
                                                               view3<double const>(w.data(), {2, 2, 2}),
                                                               view2<double>(y.data(), {2, 4}), false, ws),
                               "seqmix: block_diagonal: inputs: expected [2,4], got [2,6]", shape_error);
}
