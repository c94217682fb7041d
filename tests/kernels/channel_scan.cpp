#include "../support/scan_case.hpp"

// The recurrence over channels against the reference, and its laws.

namespace {

using namespace seqmix;
using namespace seqmix::testing;

std::vector<double> normals(index_t n, std::uint64_t seed) {
  random_numbers draw(seed);
  std::vector<double> x(std::size_t(n), 0.0);
  for (auto& e : x) e = draw.normal();
  return x;
}
template <class T>
std::vector<T> as(std::vector<double> const& x) {
  return {x.begin(), x.end()};
}
template <class T>
std::vector<T> rows_of(std::vector<T> const& x, index_t width, index_t begin, index_t count) {
  return {x.begin() + begin * width, x.begin() + (begin + count) * width};
}

struct heads_of {
  index_t states, query = 1, key = 1, value = 0, gate = 0;  ///< 0: as many as states
};
scan_form form_of(heads_of h, index_t K, index_t V, sequences seq, index_t chunk = 4) {
  scan_form f;
  f.s.seq = seq;
  f.s.heads = h.states, f.s.query_heads = h.query, f.s.key_heads = h.key;
  f.s.value_heads = h.value > 0 ? h.value : h.states;
  f.s.gate_heads = h.gate > 0 ? h.gate : h.states;
  f.s.key_dim = K, f.s.value_dim = V;
  f.s.scale = 0.7;
  f.s.chunk = chunk;
  return f;
}
/// Mamba-1: a decay per channel and state from a step and a rate, queries and keys shared by all channels.
scan_form selective(index_t channels, index_t K, sequences seq, index_t chunk = 4) {
  auto f = form_of({channels}, K, 1, seq, chunk);
  f.rated = true;
  return f;
}
/// h = a h + w b per channel.
scan_form elementwise(index_t channels, sequences seq, index_t chunk = 4) {
  auto f = form_of({channels}, 1, 1, seq, chunk);
  f.addressed = false;
  f.s.scale = 1;
  return f;
}

/// Outputs, final states and the derivatives along random directions over all inputs at once.
void check_against_reference(scan_form const& f, scan_numbers<double> const& x, int directions = 2) {
  using number = dual<double, 1>;
  auto const d_o = normals(f.outputs(), 31), d_final = normals(f.states(), 32);
  auto const r = run_scan(f, x, d_o, d_final);
  random_numbers draw(33);
  for (int direction = 0; direction < directions; ++direction) {
    double got = 0, expected = 0, absolute = 0;
    scan_numbers<number> y;
    for (std::size_t part = 0; part < scan_numbers<double>::parts; ++part)
      for (std::size_t i = 0; i < x.part(part).size(); ++i) {
        number e(x.part(part)[i]);
        e.slope[0] = draw.normal();
        double const term = e.slope[0] * r.d.part(part)[i];
        got += term, absolute += std::abs(term);
        y.part(part).push_back(e);
      }
    auto const reference = reference_scan(f, y);
    std::vector<double> o, final;
    for (auto const& e : reference.o) o.push_back(e.value);
    for (auto const& e : reference.final) final.push_back(e.value);
    for (std::size_t i = 0; i < o.size(); ++i) expected += d_o[i] * reference.o[i].slope[0];
    for (std::size_t i = 0; i < final.size(); ++i) expected += d_final[i] * reference.final[i].slope[0];
    DOCTEST_CHECK(scan_difference(r.o, o) <= 1e-13);
    DOCTEST_CHECK(scan_difference(r.final, final) <= 1e-13);
    DOCTEST_CHECK_MESSAGE(std::abs(got - expected) <= 1e-12 * (absolute + 1e-3), "direction ", direction,
                          ": backward gives ", got, ", the reference ", expected, ", terms ", absolute);
  }
}
void check_against_reference(scan_form const& f) {
  DOCTEST_CAPTURE(f.s.heads);
  DOCTEST_CAPTURE(f.s.key_dim);
  DOCTEST_CAPTURE(f.s.value_dim);
  DOCTEST_CAPTURE(f.s.query_heads);
  DOCTEST_CAPTURE(f.s.gate_heads);
  check_against_reference(f, f.random(30));
}

std::array<index_t, 6> const ragged{0, 0, 1, 6, 6, 19};
sequences ragged_rows() { return sequences::packed(ragged); }

}  // namespace

