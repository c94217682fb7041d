#include "../support/spaced.hpp"
#include <seqmix/kernels/cpu/head_norm.hpp>

// Normalisations of heads: against the reference and its dual numbers, and where vectors are tiny or zero.

namespace {

using namespace seqmix;
using namespace seqmix::testing;
using kernels::head_norm;
using kernels::norm_over;
using number = dual<double, 1>;

struct norm_case {
  head_norm s;
  bool weight, bias;
};
std::vector<norm_case> all_norms() {
  std::vector<norm_case> all;
  for (auto over : {norm_over::l1, norm_over::l2, norm_over::l2_max})
    all.push_back({{over, over == norm_over::l2 ? 1e-6 : 1e-4}, false, false});
  for (auto over : {norm_over::rms, norm_over::layer})
    for (bool per_head : {false, true})
      for (bool bias : {false, true}) all.push_back({{over, 1e-5, per_head, bias != per_head}, true, bias});
  all.push_back({{norm_over::layer, 64e-5, true}, true, true});  // RWKV
  all.push_back({{norm_over::rms}, false, false});
  return all;
}
struct problem {
  std::array<index_t, 3> shape;
  std::vector<double> x, w, b;
  problem(norm_case const& c, std::array<index_t, 3> const& e)
      : shape(e), x(rounded(normals(e[0] * e[1] * e[2], 1))),
        w(rounded(normals(c.weight ? (c.s.per_head ? e[1] * e[2] : e[2]) : 0, 2))),
        b(rounded(normals(c.bias ? (c.s.per_head ? e[1] * e[2] : e[2]) : 0, 3))) {}
};

template <class S>
std::vector<S> reference(norm_case const& c, problem const& p, std::vector<S> const& x, std::vector<S> const& w,
                         std::vector<S> const& b) {
  std::vector<S> y(x.size()), saved(std::size_t(kernels::head_norm_saved(c.s, p.shape[0], p.shape[1])), S{});
  kernels::head_norm_forward(device::reference{}, c.s, view3<S const>(x.data(), p.shape),
                             c.weight ? w.data() : nullptr, c.bias ? b.data() : nullptr,
                             view3<S>(y.data(), p.shape), saved.data());
  return y;
}
/// y, dx, dw, db
template <class T>
arrays<double> fast(int threads, norm_case const& c, problem const& p, std::vector<double> const& dy,
                    bool add = false) {
  spaced<T, 3> x(p.shape, p.x), y(p.shape), up(p.shape, dy),
      dx(p.shape, std::vector<double>(add ? p.x.size() : 0, 0.5));
  std::vector<T> w(p.w.begin(), p.w.end()), b(p.b.begin(), p.b.end()), dw(w.size(), T(0.5)), db(b.size(), T(0.5));
  std::vector<T> saved(std::size_t(kernels::head_norm_saved(c.s, p.shape[0], p.shape[1])));
  kernels::head_norm_forward(device::cpu{threads}, c.s, x(), c.weight ? w.data() : nullptr,
                             c.bias ? b.data() : nullptr, y.view_of(), saved.data());
  with_planned_memory(threads, [&](device::cpu dev, arena& ws) {
    kernels::head_norm_backward(dev, c.s, x(), c.weight ? w.data() : nullptr, saved.data(), up(), dx.view_of(), add,
                                c.weight ? dw.data() : nullptr, c.bias ? db.data() : nullptr, ws);
  });
  DOCTEST_CHECK(y.intact());
  DOCTEST_CHECK(dx.intact());
  arrays<double> all{y.values(), dx.values(), {dw.begin(), dw.end()}, {db.begin(), db.end()}};
  for (std::size_t i : {2u, 3u})
    for (auto& e : all[i]) e -= 0.5;
  if (add)
    for (auto& e : all[1]) e -= 0.5;
  return all;
}

/// y and dx of one vector, without weights.
template <class T>
arrays<double> one_vector(head_norm s, std::vector<double> const& x, std::vector<double> const& dy) {
  norm_case const c{s, false, false};
  problem p(c, {1, 1, index_t(x.size())});
  p.x = x;
  auto all = fast<T>(1, c, p, dy);
  all.resize(2);
  return all;
}

}  // namespace

DOCTEST_TEST_CASE("every head norm and its backward agree with the reference, for any number of threads") {
  for (auto const& c : all_norms())
    for (std::array<index_t, 3> shape : {std::array<index_t, 3>{0, 2, 3}, {1, 1, 1}, {63, 2, 5}, {65, 3, 18}}) {
      DOCTEST_CAPTURE(int(c.s.over));
      DOCTEST_CAPTURE(shape[2]);
      problem const p(c, shape);
      auto const dy = rounded(normals(index_t(p.x.size()), 4));
      auto const found = fast<double>(1, c, p, dy), single = fast<float>(1, c, p, dy);
      check_close({found[0]}, {reference(c, p, p.x, p.w, p.b)}, row_tolerance<double>);
      check_close({single[0]}, {found[0]}, row_tolerance<float>);
      DOCTEST_CHECK(fast<double>(3, c, p, dy) == found);
      DOCTEST_CHECK(fast<float>(3, c, p, dy) == single);
      if (shape[0] < 2) continue;
      check_close(single, found, 10 * row_tolerance<float>);
      check_close({fast<double>(2, c, p, dy, true)[1]}, {found[1]}, 1e-14);
      check_pullback(
          {p.x, p.w, p.b}, [&](arrays<number> const& in) { return reference(c, p, in[0], in[1], in[2]); },
          [&](std::vector<double> const& d) {
            auto all = fast<double>(2, c, p, d);
            return arrays<double>{all[1], all[2], all[3]};
          });
    }
}

