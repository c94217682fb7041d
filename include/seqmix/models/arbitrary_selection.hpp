#pragma once

#include <seqmix/layers/parallel_block.hpp>
#include <seqmix/models/language_model.hpp>

namespace seqmix::inline v0 {

/// Our reading of the base-capability principle (Lu et al., arXiv 2505.18522): an architecture keeps its base
/// capability when any token of the whole sequence can be selected. Three parts, known at compile time:
struct selection_parts {
  bool full_sequence;  ///< every j <= t can receive weight at any distance: no window, no fixed decay
  bool relations;      ///< scores come from the query and the real keys
  bool non_uniform;    ///< weights can gather on few tokens: softmax, top-1, top-k
  constexpr bool all() const noexcept { return full_sequence && relations && non_uniform; }
};

template <mixer_type M>
inline constexpr selection_parts selection_parts_of{
    .full_sequence = M::state_type::spec.kind == state_kind::history &&
                     M::selector_type::which_type::spec.full_sequence && !M::gate_type::spec.constant(),
    .relations = M::state_type::spec.kind == state_kind::history,
    .non_uniform = M::selector_type::how_type::spec.non_uniform};

/// True for full attention, Top-1 element and chunk selection; false for bounded states, windows and fixed decays.
template <mixer_type M>
inline constexpr bool arbitrary_selection = selection_parts_of<M>.all();

/// A layer has it if its mixer does and its keys are made from the tokens; a block, a parallel block or a pattern
/// if any of its layers does.
template <class L>
inline constexpr bool layer_selects_arbitrarily = false;
template <class M, extras E>
inline constexpr bool layer_selects_arbitrarily<layer<M, E>> = arbitrary_selection<M> &&
                                                               (E.keys == key_source::projected ||
                                                                E.keys == key_source::one_minus_decay);
template <class... L>
inline constexpr bool layer_selects_arbitrarily<block<L...>> = (layer_selects_arbitrarily<L> || ...);
template <class... L>
inline constexpr bool layer_selects_arbitrarily<parallel_block<L...>> = (layer_selects_arbitrarily<L> || ...);
template <class... L>
inline constexpr bool layer_selects_arbitrarily<pattern<L...>> = (layer_selects_arbitrarily<L> || ...);

}  // namespace seqmix::inline v0
