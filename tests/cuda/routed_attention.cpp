#include "routed_attention.hpp"

#include <algorithm>
#include <array>

#include "support/golden.hpp"

// Routed attention on the device in float: the stored cases of Top-1 chunk selection, and the CPU's kernels in
// double.

namespace {

using namespace seqmix;
using namespace seqmix::testing;
using namespace seqmix::selectors;
using enum chunk_score;
using enum chunk_gradient;

constexpr double eps = 0x1p-23;

using own = own_plus_top1<>;
using own_mass_through = own_plus_top1<exact_mass, chunk_straight_through>;
using one_prefix_score = exactly_one<mean_key_prefix, chunk_straight_through, chunk_probability::score>;
using one_max_gated = exactly_one<exact_max, gated>;
using near_mass_through = window_plus_top1<exact_mass, chunk_straight_through>;
using own_k = own_plus_top_k<>;
using own_k_gated = own_plus_top_k<mean_key, gated>;
using own_k_through = own_plus_top_k<exact_mass, chunk_straight_through>;
using near_k_gated = window_plus_top_k<exact_max, gated>;
using near_k_score = window_plus_top_k<mean_key, chunk_straight_through, chunk_probability::score>;

// ---- stored cases

void check_golden(golden_tensor const& want, std::string const& what, std::vector<double> const& got,
                  double sign = 1) {
  double worst = 0;
  bool const complete = got.size() == want.data.size();
  for (std::size_t i = 0; complete && i < got.size(); ++i) {
    double const off = std::fabs(sign * got[i] - want.data[i]);
    if (worst == worst && !(off <= worst)) worst = off;  // a NaN stays
  }
  check(complete && worst <= want.tolerance(), what + ": " + want.name + ": off by " + std::to_string(worst) +
                                                   ", allowed are " + std::to_string(want.tolerance()));
}

routed_case read_case(golden_case const& g) {
  routed_case c;
  auto const &q = g["q"], &v = g["v"];
  std::size_t const rows = q.shape.size() - 3;  // [B,T,H,K], or [R,H,K] of packed sequences
  auto& s = c.shape;
  s.heads = s.gate_heads = q.extent(rows + 1);
  s.key_dim = q.extent(rows + 2);
  s.value_heads = s.key_heads = v.extent(rows + 1);
  s.value_dim = v.extent(rows + 2);
  s.scale = g.number("scale", 1.0);
  s.knobs.temperature = g.number("temperature", 1.0);
  s.select.chunk = index_t(g.number("chunk_size", 0));
  s.select.window = index_t(g.number("window", 0));
  s.select.shared_choice = g.text("choice") == "group";
  index_t const batch = rows == 0 ? 1 : q.extent(0), length = q.extent(rows);
  for (index_t n = 0; n <= batch; ++n) c.offsets.push_back(n * length);
  s.seq = sequences::batch(batch, length);
  if (g.has("cu_seqlens")) {
    c.offsets.clear();
    for (double x : g["cu_seqlens"].data) c.offsets.push_back(index_t(x));
    s.seq = sequences::packed(c.offsets);
  }
  c.q = q.data;
  c.k = g["k"].data;
  c.v = v.data;
  c.d_o = g["cot_o"].data;
  if (g.has("slopes")) {
    c.gate = routed_case::gate::constant;
    for (double x : g["slopes"].data) c.g.push_back(-x);
  }
  return c;
}

template <class Which>
void run_golden(golden_case const& g) {
  auto const c = read_case(g);
  auto const r = run_on_device<Which, float>(c);
  check_golden(g["o"], g.name(), r.o);
  if (g.has("lse")) check_golden(g["lse"], g.name(), r.lse);
  check(std::vector<double>(r.choice.begin(), r.choice.end()) == g["chunk"].data, g.name() + ": other choices");
  check_golden(g["grad_q"], g.name(), r.d_q);
  check_golden(g["grad_k"], g.name(), r.d_k);
  check_golden(g["grad_v"], g.name(), r.d_v);
  if (g.has("grad_slopes")) check_golden(g["grad_slopes"], g.name(), r.d_g, -1);
}

struct golden_selector {
  char const *visible, *score, *gradient;
  bool by_score;
  void (*run)(golden_case const&);
};
constexpr golden_selector golden_selectors[]{
    {"own_plus_top1", "mean_key", "index_constant", false, &run_golden<own_plus_top1<>>},
    {"own_plus_top1", "mean_key", "gated", false, &run_golden<own_plus_top1<mean_key, gated>>},
    {"own_plus_top1", "exact_mass", "index_constant", false, &run_golden<own_plus_top1<exact_mass>>},
    {"own_plus_top1", "exact_mass", "chunk_straight_through", false, &run_golden<own_mass_through>},
    {"own_plus_top1", "exact_max", "index_constant", false, &run_golden<own_plus_top1<exact_max>>},
    {"exactly_one", "mean_key_prefix", "index_constant", false, &run_golden<exactly_one<>>},
    {"exactly_one", "mean_key_prefix", "chunk_straight_through", false,
     &run_golden<exactly_one<mean_key_prefix, chunk_straight_through>>},
    {"exactly_one", "mean_key_prefix", "chunk_straight_through", true, &run_golden<one_prefix_score>},
    {"exactly_one", "mean_key_prefix", "gated", false, &run_golden<exactly_one<mean_key_prefix, gated>>},
    {"exactly_one", "exact_mass", "index_constant", false, &run_golden<exactly_one<exact_mass>>},
    {"exactly_one", "exact_mass", "chunk_straight_through", false,
     &run_golden<exactly_one<exact_mass, chunk_straight_through>>},
    {"exactly_one", "exact_mass", "gated", false, &run_golden<exactly_one<exact_mass, gated>>},
    {"exactly_one", "exact_max", "index_constant", false, &run_golden<exactly_one<exact_max>>},
    {"exactly_one", "exact_max", "chunk_straight_through", false,
     &run_golden<exactly_one<exact_max, chunk_straight_through>>},
    {"exactly_one", "exact_max", "gated", false, &run_golden<one_max_gated>},
    {"window_plus_top1", "mean_key", "index_constant", false, &run_golden<window_plus_top1<>>},
    {"window_plus_top1", "mean_key", "gated", false, &run_golden<window_plus_top1<mean_key, gated>>},
    {"window_plus_top1", "exact_mass", "index_constant", false, &run_golden<window_plus_top1<exact_mass>>},
    {"window_plus_top1", "exact_mass", "chunk_straight_through", false, &run_golden<near_mass_through>},
    {"window_plus_top1", "exact_max", "index_constant", false, &run_golden<window_plus_top1<exact_max>>},
};

// ---- random cases

/// Sums over all pairs of tokens whose terms are many times the result, in floats.
constexpr double decay_tolerance = 512 * eps;

template <class Which>
void compare(std::string const& what, routed_case& c, std::uint64_t seed) {
  draw<float>(c, seed);
  check_results(what, run_on_device<Which, float>(c), run_on_cpu<Which>(c), 32 * eps, 64 * eps, decay_tolerance);
}

/// Packed sequences with gates, gaps and sinks; then a past, a shared choice and, of every other seed, constant
/// gates.
template <class Which>
void compare_ragged(std::string const& what, std::uint64_t seed) {
  constexpr which_spec spec = Which::spec;
  routed_sizes size;
  size.heads = size.value_heads = size.gate_heads = 2;
  size.key_heads = 1;
  size.top_k = spec.several ? 2 : 1;
  auto c = make_case(size, {5, 0, 68, 1});
  c.gate = routed_case::gate::tokens;
  c.sink = true;
  c.gap = 3;
  c.shape.select.router_bias = scores_by_mean(spec.score);
  compare<Which>(what + ", packed", c, seed);

  size.chunk = 16;
  size.top_k = spec.several ? 3 : 1;
  size.gate_heads = size.value_heads = 1;
  auto d = make_case(size, {3, 0, 20});
  d.capacity = 40;
  d.past = {40, 7, 31};
  d.gate = seed % 2 ? routed_case::gate::constant : routed_case::gate::tokens;
  d.shape.select.shared_choice = true;
  compare<Which>(what + ", with a past", d, seed + 1);
}

template <class Error, class F>
void check_throws(char const* what, F const& f) {
  bool thrown = false;
  try {
    f();
  } catch (Error const&) {
    thrown = true;
  }
  check(thrown, std::string(what) + ": no error");
}

}  // namespace

