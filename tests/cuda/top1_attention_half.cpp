#include "top1_attention.hpp"

namespace {

using namespace seqmix;
using namespace seqmix::testing;
using selectors::all;
using selectors::window;
using enum selectors::top1_output;
using enum selectors::top1_gradient;

// Both sides read the same rounded numbers. With u the rounding of one number: outputs are rounded once;
// derivatives have rounded weights and derivatives of scores and are rounded, each a few u of a sum of absolute
// values, which is some times its largest result.
constexpr double u_of_bfloat16 = 1.0 / 512, u_of_float16 = 1.0 / 4096;
constexpr attention_tolerance of_bfloat16{2 * u_of_bfloat16, 8 * u_of_bfloat16};
constexpr attention_tolerance of_float16{2 * u_of_float16, 8 * u_of_float16};

auto const hard_st = top1_kernels<bfloat16>::of<all, hard, straight_through>();
auto const weighted_sel = top1_kernels<bfloat16>::of<all, weighted, selected_weight>();
auto const window_st = top1_kernels<float16>::of<window, hard, straight_through>();

DEVICE_TEST("bfloat16, heads of 64") {
  auto c = packed_setting("bfloat16, 64", {0, 5, 5, 70, 210}, 2, 64, 64);
  compare_top1(hard_st, c, of_bfloat16);
  c.offsets = {0, 70};
  compare_top1(weighted_sel, c, of_bfloat16, {2.0, 0.7});
}

DEVICE_TEST("bfloat16, heads of 128 that share keys, with a past and a gate") {
  auto c = packed_setting("bfloat16, 128", {0, 66, 90}, 2, 128, 96);
  c.key_heads = c.value_heads = 1;
  c.gate = gate_kind::per_token;
  c.capacity = 72;
  c.past = {70, 3};
  compare_top1(hard_st, c, of_bfloat16);
  compare_top1(weighted_sel, c, of_bfloat16, {0.5, 1.0}, false);
}

DEVICE_TEST("bfloat16, more channels than a tile holds, rows that cannot be read 16 bytes at a time") {
  auto c = packed_setting("bfloat16, slices", {0, 40}, 1, 136, 140);
  c.padding = 1;
  for (auto const& f : {hard_st, weighted_sel}) compare_top1(f, c, of_bfloat16);
}

DEVICE_TEST("bfloat16, one row with a long past") {
  auto c = packed_setting("bfloat16, one row", {}, 8, 128, 128);
  c.key_heads = c.value_heads = 2;
  c.capacity = 500;
  c.past = {490};
  for (auto const& f : {hard_st, weighted_sel}) compare_top1(f, c, of_bfloat16, {}, false);
}

DEVICE_TEST("float16, a window and a constant gate") {
  auto c = packed_setting("float16", {0, 80}, 2, 32, 24);
  c.window = 50;
  c.gate = gate_kind::constant;
  compare_top1(window_st, c, of_float16);
  compare_top1(window_st, c, of_float16, {0.5, 0.6});
  compare_top1(window_st, c, of_float16, {}, false);
}

DEVICE_TEST("bfloat16, equal keys tie wherever they stand, and a sequence chooses as its tokens do one by one") {
  auto c = batch_setting("ties", 1, 150, 2, 80, 32);
  c.key_heads = 1;
  auto x = attention_numbers(c).rounded<bfloat16>();
  index_t const width = c.key_dim;
  attention_random random(5);
  for (index_t t = 7; t < c.length; ++t) {
    auto const from = index_t((random.next() + 1) / 2 * 7);
    std::copy_n(x.k.begin() + from * width, width, x.k.begin() + t * width);
  }
  auto const whole = hard_st.device(c, {}, x, false);
  for (index_t choice : whole.choice) check(choice < 7, "the first of equal keys");
  check(hard_st.oracle(c, {}, x, false).choice == whole.choice, "by definition");
  check(hard_st.device(c, {}, x, true).choice == whole.choice, "with a surrogate");
  std::vector<index_t> const steps{0, 5, 63, 64, 65, 127, 128, 149};
  auto const one_by_one = top1_by_steps<all, top1<hard, straight_through>, bfloat16>(c, {}, x, steps);
  for (index_t t : steps)
    for (std::size_t h = 0; h < 2; ++h) {
      auto const at = std::size_t(t) * 2 + h;
      check(one_by_one.choice[at] == whole.choice[at], "split keys, position " + std::to_string(t));
      bool same = true;
      for (std::size_t i = 0; i < 32; ++i) same = same && one_by_one.o[at * 32 + i] == whole.o[at * 32 + i];
      check(same, "split keys, output at " + std::to_string(t));
    }
}

DEVICE_TEST("bfloat16, a row that sees one key has its value and no derivative of its score") {
  auto c = packed_setting("one key", {0, 1, 2}, 2, 64, 64);
  auto const x = attention_numbers(c).rounded<bfloat16>();
  for (auto const& f : {hard_st, weighted_sel}) {
    auto const got = f.device(c, {}, x, true);
    check(got.o == x.v, f.name + ": o is v");
    check(got.d_v == x.d_o, f.name + ": d_v is d_o");
    bool zero = true;
    for (double d : got.d_q) zero = zero && d == 0;
    for (double d : got.d_k) zero = zero && d == 0;
    check(zero, f.name + ": d_q and d_k are 0");
  }
}

}  // namespace