DOCTEST_TEST_CASE(
    "the channel scan and its gradients are the reference's for every number of states and channels") {
  for (index_t K : {1, 5, 16}) check_against_reference(selective(21, K, ragged_rows()));
  check_against_reference(selective(3, 257, sequences::batch(1, 6)));
  check_against_reference(selective(300, 3, ragged_rows()));  // three units that share queries and keys
  for (index_t channels : {1, 8, 257}) check_against_reference(elementwise(channels, ragged_rows()));
  auto wide = elementwise(3, ragged_rows());
  wide.s.value_dim = 300;
  check_against_reference(wide);
  auto bare = elementwise(5, ragged_rows());
  bare.writes = bare.starts = false;
  check_against_reference(bare);
  bare.gated = false;
  check_against_reference(bare);
}

DOCTEST_TEST_CASE("the channel scan's heads may share queries, keys, values and gates") {
  auto const check = [](heads_of h, index_t K, index_t V, bool rated) {
    auto f = form_of(h, K, V, ragged_rows());
    f.rated = rated;
    check_against_reference(f);
  };
  check({6, 2, 3, 6, 3}, 5, 3, true);
  check({6, 6, 6, 2, 6}, 4, 1, true);
  check({12, 1, 4, 12, 12}, 2, 3, false);
  check({260, 4, 1}, 2, 1, true);          // blocks of 128 over groups of 65
  check({512, 2, 4}, 2, 1, true);          // two units for every query head, one for every key head
  check({300, 1, 1, 1, 300}, 2, 1, true);  // one value for all: one unit of three blocks
  check({300, 1, 1, 300, 1}, 2, 1, true);
}

DOCTEST_TEST_CASE("the channel scan takes decays per key and decays that no token changes") {
  for (index_t gate_heads : {18, 6, 1})
    for (bool constant : {false, true}) {
      auto f = form_of({18, 1, 1, 18, gate_heads}, 5, 1, ragged_rows());
      f.constant = constant;
      check_against_reference(f);
      f.rated = true;
      check_against_reference(f);
      f.rated = false, f.per_key = true;
      check_against_reference(f);
    }
  auto f = form_of({6, 6, 3}, 5, 3, ragged_rows());
  f.per_key = true;
  check_against_reference(f);
}

DOCTEST_TEST_CASE("extreme decays of the channel scan: none, hardly any, at the bound and far beyond") {
  std::array<double, 6> const decays{0.0, -1e-3, -1.0, -30.0, -128.0, log_decay_bound<double>};
  std::array<double, 4> const rates{0.0, 0.5, 1.0, 40.0};
  auto const f = selective(21, 5, ragged_rows());
  auto x = f.random(40);
  random_numbers draw(41);
  for (auto& g : x.g) g = decays[std::size_t(draw.below(6))];
  for (auto& rate : x.rate) rate = rates[std::size_t(draw.below(4))];
  check_against_reference(f, x);
  auto e = elementwise(21, ragged_rows());
  auto y = e.random(42);
  for (auto& g : y.g) g = decays[std::size_t(draw.below(6))];
  check_against_reference(e, y);

  // Products beyond the range of a float: everything is forgotten, and every derivative stays finite.
  for (auto& g : x.g) g = draw.below(2) == 0 ? 0.0 : -1e30;
  for (auto& rate : x.rate) rate = draw.below(2) == 0 ? 0.0 : 1e30;
  auto const expected = reference_scan(f, x);
  auto const d_o = normals(f.outputs(), 43);
  auto const r = run_scan(f, x.as<float>(), as<float>(d_o));
  DOCTEST_CHECK(scan_difference(r.o, expected.o) <= 1e-5);
  for (std::size_t part = 0; part < scan_numbers<float>::parts; ++part)
    for (float d : r.d.part(part)) DOCTEST_CHECK(std::isfinite(d));
}

