#include "../support/spaced.hpp"
#include <seqmix/kernels/cpu/token_shift.hpp>

// Token shift, static and dynamic: against the reference and its dual numbers, packed and in pieces.

namespace {

using namespace seqmix;
using namespace seqmix::testing;
using number = dual<double, 1>;

template <class S>
struct shift_numbers {
  std::vector<S> x, mu, t, carried;  // t and carried may be empty
};
template <class S>
struct shift_result {
  std::vector<S> y, carried;
};
struct shift_shape {
  sequences seq;
  index_t J, D;
  index_t R() const { return seq.rows(); }
  index_t N() const { return seq.count(); }
};

template <class S>
shift_result<S> reference(shift_shape const& s, shift_numbers<S> const& in) {
  shift_result<S> r{std::vector<S>(std::size_t(s.J * s.R() * s.D)), std::vector<S>(std::size_t(s.N() * s.D))};
  kernels::token_shift_forward(device::reference{}, s.seq, view2<S const>(in.x.data(), {s.R(), s.D}),
                               view2<S const>(in.mu.data(), {s.J, s.D}),
                               in.t.empty() ? view3<S const>{} : view3<S const>(in.t.data(), {s.J, s.R(), s.D}),
                               in.carried.empty() ? view2<S const>{}
                                                  : view2<S const>(in.carried.data(), {s.N(), s.D}),
                               view3<S>(r.y.data(), {s.J, s.R(), s.D}), view2<S>(r.carried.data(), {s.N(), s.D}));
  return r;
}

/// y, final tokens | dx, dmu, dt, d_carried
struct shift_run {
  arrays<double> out, d;
  friend bool operator==(shift_run const&, shift_run const&) = default;
};
template <class T>
shift_run fast(int threads, shift_shape const& s, shift_numbers<double> const& in, std::vector<double> const& dy,
               std::vector<double> const& d_out) {
  std::array<index_t, 2> const rows{s.R(), s.D}, shares{s.J, s.D}, tokens{s.N(), s.D};
  std::array<index_t, 3> const targets{s.J, s.R(), s.D};
  spaced<T, 2> x(rows, in.x), mu(shares, in.mu), carried(tokens, in.carried), final(tokens), dx(rows),
      dmu(shares, std::vector<double>(in.mu.size(), 0.5)), d_carried(tokens), d_final(tokens, d_out);
  spaced<T, 3> t(targets, in.t), y(targets), up(targets, dy), dt(targets);
  bool const dynamic = !in.t.empty(), starts = !in.carried.empty();
  auto const before = starts ? carried() : view2<T const>{};
  auto const moves = dynamic ? t() : view3<T const>{};
  kernels::token_shift_forward(device::cpu{threads}, s.seq, x(), mu(), moves, before, y.view_of(), final.view_of());
  with_planned_memory(threads, [&](device::cpu dev, arena& ws) {
    kernels::token_shift_backward(
        dev, s.seq, x(), mu(), moves, before, up(), d_out.empty() ? view2<T const>{} : d_final(), dx.view_of(),
        dmu.view_of(), dynamic ? dt.view_of() : view3<T>{}, starts ? d_carried.view_of() : view2<T>{}, false, ws);
  });
  for (auto const* a : {&final, &dx, &dmu, &d_carried}) DOCTEST_CHECK(a->intact());
  for (auto const* a : {&y, &dt}) DOCTEST_CHECK(a->intact());
  shift_run r{{y.values(), final.values()},
              {dx.values(), dmu.values(), dynamic ? dt.values() : std::vector<double>{},
               starts ? d_carried.values() : std::vector<double>{}}};
  for (auto& e : r.d[1]) e -= 0.5;
  return r;
}

shift_numbers<double> random_numbers_of(shift_shape const& s, bool dynamic, bool carried) {
  return {rounded(normals(s.R() * s.D, 1)), rounded(normals(s.J * s.D, 2)),
          rounded(normals(dynamic ? s.J * s.R() * s.D : 0, 3)), rounded(normals(carried ? s.N() * s.D : 0, 4))};
}

}  // namespace

DOCTEST_TEST_CASE("token shift and its backward agree with the reference, for any number of threads") {
  std::array<index_t, 7> const offsets{0, 0, 1, 63, 63, 66, 131};
  for (auto const& seq : {sequences::packed(offsets), sequences::batch(2, 0), sequences::batch(1, 1),
                          sequences::batch(3, 21), sequences::batch(1, 65)})
    for (bool dynamic : {false, true})
      for (bool carried : {false, true}) {
        shift_shape const s{seq, dynamic ? 5 : 3, 19};
        DOCTEST_CAPTURE(seq.rows());
        DOCTEST_CAPTURE(dynamic);
        auto const in = random_numbers_of(s, dynamic, carried);
        auto const dy = rounded(normals(s.J * s.R() * s.D, 5)), d_out = rounded(normals(s.N() * s.D, 6));
        auto const found = fast<double>(1, s, in, dy, d_out), single = fast<float>(1, s, in, dy, d_out);
        auto const expected = reference(s, in);
        check_close(found.out, {expected.y, expected.carried}, row_tolerance<double>);
        check_close(single.out, {expected.y, expected.carried}, row_tolerance<float>);
        check_close(single.d, found.d, 4 * row_tolerance<float>);
        DOCTEST_CHECK(fast<double>(3, s, in, dy, d_out) == found);
        DOCTEST_CHECK(fast<float>(2, s, in, dy, d_out) == single);
        check_pullback(
            {in.x, in.mu, in.t, in.carried},
            [&](arrays<number> const& a) {
              auto r = reference<number>(s, {a[0], a[1], a[2], a[3]});
              r.y.insert(r.y.end(), r.carried.begin(), r.carried.end());
              return r.y;
            },
            [&](std::vector<double> const& d) {
              auto const cut = d.begin() + s.J * s.R() * s.D;
              return fast<double>(2, s, in, {d.begin(), cut}, {cut, d.end()}).d;
            });
      }
}

