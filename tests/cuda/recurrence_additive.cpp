#include <limits>

#include "recurrence.hpp"

namespace {

using namespace seqmix;
using namespace seqmix::testing;
using state = states::outer_product;

// Sums of up to 200 products in float, against double.
constexpr double eps = 1.1920929e-07;
constexpr recurrence_tolerance of_float{16 * eps, 64 * eps};
// Every factor of a product is rounded to eight bits, off by 2^-9 at most; states, values and weights are rounded
// on the way again. The errors of a sum's terms are independent, so the worst of all outputs is off by a few 2^-9.
constexpr recurrence_tolerance of_bfloat16{1.0 / 64, 1.0 / 64};
constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

auto const batch = recurrence_batch;
auto const packed = recurrence_packed;

DEVICE_TEST("one decay per head and a write scale, from a state to a state") {
  auto c = batch("per head", 2, 100, 2, 24, 40);
  c.gate = decay::per_head;
  c.write = c.state = true;
  compare_recurrence<state, false, float>(c, of_float, {}, true, true);
}

DEVICE_TEST("no gate, rows with gaps between them, channels that fill no vector") {
  auto c = batch("no gate", 1, 70, 2, 10, 9);
  c.padding = 3;
  compare_recurrence<state, false, float>(c, of_float);
  compare_recurrence<state, true, float>(c, of_float);
}

DEVICE_TEST("heads of more channels than a tile holds share queries, keys and gates") {
  auto c = batch("slices", 1, 66, 4, 72, 72);
  c.query_heads = 1;
  c.key_heads = 2;
  c.gate_heads = 1;
  c.gate = decay::per_head;
  c.write = true;
  compare_recurrence<state, false, float>(c, of_float);
  c.heads = c.value_heads = 2;
  c.key_heads = 1;
  c.gate = decay::per_channel;
  c.name = "slices of channels that decay on their own";
  compare_recurrence<state, true, float>(c, of_float);
}

DEVICE_TEST("packed sequences, empty ones among them") {
  auto c = packed("packed", {0, 0, 3, 67, 131, 131}, 2, 16, 16);
  c.value_heads = 1;
  c.state = true;
  c.gate = decay::constant_head;
  compare_recurrence<state, false, float>(c, of_float);
  c.gate = decay::constant_channel;
  compare_recurrence<state, true, float>(c, of_float);
}

DEVICE_TEST("sequences without tokens hand their state on") {
  for (index_t count : {0, 2}) {
    auto c = batch("nothing", count, 0, 2, 5, 6);
    c.gate = decay::per_head;
    c.state = true;
    compare_recurrence<state, false, float>(c, of_float);
    auto const got = compare_recurrence<state, false, float>(c, of_float, {}, false);
    check(got.final == recurrence_numbers(c).rounded<float>().initial, "nothing: the final state is the first one");
  }
}

DEVICE_TEST("a decay for every key channel, in all the ways to give it") {
  auto c = batch("per channel", 1, 100, 2, 24, 40);
  c.gate = decay::per_channel;
  c.write = c.state = true;
  compare_recurrence<state, true, float>(c, of_float, {}, true, true);
  c = packed("factored", {0, 5, 5, 71}, 2, 16, 16);
  c.gate = decay::factored;
  c.gate_heads = 1;
  c.state = true;
  compare_recurrence<state, true, float>(c, of_float);
  c.gate = decay::constant_factored;
  c.name = "factored, constant";
  compare_recurrence<state, true, float>(c, of_float);
  c.gate = decay::per_head;
  c.gate_heads = 2;
  c.name = "one for all channels";
  compare_recurrence<state, true, float>(c, of_float);
  c.gate = decay::constant_head;
  c.name = "one for all channels, constant";
  compare_recurrence<state, true, float>(c, of_float);
}

// Tiny decays, resets and no decay at all within one strip, one chunk and between chunks.
void extreme(recurrence_numbers& x) {
  double const some[] = {-128, -30, -1e-7, 0, -0.1, -5, -0.5, -90};
  std::uint32_t random = 1;
  for (double& g : x.g) g = some[(random = random * 1664525U + 1013904223U) >> 29];
}
DEVICE_TEST("extreme decays") {
  auto c = batch("extreme", 1, 130, 2, 8, 8);
  c.state = true;
  c.gate = decay::per_head;
  compare_recurrence<state, false, float>(c, of_float, extreme);
  c.gate = decay::per_channel;
  compare_recurrence<state, true, float>(c, of_float, extreme);
  c.gate = decay::factored;
  c.name = "extreme, factored";
  compare_recurrence<state, true, float>(c, of_float, extreme);
}

DEVICE_TEST("P-N2: the derivative of a tiny decay is as tiny as it is") {
  auto const c = batch("P-N2", 1, 4, 1, 2, 1);
  auto const ones = [](recurrence_numbers& x) {
    for (auto* part : {&x.q, &x.k, &x.d_o}) part->assign(part->size(), 1);
    x.v = {1, 2, 3, 4};
  };
  auto per_channel = c;
  per_channel.gate = decay::per_channel;
  auto d = compare_recurrence<state, true, float>(per_channel, of_float, [&](recurrence_numbers& x) {
             ones(x);
             x.g = {-30, -0.1, -30, -0.2, -30, -0.3, -30, -0.4};
           }).d_g;
  for (std::size_t t = 0; t < 8; t += 2)
    check(std::fabs(d[t]) <= 1e-12, "P-N2: channel, token " + std::to_string(t / 2));
  auto per_head = c;
  per_head.gate = decay::per_head;
  d = compare_recurrence<state, false, float>(per_head, of_float, [&](recurrence_numbers& x) {
        ones(x);
        x.g = {-0.1, -30, -0.2, -0.3};
      }).d_g;
  check(std::fabs(d[1]) <= 1e-11, "P-N2: head");
}

DEVICE_TEST("decays near 1 do not drift over many tokens") {
  auto c = batch("slow", 1, 400, 1, 4, 4);
  c.state = true;
  recurrence_tolerance const narrow{8 * eps, 8 * eps};
  auto const slow = [](recurrence_numbers& x) {
    for (double& g : x.g) g = -1e-4;
    for (double& v : x.v) v *= 1e-3;
  };
  c.gate = decay::constant_head;
  compare_recurrence<state, false, float>(c, narrow, slow, false);
  c.gate = decay::constant_channel;
  compare_recurrence<state, true, float>(c, narrow, slow, false);
  c.length = 150;
  compare_steps<state, true, float>(c, 8 * eps);
}

DEVICE_TEST("token by token is the sequence") {
  auto c = batch("steps", 3, 5, 2, 21, 35);
  c.key_heads = 1;
  c.write = c.state = true;
  c.padding = 1;
  c.gate = decay::per_head;
  compare_steps<state, false, float>(c, 4 * eps);
  c.gate = decay::factored;
  compare_steps<state, true, float>(c, 4 * eps);
  c.state = false;
  c.gate = decay::none;
  compare_steps<state, false, bfloat16>(c, of_bfloat16.output);
}

DEVICE_TEST("sixteen-bit numbers") {
  auto c = batch("bfloat16", 1, 100, 2, 64, 64);
  c.gate = decay::per_head;
  c.key_heads = 1;
  c.write = c.state = true;
  compare_recurrence<state, false, bfloat16>(c, of_bfloat16);
  c.gate = decay::per_channel;
  compare_recurrence<state, true, bfloat16>(c, of_bfloat16);
  c = packed("bfloat16, packed", {0, 0, 3, 67, 100}, 2, 72, 72);
  c.padding = 3;
  c.value_heads = 1;
  c.gate = decay::per_head;
  compare_recurrence<state, false, bfloat16>(c, of_bfloat16);
  c.gate = decay::constant_factored;
  compare_recurrence<state, true, bfloat16>(c, of_bfloat16);
  c = batch("bfloat16, extreme", 1, 80, 1, 16, 16);
  c.state = true;
  c.gate = decay::per_channel;
  compare_recurrence<state, true, bfloat16>(c, of_bfloat16, extreme);
}

DEVICE_TEST("a NaN stays in its sequence and does not vanish") {
  for (auto gate : {decay::per_head, decay::per_channel}) {
    auto c = packed("NaN", {0, 70, 140, 150}, 1, 4, 4);
    c.gate = gate;
    auto const spoil = [&](recurrence_numbers& x) {
      x.v[std::size_t(100 * 4)] = not_a_number;
      x.g[std::size_t(145 * c.decays())] = not_a_number;
    };
    recurrence_numbers raw(c);
    spoil(raw);
    auto const x = raw.rounded<float>();
    auto const got = gate == decay::per_head ? on_device<state, false, float>(c, x, false)
                                             : on_device<state, true, float>(c, x, false);
    auto const is_nan = [&](index_t r) {
      double const o = got.o[std::size_t(r * 4)];
      return o != o;
    };
    bool before = false, behind = true, gated = true;
    for (index_t r = 0; r < 70; ++r) before = before || is_nan(r);
    for (index_t r = 100; r < 140; ++r) behind = behind && is_nan(r);
    for (index_t r = 146; r < 150; ++r) gated = gated && is_nan(r);
    check(!before, "NaN: reaches another sequence");
    check(behind, "NaN: a value's is lost");
    check(gated, "NaN: a log-decay's is lost");
  }
}

DEVICE_TEST("derivatives that nobody asks for are left alone") {
  using kernel = kernels::cuda_recurrence<state, false, float>;
  auto c = batch("not asked for", 1, 70, 2, 8, 8);
  c.gate = decay::per_head;
  c.gate_heads = 1;
  c.write = c.state = true;
  auto const x = recurrence_numbers(c).rounded<float>();
  auto const all = on_device<state, false, float>(c, x, true);
  recurrence_memory<float, device_array> const m(c, x, 0);
  auto const run = [&](arena& a, device::cuda const& dev) {
    auto const saved = kernel::carve(a, m.shape());
    kernel::forward(dev, m.shape(), m.input(), m.output(), &saved, {}, a);
    auto d = m.gradient();
    d.g_rhk = {}, d.write_rh = {}, d.initial_nhkv = {};
    kernel::backward(dev, m.shape(), m.input(), saved, m.upstream(), m.d_final(), d, a);
  };
  device::cuda dry;
  dry.dry = true;
  device_arena room([&](arena& a) { run(a, dry); });
  run(room.pieces(), {});
  auto const got = m.results();
  check(got.d_q == all.d_q && got.d_k == all.d_k && got.d_v == all.d_v, "not asked for: the others are the same");
  for (auto const* part : {&got.d_g, &got.d_write, &got.d_initial, &got.final})
    check(*part == std::vector<double>(part->size(), untouched), "not asked for: written all the same");
}

template <class Error, class F>
void expect_error(char const* words, F const& f) {
  try {
    f();
    check(false, std::string("no error about ") + words);
  } catch (Error const& e) {
    check(std::string(e.what()).find(words) != std::string::npos, std::string(words) + ": " + e.what());
  }
}
DEVICE_TEST("what does not fit is named") {
  using kernel = kernels::cuda_recurrence<state, false, float>;
  auto c = batch("errors", 1, 3, 2, 4, 4);
  c.gate = decay::per_head;
  c.write = true;
  recurrence_memory<float, device_array> const m(c, recurrence_numbers(c), 0);
  arena ws = arena::measure();
  device::cuda const dev{};
  auto const forward = [&](recurrence_shape const& s, recurrence_input<float> const& in, view3<float> o) {
    kernel::forward(dev, s, in, o, nullptr, {}, ws);
  };
  auto s = m.shape();
  auto in = m.input();
  expect_error<shape_error>("recurrence output o", [&] { forward(s, in, m.output().slice(1, 0, 1)); });
  in.k_rhk.extent[1] = 1;
  expect_error<shape_error>("recurrence key k", [&] { forward(s, in, m.output()); });
  in = m.input();
  in.v_rhv.stride[2] = 2;
  expect_error<shape_error>("contiguous", [&] { forward(s, in, m.output()); });
  in = m.input();
  in.write_rh.extent[1] = 1;
  expect_error<shape_error>("write scale", [&] { forward(s, in, m.output()); });
  in = m.input();
  in.g_rhk.extent[2] = 4;
  expect_error<shape_error>("one per key channel", [&] { forward(s, in, m.output()); });
  s.gate_heads = 3;
  expect_error<shape_error>("gate_heads", [&] { forward(s, m.input(), m.output()); });
  s = m.shape();
  s.chunk = 0;
  expect_error<value_error>("chunk", [&] { forward(s, m.input(), m.output()); });
  auto d = m.gradient();
  d.k_rhk.extent[2] = 1;
  expect_error<shape_error>("derivative d_k", [&] {
    kernel::backward(dev, m.shape(), m.input(), kernel::carve(ws, m.shape()), m.upstream(), {}, d, ws);
  });
  std::vector<index_t> const offsets{0, 3};
  s = m.shape();
  s.seq = sequences::packed(offsets);
  expect_error<value_error>("offsets", [&] { forward(s, m.input(), m.output()); });
}

}  // namespace
