#include "../support/laws.hpp"
#include <seqmix/gates/constant.hpp>
#include <seqmix/gates/mamba2.hpp>
#include <seqmix/mixers/attention.hpp>
#include <seqmix/mixers/recurrence.hpp>

// P-S6 and P-U2: which views a mixer takes, and what it says of those it does not take.

namespace {

using namespace seqmix;
using namespace seqmix::testing;
using doctest::Contains;

constexpr index_t R = 40, H = 2, K = 5, V = 3, W = 40;  // W: columns of a wide row

mixer_shape shape() {
  mixer_shape s;
  s.seq = sequences::batch(2, R / 2);
  s.heads = s.query_heads = s.key_heads = s.value_heads = s.gate_heads = H;
  s.key_dim = K;
  s.value_dim = V;
  s.chunk = 8;
  s.capacity = R;
  return s;
}
/// [R,H,C] inside rows of W numbers.
template <class T>
view3<T> block(std::vector<std::remove_const_t<T>>& rows, index_t column, index_t channels) {
  return as_heads(view2<T>(rows.data() + column, {R, H * channels}, {W, 1}), H, channels);
}
template <class T>
view3<T const> constant(view3<T> x) {
  return x;
}
/// The same extents, the last axis with stride 2.
template <class T>
view3<T> spread(view3<T> x) {
  x.stride = {2 * x.extent[1] * x.extent[2], 2 * x.extent[2], 2};
  return x;
}

template <class M>
struct views {
  mixer_shape s = shape();
  mixer_numbers<double> x = random_mixer_numbers<M>(s, 81), d = x;
  std::vector<double> o = std::vector<double>(2 * R * H * V), d_o = random_vector(2 * R * H * V, 82), room = o;
  mixer_input<double> in = input_of<M>(s, x);
  mixer_gradient<double> dx = gradient_of<M>(s, d);
  view3<double> out{o.data(), {R, H, V}};
  view3<double const> d_out{d_o.data(), {R, H, V}};
  buffer<std::byte> saved_block;
  arena ws = arena::growing();

  void run() {
    auto plan = arena::measure();
    M::template saved<double>::template carve<cpu_device::isa>(plan, s);
    saved_block = buffer<std::byte>(plan.used());
    arena pieces(saved_block);
    auto const keep = M::template saved<double>::template carve<cpu_device::isa>(pieces, s);
    M::forward(cpu_device{2}, s, in, out, nullptr, nullptr, &keep, ws);
    M::backward(cpu_device{2}, s, in, constant(out), keep, d_out, nullptr, nullptr, dx, nullptr, ws);
  }
};

template <class M>
void check_blocks() {
  views<M> packed;
  packed.run();
  views<M> inside;
  std::vector<double> rows(std::size_t(R * W), -7.0), d_rows(rows), out_rows(rows), d_out_rows(rows);
  auto const copy = [](view3<double const> from, view3<double> to) {
    for (index_t r = 0; r < R; ++r)
      for (index_t h = 0; h < H; ++h)
        for (index_t c = 0; c < from.extent[2]; ++c) to(r, h, c) = from(r, h, c);
  };
  copy(inside.in.q_rhk, block<double>(rows, 1, K)), copy(inside.in.k_rhk, block<double>(rows, 12, K));
  copy(inside.in.v_rhv, block<double>(rows, 23, V)), copy(inside.d_out, block<double>(d_out_rows, 3, V));
  inside.in.q_rhk = block<double>(rows, 1, K), inside.in.k_rhk = block<double>(rows, 12, K);
  inside.in.v_rhv = block<double>(rows, 23, V), inside.d_out = block<double>(d_out_rows, 3, V);
  inside.dx.q_rhk = block<double>(d_rows, 1, K), inside.dx.k_rhk = block<double>(d_rows, 12, K);
  inside.dx.v_rhv = block<double>(d_rows, 23, V), inside.out = block<double>(out_rows, 9, V);
  inside.run();
  index_t different = 0;
  auto const compare = [&](auto const& a, auto const& b) {
    for (index_t r = 0; r < R; ++r)
      for (index_t h = 0; h < H; ++h)
        for (index_t c = 0; c < a.extent[2]; ++c) different += a(r, h, c) == b(r, h, c) ? 0 : 1;
  };
  compare(inside.out, packed.out), compare(inside.dx.q_rhk, packed.dx.q_rhk),
      compare(inside.dx.k_rhk, packed.dx.k_rhk);
  compare(inside.dx.v_rhv, packed.dx.v_rhv);
  DOCTEST_CHECK(different == 0);
  DOCTEST_CHECK(same_bits(inside.d.g, packed.d.g));
  // Nothing beside the blocks was touched.
  for (index_t r = 0; r < R; ++r)
    for (index_t c = 0; c < W; ++c) {
      if (c < 9 || c >= 9 + H * V) DOCTEST_REQUIRE(out_rows[std::size_t(r * W + c)] == -7.0);
      bool const of_block = (c >= 1 && c < 11) || (c >= 12 && c < 22) || (c >= 23 && c < 29);
      if (!of_block) DOCTEST_REQUIRE(d_rows[std::size_t(r * W + c)] == -7.0);
    }

  // An upstream gradient that is one row for all tokens.
  views<M> broadcast, repeated;
  for (index_t r = 0; r < R; ++r) std::copy_n(broadcast.d_o.data(), H * V, repeated.d_o.data() + r * H * V);
  broadcast.d_out.stride[0] = 0;
  broadcast.run(), repeated.run();
  DOCTEST_CHECK(same_bits(broadcast.d, repeated.d));
}

template <class M>
void check_refusals() {
  auto const refused = [](auto const& change, std::string const& what) {
    views<M> v;
    change(v);
    DOCTEST_CAPTURE(what);
    DOCTEST_CHECK_THROWS_WITH_AS(v.run(), Contains(what.c_str()), shape_error);
  };
  // Inner strides other than 1 are refused rather than misread.
  refused([](auto& v) { v.in.q_rhk = spread(v.in.q_rhk); }, "must be contiguous, its stride is 2");
  refused([](auto& v) { v.in.k_rhk = spread(v.in.k_rhk); }, "must be contiguous, its stride is 2");
  refused([](auto& v) { v.in.v_rhv = spread(v.in.v_rhv); }, "must be contiguous, its stride is 2");
  refused([](auto& v) { v.d_out = spread(v.d_out); }, "must be contiguous, its stride is 2");
  refused([](auto& v) { v.d_out.stride = {0, 0, 0}; }, "must be contiguous, its stride is 0");
  refused([](auto& v) { v.out = spread(v.out); }, "must be contiguous, its stride is 2");
  // Sizes: the argument, the expected and the actual one.
  refused([](auto& v) { v.in.q_rhk.extent[1] = 3; }, "query q: expected [40,2,5], got [40,3,5]");
  refused([](auto& v) { v.in.k_rhk.extent[2] = 4; }, "key k: expected [40,2,5], got [40,2,4]");
  refused([](auto& v) { v.in.v_rhv.extent[0] = 39; }, "value v: expected [40,2,3], got [39,2,3]");
  refused([](auto& v) { v.s.value_heads = 3; }, "value_heads");
  refused([](auto& v) { v.out.extent[2] = 2; }, "expected [40,2,3], got [40,2,2]");
  refused([](auto& v) { v.d_out.extent[0] = 7; }, "expected [40,2,3], got [7,2,3]");
}

}  // namespace

