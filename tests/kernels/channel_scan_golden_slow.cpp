#include <functional>

#include "../support/golden.hpp"
#include "../support/scan_case.hpp"
#include <seqmix/kernels/cpu/convolution.hpp>

// The recurrence over channels against golden vectors and worked cases. The gates around it are formulas on dual
// numbers here: derivatives run backwards through the scan and forwards through the formulas.

namespace {

using namespace seqmix;
using namespace seqmix::testing;

using number = dual<double, 8>;
using numbers = std::vector<number>;

/// What formulas make of their parameters: the scan's inputs, and y = gain o + offset of its output (empty: 1, 0).
struct formulas {
  scan_numbers<number> x;
  numbers gain, offset;
};

/// A quantity from which formulas compute, in the order of the library's rows.
struct parameter {
  char const* name;
  std::vector<double> value;
};

struct glued_scan {
  scan_form form;
  std::vector<parameter> parameters;
  std::function<formulas(std::vector<numbers> const&)> apply;

  std::vector<numbers> constants() const {
    std::vector<numbers> p;
    for (auto const& e : parameters) p.emplace_back(e.value.begin(), e.value.end());
    return p;
  }
  std::size_t index(std::string_view name) const {
    for (std::size_t i = 0; i < parameters.size(); ++i)
      if (parameters[i].name == name) return i;
    throw value_error("seqmix tests: no such parameter");
  }
};

template <class T>
struct glued_outcome {
  std::vector<T> y, final;
  std::vector<std::vector<T>> d;  ///< one per parameter
};

/// Runs the scan in T, everything around it in double.
template <class T>
glued_outcome<T> run(glued_scan const& c, std::vector<double> const& d_y, std::vector<double> const& d_final) {
  auto p = c.constants();
  auto const f = c.apply(p);
  std::vector<T> d_o;
  for (std::size_t i = 0; i < d_y.size(); ++i) d_o.push_back(T(d_y[i] * (f.gain.empty() ? 1 : f.gain[i].value)));
  auto const x = f.x.template map<T>([](number const& e) { return T(e.value); });
  auto const r = run_scan<T>(c.form, x, d_o, {d_final.begin(), d_final.end()});
  glued_outcome<T> out{r.o, r.final, {}};
  for (std::size_t i = 0; i < out.y.size(); ++i) {
    if (!f.gain.empty()) out.y[i] *= T(f.gain[i].value);
    if (!f.offset.empty()) out.y[i] += T(f.offset[i].value);
  }
  for (std::size_t a = 0; a < p.size(); ++a) {
    out.d.emplace_back(p[a].size());
    for (std::size_t at = 0; at < p[a].size(); at += 8) {
      std::size_t const count = std::min<std::size_t>(8, p[a].size() - at);
      for (std::size_t i = 0; i < count; ++i) p[a][at + i].slope[i] = 1;
      auto const g = c.apply(p);
      for (std::size_t i = 0; i < count; ++i) {
        double sum = 0;
        for (std::size_t part = 0; part < scan_numbers<T>::parts; ++part)
          for (std::size_t j = 0; j < g.x.part(part).size(); ++j)
            sum += g.x.part(part)[j].slope[i] * double(r.d.part(part)[j]);
        for (std::size_t j = 0; j < g.gain.size(); ++j) sum += d_y[j] * g.gain[j].slope[i] * double(r.o[j]);
        for (std::size_t j = 0; j < g.offset.size(); ++j) sum += d_y[j] * g.offset[j].slope[i];
        out.d.back()[at + i] = T(sum);
        p[a][at + i].slope[i] = 0;
      }
    }
  }
  return out;
}

struct golden_scan {
  golden_case file;
  std::string output, state;
  bool channel_first = false;  ///< [B,C,T]