DOCTEST_TEST_CASE("token shift: numbers by hand, a carried token, and an empty sequence that passes it on") {
  std::array<index_t, 4> const offsets{0, 2, 2, 3};
  shift_shape const s{sequences::packed(offsets), 1, 1};
  auto const r = fast<double>(2, s, {{1, 2, 5}, {0.25}, {}, {9, 7, 8}}, {0, 0, 0}, {});
  DOCTEST_CHECK(r.out[0] == std::vector<double>{3, 1.75, 5.75});
  DOCTEST_CHECK(r.out[1] == std::vector<double>{2, 7, 5});
  auto const zero = fast<double>(2, s, {{1, 2, 5}, {0.25}, {}, {}}, {0, 0, 0}, {});
  DOCTEST_CHECK(zero.out[0] == std::vector<double>{0.75, 1.75, 3.75});
  DOCTEST_CHECK(zero.out[1] == std::vector<double>{2, 0, 5});
}

DOCTEST_TEST_CASE("token shift in pieces is token shift of the whole, and packed sequences are separate ones") {
  index_t const J = 3, D = 6, T = 9;
  shift_shape const whole{sequences::batch(1, T), J, D};
  auto in = random_numbers_of(whole, true, false);
  std::vector<double> const none(std::size_t(J * T * D), 0.0);
  auto const expected = fast<double>(1, whole, in, none, {});
  auto const rows = [&](std::vector<double> const& from, index_t count, index_t begin, index_t end) {
    std::vector<double> part;
    for (index_t j = 0; j < count; ++j)
      part.insert(part.end(), from.begin() + (j * T + begin) * D, from.begin() + (j * T + end) * D);
    return part;
  };
  for (std::vector<index_t> const& cuts :
       {std::vector<index_t>{0, 9}, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, {0, 0, 4, 4, 9}, {0, 8, 9}}) {
    std::vector<double> carried;
    for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
      index_t const begin = cuts[i], end = cuts[i + 1];
      shift_shape const piece{sequences::batch(1, end - begin), J, D};
      auto const r = fast<double>(2, piece, {rows(in.x, 1, begin, end), in.mu, rows(in.t, J, begin, end), carried},
                                  rows(none, J, begin, end), {});
      DOCTEST_CHECK(r.out[0] == rows(expected.out[0], J, begin, end));
      carried = r.out[1];
    }
    DOCTEST_CHECK(carried == expected.out[1]);
  }
  std::array<index_t, 4> const offsets{0, 4, 4, 9};
  shift_shape const packed{sequences::packed(offsets), J, D};
  auto const y = fast<double>(2, packed, in, none, {}).out[0];
  for (std::size_t n : {0u, 2u}) {
    shift_shape const alone{sequences::batch(1, offsets[n + 1] - offsets[n]), J, D};
    shift_numbers<double> const part{
        rows(in.x, 1, offsets[n], offsets[n + 1]), in.mu, rows(in.t, J, offsets[n], offsets[n + 1]), {}};
    DOCTEST_CHECK(fast<double>(1, alone, part, rows(none, J, offsets[n], offsets[n + 1]), {}).out[0] ==
                  rows(y, J, offsets[n], offsets[n + 1]));
  }
}

DOCTEST_TEST_CASE(
    "the second shift of a token adds to the gradients of the first, in place where states may share memory") {
  shift_shape const s{sequences::batch(2, 5), 2, 7};
  auto const in = random_numbers_of(s, false, true);
  auto const dy = normals(2 * 10 * 7, 7), d_out = normals(14, 8);
  auto const once = fast<double>(1, s, in, dy, d_out), plain = fast<double>(1, s, in, dy, {});
  auto dx = once.d[0], d_carried = once.d[3];
  std::vector<double> dmu(14, 0.0);
  auto const rows = [&](auto& v, index_t n) {
    return view2<std::remove_reference_t<decltype(v[0])>>(v.data(), {n, 7});
  };
  with_planned_memory(2, [&](device::cpu dev, arena& ws) {
    kernels::token_shift_backward(dev, s.seq, rows(in.x, 10), rows(in.mu, 2), view3<double const>{},
                                  rows(in.carried, 2), view3<double const>(dy.data(), {2, 10, 7}),
                                  view2<double const>{}, rows(dx, 10), rows(dmu, 2), view3<double>{},
                                  rows(d_carried, 2), true, ws);
  });
  auto expected = once.d;
  for (std::size_t i : {0u, 3u})
    for (std::size_t e = 0; e < expected[i].size(); ++e) expected[i][e] += plain.d[i][e];
  check_close({dx, d_carried}, {expected[0], expected[3]}, 1e-14);

  auto state = in.carried;
  std::vector<double> y(2 * 10 * 7);
  kernels::token_shift_forward(device::cpu{2}, s.seq, rows(in.x, 10), rows(in.mu, 2), view3<double const>{},
                               rows(std::as_const(state), 2), view3<double>(y.data(), {2, 10, 7}), rows(state, 2));
  DOCTEST_CHECK(y == once.out[0]);
  DOCTEST_CHECK(state == once.out[1]);
}