DEVICE_TEST("routed attention gives the stored results of Top-1 chunk selection, forward and backward") {
  auto const cases = golden_cases("top1", "top1_chunk_");
  check(cases.size() == 34, "34 stored cases");
  for (auto const& path : cases) {
    golden_case const g(path);
    bool const by_score = g.text("selector_probability") == "softmax over candidates of the chunk score r_c";
    bool found = false;
    for (auto const& s : golden_selectors)
      if (g.text("visible") == s.visible && g.text("score") == s.score && g.text("gradient") == s.gradient &&
          (by_score && g.text("gradient") == "chunk_straight_through") == s.by_score)
        s.run(g), found = true;
    check(found, g.name() + ": its selector is run");
  }
}

DEVICE_TEST("routed attention agrees with the CPU on packed sequences, gates, sinks, shared heads and pasts") {
  compare_ragged<own>("own_plus_top1", 10);
  compare_ragged<one_prefix_score>("exactly_one, straight through by score", 30);
  compare_ragged<one_max_gated>("exactly_one, max, gated", 41);
  compare_ragged<near_mass_through>("window_plus_top1, mass, straight through", 50);
  compare_ragged<own_k_gated>("own_plus_top_k, gated", 61);
  compare_ragged<own_k_through>("own_plus_top_k, mass, straight through", 70);
  compare_ragged<near_k_gated>("window_plus_top_k, max, gated", 81);
  compare_ragged<near_k_score>("window_plus_top_k, straight through by score", 90);
}

