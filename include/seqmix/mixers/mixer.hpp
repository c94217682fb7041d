#pragma once

#include <seqmix/concepts/mixer.hpp>
#include <seqmix/selectors/select.hpp>
#include <seqmix/states/delta_rule.hpp>
#include <seqmix/states/diagonal_plus_low_rank.hpp>
#include <seqmix/states/elementwise.hpp>
#include <seqmix/states/exclusive.hpp>
#include <seqmix/states/history.hpp>
#include <seqmix/states/outer_product.hpp>

namespace seqmix::inline v0 {

namespace mixer_detail {

/// One sentence for every cell of state x gate x selector that makes no sense.
template <class State, class Gate, class Selector>
consteval bool pairs() {
  static_assert(state<State>, "seqmix mixer: the first policy must satisfy seqmix::state");
  static_assert(
      gate<Gate>,
      "seqmix mixer: the second policy must satisfy seqmix::gate; explain_gate<G>() says what is missing");
  static_assert(selector<Selector>, "seqmix mixer: the third policy must be a seqmix::select or one of its halves");
  constexpr bool history = State::spec.kind == state_kind::history;
  using which_type = typename Selector::which_type;
  using how_type = typename Selector::how_type;
  static_assert(history || how_type::spec.multiplies_decay,
                "seqmix pairing: a matrix state keeps no single keys, so nothing can be selected from it; take "
                "selectors::linear, or states::history for softmax, top1 and chunks");
  static_assert(
      history || (which_type::spec.full_sequence && !which_type::spec.routed),
      "seqmix pairing: a matrix state cannot be read through a window or by chunks; take states::history, or let "
      "a gate forget");
  static_assert(!history || Gate::spec.decay == axis::head || !Gate::spec.decays,
                "seqmix pairing: a per-channel gate is no score bias; take a per-head gate or outer_product");
  static_assert(State::spec.kind == state_kind::stabilised || !Gate::spec.log_write,
                "seqmix pairing: a gate whose write scale is a logarithm needs a state kept relative to a running "
                "maximum; take states::mlstm or states::wkv, or a gate that writes plain numbers");
  return true;
}

}  // namespace mixer_detail

/// The product of the four policies: attention for `history`, a recurrence for bounded states.
template <class State, class Gate, class Selector>
struct mixer;

}  // namespace seqmix::inline v0

#include <seqmix/mixers/attention.hpp>
#include <seqmix/mixers/recurrence.hpp>
#include <seqmix/mixers/stabilised.hpp>