  golden_tensor stored(std::string const& name) const {
    auto const& t = file[name];
    bool const rows = t.shape.size() == 3 && !name.ends_with(state);
    return channel_first && rows ? token_first(t) : t.clone();
  }
  parameter read(char const* name) const {
    auto const t = stored(name);
    return {name, {t.data.begin(), t.data.end()}};
  }
  void add(glued_scan& c, char const* name) const {
    if (file.has(name)) c.parameters.push_back(read(name));
  }
};

template <class T>
void check_golden(golden_scan const& g, glued_scan const& c) {
  DOCTEST_CAPTURE(g.file.name());
  auto const check = [&](std::vector<T> const& found, std::string const& name) {
    auto const expected = g.stored(name);
    DOCTEST_REQUIRE(index_t(found.size()) == expected.size());
    auto const r = compare(found.data(), expected);
    DOCTEST_CHECK_MESSAGE(r.good, r.text);
  };
  auto const r = run<T>(c, g.read(("cot_" + g.output).c_str()).value, g.read(("cot_" + g.state).c_str()).value);
  check(r.y, g.output);
  check(r.final, g.state);
  for (std::size_t i = 0; i < c.parameters.size(); ++i)
    if (g.file.has(std::string("grad_") + c.parameters[i].name))
      check(r.d[i], std::string("grad_") + c.parameters[i].name);
}
void check_golden(golden_scan const& g, glued_scan const& c) {
  check_golden<double>(g, c);
  check_golden<float>(g, c);
}

/// `rows` names a tensor [B,T,D]: one state per channel.
scan_form channels_of(golden_scan const& g, char const* rows, index_t chunk) {
  auto const t = g.stored(rows);
  scan_form f;
  f.s.seq = sequences::batch(t.extent(0), t.extent(1));
  f.s.heads = f.s.value_heads = f.s.gate_heads = t.extent(2);
  f.s.chunk = chunk;
  f.addressed = f.writes = false;
  f.starts = g.file.has("h0");
  return f;
}
double at(std::vector<double> const& x, index_t i) { return x[std::size_t(i)]; }
number const& at(numbers const& x, index_t i) { return x[std::size_t(i)]; }

/// Row r times the rows [first, first + count) of W [.,D].
number product(numbers const& x, index_t r, numbers const& W, index_t row, index_t D) {
  number sum(0);
  for (index_t j = 0; j < D; ++j) sum += at(W, row * D + j) * at(x, r * D + j);
  return sum;
}
/// minGRU's and minLSTM's positive activation.
number positive(number const& x) { return x.value >= 0 ? x + number(0.5) : sigmoid(x); }

/// y = (o + D u) silu(z) of x_{d,n} = e^(Delta_d A_dn) x + Delta_d B_n u_d, o_d = C' x_d, Delta = softplus(raw +
/// bias).
formulas selective_scan(std::vector<numbers> const& p, index_t channels) {
  auto const &u = p[0], &delta = p[1], &A = p[2], &B = p[3], &C = p[4], &D = p[5], &bias = p[6];
  formulas f;
  f.x.k = B, f.x.q = C, f.x.v = u;
  for (auto const& a : A) f.x.rate.push_back(-a);
  for (std::size_t i = 0; i < u.size(); ++i) {
    std::size_t const d = i % std::size_t(channels);
    f.x.write.push_back(softplus(delta[i] + bias[d]));
    f.x.g.push_back(-f.x.write.back());
    auto const gate = p.size() > 7 ? silu(p[7][i]) : number(1);
    f.gain.push_back(gate), f.offset.push_back(D[d] * u[i] * gate);
  }
  return f;
}
scan_form selective_form(index_t batch, index_t length, index_t channels, index_t states, index_t chunk) {
  scan_form f;
  f.s.seq = sequences::batch(batch, length);
  f.s.heads = f.s.value_heads = f.s.gate_heads = channels;
  f.s.key_dim = states;
  f.s.chunk = chunk;
  f.rated = true;
  return f;
}

}  // namespace

