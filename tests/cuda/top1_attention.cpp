#include "top1_attention.hpp"

#include <limits>

#include "support/golden.hpp"

namespace {

using namespace seqmix;
using namespace seqmix::testing;
using selectors::all;
using selectors::window;
using enum selectors::top1_output;
using enum selectors::top1_gradient;
using kernel_pair = top1_kernels<float>;

// Sums of up to 200 products in float, against double.
constexpr double eps = 1.1920929e-07;
constexpr attention_tolerance of_float{32 * eps, 64 * eps};
constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

kernel_pair const hard_st = kernel_pair::of<all, hard, straight_through>();
kernel_pair const hard_sto = kernel_pair::of<all, hard, straight_through_output>();
kernel_pair const hard_none = kernel_pair::of<all, hard, none>();
kernel_pair const weighted_st = kernel_pair::of<all, weighted, straight_through>();
kernel_pair const weighted_sto = kernel_pair::of<all, weighted, straight_through_output>();
kernel_pair const weighted_sel = kernel_pair::of<all, weighted, selected_weight>();
kernel_pair const weighted_none = kernel_pair::of<all, weighted, none>();
kernel_pair const every[] = {hard_st, hard_sto, hard_none, weighted_st, weighted_sto, weighted_sel, weighted_none};
kernel_pair const window_st = kernel_pair::of<window, hard, straight_through>();
kernel_pair const window_none = kernel_pair::of<window, hard, none>();
kernel_pair const window_sel = kernel_pair::of<window, weighted, selected_weight>();

DEVICE_TEST("every output and surrogate: packed sequences, shared heads, a gate, rows with gaps between them") {
  for (auto const& f : every) {
    auto c = packed_setting("packed", {0, 0, 1, 30, 30, 100}, 2, 20, 24);
    c.key_heads = 1;
    c.value_heads = f.output == hard ? 1 : 2;
    c.gate_heads = 1;
    c.gate = gate_kind::per_token;
    c.padding = 3;
    compare_top1(f, c, of_float);
    c.name = "packed, no backward";
    if (f.gradient == none || f.gradient == selected_weight) compare_top1(f, c, of_float, {}, false);
  }
}

DEVICE_TEST("every output and surrogate: a past, two temperatures, mixed with the soft output") {
  constexpr top1_knobs settings[] = {{2.0, 1.0}, {0.4, 0.6}, {0.0, 0.3}};
  std::size_t i = 0;
  for (auto const& f : every) {
    auto c = packed_setting("past", {0, 3, 28, 28}, 2, 12, 8);
    c.value_heads = 1;
    c.capacity = 80;
    c.past = {0, 70, 5};
    c.temperature = 0.7;
    c.gate = gate_kind::per_token;
    compare_top1(f, c, of_float, settings[i++ % 3]);
    c.name = "past, no backward";
    compare_top1(f, c, of_float, settings[i % 3], false);
  }
}

DEVICE_TEST("windows, constant gates") {
  auto c = batch_setting("window", 1, 150, 2, 16, 32);
  c.window = 40;
  c.gate = gate_kind::constant;
  c.gate_heads = 1;
  c.padding = 4;
  for (auto const& f : {window_st, window_none, window_sel}) compare_top1(f, c, of_float);
  c.window = 1;
  c.length = 20;
  c.name = "window of one";
  for (auto const& f : {window_st, window_none, window_sel}) compare_top1(f, c, of_float);
}

DEVICE_TEST("heads of more channels than a tile holds") {
  auto c = batch_setting("slices", 1, 66, 2, 70, 130);
  c.key_heads = 1;
  c.gate = gate_kind::per_token;
  compare_top1(hard_none, c, of_float);
  compare_top1(weighted_none, c, of_float, {}, false);
  c.heads = c.value_heads = c.gate_heads = 1;
  compare_top1(hard_st, c, of_float);
  c.length = 34;
  compare_top1(weighted_sel, c, of_float, {0.5, 1.0});
  c = batch_setting("a slice of keys, one of values", 1, 20, 1, 129, 8);
  compare_top1(hard_st, c, of_float);
}

DEVICE_TEST("few rows with a long past: heads share blocks, keys are split") {
  auto c = batch_setting("one row", 2, 1, 8, 32, 20);
  c.key_heads = 2;
  c.value_heads = 4;
  c.gate = gate_kind::per_token;
  c.gate_heads = 4;
  c.gate_size = 0.02;
  c.capacity = 330;
  c.past = {0, 330};
  for (auto const& f : {hard_none, weighted_sel, hard_st}) compare_top1(f, c, of_float, {}, false);
  c = batch_setting("one row, with a backward", 1, 1, 2, 8, 20);
  c.key_heads = 1;
  c.gate = gate_kind::per_token;
  c.capacity = c.past.emplace_back(200);
  compare_top1(weighted_sel, c, of_float, {2.0, 0.5});
  compare_top1(hard_st, c, of_float, {0.5, 1.0});
  c = packed_setting("few rows", {0, 16, 16, 19}, 1, 8, 8);
  c.capacity = 140;
  c.past = {131, 7, 0};
  compare_top1(hard_none, c, of_float);
  compare_top1(weighted_sto, c, of_float, {0.5, 0.7});
  c = batch_setting("one row, window", 1, 1, 2, 8, 8);
  c.window = 200;
  c.capacity = 600;
  c.past = {577};
  compare_top1(window_st, c, of_float, {}, false);
}

DEVICE_TEST("queries that bring no keys") {
  auto c = packed_setting("queries alone", {0, 20, 24}, 2, 16, 16);
  c.alone = true;
  c.capacity = 72;
  c.past = {70, 5};
  c.position = {40, 1};
  for (auto const& f : {hard_st, hard_none, weighted_sel}) compare_top1(f, c, of_float);
}

DEVICE_TEST("no rows, no tokens") {
  for (auto const& offsets : {std::vector<index_t>{0}, std::vector<index_t>{0, 0, 0}}) {
    auto c = packed_setting("nothing", offsets, 2, 8, 8);
    c.gate = gate_kind::constant;
    for (auto const& f : {hard_st, hard_none}) compare_top1(f, c, of_float);
  }
  auto c = batch_setting("a past alone", 2, 0, 1, 8, 8);
  c.capacity = 9;
  c.past = {9, 0};
  for (auto const& f : {hard_st, hard_none}) compare_top1(f, c, of_float);
}

DEVICE_TEST("extreme gates: bounded token by token, near keys lose no digits") {
  auto c = batch_setting("extreme gates", 1, 100, 1, 8, 8);
  c.gate = gate_kind::per_token;
  c.gate_size = 0.01;
  auto const change = [](attention_numbers& x) {
    for (std::size_t t : {3U, 20U, 21U, 70U}) x.g[t] = -1e30;
    x.g[40] = -infinity;
    x.g[50] = -9000;
  };
  for (auto const& f : {hard_st, weighted_sel}) compare_top1(f, c, of_float, {0.5, 1.0}, true, change);
}

DEVICE_TEST("a second run gives the same bits") {
  auto c = packed_setting("twice", {0, 5, 40}, 2, 16, 20);
  c.key_heads = c.value_heads = 1;
  c.gate = gate_kind::per_token;
  auto const x = attention_numbers(c).rounded<float>();
  for (auto const& f : {hard_st, weighted_sel})
    check(same_bits(f.device(c, {}, x, true), f.device(c, {}, x, true)), f.name);
  c = batch_setting("twice, split", 1, 1, 1, 16, 20);
  c.capacity = 140;
  c.past = {140};
  auto const y = attention_numbers(c).rounded<float>();
  check(same_bits(hard_st.device(c, {1.0, 0.5}, y, true), hard_st.device(c, {1.0, 0.5}, y, true)), "split");
}

// ---- the choice

/// Keys that repeat a few rows at all distances: of equal scores the lowest index wins.
attention_numbers with_repeated_keys(attention_setting const& c, int patterns) {
  attention_numbers x(c);
  index_t const width = c.key_heads * c.key_dim, tokens = index_t(x.k.size()) / width;
  attention_random random(c.seed + 7);
  for (index_t t = patterns; t < tokens; ++t) {
    auto const from = index_t((random.next() + 1) / 2 * patterns);
    std::copy_n(x.k.begin() + from * width, width, x.k.begin() + t * width);
  }
  return x;
}
/// By definition, in double, where equal keys have equal scores.
std::vector<index_t> lowest_of_greatest(attention_setting const& c, attention_numbers const& x) {
  std::vector<index_t> choice;
  for (index_t n = 0; n < c.count; ++n)
    for (index_t t = 0; t < c.length; ++t)
      for (index_t h = 0; h < c.heads; ++h) {
        index_t best = -1;
        double most = 0;
        for (index_t j = c.window > 0 ? std::max<index_t>(0, t - c.window + 1) : 0; j <= t; ++j) {
          double score = 0;
          for (index_t i = 0; i < c.key_dim; ++i)
            score +=
                x.q[std::size_t(((n * c.length + t) * c.heads + h) * c.key_dim + i)] *
                x.k[std::size_t(((n * c.length + j) * c.key_heads + h * c.key_heads / c.heads) * c.key_dim + i)];
          if (best < 0 || score > most) best = j, most = score;
        }
        choice.push_back(best);
      }
  return choice;
}
std::vector<index_t> positions_of(index_t length) {
  std::vector<index_t> positions;
  for (index_t t = 0; t<length; t += t % 64> 60 || t % 64 < 3 ? 1 : 7) positions.push_back(t);
  return positions;
}

DEVICE_TEST("of equal scores the lowest index wins: across tiles, windows and split keys") {
  auto c = batch_setting("ties", 1, 140, 2, 24, 4);
  c.key_heads = 1;
  for (int patterns : {1, 6}) {
    auto const x = with_repeated_keys(c, patterns).rounded<float>();
    auto const want = lowest_of_greatest(c, x);
    check(hard_none.device(c, {}, x, false).choice == want, "the hard kernel, " + std::to_string(patterns));
    check(hard_st.device(c, {}, x, true).choice == want, "with a surrogate, " + std::to_string(patterns));
    check(weighted_sel.device(c, {0.5, 1.0}, x, false).choice == want, "weighted, " + std::to_string(patterns));
    auto windowed = c;
    windowed.window = 70;
    check(window_none.device(windowed, {}, x, false).choice == lowest_of_greatest(windowed, x),
          "window, " + std::to_string(patterns));
    std::vector<index_t> const steps{0, 1, 63, 64, 65, 127, 128, 130, 139};
    auto const hard_steps = top1_by_steps<all, top1<hard, none>, float>(c, {}, x, steps);
    auto const soft_steps = top1_by_steps<all, top1<hard, none>, float>(c, {0.0, 0.5}, x, steps);
    for (index_t t : steps)
      for (index_t h = 0; h < 2; ++h) {
        auto const at = std::size_t(t * 2 + h);
        check(hard_steps.choice[at] == want[at] && soft_steps.choice[at] == want[at],
              "split keys, position " + std::to_string(t));
      }
  }
}

DEVICE_TEST("a sequence chooses as its tokens do one by one, and puts out the same bits") {
  auto c = batch_setting("steps", 2, 80, 4, 8, 12);
  c.key_heads = 2;
  c.gate_heads = 2;
  c.gate = gate_kind::per_token;
  c.gate_size = 0.02;
  auto const x = attention_numbers(c).rounded<float>();
  auto const positions = positions_of(c.length);
  // Of the rows that are taken one by one.
  auto const taken = [&](auto const& from) {
    auto const row = std::size_t(from.size()) / std::size_t(c.count * c.length);
    std::remove_cvref_t<decltype(from)> to;
    for (index_t n = 0; n < c.count; ++n)
      for (index_t t : positions)
        for (std::size_t i = 0; i < row; ++i) to.push_back(from[std::size_t(n * c.length + t) * row + i]);
    return to;
  };
  auto const whole = hard_none.device(c, {}, x, false);
  auto const steps = top1_by_steps<all, top1<hard, none>, float>(c, {}, x, positions);
  check(taken(whole.choice) == taken(steps.choice), "choices");
  check(same_bits(taken(whole.o), taken(steps.o)), "outputs");
  top1_knobs const knobs{0.5, 1.0};
  auto const weighted_whole = weighted_sel.device(c, knobs, x, false);
  auto const weighted_steps = top1_by_steps<all, top1<weighted, selected_weight>, float>(c, knobs, x, positions);
  check(taken(weighted_whole.choice) == taken(weighted_steps.choice), "weighted choices");
  check_close("weighted outputs", taken(weighted_steps.o), taken(weighted_whole.o), of_float.output);
}

DEVICE_TEST("a hard output is the chosen value, bit by bit; values that are not chosen cannot spoil it") {
  auto c = batch_setting("gather", 1, 90, 1, 8, 12);
  auto x = attention_numbers(c).rounded<float>();
  auto const before = hard_none.device(c, {}, x, true);
  bool same = true;
  std::vector<bool> chosen(90, false);
  for (std::size_t t = 0; t < 90; ++t) {
    auto const at = std::size_t(before.choice[t]);
    chosen[at] = true;
    for (std::size_t i = 0; i < 12; ++i) same = same && before.o[t * 12 + i] == x.v[at * 12 + i];
  }
  check(same, "o is v of the choice");
  int spoiled = 0;
  for (std::size_t t = 0; t < 90; ++t)
    for (std::size_t i = 0; i < 12 && !chosen[t]; ++i) x.v[t * 12 + i] = ++spoiled % 2 ? infinity : not_a_number;
  check(spoiled > 100, "values are spoiled");
  for (auto const& f : {hard_none, hard_st})
    for (bool backward : {false, true}) {
      auto const after = f.device(c, {}, x, backward);
      check(same_bits(before.o, after.o) && before.choice == after.choice, f.name);
    }
  // Nor can derivatives of rows that did not choose a value spoil that value's.
  for (std::size_t i = 0; i < 12; ++i) x.d_o[40 * 12 + i] = infinity;
  auto const after = hard_none.device(c, {}, x, true);
  bool apart = true;
  for (std::size_t t = 0; t < 90; ++t)
    for (std::size_t i = 0; i < 12; ++i)
      apart = apart && (t == std::size_t(after.choice[40]) ? after.d_v[t * 12 + i] == infinity
                                                           : after.d_v[t * 12 + i] == before.d_v[t * 12 + i]);
  check(apart, "d_v of the others");
}

DEVICE_TEST("infinite and NaN scores") {
  auto c = batch_setting("scores of -inf", 1, 150, 1, 4, 4);
  c.seed = 3;
  for (auto const& f : {hard_none, hard_st, weighted_sel}) {
    // Keys 0 and 1 are -inf to every query, so that rows 0 and 1 choose nothing and are 0.
    auto const hidden = [](attention_numbers& x) {
      for (std::size_t i = 0; i < x.q.size(); i += 4) x.q[i] = 0.5;
      x.k[0] = x.k[4] = -infinity;
    };
    c.name = "scores of -inf";
    compare_top1(f, c, of_float, {}, false, hidden);
    compare_top1(f, c, of_float, {0.5, 0.5}, false, hidden);
    // A NaN is chosen and shows in every row that sees it, the first of two, and in no other.
    auto const two_nans = [](attention_numbers& x) { x.k[4 * 100 + 1] = x.k[4 * 30 + 1] = not_a_number; };
    c.name = "NaN keys";
    compare_top1(f, c, of_float, {}, false, two_nans);
    compare_top1(f, c, of_float, {0.5, 0.5}, false, two_nans);
    attention_numbers x(c);
    two_nans(x);
    auto const got = f.device(c, {}, x.rounded<float>(), false);
    for (std::size_t t : {29U, 30U, 31U, 99U, 100U, 149U})
      check((got.choice[t] == 30) == (t >= 30) && (got.o[t * 4] != got.o[t * 4]) == (t >= 30),
            "NaN, row " + std::to_string(t));
    // Of keys of +inf the first.
    compare_top1(hard_none, c, of_float, {}, false, [](attention_numbers& y) {
      for (std::size_t i = 0; i < y.q.size(); i += 4) y.q[i] = 0.5;
      y.k[4 * 50] = y.k[4 * 70] = infinity;
    });
  }
  c.window = 5;
  c.gate = gate_kind::per_token;
  c.name = "a NaN gate in a window";
  for (auto const& f : {window_none, window_sel})
    compare_top1(f, c, of_float, {0.5, 1.0}, false, [](attention_numbers& x) { x.g[80] = not_a_number; });
  // Split keys.
  c = batch_setting("a NaN among split keys", 1, 1, 1, 8, 8);
  c.capacity = 500;
  c.past = {500};
  for (auto const& f : {hard_none, weighted_sel})
    compare_top1(f, c, of_float, {}, false,
                 [](attention_numbers& x) { x.past_k[8 * 450] = x.past_k[8 * 300] = not_a_number; });
  for (auto const& f : {hard_none, weighted_sel})
    compare_top1(f, c, of_float, {}, false, [](attention_numbers& x) {
      for (auto* keys : {&x.past_k, &x.k})
        for (auto& k : *keys) k = -infinity;
      for (auto& q : x.q) q = 1.0;
    });
}

DEVICE_TEST("a row that sees one key has its value and no derivative of its score") {
  auto c = batch_setting("one key", 2, 1, 1, 40, 40);
  auto const x = attention_numbers(c).rounded<float>();
  for (auto const& f : every) {
    auto const got = f.device(c, {}, x, true);
    check(got.o == x.v, f.name + ": o is v");
    check(got.d_v == x.d_o, f.name + ": d_v is d_o");
    bool zero = true;
    for (double d : got.d_q) zero = zero && d == 0;
    for (double d : got.d_k) zero = zero && d == 0;
    check(zero, f.name + ": d_q and d_k are 0");
  }
}

DEVICE_TEST("the reference agrees too") {
  auto c = batch_setting("reference", 1, 37, 2, 8, 5);
  c.gate = gate_kind::per_token;
  auto const x = attention_numbers(c).rounded<float>();
  top1_knobs const knobs{0.5, 0.6};
  auto const compare = [&]<top1_output Output, top1_gradient Gradient>(kernel_pair const& f) {
    attention_memory<double, host_array> const m(c, x, 0);
    auto const want = results_of(c, knobs, m, [&](attention_shape const& s, attention_record const& record) {
      kernels::attention_forward<all, top1<Output, Gradient>>(device::reference{}, s, m.input(), m.output(),
                                                              record);
    });
    auto const got = f.device(c, knobs, x, false);
    check(got.choice == want.choice, f.name);
    check_close(f.name + ": o", got.o, want.o, of_float.output);
    check_close(f.name + ": lse", got.lse, want.lse, 32 * eps);
  };
  compare.operator()<hard, straight_through>(hard_st);
  compare.operator()<weighted, selected_weight>(weighted_sel);
}

// ---- stored cases

kernel_pair const& kernels_of(golden_case const& c) {
  std::string const name = "output=" + c.text("forward") + ",gradient=" + c.text("backward");
  for (auto const& f : every)
    if (f.name == name) return f;
  throw file_error("golden case " + c.name() + " has unknown " + name);
}
void check_within(std::string const& what, std::vector<double> const& got, golden_tensor const& want,
                  double sign = 1, double allowance = 1) {
  if (!check(got.size() == want.data.size(), what + ": as many numbers")) return;
  double worst = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    double const off = std::fabs(sign * got[i] - want.data[i]);
    if (!(off <= worst)) worst = off;
  }
  check(worst <= allowance * want.tolerance(),
        what + ": off by " + std::to_string(worst) + ", tolerance " + std::to_string(want.tolerance()));
}

