#include "recurrence.hpp"

namespace {

using namespace seqmix;
using namespace seqmix::testing;
using state = states::delta_rule;

// Sums of up to 200 products in float, against double; a chunk's system adds some of its rows' errors.
constexpr double eps = 1.1920929e-07;
constexpr recurrence_tolerance of_float{16 * eps, 64 * eps};
// Factors of products are off by 2^-9 (bfloat16) or 2^-12 (float16) at most. The inverse of a chunk's system, its
// solutions, states and weights are rounded in turn, and what a token writes passes through a few of these.
constexpr recurrence_tolerance of_bfloat16{1.0 / 64, 1.0 / 32}, of_float16{1.0 / 512, 1.0 / 256};

auto const batch = recurrence_batch;
auto const packed = recurrence_packed;

recurrence_setting gated(recurrence_setting c, decay gate) {
  c.gate = gate;
  c.write = c.beta = c.state = true;
  return c;
}

DEVICE_TEST("one decay per head, from a state to a state") {
  compare_recurrence<state, false, float>(gated(batch("per head", 2, 100, 2, 24, 40), decay::per_head), of_float,
                                          {}, true, true);
}

DEVICE_TEST("no gate, no strength, rows with gaps between them, channels that fill no vector") {
  auto c = batch("no gate", 1, 70, 2, 10, 9);
  c.padding = 3;
  c.key_size = 0.7;
  compare_recurrence<state, false, float>(c, of_float);
  compare_recurrence<state, true, float>(c, of_float);
}

DEVICE_TEST("heads of more channels than a tile holds share queries, keys and gates") {
  auto c = gated(batch("slices", 1, 70, 2, 136, 40), decay::per_head);
  c.query_heads = c.key_heads = c.gate_heads = 1;
  compare_recurrence<state, false, float>(c, of_float);
  c = gated(batch("slices of channels that decay on their own", 1, 66, 2, 72, 72), decay::per_channel);
  c.value_heads = c.gate_heads = 1;
  compare_recurrence<state, true, float>(c, of_float);
}

DEVICE_TEST("packed sequences, empty ones among them") {
  auto c = gated(packed("packed", {0, 0, 3, 67, 131, 131}, 2, 16, 16), decay::constant_head);
  c.value_heads = 1;
  compare_recurrence<state, false, float>(c, of_float);
  c.gate = decay::constant_channel;
  compare_recurrence<state, true, float>(c, of_float);
}

DEVICE_TEST("sequences without tokens hand their state on") {
  compare_recurrence<state, false, float>(gated(batch("nothing", 2, 0, 2, 5, 6), decay::per_head), of_float);
}

DEVICE_TEST("a decay for every key channel") {
  compare_recurrence<state, true, float>(gated(batch("per channel", 1, 130, 2, 24, 40), decay::per_channel),
                                         of_float, {}, true, true);
  auto c = gated(packed("factored", {0, 5, 5, 71}, 2, 16, 16), decay::factored);
  c.gate_heads = 1;
  compare_recurrence<state, true, float>(c, of_float);
}

DEVICE_TEST("extreme decays") {
  auto const extreme = [](recurrence_numbers& x) {
    double const some[] = {-128, -30, -1e-7, 0, -0.1, -5, -0.5, -90};
    std::uint32_t random = 1;
    for (double& g : x.g) g = some[(random = random * 1664525U + 1013904223U) >> 29];
  };
  compare_recurrence<state, false, float>(gated(batch("extreme", 1, 130, 2, 8, 8), decay::per_head), of_float,
                                          extreme);
  compare_recurrence<state, true, float>(gated(batch("extreme", 1, 130, 2, 8, 8), decay::per_channel), of_float,
                                         extreme);
}

// With strength 1 the state holds the last value alone: A is full of ones, its inverse has two diagonals.
DEVICE_TEST("the same key again and again finds the last value") {
  auto c = batch("one key", 1, 100, 1, 16, 8);
  auto const same = [](recurrence_numbers& x) {
    for (std::size_t i = 0; i < x.k.size(); ++i) x.k[i] = i % 16 == 3 ? 1 : 0;
    for (std::size_t i = 0; i < x.q.size(); ++i) x.q[i] = i % 16 == 3 ? 4 : 0;
  };
  auto const got = compare_recurrence<state, false, float>(c, of_float, same);
  check(got.o == recurrence_numbers(c).rounded<float>().v, "one key: the last value, exactly");
  compare_recurrence<state, true, float>(c, of_float, same);
  c.beta = true;
  compare_recurrence<state, false, float>(c, of_float, [&](recurrence_numbers& x) {
    same(x);
    for (double& b : x.beta) b = 2;  // as far as it may go: values change sign
  });
}

DEVICE_TEST("token by token is the sequence") {
  auto c = gated(batch("steps", 3, 5, 2, 21, 35), decay::per_head);
  c.key_heads = 1;
  c.padding = 1;
  compare_steps<state, false, float>(c, 4 * eps);
  c.gate = decay::per_channel;
  compare_steps<state, true, float>(c, 4 * eps);
  c.state = c.beta = false;
  c.gate = decay::none;
  compare_steps<state, true, bfloat16>(c, of_bfloat16.output);
}

DEVICE_TEST("sixteen-bit numbers") {
  auto c = gated(batch("float16", 1, 100, 2, 64, 64), decay::per_head);
  c.key_heads = 1;
  compare_recurrence<state, false, float16>(c, of_float16);
  c.name = "bfloat16";
  c.gate = decay::per_channel;
  compare_recurrence<state, true, bfloat16>(c, of_bfloat16);
  c = gated(packed("float16, packed", {0, 0, 3, 67, 100}, 2, 72, 72), decay::constant_head);
  c.padding = 3;
  c.value_heads = 1;
  compare_recurrence<state, false, float16>(c, of_float16);
  c.name = "bfloat16, packed";
  c.gate = decay::factored;
  compare_recurrence<state, true, bfloat16>(c, of_bfloat16);
}

}  // namespace
