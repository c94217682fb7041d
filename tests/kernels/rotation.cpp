#include "../support/golden.hpp"
#include "../support/spaced.hpp"
#include <seqmix/kernels/cpu/rotation.hpp>

// Rotary positions with options, and rotations by summed angles: against the reference and its dual numbers.

namespace {

using namespace seqmix;
using namespace seqmix::testing;
using kernels::rope_options;
using number = dual<double, 1>;

struct turn_shape {
  sequences seq;
  index_t G, H, S, K, Hx;
  index_t R() const { return seq.rows(); }
  std::array<index_t, 3> raw() const { return {R(), G, S}; }
  std::array<index_t, 2> delta() const { return {R(), H}; }
  std::array<index_t, 3> carried() const { return {seq.count(), H, S}; }
  std::array<index_t, 3> theta() const { return {R(), H, S}; }
  std::array<index_t, 3> x() const { return {R(), Hx, K}; }
  std::array<index_t, 3> y() const { return {R(), H, K}; }
};
template <std::size_t Rank>
index_t count(std::array<index_t, Rank> const& e) {
  index_t n = 1;
  for (auto i : e) n *= i;
  return n;
}
/// raw, delta, carried (may be empty), x, bias (may be empty)
arrays<double> random_inputs(turn_shape const& s, bool carried, bool bias) {
  arrays<double> x{rounded(normals(count(s.raw()), 1)), rounded(normals(count(s.delta()), 2)),
                   rounded(normals(carried ? count(s.carried()) : 0, 3)), rounded(normals(count(s.x()), 4)),
                   rounded(normals(bias ? s.H * s.K : 0, 5))};
  for (auto& e : x[1]) e = double(float(std::abs(e)));
  for (auto& e : x[2]) e = double(float(std::abs(e)));
  return x;
}

/// turned numbers | final angles | angles
template <class S>
arrays<S> reference(turn_shape const& s, arrays<S> const& in) {
  arrays<S> out{std::vector<S>(std::size_t(count(s.y()))), std::vector<S>(std::size_t(count(s.carried()))),
                std::vector<S>(std::size_t(count(s.theta())))};
  auto ws = arena::growing();
  kernels::rotation_angles_forward(device::reference{}, s.seq, view3<S const>(in[0].data(), s.raw()),
                                   view2<S const>(in[1].data(), s.delta()),
                                   in[2].empty() ? view3<S const>{} : view3<S const>(in[2].data(), s.carried()),
                                   view3<S>(out[2].data(), s.theta()), view3<S>(out[1].data(), s.carried()), ws);
  kernels::rotate_forward(device::reference{}, view3<S const>(in[3].data(), s.x()),
                          in[4].empty() ? nullptr : in[4].data(), view3<S const>(out[2].data(), s.theta()),
                          view3<S>(out[0].data(), s.y()));
  return out;
}

struct turn_run {
  arrays<double> out, d;
  friend bool operator==(turn_run const&, turn_run const&) = default;
};
/// The same and the gradients of all inputs.
template <class T>
turn_run fast(int threads, turn_shape const& s, arrays<double> const& in, std::vector<double> const& dy,
              std::vector<double> const& d_final) {
  spaced<T, 3> raw(s.raw(), in[0]), carried(s.carried(), in[2]), x(s.x(), in[3]), theta(s.theta()),
      final(s.carried()), y(s.y()), up(s.y(), dy), d_out(s.carried(), d_final), draw(s.raw()),
      d_carried(s.carried()), dx(s.x()), dtheta(s.theta());
  spaced<T, 2> delta(s.delta(), in[1]), ddelta(s.delta());
  std::vector<T> const bias(in[4].begin(), in[4].end());
  std::vector<T> dbias(bias.size(), T(0.5));
  bool const starts = !in[2].empty(), biased = !bias.empty();
  auto const before = starts ? carried() : view3<T const>{};
  with_planned_memory(threads, [&](device::cpu dev, arena& ws) {
    kernels::rotation_angles_forward(dev, s.seq, raw(), delta(), before, theta.view_of(), final.view_of(), ws);
    kernels::rotate_forward(dev, x(), biased ? bias.data() : nullptr, theta(), y.view_of());
    kernels::rotate_backward(dev, y(), theta(), up(), dx.view_of(), biased ? dbias.data() : nullptr,
                             dtheta.view_of(), false, ws);
    kernels::rotation_angles_backward(dev, s.seq, raw(), delta(), d_out(), dtheta.view_of(), draw.view_of(),
                                      ddelta.view_of(), starts ? d_carried.view_of() : view3<T>{}, ws);
  });
  for (auto const* a : {&theta, &final, &y, &draw, &d_carried, &dx, &dtheta}) DOCTEST_CHECK(a->intact());
  DOCTEST_CHECK(ddelta.intact());
  turn_run r{{y.values(), final.values(), theta.values()},
             {draw.values(),
              ddelta.values(),
              starts ? d_carried.values() : std::vector<double>{},
              dx.values(),
              {dbias.begin(), dbias.end()}}};
  for (auto& e : r.d[4]) e -= 0.5;
  return r;
}
/// Angles that point the same way are equal: rounding may put them on either side of a whole turn.
std::vector<double> directions(std::vector<double> const& angles) {
  std::vector<double> d;
  for (double a : angles) {
    DOCTEST_CHECK((a >= 0 && a <= 6.283186));
    d.push_back(std::cos(a));
    d.push_back(std::sin(a));
  }
  return d;
}

}  // namespace

