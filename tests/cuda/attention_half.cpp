#include "attention.hpp"

namespace {

using namespace seqmix;
using namespace seqmix::testing;
using selectors::all;
using selectors::window;

// Both sides read the same rounded numbers. With u the rounding of one number: outputs have rounded weights and are
// rounded, 2 u of the largest value; derivatives have rounded weights and derivatives of scores, the rounded o in
// g.o, and are rounded, each a few u of a sum of absolute values, which is some times its largest result.
constexpr double u_of_bfloat16 = 1.0 / 512, u_of_float16 = 1.0 / 4096;
constexpr attention_tolerance of_bfloat16{2 * u_of_bfloat16, 8 * u_of_bfloat16};
constexpr attention_tolerance of_float16{2 * u_of_float16, 8 * u_of_float16};

attention_setting packed(std::string name, std::vector<index_t> offsets, index_t heads, index_t key_dim,
                         index_t value_dim) {
  attention_setting c{std::move(name)};
  c.offsets = std::move(offsets);
  c.heads = c.key_heads = c.value_heads = c.gate_heads = heads;
  c.key_dim = key_dim;
  c.value_dim = value_dim;
  return c;
}

DEVICE_TEST("bfloat16, heads of 64") {
  auto c = packed("bfloat16, 64", {0, 5, 5, 70, 210}, 2, 64, 64);
  compare_attention<all, bfloat16>(c, of_bfloat16, {}, true, true);
}

DEVICE_TEST("bfloat16, heads of 128 that share keys, with a past and a gate") {
  auto c = packed("bfloat16, 128", {0, 66, 90}, 2, 128, 96);
  c.key_heads = c.value_heads = 1;
  c.gate = gate_kind::per_token;
  c.capacity = 72;
  c.past = {70, 3};
  c.sink = true;
  compare_attention<all, bfloat16>(c, of_bfloat16);
}

DEVICE_TEST("bfloat16, more channels than a tile holds, rows that cannot be read 16 bytes at a time") {
  auto c = packed("bfloat16, slices", {0, 40}, 1, 136, 140);
  c.padding = 1;
  compare_attention<all, bfloat16>(c, of_bfloat16);
}

DEVICE_TEST("bfloat16, one row with a long past") {
  auto c = packed("bfloat16, one row", {}, 8, 128, 128);
  c.key_heads = c.value_heads = 2;
  c.capacity = 500;
  c.past = {490};
  compare_attention<all, bfloat16>(c, of_bfloat16, {}, false);
}

DEVICE_TEST("float16, a window and a constant gate") {
  auto c = packed("float16", {0, 80}, 2, 32, 24);
  c.window = 50;
  c.gate = gate_kind::constant;
  compare_attention<window, float16>(c, of_float16);
}

DEVICE_TEST("bfloat16, a row that sees one key has its value and no derivative of its score") {
  auto c = packed("one key", {0, 1, 2}, 2, 64, 64);
  auto const x = attention_numbers(c).rounded<bfloat16>();
  auto const got = on_device<all, bfloat16>(c, x);
  check(got.o == x.v, "o is v");
  check(got.d_v == x.d_o, "d_v is d_o");
  bool zero = true;
  for (double d : got.d_q) zero = zero && d == 0;
  for (double d : got.d_k) zero = zero && d == 0;
  check(zero, "d_q and d_k are 0");
}

}  // namespace
