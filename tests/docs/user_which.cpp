#include "../support/laws.hpp"
#include <seqmix/mixers/mixer.hpp>
#include <seqmix/models/arbitrary_selection.hpp>

// The visible keys of docs/adding-a-policy.md.

namespace {

using namespace seqmix;
using namespace seqmix::testing;

// [doc:which]
/// The first four tokens of the sequence, and the last `selection::window` ones.
struct sink_and_window {
  static constexpr std::string_view name = "sink_and_window";
  static constexpr which_spec spec{.full_sequence = false};
  static constexpr key_ranges blocks(index_t query, index_t, selection const& s) noexcept {
    index_t const near = query - s.window + 1 > 0 ? query - s.window + 1 : 0;
    key_ranges seen;
    seen.add({0, near < 4 ? near : 4});
    seen.add({near, query + 1});
    return seen;
  }
};
static_assert(which<sink_and_window>);
using sink_attention = attention<sink_and_window>;  // select<sink_and_window, selectors::softmax>
// [/doc:which]
static_assert(std::is_same_v<sink_attention::selector_type, seqmix::select<sink_and_window, selectors::softmax>>);
static_assert(!arbitrary_selection<sink_attention>);

}  // namespace

// [doc:which-test]
DOCTEST_TEST_CASE(
    "a user's visible keys: causality, cuts, packed sequences, threads, and the reference's gradients") {
  check_laws<sink_attention>();
  check_laws<attention<seqmix::select<sink_and_window, selectors::top1<>>>>();
}
// [/doc:which-test]

DOCTEST_TEST_CASE("a user's visible keys are the first four and the window, each once") {
  for (index_t query = 0; query < 30; ++query)
    for (index_t key = 0; key < 32; ++key) {
      bool const expected = key <= query && (key < 4 || query - key < 5);
      DOCTEST_CHECK(sink_and_window::blocks(query, -1, {.window = 5}).contains(key) == expected);
    }
  DOCTEST_CHECK(sink_and_window::blocks(20, -1, {.window = 5}).size() == 9);
}