DEVICE_TEST("the stored cases of Top-1 element selection") {
  auto const cases = golden_cases("top1", "top1_element_");
  check(cases.size() == 27, "27 cases");
  for (auto const& path : cases) {
    golden_case const stored_case(path);
    auto const &q = stored_case["q"], &v = stored_case["v"];
    auto c = batch_setting(stored_case.name(), q.extent(0), q.extent(1), q.extent(2), q.extent(3), v.extent(3));
    c.key_heads = c.value_heads = v.extent(2);
    c.score_size = stored_case.number("scale", 1.0) * std::sqrt(double(c.key_dim));
    c.temperature = stored_case.number("temperature_backward", 1.0);
    if (stored_case.has("cu_seqlens"))
      for (double x : stored_case["cu_seqlens"].data) c.offsets.push_back(index_t(x));
    bool const biased = stored_case.has("slopes");
    if (biased) c.gate = gate_kind::constant;
    attention_numbers x(c);
    x.q = q.data;
    x.k = stored_case["k"].data;
    x.v = v.data;
    x.d_o = stored_case["cot_o"].data;
    for (std::size_t h = 0; h < x.g.size(); ++h) x.g[h] = -stored_case["slopes"].data[h];
    auto const& f = kernels_of(stored_case);
    top1_knobs const knobs{stored_case.number("temperature_forward", 1.0),
                           stored_case.number("hard_fraction", 1.0)};
    auto const got = f.device(c, knobs, x, true);
    std::vector<index_t> choice;
    for (double i : stored_case[stored_case.has("index_in_sequence") ? "index_in_sequence" : "index"].data)
      choice.push_back(index_t(i));
    check(got.choice == choice, c.name + ": index");
    check_within(c.name + ": o", got.o, stored_case["o"]);
    // Without a softmax anywhere there is no log-sum-exp.
    if (f.gradient != none || f.output == weighted || knobs.hard_fraction < 1)
      check_within(c.name + ": lse", got.lse, stored_case["lse"]);
    check_within(c.name + ": grad_q", got.d_q, stored_case["grad_q"]);
    check_within(c.name + ": grad_k", got.d_k, stored_case["grad_k"]);
    check_within(c.name + ": grad_v", got.d_v, stored_case["grad_v"]);
    // tests/golden/README.md, "What needs more".
    if (biased)
      check_within(c.name + ": grad_slopes", got.d_g, stored_case["grad_slopes"], -1,
                   c.name == "top1_element_weighted_sel_alibi_temp" ? 2 : 1);
    check(hard_none.device(c, knobs, x, false).choice == choice, c.name + ": index without a softmax");
  }
}