DEVICE_TEST("routed attention takes heads of any width, in slices beyond its tiles") {
  routed_sizes size;
  size.heads = 2;
  size.key_heads = size.value_heads = size.gate_heads = 1;
  size.chunk = 20;
  for (auto const& [key_dim, value_dim] : std::vector<std::array<index_t, 2>>{{1, 1}, {64, 33}, {12, 130}}) {
    size.key_dim = key_dim;
    size.value_dim = value_dim;
    auto c = make_case(size, {43});
    compare<own>("K " + std::to_string(key_dim) + ", V " + std::to_string(value_dim), c, 5);
  }
  size.key_dim = 70;
  size.value_dim = 66;
  auto c = make_case(size, {33});
  c.gate = routed_case::gate::tokens;
  compare<own_k_through>("exact scores of sliced heads", c, 6);
}

DEVICE_TEST("gates that close do not spoil routed attention, and their bound stops the derivative") {
  auto c = make_case({}, {40});
  c.gate = routed_case::gate::tokens;
  draw<float>(c, 33);
  for (std::size_t i = 0; i < c.g.size(); i += 5) c.g[i] = i % 2 ? -300.0 : -2e4;
  auto const want = run_on_cpu<own_mass_through>(c);
  check_results("closed gates", run_on_device<own_mass_through, float>(c), want, 32 * eps, 64 * eps,
                decay_tolerance);
  check(want.d_g[0] == 0.0, "the derivative of a bounded log-decay is 0");
}

DEVICE_TEST("where there are fewer chunks than choices all are chosen") {
  routed_sizes size;
  size.top_k = 1000;
  size.chunk = 9;
  size.heads = 2;
  size.key_heads = size.value_heads = size.gate_heads = 1;
  auto c = make_case(size, {31});
  compare<own_k>("top_k beyond the chunks", c, 3);
  size.top_k = 2;
  size.chunk = 100;
  auto d = make_case(size, {31});
  compare<own_k_through>("no candidates", d, 4);
  auto const choices = run_on_device<own_k_through, float>(d, false).choices;
  check(std::all_of(choices.begin(), choices.end(), [](index_t x) { return x == -1; }), "no chunk is chosen");
}