DOCTEST_TEST_CASE("the channel scan gives the golden outputs, states and gradients of HGRN") {
  for (auto const* name : {"hgrn", "hgrn_init", "hgrn_t1"})
    for (index_t chunk : {5, 32}) {
      golden_scan const g{golden_case(std::string("ops/") + name), "o", "h"};
      glued_scan c{channels_of(g, "x", chunk), {}, [](std::vector<numbers> const& p) {
                     formulas f;
                     f.x.v = p[0], f.x.g = p[1];
                     if (p.size() > 2) f.x.initial = p[2];
                     return f;
                   }};
      for (auto const* n : {"x", "g", "h0"}) g.add(c, n);
      check_golden(g, c);
    }
}

DOCTEST_TEST_CASE("the channel scan gives the golden outputs, states and gradients of the selective scan") {
  for (auto const* name : {"selective_scan", "selective_scan_t1"}) {
    golden_scan const g{golden_case(std::string("ops/") + name), "o", "x", true};
    auto const u = g.stored("u");
    index_t const channels = u.extent(2);
    glued_scan c{selective_form(u.extent(0), u.extent(1), channels, g.file["A"].extent(1), 16),
                 {},
                 [=](std::vector<numbers> const& p) { return selective_scan(p, channels); }};
    c.form.starts = false;
    for (auto const* n : {"u", "delta", "A", "B", "C", "D", "delta_bias", "z"}) g.add(c, n);
    check_golden(g, c);
  }
}

DOCTEST_TEST_CASE("the channel scan gives the golden outputs, states and gradients of the RG-LRU") {
  for (auto const* name : {"rglru", "rglru_init", "rglru_t1"}) {
    golden_scan const g{golden_case(std::string("ops/") + name), "y", "h"};
    auto const position = g.read("segment_pos").value;
    auto const width = g.file["input_gate_w"].extent(1);
    double const strength = g.file.number("c", 8.0);
    glued_scan c{channels_of(g, "x", 16), {}, nullptr};
    c.form.writes = true;
    index_t const D = c.form.s.heads;
    c.apply = [=](std::vector<numbers> const& p) {
      auto const &x = p[0], &a_param = p[1];
      auto const gate = [&](numbers const& w, numbers const& b, index_t r, index_t d) {
        index_t const block = d / width;
        number sum = at(b, d);
        for (index_t i = 0; i < width; ++i)
          sum += at(w, (block * width + i) * width + d % width) * at(x, r * D + block * width + i);
        return sigmoid(sum);
      };
      formulas f;
      for (index_t i = 0; i < index_t(x.size()); ++i) {
        index_t const r = i / D, d = i % D;
        auto const log_a = number(-strength) * gate(p[4], p[5], r, d) * softplus(at(a_param, d));
        bool const reset = at(position, r) == 0;
        f.x.v.push_back(gate(p[2], p[3], r, d) * at(x, i));
        f.x.g.push_back(reset ? number(log_decay_bound<double>) : log_a);
        f.x.write.push_back(reset ? number(1) : sqrt(number(1) - exp(number(2) * log_a)));
      }
      if (p.size() > 6) f.x.initial = p[6];
      return f;
    };
    for (auto const* n : {"x", "a_param", "input_gate_w", "input_gate_b", "a_gate_w", "a_gate_b", "h0"})
      g.add(c, n);
    check_golden(g, c);
  }
}

DOCTEST_TEST_CASE("the channel scan gives the golden outputs, states and gradients of minGRU") {
  for (auto const* name : {"mingru", "mingru_init", "mingru_t1"}) {
    golden_scan const g{golden_case(std::string("ops/") + name), "o", "h"};
    glued_scan c{channels_of(g, "x", 16), {}, nullptr};
    c.form.writes = true;
    index_t const D = c.form.s.heads;
    c.apply = [=](std::vector<numbers> const& p) {
      formulas f;
      for (index_t i = 0; i < index_t(p[0].size()); ++i) {
        auto const gate = product(p[0], i / D, p[1], D + i % D, D);
        f.x.v.push_back(positive(product(p[0], i / D, p[1], i % D, D)));
        f.x.write.push_back(sigmoid(gate));
        f.x.g.push_back(-softplus(gate));
      }
      if (p.size() > 2) f.x.initial = p[2];
      return f;
    };
    for (auto const* n : {"x", "W", "h0"}) g.add(c, n);
    check_golden(g, c);
  }
}