DOCTEST_TEST_CASE(
    "the channel scan's exponential: exact at 0, in the last places elsewhere, 0 when it underflows") {
  using isa = device::cpu::isa;
  auto const check = [](auto number) {
    using T = decltype(number);
    auto const factor = [](double x) {
      return kernels::detail::decay_factor<isa, T>(simd::vec<isa, T>{} + T(x))[0];
    };
    double worst = 0;
    for (double x = sizeof(T) == 4 ? -126 : -1022; x < 0; x += 0.0137) {
      double const exact = std::exp2(double(T(x)));
      worst = std::max(worst, std::abs(double(factor(x)) - exact) / exact);
    }
    DOCTEST_CHECK(worst <= 1.5 * double(std::numeric_limits<T>::epsilon()));
    DOCTEST_CHECK(factor(0) == T(1));
    DOCTEST_CHECK(factor(-0.0) == T(1));
    for (double x : {-1030.0, -1e30, -std::numeric_limits<double>::infinity()}) DOCTEST_CHECK(factor(x) == T(0));
    DOCTEST_CHECK(std::isnan(factor(std::numeric_limits<double>::quiet_NaN())));
  };
  check(float{});
  check(double{});
}

DOCTEST_TEST_CASE("P-G1: the scan and its reverse on numbers known exactly") {
  // h_t = a_t h_{t-1} + b_t with a = 0.5, 2, -1, 0.25. A decay is positive and at most 1, so the states are scaled:
  // c_t h_t has the factors a_t c_t / c_{t-1} = 0.5, 1, 1, 0.25.
  std::vector<double> const c{1, 0.5, -0.5, -0.5}, a{0.5, 1, 1, 0.25}, b{3, -1, 2, 5}, h{3, 5, -3, 4.25},
      d_a{0, -0.75, 6.25, -3}, d_b{0.5, -0.25, 1.25, 1};
  for (index_t chunk : {1, 2, 3, 4, 32}) {
    auto f = elementwise(1, sequences::batch(1, 4), chunk);
    f.writes = false;
    scan_numbers<double> x;
    std::vector<double> d_o;
    for (std::size_t t = 0; t < 4; ++t) {
      x.g.push_back(std::log(a[t])), x.v.push_back(c[t] * b[t]);
      d_o.push_back(1 / c[t]);
    }
    x.initial = {0};
    auto const r = run_scan(f, x, d_o);
    for (std::size_t t = 0; t < 4; ++t) {
      double const before = t > 0 ? c[t - 1] : 1;
      DOCTEST_CHECK(std::abs(r.o[t] / c[t] - h[t]) <= 1e-14);
      DOCTEST_CHECK(std::abs(r.d.v[t] * c[t] - d_b[t]) <= 1e-14);
      DOCTEST_CHECK(std::abs(r.d.g[t] / a[t] * c[t] / before - d_a[t]) <= 1e-14);
    }
    DOCTEST_CHECK(std::abs(r.d.initial[0] - 0.25) <= 1e-14);
  }
}

DOCTEST_TEST_CASE("P-G1: scans of every length around a chunk, cut into any chunks, are the plain loop") {
  index_t const D = 3;
  for (index_t T : {1, 2, 3, 31, 32, 33, 1023, 1025}) {
    DOCTEST_CAPTURE(T);
    auto f = elementwise(D, sequences::batch(1, T));
    f.writes = false;
    auto const x = f.random(50);
    auto const d_o = normals(T * D, 51), d_final = normals(D, 52);
    std::vector<double> h(x.v), d_v(d_o), d_g(x.g);
    auto const at = [&](index_t t, index_t c) { return std::size_t(t * D + c); };
    std::vector<double> d_initial(std::size_t(D), 0.0);
    for (index_t c = 0; c < D; ++c) {
      for (index_t t = 0; t < T; ++t)
        h[at(t, c)] += std::exp(x.g[at(t, c)]) * (t > 0 ? h[at(t - 1, c)] : x.initial[std::size_t(c)]);
      double carried = d_final[std::size_t(c)];
      for (index_t t = T; t-- > 0;) {
        carried = d_v[at(t, c)] += carried;
        carried *= std::exp(x.g[at(t, c)]);
        d_g[at(t, c)] = carried * (t > 0 ? h[at(t - 1, c)] : x.initial[std::size_t(c)]);
      }
      d_initial[std::size_t(c)] = carried;
    }
    std::vector<double> first;
    for (index_t chunk : {1, 2, 7, 32, 64, 2000}) {
      DOCTEST_CAPTURE(chunk);
      f.s.chunk = chunk;
      auto const r = run_scan(f, x, d_o, d_final);
      DOCTEST_CHECK(scan_difference(r.o, h) <= 1e-14);
      DOCTEST_CHECK(scan_difference(r.d.v, d_v) <= 1e-14);
      DOCTEST_CHECK(scan_difference(r.d.g, d_g) <= 1e-14);
      DOCTEST_CHECK(scan_difference(r.d.initial, d_initial) <= 1e-14);
      if (first.empty()) first = r.o;
      DOCTEST_CHECK(scan_same_bits(r.o, first));  // chunks only say which states are kept
    }
  }
}