DOCTEST_TEST_CASE("summed rotations and their gradients agree with the reference, for any number of threads") {
  std::array<index_t, 6> const offsets{0, 0, 1, 63, 63, 65};
  for (turn_shape const& s : {turn_shape{sequences::packed(offsets), 1, 4, 3, 8, 2},
                              {sequences::batch(1, 63), 2, 4, 17, 34, 4},
                              {sequences::batch(3, 21), 3, 3, 1, 5, 1},
                              {sequences::batch(1, 1), 1, 1, 9, 20, 1},
                              {sequences::batch(2, 0), 1, 2, 2, 4, 2}})
    for (bool all : {false, true}) {
      DOCTEST_CAPTURE(s.S);
      DOCTEST_CAPTURE(all);
      auto const in = random_inputs(s, all, all);
      auto const dy = rounded(normals(count(s.y()), 6)), d_final = rounded(normals(count(s.carried()), 7));
      auto const expected = reference(s, in);
      auto const found = fast<double>(1, s, in, dy, d_final), single = fast<float>(1, s, in, dy, d_final);
      check_close({found.out[0], directions(found.out[1]), directions(found.out[2])},
                  {expected[0], directions(expected[1]), directions(expected[2])}, 1e-13);
      check_close({single.out[0], directions(single.out[2])}, {expected[0], directions(expected[2])}, 3e-5);
      check_close(single.d, found.d, 3e-5);
      DOCTEST_CHECK(fast<double>(3, s, in, dy, d_final) == found);
      DOCTEST_CHECK(fast<float>(2, s, in, dy, d_final) == single);
      check_pullback(
          in,
          [&](arrays<number> const& x) {
            auto r = reference(s, x);
            r[0].insert(r[0].end(), r[1].begin(), r[1].end());
            return r[0];
          },
          [&](std::vector<double> const& d) {
            auto const cut = d.begin() + count(s.y());
            return fast<double>(2, s, in, {d.begin(), cut}, {cut, d.end()}).d;
          });
    }
}

DOCTEST_TEST_CASE(
    "queries and keys turned by the same angles add their gradients, in place where heads are not shared") {
  turn_shape const s{sequences::batch(1, 66), 1, 2, 3, 7, 2};
  auto const in = random_inputs(s, false, false);
  auto const dy = normals(count(s.y()), 8);
  auto const theta = reference(s, in)[2];
  view3<double const> const angles(theta.data(), s.theta());
  std::vector<double> y(in[3].size()), dx(y), once(theta.size()), twice(once);
  kernels::rotate_forward(device::cpu{2}, view3<double const>(in[3].data(), s.x()), nullptr, angles,
                          view3<double>(y.data(), s.y()));
  auto in_place = in[3];
  kernels::rotate_forward(device::cpu{2}, view3<double const>(in_place.data(), s.x()), nullptr, angles,
                          view3<double>(in_place.data(), s.y()));
  DOCTEST_CHECK(in_place == y);
  auto const backward = [&](std::vector<double> const& up, std::vector<double>& to, std::vector<double>& d,
                            bool add) {
    with_planned_memory(2, [&](device::cpu dev, arena& ws) {
      kernels::rotate_backward(dev, view3<double const>(y.data(), s.y()), angles,
                               view3<double const>(up.data(), s.y()), view3<double>(to.data(), s.x()), nullptr,
                               view3<double>(d.data(), s.theta()), add, ws);
    });
  };
  backward(dy, dx, once, false);
  twice = once;
  auto over = dy;
  backward(over, over, twice, true);
  DOCTEST_CHECK(over == dx);
  for (std::size_t i = 0; i < once.size(); ++i) DOCTEST_CHECK(twice[i] == 2 * once[i]);
}

