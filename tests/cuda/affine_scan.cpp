#include "recurrence.hpp"
#include <seqmix/states/elementwise.hpp>
#include <seqmix/states/outer_product.hpp>

// The affine scan against the reference and the CPU's kernels in double, from the same stored numbers.

namespace {

using namespace seqmix;
using namespace seqmix::testing;

/// Without queries and keys: one number per channel.
enum class addressed { by_keys, by_none };

template <class Numbers>
void drop_keys(addressed by, Numbers& x) {
  if (by == addressed::by_none) x.q_rhk = {}, x.k_rhk = {};
}

template <class State, kernels::recurrence_form Form>
recurrence_results right(recurrence_setting const& c, recurrence_numbers const& x, addressed by) {
  recurrence_memory<double, host_array> const m(c, x, 0), scratch(c, x, 0);
  auto const& s = m.shape();
  auto in = m.input();
  auto d = m.gradient();
  drop_keys(by, in);
  drop_keys(by, d);
  kernels::recurrence_forward<State>(device::reference{}, s, in, m.output(), m.final());
  device::cpu const dev{};
  arena ws = arena::growing();
  auto const saved = kernels::recurrence_saved<double>::carve<device::cpu::isa>(ws, s, State::spec);
  kernels::recurrence_forward<Form, State>(dev, s, in, scratch.output(), &saved, {}, ws);
  kernels::recurrence_backward<Form, State>(dev, s, in, saved, m.upstream(), m.d_final(), d, ws);
  return m.results();
}

template <class T>
recurrence_results scanned(recurrence_setting const& c, recurrence_numbers const& x, addressed by, bool backward) {
  using kernel = kernels::cuda_affine_scan<T>;
  recurrence_memory<T, device_array> const m(c, x, c.padding);
  auto const& s = m.shape();
  device::cuda const dev{.offsets = m.offsets()}, dry{.dry = true};
  auto in = m.input();
  auto d = m.gradient();
  drop_keys(by, in);
  drop_keys(by, d);
  auto const run = [&](arena& a, device::cuda const& on) {
    if (!backward) return kernel::forward(on, s, in, m.output(), nullptr, m.final(), a);
    auto const saved = kernel::carve(a, s);
    kernel::forward(on, s, in, m.output(), &saved, m.final(), a);
    kernel::backward(on, s, in, saved, m.upstream(), m.d_final(), d, a);
  };
  arena measured = arena::measure();
  run(measured, dry);
  device_arena real([&](arena& a) { run(a, dry); });
  run(real.pieces(), dev);
  check(real.pieces().peak() == measured.peak(), c.name + ": a dry run plans what is used");
  return m.results();
}

template <class T>
void compare(recurrence_setting const& c, addressed by = addressed::by_keys,
             std::function<void(recurrence_numbers&)> const& change = {}, bool twice = false) {
  // Float: sums of some hundred products. Sixteen bits: one rounding of what is stored.
  constexpr bool wide = std::is_same_v<T, float>;
  double const unit = wide                          ? std::ldexp(1.0, -23)
                      : std::is_same_v<T, bfloat16> ? std::ldexp(1.0, -8)
                                                    : std::ldexp(1.0, -11);
  double const output = wide ? 32 * unit : 2 * unit, gradient = wide ? 64 * unit : 2 * unit;
  recurrence_numbers raw(c);
  if (change) change(raw);
  auto const x = raw.rounded<T>();
  auto const want = by == addressed::by_none
                        ? right<states::elementwise, kernels::recurrence_form::sequential>(c, x, by)
                        : right<states::outer_product, kernels::recurrence_form::sequential>(c, x, by);
  auto const got = scanned<T>(c, x, by, true);
  got.with(want, [&](char const* what, auto const& mine, auto const& right_ones, bool derivative) {
    check_close(c.name + ": " + what, mine, right_ones, derivative ? gradient : output);
  });
  // Without a backward to come nothing is saved, and single tokens have a kernel of their own.
  auto const alone = scanned<T>(c, x, by, false);
  check_close(c.name + ": o without a backward", alone.o, want.o, output);
  check_close(c.name + ": final state without a backward", alone.final, want.final, output);
  if (twice)
    scanned<T>(c, x, by, true).with(got, [&](char const* what, auto const& a, auto const& b, bool) {
      check(a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0),
            c.name + ": a second run gives the same bits of " + what);
    });
}

recurrence_setting mamba(std::string const& name, index_t length) {
  return {.name = name,
          .length = length,
          .heads = 6,
          .query_heads = 1,
          .key_heads = 1,
          .value_heads = 6,
          .gate_heads = 6,
          .key_dim = 4,
          .value_dim = 1,
          .gate = decay::factored,
          .write = true,
          .state = true};
}
recurrence_setting elementwise(std::string const& name, index_t length) {
  return {.name = name,
          .length = length,
          .heads = 11,
          .query_heads = 11,
          .key_heads = 11,
          .value_heads = 11,
          .gate_heads = 11,
          .key_dim = 1,
          .value_dim = 1,
          .gate = decay::per_head,
          .state = true};
}

}  // namespace