DOCTEST_TEST_CASE("the channel scan may be cut anywhere when its state and the state's derivative are carried") {
  index_t const D = 19, K = 5, T = 9;
  auto const f = selective(D, K, sequences::batch(1, T));
  auto const x = f.random(60);
  auto const d_o = normals(f.outputs(), 61), d_final = normals(f.states(), 62);
  auto const whole = run_scan(f, x, d_o, d_final);
  for (index_t cut = 0; cut <= T; ++cut) {
    DOCTEST_CAPTURE(cut);
    auto const piece = [&](index_t begin, index_t count, std::vector<double> const& initial) {
      return scan_numbers<double>{rows_of(x.q, K, begin, count),
                                  rows_of(x.k, K, begin, count),
                                  rows_of(x.v, D, begin, count),
                                  rows_of(x.g, D, begin, count),
                                  rows_of(x.write, D, begin, count),
                                  x.rate,
                                  initial};
    };
    auto const a = selective(D, K, sequences::batch(1, cut)), b = selective(D, K, sequences::batch(1, T - cut));
    auto const x_a = piece(0, cut, x.initial);
    auto const middle = run_scan(a, x_a).final;
    auto const x_b = piece(cut, T - cut, middle);
    auto const d_o_b = rows_of(d_o, D, cut, T - cut);
    auto const second = run_scan(b, x_b, d_o_b, d_final);
    auto const first = run_scan(a, x_a, rows_of(d_o, D, 0, cut), second.d.initial);
    auto o = first.o;
    o.insert(o.end(), second.o.begin(), second.o.end());
    DOCTEST_CHECK(scan_same_bits(o, whole.o));
    DOCTEST_CHECK(scan_same_bits(second.final, whole.final));
    auto d = first.d;
    for (std::size_t part = 0; part < 5; ++part)
      d.part(part).insert(d.part(part).end(), second.d.part(part).begin(), second.d.part(part).end());
    for (std::size_t i = 0; i < d.rate.size(); ++i) d.rate[i] += second.d.rate[i];
    DOCTEST_CHECK(scan_difference(d, whole.d) <= 1e-14);
  }
}