// ---- identities between outputs, surrogates and softmax attention

attention_setting random_setting(std::uint32_t seed) {
  auto c = batch_setting("identity", 1, 40, 2, 12, 8);
  c.seed = seed;
  return c;
}

DEVICE_TEST("identity 10: what the surrogates share and where they differ") {
  auto const c = random_setting(10);
  auto const x = attention_numbers(c).rounded<float>();
  auto const soft = oracle<all>(c, x);
  for (top1_knobs const knobs : {top1_knobs{}, top1_knobs{0.5, 1.0}}) {
    auto const st = hard_st.device(c, knobs, x, true), sto = hard_sto.device(c, knobs, x, true);
    auto const off = hard_none.device(c, knobs, x, true), other = weighted_st.device(c, knobs, x, true);
    check(same_bits(st.o, sto.o) && same_bits(st.o, off.o), "the same outputs");
    check(same_bits(st.d_q, sto.d_q) && same_bits(st.d_k, sto.d_k), "st and sto: the same d_q, d_k");
    check(same_bits(st.d_q, other.d_q) && same_bits(st.d_k, other.d_k), "hard and weighted: the same d_q, d_k");
    check(same_bits(st.d_v, off.d_v) && !same_bits(st.d_v, sto.d_v), "d_v by the choice alone, and by p");
    check_close("sto: d_q of attention", sto.d_q, soft.d_q, of_float.gradient);
    check_close("sto: d_k of attention", sto.d_k, soft.d_k, of_float.gradient);
    check_close("sto: d_v of attention", sto.d_v, soft.d_v, of_float.gradient);
    for (double d : off.d_q) check(d == 0, "none: d_q");
  }
}