DOCTEST_TEST_CASE("the channel scan gives the golden outputs, states and gradients of minLSTM") {
  for (auto const* name : {"minlstm", "minlstm_init", "minlstm_t1"}) {
    golden_scan const g{golden_case(std::string("ops/") + name), "o", "h"};
    glued_scan c{channels_of(g, "x", 16), {}, nullptr};
    c.form.writes = true;
    index_t const D = c.form.s.heads;
    c.apply = [=](std::vector<numbers> const& p) {
      formulas f;
      for (index_t i = 0; i < index_t(p[0].size()); ++i) {
        auto const forget = product(p[0], i / D, p[1], D + i % D, D),
                   input = product(p[0], i / D, p[1], 2 * D + i % D, D);
        auto const balance = softplus(-forget) - softplus(-input);
        f.x.v.push_back(positive(product(p[0], i / D, p[1], i % D, D)));
        f.x.write.push_back(sigmoid(balance));
        f.x.g.push_back(-softplus(balance));
      }
      if (p.size() > 2)
        for (auto const& h : p[2]) f.x.initial.push_back(positive(h));
      return f;
    };
    for (auto const* n : {"x", "W", "h0"}) g.add(c, n);
    check_golden(g, c);
  }
}

namespace {

/// Case P-C1: one channel, two states, behind a convolution with SiLU.
struct worked_case {
  std::vector<double> x{1, -1, 2, 0.5}, taps{0.1, 0.2, 0.3, 0.4}, raw{0, 1, -1, 0.5}, A{-1, -2},
      B{1, .5, -1, 1, .5, .5, 1, -1}, C{1, 1, 1, -1, 2, .5, -1, 1};
  double conv_bias = 0.05, bias = -0.5, D = 0.5;

  /// Parameters: those of selective_scan with x for u, then taps, convolution bias and h_0.
  glued_scan scan(index_t length) const {
    auto const first = [&](std::vector<double> const& v, index_t n) {
      return std::vector<double>(v.begin(), v.begin() + n);
    };
    return {selective_form(1, length, 1, 2, 2),
            {{"x", first(x, length)},
             {"raw", first(raw, length)},
             {"A", A},
             {"B", first(B, 2 * length)},
             {"C", first(C, 2 * length)},
             {"D", {D}},
             {"bias", {bias}},
             {"taps", taps},
             {"conv_bias", {conv_bias}},
             {"h0", {0, 0}}},
            [](std::vector<numbers> const& p) {
              std::vector<numbers> inner(p.begin(), p.begin() + 7);
              for (std::size_t t = 0; t < p[0].size(); ++t) {
                number sum = p[8][0];
                for (std::size_t j = 0; j < 4; ++j)
                  if (t + j >= 3) sum += p[7][j] * p[0][t + j - 3];
                inner[0][t] = silu(sum);
              }
              auto f = selective_scan(inner, 1);
              f.x.initial = p[9];
              return f;
            }};
  }
};
/// `got` is `expected` to the ten digits in which it is written down.
void check_digits(std::vector<double> const& got, std::vector<double> const& expected) {
  DOCTEST_REQUIRE(got.size() == expected.size());
  for (std::size_t i = 0; i < got.size(); ++i)
    DOCTEST_CHECK_MESSAGE(std::abs(got[i] - expected[i]) <= 2e-10, "entry ", i, ": got ", got[i], ", expected ",
                          expected[i]);
}

}  // namespace

