#include <cstdint>
#include <type_traits>
#include <utility>

#include <doctest/doctest.h>

#include <seqmix/tensor/arena.hpp>
#include <seqmix/tensor/buffer.hpp>

using namespace seqmix;

namespace {
bool aligned(void const* p) { return reinterpret_cast<std::uintptr_t>(p) % alignment == 0; }

// Three pieces, one of them only for a while: the same function plans and carves.
struct pieces {
  view2<float> a_rc;
  double* scratch = nullptr;
  view1<float> b_c;
};
pieces carve(arena& from) {
  pieces p;
  p.a_rc = from.take_view<float, 2>({3, 5});
  {
    arena_scope const scope(from);
    p.scratch = from.take<double>(100);
  }
  p.b_c = from.take_view<float, 1>({1});
  return p;
}
}  // namespace

DOCTEST_TEST_CASE("buffer: begins on a 64-byte boundary, holds zeros, fills") {
  for (index_t size : {index_t(1), index_t(17), index_t(1000)}) {
    buffer<float> numbers(size);
    DOCTEST_CHECK(aligned(numbers.data()));
    DOCTEST_CHECK(numbers.size() == size);
    DOCTEST_CHECK(numbers.end() - numbers.begin() == size);
    bool zero = true;
    for (float x : numbers) zero = zero && x == 0.0f;
    DOCTEST_CHECK(zero);
    numbers.fill(2.5f);
    DOCTEST_CHECK(numbers[size - 1] == 2.5f);
  }
}

DOCTEST_TEST_CASE("buffer: of size 0 is empty, not an error") {
  buffer<float> const none(0);
  DOCTEST_CHECK(none.data() == nullptr);
  DOCTEST_CHECK(none.begin() == none.end());
  DOCTEST_CHECK(buffer<float>().size() == 0);
}

DOCTEST_TEST_CASE("buffer: moves without copying") {
  static_assert(!std::is_copy_constructible_v<buffer<float>> && !std::is_copy_assignable_v<buffer<float>>);
  static_assert(std::is_nothrow_move_constructible_v<buffer<float>>);
  buffer<float> first(4);
  auto const* const where = first.data();
  buffer<float> second(std::move(first));
  DOCTEST_CHECK(second.data() == where);
  buffer<float> third;
  third = std::move(second);
  DOCTEST_CHECK(third.data() == where);
  DOCTEST_CHECK(third.size() == 4);
}

DOCTEST_TEST_CASE("arena: the plan and the real block give the same pieces, each on a 64-byte boundary") {
  auto plan = arena::measure();
  auto const planned = carve(plan);
  DOCTEST_CHECK(plan.measuring());
  DOCTEST_CHECK(planned.a_rc.data == nullptr);
  DOCTEST_CHECK(planned.a_rc.extent[1] == 5);
  DOCTEST_CHECK(plan.used() == 64 + 64);
  DOCTEST_CHECK(plan.peak() == 64 + 832);  // 100 doubles, rounded up to whole lines

  buffer<std::byte> block(plan.peak());
  arena real(block);
  auto const p = carve(real);
  DOCTEST_CHECK(!real.measuring());
  DOCTEST_CHECK(aligned(p.a_rc.data));
  DOCTEST_CHECK(aligned(p.scratch));
  DOCTEST_CHECK(aligned(p.b_c.data));
  DOCTEST_CHECK(static_cast<void*>(p.b_c.data) == static_cast<void*>(p.scratch));  // the scratch was given back
  DOCTEST_CHECK(real.used() == plan.used());
  DOCTEST_CHECK(real.peak() == plan.peak());
}

DOCTEST_TEST_CASE("arena: taking more than was planned is an error that says how much") {
  buffer<std::byte> block(128);
  arena real(block);
  real.take<float>(16);
  real.take<float>(16);
  DOCTEST_CHECK_THROWS_WITH_AS(
      real.take<float>(1), "seqmix: arena: planned 128 bytes, needs 192; plan again for this shape", shape_error);
  DOCTEST_CHECK(real.used() == 128);  // the failed request took nothing
  DOCTEST_CHECK_NOTHROW(real.take<float>(0));
}