DEVICE_TEST("identity 11: mixing hard and soft outputs moves values, not the surrogate of the scores") {
  auto const c = random_setting(11);
  auto const x = attention_numbers(c).rounded<float>();
  auto const soft = oracle<all>(c, x);
  for (auto const& f : {hard_st, hard_sto, hard_none}) {
    auto const got = f.device(c, {0.0, 0.0}, x, true);
    check_close(f.name + ", m = 0: o", got.o, soft.o, of_float.output);
    check_close(f.name + ", m = 0: d_q", got.d_q, soft.d_q, of_float.gradient);
    check_close(f.name + ", m = 0: d_k", got.d_k, soft.d_k, of_float.gradient);
    check_close(f.name + ", m = 0: d_v", got.d_v, soft.d_v, of_float.gradient);
  }
  for (auto const& f : {hard_st, hard_sto}) {
    auto const some = f.device(c, {0.0, 0.3}, x, true), more = f.device(c, {0.0, 0.8}, x, true);
    check(same_bits(some.d_q, more.d_q) && same_bits(some.d_k, more.d_k), f.name + ": d_q, d_k for any m");
    check(same_bits(some.d_v, more.d_v) == (f.gradient == straight_through_output), f.name + ": d_v");
  }
  auto part = hard_none.device(c, {0.0, 0.3}, x, true);
  for (auto* d : {&part.d_q, &part.d_k})
    for (auto& y : *d) y /= 0.7;
  check_close("none: a part of d_q", part.d_q, soft.d_q, of_float.gradient);
  check_close("none: a part of d_k", part.d_k, soft.d_k, of_float.gradient);
}