DEVICE_TEST("a NaN shows in the rows that score or read it, and nowhere else") {
  auto const check_like_cpu = [](std::string const& what, auto which, auto const& spoil) {
    using selector = decltype(which);
    auto c = make_case({}, {33});
    draw<float>(c, 12);
    spoil(c);
    auto const got = run_on_device<selector, float>(c), want = run_on_cpu<selector>(c);
    check_numbers(what + ": o", got.o, want.o, 32 * eps);
    check(got.choices == want.choices, what + ": other choices");
    check(std::any_of(want.o.begin(), want.o.end(), [](double x) { return x != x; }), what + ": there is a NaN");
  };
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  auto const of_query = [](routed_case& c) { c.q[20 * 20 + 7] = nan; };
  auto const of_key = [](routed_case& c) { c.k[12 * 10 + 1] = nan; };
  check_like_cpu("query, own_plus_top1", own(), of_query);
  check_like_cpu("query, window_plus_top1", near_mass_through(), of_query);
  check_like_cpu("key, own_plus_top1", own(), of_key);
  check_like_cpu("key, exactly_one, max", one_max_gated(), of_key);
  check_like_cpu("key, own_plus_top_k", own_k_gated(), of_key);
}

DEVICE_TEST("routed attention of nothing does nothing, and a past alone has no gradient") {
  auto c = make_case({}, {});
  c.shape.seq = sequences::batch(0, 5);
  run_on_device<own, float>(c);
  auto d = make_case({}, {0, 0});
  d.capacity = 3;
  d.past = {3, 0};
  compare<own_mass_through>("no rows", d, 2);
}

DEVICE_TEST("repeated runs of routed attention have the same bits") {
  routed_sizes size;
  size.top_k = 2;
  auto c = make_case(size, {60, 3});
  c.gate = routed_case::gate::tokens;
  draw<float>(c, 77);
  auto const a = run_on_device<own_k_gated, float>(c), b = run_on_device<own_k_gated, float>(c);
  check(a.o == b.o && a.d_q == b.d_q && a.d_k == b.d_k && a.d_v == b.d_v && a.d_g == b.d_g, "the same bits");
}

DEVICE_TEST("routed attention says what is wrong with its arguments") {
  using kernel = kernels::cuda_routed_attention<own, float>;
  auto c = make_case({}, {7});
  draw<float>(c, 1);
  routed_arrays<float, device_array> a(c);
  device::cuda const dry{.dry = true};
  auto plan = arena::measure();
  auto const forward = [&](attention_shape const& s, attention_input<float> const& in, view3<float> o) {
    kernel::forward(dry, s, in, o, nullptr, {}, plan);
  };
  forward(c.shape, a.in, a.o_rhv);
  check(plan.used() == 0 && plan.peak() > 0, "scratch is given back");
  check_throws<value_error>("queries alone", [&] {
    auto in = a.in;
    in.queries_alone = true;
    forward(c.shape, in, a.o_rhv);
  });
  check_throws<value_error>("no chunk", [&] {
    auto s = c.shape;
    s.select.chunk = 0;
    forward(s, a.in, a.o_rhv);
  });
  check_throws<value_error>("several choices of a selector of one", [&] {
    auto s = c.shape;
    s.select.top_k = 2;
    forward(s, a.in, a.o_rhv);
  });
  check_throws<shape_error>("output of other rows", [&] { forward(c.shape, a.in, a.o_rhv.slice(0, 0, 5)); });
  check_throws<shape_error>("keys of other heads", [&] {
    auto s = c.shape;
    s.key_heads = 4;
    forward(s, a.in, a.o_rhv);
  });
  check_throws<shape_error>("a sink for other heads", [&] {
    auto in = a.in;
    in.sink_h = view1<float const>(a.q.data(), {3});
    forward(c.shape, in, a.o_rhv);
  });
}