DOCTEST_TEST_CASE("P-C1: Mamba-1 step by step, in two pieces and at once") {
  worked_case const w;
  std::vector<double> const y{0.3327995820, 0.0751971738, 0.4973497966, -0.4965160707},
      states{0.1302705029, 0.0651352515, 0.0729256661, -0.0144590728,
             0.1109205163, 0.0416335036, 0.4085383585, -0.3426697244};

  /// Convolution and scan with carried window and state; the states behind every piece.
  struct outcome {
    std::vector<double> y, states, window;
  };
  auto const pieces = [&](std::vector<index_t> const& lengths) {
    outcome out{{}, {}, std::vector<double>(3, 0.0)};
    std::vector<double> h(2, 0.0);
    index_t begin = 0;
    for (index_t n : lengths) {
      auto const seq = sequences::batch(1, n);
      auto const rows = [&](std::vector<double> const& v, index_t width) {
        return std::vector<double>(v.begin() + begin * width, v.begin() + (begin + n) * width);
      };
      auto const x = rows(w.x, 1);
      std::vector<double> u(std::size_t(n), 0.0), window(3, 0.0);
      auto ws = arena::growing();
      kernels::conv_forward(device::cpu{}, seq, view2<double const>(x.data(), {n, 1}),
                            view2<double const>(w.taps.data(), {1, 4}), &w.conv_bias, true,
                            view3<double const>(out.window.data(), {1, 1, 3}), view2<double>(u.data(), {n, 1}),
                            view3<double>(window.data(), {1, 1, 3}), ws);
      out.window = window;
      scan_numbers<double> in{rows(w.C, 2), rows(w.B, 2), u, {}, {}, {-w.A[0], -w.A[1]}, h};
      for (double e : rows(w.raw, 1)) in.write.push_back(softplus(e + w.bias)), in.g.push_back(-in.write.back());
      auto const r = run_scan(selective_form(1, n, 1, 2, 2), in);
      h = r.final;
      for (std::size_t t = 0; t < u.size(); ++t) out.y.push_back(r.o[t] + w.D * u[t]);
      out.states.insert(out.states.end(), h.begin(), h.end());
      begin += n;
    }
    return out;
  };
  auto const steps = pieces({1, 1, 1, 1}), again = pieces({1, 1, 1, 1}), whole = pieces({4}),
             halves = pieces({2, 2});
  check_digits(steps.y, y);
  check_digits(steps.states, states);
  check_digits(whole.y, y);
  check_digits(halves.y, y);
  for (auto const* o : {&whole, &halves, &steps}) {
    check_digits({o->states.end() - 2, o->states.end()}, {states.end() - 2, states.end()});
    DOCTEST_CHECK(o->window == std::vector<double>{-1, 2, 0.5});
  }
  DOCTEST_CHECK(scan_same_bits(steps.y, again.y));
  DOCTEST_CHECK(scan_same_bits(steps.states, again.states));
}

DOCTEST_TEST_CASE("P-G4: lanes and tokens behind the end change no gradient of Mamba-1") {
  auto const c = worked_case().scan(3);
  auto const r = run<double>(c, {1, 1, 1}, {0, 0});
  auto const check = [&](char const* name, std::vector<double> const& expected) {
    DOCTEST_CAPTURE(name);
    check_digits(r.d[c.index(name)], expected);
  };
  check("raw", {0.2539046120, -0.0228938737, 0.0961657158});
  check("bias", {0.3271764541});
  check("A", {0.1502606740, -0.0069943544});
  check("D", {0.7597965495});
  check("x", {0.2163236413, -0.3258990646, 0.2533753973});
  check("conv_bias", {0.5350717171});
  check("taps", {0, 0.6334384933, -1.9232650248, 3.7481632734});
  check("h0", {1.2417291172, 0.3506864262});
  check("B", {.2598734864, .1179079483, -.0625670090, .0158079253, .2051934122, .0512983531});
  check("C", {0.1302705029, 0.0651352515, 0.0729256661, -0.0144590728, 0.1109205163, 0.0416335036});
}