DEVICE_TEST("identity 12: the derivatives of all keys of a head sum to zero") {
  auto const c = random_setting(12);
  auto const x = attention_numbers(c).rounded<float>();
  std::size_t const width = std::size_t(c.heads * c.key_dim);
  for (auto const& f : every) {
    auto const d_k = f.device(c, {0.5, 1.0}, x, true).d_k;
    double most = 0, total = 0;
    for (double d : d_k) total = std::fmax(total, std::fabs(d));
    for (std::size_t i = 0; i < width; ++i) {
      double sum = 0;
      for (std::size_t at = i; at < d_k.size(); at += width) sum += d_k[at];
      most = std::fmax(most, std::fabs(sum));
    }
    check(most <= 64 * eps * total, f.name + ": off by " + std::to_string(most));
  }
}

DEVICE_TEST("identity 14: temperature without a bias leaves the choice alone") {
  auto cold = random_setting(14), hot = random_setting(14);
  cold.temperature = 0.5;
  hot.temperature = 2.0;
  auto const x = attention_numbers(cold).rounded<float>();
  check(hard_none.device(cold, {}, x, false).choice == hard_none.device(hot, {}, x, false).choice, "choices");
}

DEVICE_TEST("identity 15: with one key per head the first one wins and the soft output is a running mean") {
  auto const c = random_setting(15);
  attention_numbers x(c);
  std::size_t const width = std::size_t(c.heads * c.key_dim), values = std::size_t(c.heads * c.value_dim);
  for (std::size_t i = width; i < x.k.size(); ++i) x.k[i] = x.k[i % width];
  x = x.rounded<float>();
  auto const got = hard_sto.device(c, {0.0, 0.0}, x, true);
  std::vector<double> mean(x.v.size());
  for (std::size_t i = 0; i < values; ++i) {
    double sum = 0;
    for (std::size_t t = 0; t < 40; ++t) mean[t * values + i] = (sum += x.v[t * values + i]) / double(t + 1);
  }
  check_close("running mean", got.o, mean, of_float.output);
  for (double d : got.d_q) check(std::fabs(d) <= 64 * eps, "d_q is 0");
  for (auto const& f : {hard_none, hard_st})
    for (index_t choice : f.device(c, {}, x, true).choice) check(choice == 0, "the first key");
}