DEVICE_TEST("elementwise states: ragged lengths over one tile and several") {
  for (index_t length : {1, 2, 37, 255, 256, 257, 600})
    compare<float>(elementwise("elementwise, T = " + std::to_string(length), length), addressed::by_none);
}
DEVICE_TEST("Mamba-1's form: factored decays, queries and keys shared by all channels") {
  for (index_t length : {1, 5, 256, 300}) compare<float>(mamba("factored, T = " + std::to_string(length), length));
}
DEVICE_TEST("few channels: a long sequence in pieces, forwards and backwards, the same bits twice") {
  auto c = mamba("pieces", 1100);
  c.heads = c.value_heads = c.gate_heads = 1;
  compare<float>(c, addressed::by_keys, {}, true);
  c.count = 2;
  c.name = "pieces of two sequences";
  compare<float>(c);
}
DEVICE_TEST("heads of several channels, every kind of decay, shared heads, rows with gaps") {
  for (auto gate : {decay::none, decay::per_head, decay::constant_head, decay::per_channel, decay::constant_channel,
                    decay::factored, decay::constant_factored}) {
    recurrence_setting c{.name = "decay " + std::to_string(int(gate)),
                         .count = 2,
                         .length = 41,
                         .heads = 4,
                         .query_heads = 2,
                         .key_heads = 1,
                         .value_heads = 2,
                         .gate_heads = 2,
                         .key_dim = 3,
                         .value_dim = 11,
                         .gate = gate,
                         .write = true,
                         .state = true,
                         .padding = 5};
    compare<float>(c);
  }
}
DEVICE_TEST("packed sequences, empty ones among them, begin and end alone") {
  auto c = mamba("packed", 0);
  c.offsets = {0, 3, 3, 260, 300, 300};
  compare<float>(c);
  auto e = elementwise("packed elementwise", 0);
  e.offsets = {0, 0, 1, 2, 3};
  compare<float>(e, addressed::by_none);
}
DEVICE_TEST("decays from none to beyond the bound in one sequence; the bound has no derivative") {
  auto c = mamba("extreme decays", 60);
  compare<float>(c, addressed::by_keys, [](recurrence_numbers& x) {
    double const sizes[] = {0.0, -1e-3, -1.0, -30.0, -128.0, -400.0};
    for (std::size_t i = 0; i < x.g.size(); ++i) x.g[i] = sizes[i % 6];
  });
}
DEVICE_TEST("sixteen bits store, float computes") {
  compare<bfloat16>(mamba("bfloat16", 70));
  compare<bfloat16>(elementwise("bfloat16 elementwise", 300), addressed::by_none);
  compare<float16>(mamba("float16", 70));
}
DEVICE_TEST("token by token is the sequence") {
  auto c = mamba("steps", 9);
  recurrence_numbers const x(c);
  auto const whole = scanned<float>(c, x.rounded<float>(), addressed::by_keys, false);
  auto state = x.initial;
  std::vector<double> joined;
  for (index_t t = 0; t < 9; ++t) {
    auto one = c;
    one.length = 1;
    recurrence_numbers y(one);
    auto const take = [&](std::vector<double> const& from, std::vector<double>& to, index_t width) {
      to.assign(from.begin() + t * width, from.begin() + (t + 1) * width);
    };
    take(x.q, y.q, 4), take(x.k, y.k, 4), take(x.v, y.v, 6), take(x.g, y.g, 6), take(x.write, y.write, 6);
    y.rate = x.rate;
    y.initial = state;
    auto const step = scanned<float>(one, y.rounded<float>(), addressed::by_keys, false);
    joined.insert(joined.end(), step.o.begin(), step.o.end());
    state = step.final;
  }
  check_close("steps: o", joined, whole.o, 16 * std::ldexp(1.0, -23));
  check_close("steps: state", state, whole.final, 16 * std::ldexp(1.0, -23));
}
DEVICE_TEST("wrong sizes are refused before anything is started") {
  auto c = mamba("sizes", 3);
  recurrence_memory<float, device_array> const m(c, recurrence_numbers(c), 0);
  arena ws = arena::measure();
  auto in = m.input();
  in.q_rhk = {};
  bool refused = false;
  try {
    kernels::cuda_affine_scan<float>::forward({}, m.shape(), in, m.output(), nullptr, {}, ws);
  } catch (shape_error const&) {
    refused = true;
  }
  check(refused, "keys without queries are refused");
}