DOCTEST_TEST_CASE_TEMPLATE("P-S6: blocks of a wider row and a broadcast gradient give the bits of dense views", M,
                           attention<>, attention<selectors::linear, gates::constant>,
                           attention<selectors::top1_element<>>,
                           recurrence<states::outer_product, gates::constant>) {
  check_blocks<M>();
}

DOCTEST_TEST_CASE("P-S6, P-U2: attention refuses views it cannot read, naming argument and sizes") {
  check_refusals<attention<>>();
}

DOCTEST_TEST_CASE("P-S6, P-U2: a recurrence refuses views it cannot read, naming argument and sizes") {
  check_refusals<recurrence<states::outer_product, gates::constant>>();
}

DOCTEST_TEST_CASE("P-U2: a state of the wrong shape is refused, naming it and both shapes") {
  using M = recurrence<states::outer_product, gates::constant>;
  auto const s = shape();
  auto other = s;
  other.key_dim = 4;
  mixer_memory<M, double> before(other);
  auto const x = random_mixer_numbers<M>(s, 83);
  DOCTEST_CHECK_THROWS_WITH_AS((mixer_machine<M, double>(s).forward(x, &before)),
                               Contains("initial state: expected [2,2,5,3], got [2,2,4,3]"), shape_error);
  mixer_memory<M, double> after(other);
  DOCTEST_CHECK_THROWS_WITH_AS((mixer_machine<M, double>(s).forward(x, nullptr, &after)),
                               Contains("expected [2,2,5,3], got [2,2,4,3]"), shape_error);
}

DOCTEST_TEST_CASE("P-U2: a cache of the wrong shape is refused, naming what is wrong") {
  using M = attention<>;
  auto const s = shape();
  auto const x = random_mixer_numbers<M>(s, 84);
  auto other = s;
  other.key_dim = 4;
  mixer_memory<M, double> before(other), after(other);
  DOCTEST_CHECK_THROWS_WITH_AS((mixer_machine<M, double>(s).forward(x, &before)), Contains("key"), shape_error);
  DOCTEST_CHECK_THROWS_WITH_AS((mixer_machine<M, double>(s).forward(x, nullptr, &after)), Contains("key"),
                               shape_error);
}