DEVICE_TEST("identity 16: packed sequences are the sequences run apart, shared heads are repeated heads") {
  auto c = random_setting(16);
  c.offsets = {0, 5, 5, 20, 40};
  auto const x = attention_numbers(c).rounded<float>();
  auto const part = [](std::vector<double> const& from, index_t rows, index_t begin, index_t end) {
    auto const width = index_t(from.size()) / rows;
    return std::vector<double>(from.begin() + begin * width, from.begin() + end * width);
  };
  for (auto const& f : {hard_st, weighted_sel}) {
    auto const together = f.device(c, {}, x, true);
    for (std::size_t n = 0; n + 1 < c.offsets.size(); ++n) {
      index_t const begin = c.offsets[n], end = c.offsets[n + 1];
      auto apart = random_setting(16);
      apart.length = end - begin;
      auto y = x;
      for (auto* numbers : {&y.q, &y.k, &y.v, &y.d_o}) *numbers = part(*numbers, 40, begin, end);
      auto const got = f.device(apart, {}, y, true);
      check(same_bits(got.o, part(together.o, 40, begin, end)) &&
                same_bits(got.d_q, part(together.d_q, 40, begin, end)) &&
                same_bits(got.d_k, part(together.d_k, 40, begin, end)) &&
                same_bits(got.d_v, part(together.d_v, 40, begin, end)),
            f.name + ", sequence " + std::to_string(n));
    }
  }
  auto grouped = random_setting(17), repeated = random_setting(17);
  grouped.heads = repeated.heads = repeated.key_heads = repeated.value_heads = 4;
  auto const few = attention_numbers(grouped).rounded<float>();
  auto many = few;
  // Of heads [R, 2, C] each one twice.
  auto const twice = [](std::vector<double> const& from, index_t channels) {
    std::vector<double> to;
    for (auto row = from.begin(); row != from.end(); row += channels)
      for (int i = 0; i < 2; ++i) to.insert(to.end(), row, row + channels);
    return to;
  };
  many.k = twice(few.k, grouped.key_dim);
  many.v = twice(few.v, grouped.value_dim);
  auto const pairs = [](std::vector<double> const& from, index_t channels) {
    std::vector<double> to;
    for (std::size_t at = 0; at < from.size(); at += std::size_t(2 * channels))
      for (std::size_t i = 0; i < std::size_t(channels); ++i)
        to.push_back(from[at + i] + from[at + std::size_t(channels) + i]);
    return to;
  };
  for (auto const& f : {hard_st, weighted_sel}) {
    auto const a = f.device(grouped, {}, few, true), b = f.device(repeated, {}, many, true);
    check(same_bits(a.o, b.o) && same_bits(a.d_q, b.d_q), f.name + ": o, d_q");
    check_close(f.name + ": d_k", a.d_k, pairs(b.d_k, grouped.key_dim), 4 * eps);
    check_close(f.name + ": d_v", a.d_v, pairs(b.d_v, grouped.value_dim), 4 * eps);
  }
}