DOCTEST_TEST_CASE("angles carried from piece to piece are those of the whole, and packed sequences restart") {
  index_t const T = 9;
  turn_shape const whole{sequences::batch(1, T), 1, 2, 3, 6, 2};
  auto const in = random_inputs(whole, true, false);
  auto const none = [](turn_shape const& s) { return std::vector<double>(std::size_t(count(s.y())), 0.0); };
  auto const expected = fast<double>(1, whole, in, none(whole), in[2]).out;
  auto const rows = [](std::vector<double> const& from, index_t begin, index_t end) {
    index_t const width = index_t(from.size()) / T;
    return std::vector<double>(from.begin() + begin * width, from.begin() + end * width);
  };
  auto const part = [&](index_t begin, index_t end, std::vector<double> const& carried) {
    auto s = whole;
    s.seq = sequences::batch(1, end - begin);
    return fast<double>(2, s,
                        {rows(in[0], begin, end), rows(in[1], begin, end), carried, rows(in[3], begin, end), {}},
                        none(s), in[2])
        .out;
  };
  for (std::vector<index_t> const& cuts :
       {std::vector<index_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, {0, 0, 4, 4, 9}, {0, 8, 9}}) {
    auto carried = in[2];
    for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
      auto const piece = part(cuts[i], cuts[i + 1], carried);
      DOCTEST_CHECK(piece[2] == rows(expected[2], cuts[i], cuts[i + 1]));
      DOCTEST_CHECK(piece[0] == rows(expected[0], cuts[i], cuts[i + 1]));
      carried = piece[1];
    }
    DOCTEST_CHECK(carried == expected[1]);
  }
  std::array<index_t, 4> const offsets{0, 4, 4, 9};
  auto packed = whole;
  packed.seq = sequences::packed(offsets);
  auto const together = fast<double>(2, packed, {in[0], in[1], {}, in[3], {}}, none(packed), normals(18, 9)).out;
  DOCTEST_CHECK(rows(together[0], 0, 4) == part(0, 4, {})[0]);
  DOCTEST_CHECK(rows(together[0], 4, 9) == part(4, 9, {})[0]);
}

DOCTEST_TEST_CASE("the final angles are Mamba-3's golden ones") {
  for (char const* name : {"mamba3_siso", "mamba3_siso_init", "mamba3_siso_t1"}) {
    golden_case const c(std::string("ops/") + name);
    auto const delta = token_first(c["DT"]);
    auto const &raw = c["Angles"], &final = c["angle"];
    turn_shape const s{sequences::batch(raw.extent(0), raw.extent(1)),
                       raw.extent(2),
                       raw.extent(2),
                       raw.extent(3),
                       2 * raw.extent(3),
                       1};
    auto const numbers = [](golden_tensor const& t) { return std::vector<double>(t.data.begin(), t.data.end()); };
    arrays<double> const in{numbers(raw),
                            numbers(delta),
                            c.has("angle0") ? numbers(c["angle0"]) : std::vector<double>{},
                            std::vector<double>(std::size_t(count(s.x())), 0.0),
                            {}};
    std::vector<double> const dy(std::size_t(count(s.y())), 0.0);
    auto const exact = compare(fast<double>(2, s, in, dy, numbers(final)).out[1].data(), final);
    DOCTEST_CHECK_MESSAGE(exact.good, exact.text);
    auto const single = fast<float>(2, s, in, dy, numbers(final)).out[1];
    std::vector<float> const angles(single.begin(), single.end());
    auto const rounded_ = compare(angles.data(), final);
    DOCTEST_CHECK_MESSAGE(rounded_.good, rounded_.text);
  }
}

