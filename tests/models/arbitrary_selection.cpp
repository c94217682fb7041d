#include <doctest/doctest.h>

#include <seqmix/models/arbitrary_selection.hpp>
#include <seqmix/models/variants.hpp>

// The expected value of the trait, and of its three parts, for every named architecture.

namespace {

using namespace seqmix;
namespace v = seqmix::variants;

template <class L>
struct mixer_of;
template <class M, extras E>
struct mixer_of<layer<M, E>> {
  using type = M;
};
template <class First, class... Rest>
struct mixer_of<block<First, Rest...>> : mixer_of<First> {};
template <class First, class... Rest>
struct mixer_of<parallel_block<First, Rest...>> : mixer_of<First> {};

template <class L>
consteval bool parts_are(bool full_sequence, bool relations, bool non_uniform) {
  constexpr auto p = selection_parts_of<typename mixer_of<L>::type>;
  return p.full_sequence == full_sequence && p.relations == relations && p.non_uniform == non_uniform &&
         layer_selects_arbitrarily<L> == (full_sequence && relations && non_uniform);
}

// Everything can be selected.
static_assert(parts_are<v::transformer_pp>(true, true, true));
static_assert(parts_are<v::gpt_neox>(true, true, true));
static_assert(parts_are<v::fox>(true, true, true));
static_assert(parts_are<v::moba>(true, true, true));
static_assert(parts_are<v::nsa>(true, true, true));
static_assert(parts_are<v::top1_element>(true, true, true));
static_assert(parts_are<v::top1_chunk>(true, true, true));
// A window or a fixed decay bounds the reach.
static_assert(parts_are<v::sliding_window>(false, true, true));
static_assert(parts_are<v::alibi>(false, true, true));
// Bounded states keep no keys.
template <class... L>
consteval bool bounded() {
  return (parts_are<L>(false, false, false) && ...);
}
static_assert(bounded<v::linear_attention, v::normalised_linear_attention, v::retnet, v::gla, v::hgrn, v::hgrn2,
                      v::mamba1, v::mamba2>());
static_assert(bounded<v::deltanet, v::gated_deltanet, v::kda, v::kda_bounded>());
static_assert(bounded<v::rwkv4, v::rwkv5, v::rwkv6, v::rwkv7, v::rg_lru, v::min_gru, v::min_lstm>());
static_assert(!layer_selects_arbitrarily<v::mamba3> && !layer_selects_arbitrarily<v::mlstm> &&
              !layer_selects_arbitrarily<v::slstm> && !layer_selects_arbitrarily<v::s4d>);
// A model has it if any layer does.
static_assert(layer_selects_arbitrarily<v::hybrid> && !layer_selects_arbitrarily<v::griffin>);
// Keys that say nothing of the tokens give no relations.
template <key_source Keys>
using ablated = layer<attention<>, extras{.keys = Keys}>;
static_assert(layer_selects_arbitrarily<ablated<key_source::projected>>);
static_assert(!layer_selects_arbitrarily<ablated<key_source::random_positions>> &&
              !layer_selects_arbitrarily<ablated<key_source::random_head>> &&
              !layer_selects_arbitrarily<ablated<key_source::trained_positions>>);

}  // namespace

DOCTEST_TEST_CASE("arbitrary selection and its parts have the expected value for every architecture") {
  DOCTEST_CHECK(layer_selects_arbitrarily<v::transformer_pp>);
  DOCTEST_CHECK(!layer_selects_arbitrarily<v::mamba2>);
}