DOCTEST_TEST_CASE("a head norm may work in place, and its gradient may replace the one above") {
  for (auto const& c : all_norms()) {
    problem const p(c, {66, 2, 7});
    auto const dy = normals(index_t(p.x.size()), 5);
    auto const expected = fast<double>(2, c, p, dy);
    auto y = p.x, d = dy;
    std::vector<double> saved(std::size_t(kernels::head_norm_saved(c.s, 66, 2)));
    auto const w = c.weight ? p.w.data() : nullptr, b = c.bias ? p.b.data() : nullptr;
    view3<double> const in_place(y.data(), p.shape), gradient(d.data(), p.shape);
    kernels::head_norm_forward(device::cpu{2}, c.s, view3<double const>(in_place), w, b, in_place, saved.data());
    DOCTEST_CHECK(y == expected[0]);
    with_planned_memory(2, [&](device::cpu dev, arena& ws) {
      kernels::head_norm_backward(dev, c.s, view3<double const>(p.x.data(), p.shape), w, saved.data(),
                                  view3<double const>(gradient), gradient, false, nullptr, nullptr, ws);
    });
    DOCTEST_CHECK(d == expected[1]);
  }
}

DOCTEST_TEST_CASE_TEMPLATE("P-G5: the norm of a zero vector has a finite derivative", T, float, double) {
  for (double eps : {1e-6, 1e-12}) {
    auto const found = one_vector<T>({norm_over::l2, eps}, {0, 0, 0}, {1, -2, 0});
    DOCTEST_CHECK(found[0] == std::vector<double>{0, 0, 0});
    check_close({found[1]}, {{1 / std::sqrt(eps), -2 / std::sqrt(eps), 0}}, 2e-7);
  }
  for (auto over : {norm_over::l1, norm_over::l2, norm_over::l2_max, norm_over::rms, norm_over::layer})
    for (double eps : {1e-6, 1e-12}) {
      auto const silent = one_vector<T>({over, eps}, {0, 0, 0}, {0, 0, 0});
      DOCTEST_CHECK(silent[0] == std::vector<double>{0, 0, 0});
      DOCTEST_CHECK(silent[1] == std::vector<double>{0, 0, 0});
      auto const pulled = one_vector<T>({over, eps}, {0, 0, 0}, {1, 2, 3});
      for (double e : pulled[1]) DOCTEST_CHECK(std::isfinite(e));
    }
}

DOCTEST_TEST_CASE("P-N6: the sum norm of signed features is finite") {
  head_norm const exact{norm_over::l1, 1e-15}, usual{norm_over::l1, 1e-4};
  check_close({one_vector<double>(exact, {3, -3}, {0, 0})[0]}, {{0.5, -0.5}}, 1e-14);
  check_close({one_vector<double>(exact, {1, 2}, {0, 0})[0]}, {{1.0 / 3, 2.0 / 3}}, 1e-14);
  check_close({one_vector<double>(usual, {1, 2}, {0, 0})[0]}, {{1 / 3.0001, 2 / 3.0001}}, 1e-14);
  for (auto const& s : {exact, usual}) {
    auto const zero = one_vector<double>(s, {0, 0}, {1, 1});
    DOCTEST_CHECK(zero[0] == std::vector<double>{0, 0});
    check_close({zero[1]}, {{1 / s.eps, 1 / s.eps}}, 1e-14);
  }
}

DOCTEST_TEST_CASE("a tiny key keeps length 1 under the maximum and is shrunk by the root of a sum") {
  std::vector<double> const tiny{6e-5, 8e-5};
  check_close({one_vector<double>({norm_over::l2_max, 1e-12}, tiny, {0, 0})[0]}, {{0.6, 0.8}}, 1e-14);
  auto const shrunk = one_vector<double>({norm_over::l2, 1e-6}, tiny, {0, 0})[0];
  DOCTEST_CHECK(std::hypot(shrunk[0], shrunk[1]) == doctest::Approx(0.0995037190).epsilon(1e-9));
  // Below the bound the divisor is a constant.
  auto const below = one_vector<double>({norm_over::l2_max, 1e-3}, tiny, {1, 2});
  check_close(below, {{0.06, 0.08}, {1e3, 2e3}}, 1e-14);
}