template <class Error, class F>
void expect_error(std::string const& what, F const& f) {
  try {
    f();
    check(false, "an error is expected: " + what);
  } catch (Error const& e) {
    check(std::string(e.what()).find(what) != std::string::npos, std::string(e.what()) + ", expected: " + what);
  }
}
DEVICE_TEST("errors name what is wrong") {
  auto c = batch_setting("errors", 1, 3, 2, 4, 4);
  attention_numbers const x(c);
  attention_memory<float, device_array> const m(c, x, 0);
  using kernel = kernels::cuda_top1<all, top1<hard, straight_through>, float>;
  arena ws = arena::measure();
  device::cuda const dev;
  auto const forward = [&](attention_shape const& s, attention_input<float> const& in, view3<float> o) {
    kernel::forward(dev, s, in, o, nullptr, {}, ws);
  };
  auto s = m.shape();
  auto in = m.input();
  expect_error<shape_error>("attention output o", [&] { forward(s, in, m.output().slice(1, 0, 1)); });
  float const sink = 0;
  in.sink_h = {&sink, {1}};
  expect_error<value_error>("sink", [&] { forward(s, in, m.output()); });
  in = m.input();
  in.k_rhk.extent[1] = 1;
  expect_error<shape_error>("attention key k", [&] { forward(s, in, m.output()); });
  in = m.input();
  s.knobs.hard_fraction = 1.5;
  expect_error<value_error>("hard_fraction", [&] { forward(s, in, m.output()); });
  s = m.shape();
  s.knobs.forward_temperature = -1;
  expect_error<value_error>("forward_temperature", [&] { forward(s, in, m.output()); });
  s = m.shape();
  s.select.shared_choice = true;
  expect_error<value_error>("shared_choice", [&] { forward(s, in, m.output()); });
  s = m.shape();
  auto const backward = [&](view3<float const> d_o, attention_gradient<float> const& d) {
    kernel::backward(dev, s, in, m.output(), kernel::saved::carve(ws, s), d_o, d, ws);
  };
  auto d = m.gradient();
  d.k_rhk.extent[2] = 1;
  expect_error<shape_error>("derivative d_k", [&] { backward(m.upstream(), d); });
  expect_error<shape_error>("derivative d_o", [&] { backward(m.upstream().slice(0, 0, 1), m.gradient()); });
  std::vector<index_t> const offsets{0, 3};
  s.seq = sequences::packed(offsets);
  expect_error<value_error>("offsets", [&] { forward(s, in, m.output()); });
}

}  // namespace
