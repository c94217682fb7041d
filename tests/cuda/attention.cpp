#include "attention.hpp"

#include <limits>

namespace {

using namespace seqmix;
using namespace seqmix::testing;
using selectors::all;
using selectors::window;

// Sums of up to 200 products in float, against double.
constexpr double eps = 1.1920929e-07;
constexpr attention_tolerance of_float{32 * eps, 64 * eps};
constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

attention_setting batch(std::string name, index_t count, index_t length, index_t heads, index_t key_dim,
                        index_t value_dim) {
  attention_setting c{std::move(name)};
  c.count = count;
  c.length = length;
  c.heads = c.key_heads = c.value_heads = c.gate_heads = heads;
  c.key_dim = key_dim;
  c.value_dim = value_dim;
  return c;
}
attention_setting packed(std::string name, std::vector<index_t> offsets, index_t heads, index_t key_dim,
                         index_t value_dim) {
  auto c = batch(std::move(name), 1, 1, heads, key_dim, value_dim);
  c.offsets = std::move(offsets);
  return c;
}

DEVICE_TEST("a batch whose heads share keys and a gate per token") {
  auto c = batch("shared heads", 2, 70, 4, 20, 24);
  c.key_heads = 2;
  c.gate_heads = 2;
  c.gate = gate_kind::per_token;
  compare_attention<all, float>(c, of_float, {}, true, true);
}

DEVICE_TEST("packed sequences, empty ones among them, rows with gaps between them") {
  auto c = packed("packed", {0, 0, 1, 64, 64, 193}, 2, 33, 64);
  c.value_heads = 1;
  c.padding = 3;
  c.sink = true;
  compare_attention<all, float>(c, of_float);
}

DEVICE_TEST("a window, a constant gate, a temperature and a sink") {
  auto c = batch("window", 1, 150, 2, 16, 32);
  c.window = 66;  // row 128, the first of a tile, is the last one that sees key 63, the last of a tile
  c.gate = gate_kind::constant;
  c.gate_heads = 1;
  c.sink = true;
  c.temperature = 0.7;
  c.padding = 4;
  compare_attention<window, float>(c, of_float);
  c.window = 1;
  c.length = 20;
  c.name = "window of one";
  compare_attention<window, float>(c, of_float);
}

DEVICE_TEST("heads of more channels than a tile holds") {
  auto c = batch("slices", 1, 66, 2, 70, 130);
  c.key_heads = 1;
  c.gate = gate_kind::per_token;
  compare_attention<all, float>(c, of_float);
  c = batch("a slice of keys, one of values", 1, 20, 1, 129, 8);
  compare_attention<all, float>(c, of_float);
}

DEVICE_TEST("past keys under a gate, of several lengths") {
  auto c = packed("past", {0, 3, 68, 68}, 2, 24, 16);
  c.key_heads = 1;
  c.gate = gate_kind::per_token;
  c.capacity = 80;
  c.past = {0, 70, 5};
  compare_attention<all, float>(c, of_float);
  c.gate = gate_kind::constant;
  c.window = 50;
  c.name = "past, window, constant gate";
  compare_attention<window, float>(c, of_float);
}

DEVICE_TEST("one row with a long past: heads share blocks, keys are split") {
  auto c = batch("one row", 2, 1, 8, 32, 20);
  c.key_heads = 2;
  c.value_heads = 4;
  c.gate = gate_kind::per_token;
  c.gate_heads = 4;
  c.gate_size = 0.02;
  c.sink = true;
  c.capacity = 200;
  c.past = {0, 130};
  compare_attention<all, float>(c, of_float, {}, true, true);
  c.window = 200;
  c.gate = gate_kind::none;
  c.value_heads = 2;
  c.capacity = 600;
  c.past = {577, 70};
  c.name = "one row, window";
  compare_attention<window, float>(c, of_float, {}, false);
  c = batch("one row, many heads share keys", 1, 1, 40, 8, 70);
  c.key_heads = c.value_heads = 2;
  c.capacity = 300;
  c.past = {299};
  compare_attention<all, float>(c, of_float, {}, false);
}

DEVICE_TEST("few rows with a past") {
  auto c = packed("few rows", {0, 16, 16, 19}, 2, 8, 8);
  c.capacity = 200;
  c.past = {190, 7, 0};
  c.gate = gate_kind::per_token;
  compare_attention<all, float>(c, of_float, {}, false);
}

DEVICE_TEST("a past of more tokens than one step of the scan of gates") {
  auto c = batch("long past", 1, 2, 1, 8, 8);
  c.capacity = 2110;
  c.past = {2100};
  c.gate = gate_kind::per_token;
  c.gate_size = 0.002;
  compare_attention<all, float>(c, of_float);
}

DEVICE_TEST("derivatives that are not asked for are not written") {
  auto c = batch("few derivatives", 2, 5, 2, 8, 8);
  c.key_heads = c.value_heads = 1;
  c.capacity = 7;
  c.past = {7, 2};
  c.gate = gate_kind::per_token;
  c.sink = true;
  auto const x = attention_numbers(c).rounded<float>();
  auto const every = on_device<all, float>(c, x);
  auto const without = [&](auto const& drop) { return on_device<all, float>(c, x, true, drop); };
  auto const least = without([](attention_gradient<float>& d) {
    d.g_rhk = {};
    d.past_k_nlhk = d.past_v_nlhv = d.past_g_nlhk = {};
    d.sink_h = {};
  });
  check(least.d_q == every.d_q && least.d_k == every.d_k && least.d_v == every.d_v,
        "d_q, d_k and d_v are the same");
  auto const no_past = without([](attention_gradient<float>& d) { d.past_k_nlhk = d.past_g_nlhk = {}; });
  check(no_past.d_g == every.d_g, "d_g needs no derivatives of the past");
  check(no_past.d_past_v == every.d_past_v, "d_past_v alone");
}

DEVICE_TEST("queries that bring no keys") {
  auto c = packed("queries alone", {0, 20, 24}, 2, 16, 16);
  c.alone = true;
  c.capacity = 72;
  c.past = {70, 5};
  c.position = {40, 1};
  compare_attention<all, float>(c, of_float);
}

DEVICE_TEST("no rows, no tokens") {
  for (auto const& offsets : {std::vector<index_t>{0}, std::vector<index_t>{0, 0, 0}}) {
    auto c = packed("nothing", offsets, 2, 8, 8);
    c.gate = gate_kind::constant;
    c.sink = true;
    compare_attention<all, float>(c, of_float);
  }
  auto c = batch("a past alone", 2, 0, 1, 8, 8);
  c.capacity = 9;
  c.past = {9, 0};
  compare_attention<all, float>(c, of_float);
}

DEVICE_TEST("extreme gates: bounded token by token, near keys lose no digits") {
  auto c = batch("extreme gates", 1, 100, 1, 8, 8);
  c.gate = gate_kind::per_token;
  c.gate_size = 0.01;
  auto const change = [](attention_numbers& x) {
    for (std::size_t t : {3U, 20U, 21U, 70U}) x.g[t] = -1e30;
    x.g[40] = -infinity;
    x.g[50] = -9000;
  };
  compare_attention<all, float>(c, of_float, change);
}

DEVICE_TEST("infinite and NaN scores") {
  auto c = batch("scores of -inf", 1, 70, 1, 4, 4);
  c.seed = 3;
  // Key 0 is -inf to every query, so that row 0 sees nothing and is 0.
  compare_attention<all, float>(
      c, of_float,
      [](attention_numbers& x) {
        for (std::size_t i = 0; i < x.q.size(); i += 4) x.q[i] = 0.5;
        x.k[0] = -infinity;
      },
      false);
  // A NaN shows in every row that sees it, and in no other.
  c.name = "a NaN key";
  compare_attention<all, float>(
      c, of_float, [](attention_numbers& x) { x.k[4 * 30 + 1] = not_a_number; }, false);
  c.window = 5;
  c.name = "a NaN gate in a window";
  c.gate = gate_kind::per_token;
  compare_attention<all, float>(
      c, of_float, [](attention_numbers& x) { x.g[20] = not_a_number; }, false);
  c.gate = gate_kind::none;
  c.name = "sinks of -inf";
  c.sink = true;
  compare_attention<window, float>(c, of_float, [](attention_numbers& x) { x.sink[0] = -infinity; });
}

DEVICE_TEST("the reference agrees too") {
  auto c = batch("reference", 1, 37, 2, 8, 5);
  c.gate = gate_kind::per_token;
  c.sink = true;
  auto const x = attention_numbers(c).rounded<float>();
  attention_memory<double, host_array> const m(c, x, 0);
  kernels::attention_forward<all, selectors::softmax>(device::reference{}, m.shape(), m.input(), m.output(),
                                                      m.record());
  auto const got = on_device<all, float>(c, x, false);
  check_close("o", got.o, m.results().o, of_float.output);
  check_close("lse", got.lse, m.results().lse, 32 * eps);
}

DEVICE_TEST("a row that sees one key has its value and no derivative of its score") {
  auto c = batch("one key", 3, 1, 2, 40, 40);
  auto const x = attention_numbers(c).rounded<float>();
  auto const got = on_device<all, float>(c, x);
  check(got.o == x.v, "o is v");
  check(got.d_v == x.d_o, "d_v is d_o");
  bool zero = true;
  for (double d : got.d_q) zero = zero && d == 0;
  for (double d : got.d_k) zero = zero && d == 0;
  check(zero, "d_q and d_k are 0");
}

/// Calls of one row on the carried cache, against the whole sequences in one call.
template <class Which>
void compare_steps(attention_setting const& c, index_t capacity) {
  auto const x = attention_numbers(c).rounded<float>();
  auto const whole = on_device<Which, float>(c, x, false);
  auto const s = c.shape();
  index_t const N = c.count, T = c.length, kr = s.key_heads * s.key_dim, vr = s.value_heads * s.value_dim;
  index_t const gr = s.gate_heads;
  device_array<float> const q(stored<float>(x.q)), k(stored<float>(x.k)), v(stored<float>(x.v)),
      g(stored<float>(x.g)), o(whole.o.size());
  device_array<float> const past_k(std::size_t(N * capacity * kr)), past_v(std::size_t(N * capacity * vr)),
      past_g(std::size_t(N * capacity * gr));
  device_array<index_t> const length(std::vector<index_t>(std::size_t(N), 0));
  auto step = s;
  step.seq = sequences::batch(N, 1);
  auto const rows = [&](device_array<float> const& a, index_t t, index_t heads, index_t channels) {
    return view3<float>(a.data() + t * heads * channels, {N, heads, channels}, {T * heads * channels, channels, 1});
  };
  attention_input<float> in;
  in.past_k_nlhk = past_k.as<4>({N, capacity, s.key_heads, s.key_dim});
  in.past_v_nlhv = past_v.as<4>({N, capacity, s.value_heads, s.value_dim});
  in.past_g_nlhk = past_g.as<4>({N, capacity, s.gate_heads, 1});
  in.past_length = length.data();
  device::cuda dev, dry;
  dry.dry = true;
  using kernel = kernels::cuda_attention<Which, float>;
  auto const forward = [&](device::cuda const& d, index_t t, arena& ws) {
    in.q_rhk = rows(q, t, s.heads, s.key_dim);
    in.k_rhk = rows(k, t, s.key_heads, s.key_dim);
    in.v_rhv = rows(v, t, s.value_heads, s.value_dim);
    in.g_rhk = rows(g, t, s.gate_heads, 1);
    kernel::forward(d, step, in, rows(o, t, s.heads, s.value_dim), nullptr, {}, ws);
  };
  device_arena ws([&](arena& a) { forward(dry, 0, a); });
  for (index_t t = 0; t < T; ++t) {
    forward(dev, t, ws.pieces());
    kernels::cuda_history<float>::remember(
        dev, step, in, Which::spec.windowed, past_k.as<4>({N, capacity, s.key_heads, s.key_dim}),
        past_v.as<4>({N, capacity, s.value_heads, s.value_dim}), past_g.as<4>({N, capacity, s.gate_heads, 1}),
        length.data(), rows(o, t, s.heads, s.value_dim));
  }
  check_close(c.name, o.download(), whole.o, of_float.output);
}
DEVICE_TEST("token by token over the cache, as in one call") {
  auto c = batch("steps", 2, 21, 4, 8, 12);
  c.key_heads = 2;
  c.gate_heads = 2;
  c.gate = gate_kind::per_token;
  compare_steps<all>(c, 21);
  c.window = 6;
  c.name = "steps in a window";
  compare_steps<window>(c, 5);
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
  auto c = batch("errors", 1, 3, 2, 4, 4);
  c.sink = true;
  attention_numbers const x(c);
  attention_memory<float, device_array> const m(c, x, 0);
  using kernel = kernels::cuda_attention<all, float>;
  arena ws = arena::measure();
  device::cuda dev;
  auto const forward = [&](attention_shape const& s, attention_input<float> const& in, view3<float> o) {
    kernel::forward(dev, s, in, o, nullptr, {}, ws);
  };
  auto s = m.shape();
  auto in = m.input();
  expect_error<shape_error>("attention output o", [&] { forward(s, in, m.output().slice(1, 0, 1)); });
  in.sink_h.extent[0] = 1;
  expect_error<shape_error>("attention sink", [&] { forward(s, in, m.output()); });
  in = m.input();
  in.k_rhk.extent[1] = 1;
  expect_error<shape_error>("attention key k", [&] { forward(s, in, m.output()); });
  in = m.input();
  in.q_rhk.stride[2] = 2;
  expect_error<shape_error>("contiguous", [&] { forward(s, in, m.output()); });
  in = m.input();
  s.knobs.temperature = 0;
  expect_error<value_error>("temperature", [&] { forward(s, in, m.output()); });
  s = m.shape();
  in.g_rhk = view3<float const>(nullptr, {1, 2, 1}, {0, 1, 1});
  in.queries_alone = true;
  expect_error<value_error>("keys of their own", [&] { forward(s, in, m.output()); });
  in = m.input();
  in.g_rhk = view3<float const>(in.q_rhk.data, {3, 2, 1});
  in.past_length = reinterpret_cast<index_t const*>(in.q_rhk.data);
  in.past_k_nlhk = view4<float const>(nullptr, {1, 0, 2, 4});
  in.past_v_nlhv = in.past_k_nlhk;
  expect_error<value_error>("past_g", [&] { forward(s, in, m.output()); });
  auto d = m.gradient();
  d.k_rhk.extent[2] = 1;
  expect_error<shape_error>("derivative d_k", [&] {
    kernel::backward(dev, s, m.input(), m.output(), kernel::saved::carve(ws, s), m.upstream(), d, ws);
  });
  auto packed_shape = m.shape();
  std::vector<index_t> const offsets{0, 3};
  packed_shape.seq = sequences::packed(offsets);
  expect_error<value_error>("offsets", [&] { forward(packed_shape, m.input(), m.output()); });
}

}  // namespace