DOCTEST_TEST_CASE("sine and cosine are right in every quarter and some hundred turns out") {
  using isa = device::cpu::isa;
  random_numbers random(11);
  double worst = 0, worst_single = 0;
  for (int i = 0; i < 4000; ++i) {
    double const angle = i % 2 == 0 ? random.uniform(0, 6.2831853071795865) : random.uniform(-700, 700);
    float const rounded_angle = float(angle);
    simd::vec<isa, double> s, c;
    kernels::detail::sine_and_cosine<isa, double>(simd::broadcast<isa, double>(angle), s, c);
    worst = std::max({worst, std::abs(s[0] - std::sin(angle)), std::abs(c[0] - std::cos(angle))});
    simd::vec<isa, float> fs, fc;
    kernels::detail::sine_and_cosine<isa, float>(simd::broadcast<isa, float>(rounded_angle), fs, fc);
    worst_single = std::max({worst_single, std::abs(double(fs[0]) - std::sin(double(rounded_angle))),
                             std::abs(double(fc[0]) - std::cos(double(rounded_angle)))});
  }
  DOCTEST_CHECK(worst <= 3e-16);
  DOCTEST_CHECK(worst_single <= 2e-7);
}

DOCTEST_TEST_CASE(
    "rotary positions: leading channels, neighbouring pairs and the closed grid agree with the reference") {
  std::array<index_t, 5> const offsets{0, 0, 3, 4, 70};
  std::array<index_t, 4> const positions{5, 1000, 0, 7};
  auto const seq = sequences::packed(offsets);
  std::array<index_t, 3> const heads{70, 2, 42};
  auto const x = normals(count(heads), 12);
  for (rope_options const& o : {rope_options{.channels = 10},
                                {.interleaved = true},
                                {.channels = 38, .interleaved = true},
                                {.base = 500.0, .closed = true},
                                {.channels = 2, .interleaved = true, .closed = true}})
    for (index_t const* position : {static_cast<index_t const*>(nullptr), positions.data()}) {
      auto expected = x;
      auto ws = arena::growing();
      kernels::rope(device::reference{}, seq, position, o, 1.0, view3<double>(expected.data(), heads), ws);
      spaced<double, 3> found(heads, x);
      spaced<float, 3> single(heads, x);
      auto const turn = [&](auto& numbers, double direction, int threads) {
        with_planned_memory(threads, [&](device::cpu dev, arena& memory) {
          kernels::rope(dev, seq, position, o, direction, numbers.view_of(), memory);
        });
      };
      turn(found, 1.0, 2);
      turn(single, 1.0, 3);
      DOCTEST_CHECK(greatest_error(found.values(), expected) <= 1e-13);
      DOCTEST_CHECK(greatest_error(single.values(), expected) <= 2e-6);
      DOCTEST_CHECK(greatest_error(expected, x) > 0.1);
      if (o.channels > 0)
        for (index_t i = 0; i < count(heads); ++i)
          if (i % 42 >= o.channels) DOCTEST_CHECK(expected[std::size_t(i)] == x[std::size_t(i)]);
      turn(found, -1.0, 1);
      DOCTEST_CHECK(greatest_error(found.values(), x) <= 1e-13);
      DOCTEST_CHECK(found.intact());
    }
}

DOCTEST_TEST_CASE("rotary positions by hand") {
  auto ws = arena::growing();
  auto const turned = [&](rope_options const& o) {
    std::vector<double> x{1, 2, 3, 4, 5, 6};
    index_t const at = 2;
    kernels::rope(device::reference{}, sequences::batch(1, 1), &at, o, 1.0, view3<double>(x.data(), {1, 1, 6}), ws);
    return x;
  };
  double const c = std::cos(2.0), s = std::sin(2.0), c2 = std::cos(0.2), s2 = std::sin(0.2);
  check_close({turned({.base = 100.0, .channels = 4})},
              {{c - 3 * s, 2 * c2 - 4 * s2, 3 * c + s, 4 * c2 + 2 * s2, 5, 6}}, 1e-15);
  check_close({turned({.base = 100.0, .channels = 4, .interleaved = true})},
              {{c - 2 * s, 2 * c + s, 3 * c2 - 4 * s2, 4 * c2 + 3 * s2, 5, 6}}, 1e-15);
  double const c3 = std::cos(0.02), s3 = std::sin(0.02);
  check_close({turned({.base = 100.0, .channels = 4, .closed = true})},
              {{c - 3 * s, 2 * c3 - 4 * s3, 3 * c + s, 4 * c3 + 2 * s3, 5, 6}}, 1e-15);
  DOCTEST_CHECK_THROWS_WITH_AS(turned({.channels = 3}),
                               "seqmix: rope: channels must be even and at most the head's 6, got 3", shape_error);
}