DOCTEST_TEST_CASE("sequences packed behind one another give to the bit what each gives alone") {
  index_t const D = 150, K = 6;
  auto const f = selective(D, K, ragged_rows());
  auto const x = f.random(70).as<float>();
  auto const d_o = as<float>(normals(f.outputs(), 71)), d_final = as<float>(normals(f.states(), 72));
  auto const packed = run_scan(f, x, d_o, d_final);
  std::vector<float> rate(x.rate.size(), 0.0f);
  for (index_t n = 0; n < f.s.seq.count(); ++n) {
    DOCTEST_CAPTURE(n);
    index_t const begin = f.s.seq.begin(n), count = f.s.seq.length(n);
    if (count == 0) continue;
    auto const cut = [&](scan_numbers<float> const& y) {
      return scan_numbers<float>{rows_of(y.q, K, begin, count),     rows_of(y.k, K, begin, count),
                                 rows_of(y.v, D, begin, count),     rows_of(y.g, D, begin, count),
                                 rows_of(y.write, D, begin, count), y.rate,
                                 rows_of(y.initial, D * K, n, 1)};
    };
    auto const alone = run_scan(selective(D, K, sequences::batch(1, count)), cut(x), rows_of(d_o, D, begin, count),
                                rows_of(d_final, D * K, n, 1));
    DOCTEST_CHECK(scan_same_bits(alone.o, rows_of(packed.o, D, begin, count)));
    DOCTEST_CHECK(scan_same_bits(alone.final, rows_of(packed.final, D * K, n, 1)));
    auto const expected = cut(packed.d);
    for (std::size_t part : {0u, 1u, 2u, 3u, 4u, 6u})
      DOCTEST_CHECK(scan_same_bits(alone.d.part(part), expected.part(part)));
    for (std::size_t i = 0; i < rate.size(); ++i) rate[i] += alone.d.rate[i];
  }
  DOCTEST_CHECK(scan_difference(packed.d.rate, rate) <= 1e-5);
}

DOCTEST_TEST_CASE("the channel scan has the same bits for any number of threads") {
  auto f = selective(300, 5, sequences::batch(40, 3));
  auto constant = elementwise(600, ragged_rows());
  constant.constant = true;
  for (auto const& form : {f, constant}) {
    auto const x = form.random(80).as<float>();
    auto const d_o = as<float>(normals(form.outputs(), 81)), d_final = as<float>(normals(form.states(), 82));
    auto const one = run_scan(form, x, d_o, d_final, 1);
    for (int threads : {2, 3}) {
      auto const many = run_scan(form, x, d_o, d_final, threads);
      DOCTEST_CHECK(scan_same_bits(one.o, many.o));
      DOCTEST_CHECK(scan_same_bits(one.final, many.final));
      for (std::size_t part = 0; part < scan_numbers<float>::parts; ++part)
        DOCTEST_CHECK(scan_same_bits(one.d.part(part), many.d.part(part)));
    }
  }
}

DOCTEST_TEST_CASE("a NaN stays visible in its channel and reaches no other, and no earlier token") {
  index_t const D = 20, T = 9, hit = 3 * D + 7;
  auto const f = selective(D, 5, sequences::batch(1, T));
  for (bool in_decay : {false, true}) {
    auto x = f.random(90);
    (in_decay ? x.g : x.v)[std::size_t(hit)] = std::numeric_limits<double>::quiet_NaN();
    auto const o = run_scan(f, x).o;
    for (index_t i = 0; i < T * D; ++i)
      DOCTEST_CHECK(std::isnan(o[std::size_t(i)]) == (i >= hit && i % D == hit % D));
  }
}

DOCTEST_TEST_CASE("P-P1: a scan's memory grows with its chunks, not with tokens times channels times states") {
  index_t const D = 64, K = 16, tokens = 2048;
  index_t const every_state = tokens * D * K * index_t(sizeof(float));
  for (index_t length : {2048, 256, 64}) {
    auto const f = selective(D, K, sequences::batch(tokens / length, length), 32);
    scan_memory m{};
    run_scan(f, f.random(95).as<float>(), std::vector<float>(std::size_t(f.outputs())), {}, 1, &m);
    DOCTEST_CHECK(m.saved == every_state / 32);
    DOCTEST_CHECK(m.scratch < every_state / 8);
  }
}

DOCTEST_TEST_CASE("the channel scan refuses queries without keys") {
  auto const f = elementwise(3, sequences::batch(1, 2));
  auto const x = f.random(97);
  auto in = f.input(x);
  in.q_rhk = {x.v.data(), {2, 1, 1}};
  std::vector<double> o(6, 0.0);
  auto ws = arena::growing();
  DOCTEST_CHECK_THROWS_WITH_AS(
      (kernels::recurrence_forward<kernels::recurrence_form::channels, states::elementwise>(
          device::cpu{}, f.s, in, view3<double>(o.data(), {2, 3, 1}), nullptr, view4<double>{}, ws)),
      "seqmix: recurrence: expected both queries and keys, or neither; got only one", shape_error);
}
