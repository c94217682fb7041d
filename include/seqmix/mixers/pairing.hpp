#pragma once

#include <seqmix/concepts/gate.hpp>
#include <seqmix/concepts/state.hpp>
#include <seqmix/selectors/select.hpp>

/// Which cells of state x gate x selector make sense. The rules stand here once: as facts for a program (`pairs_v`,
/// `misfit_of`), and as sentences that the compiler prints when a mixer breaks one (`explain_pairing`).
namespace seqmix::inline v0 {

/// The first rule that a cell breaks.
enum class misfit {
  none,                     ///< it makes sense
  not_a_state,              ///< the first policy is no seqmix::state
  not_a_gate,               ///< the second is no seqmix::gate
  not_a_selector,           ///< the third is no seqmix::select, nor one of its halves
  hard_choice_in_chunks,    ///< chosen chunks are read by softmax; select<> says so itself
  choice_from_a_matrix,     ///< softmax, top1, top-k over a state that keeps no single keys
  part_of_a_matrix,         ///< a window or chunks of such a state
  channel_bias,             ///< a decay per key channel as score bias; linear weights decay each product instead
  bias_on_a_mean,           ///< a decay as bias of a whole chunk's mean
  unstabilised_logarithm,   ///< a logarithmic write scale without a running maximum
  channels_of_one_maximum,  ///< a decay per key channel under one running maximum a head
  plain_write_to_weights    ///< a plain write scale where the state is written with e^write
};

namespace mixer_detail {

/// The halves of a selector, also of one that select<> itself refuses: it is taken apart, never looked into.
template <class S>
struct completed_half {};
template <how H>
struct completed_half<H> {
  using which_type = selectors::all;
  using how_type = H;
};
template <which W>
struct completed_half<W> {
  using which_type = W;
  using how_type = selectors::softmax;
};
template <class S>
struct halves : completed_half<S> {};
template <class Which, class How>
struct halves<select<Which, How>> {
  using which_type = Which;
  using how_type = How;
};
template <class S>
concept is_selector = which<typename halves<S>::which_type> && how<typename halves<S>::how_type>;

template <state State, gate Gate, is_selector Selector>
struct rules {
  using which_type = typename halves<Selector>::which_type;
  using how_type = typename halves<Selector>::how_type;
  static constexpr state_spec state = State::spec;
  static constexpr gate_spec gate = Gate::spec;
  static constexpr which_spec which = which_type::spec;
  static constexpr how_spec how = how_type::spec;
  static constexpr bool history = state.kind == state_kind::history;
  static constexpr bool stabilised = state.kind == state_kind::stabilised;
  static constexpr bool per_channel = gate.decays && gate.decay != axis::head;

  static constexpr bool breaks(misfit rule) {
    switch (rule) {
    case misfit::hard_choice_in_chunks:
      return which.routed && (how.hard || how.multiplies_decay);
    case misfit::choice_from_a_matrix:
      return !history && !how.multiplies_decay;
    case misfit::part_of_a_matrix:
      return !history && (!which.full_sequence || which.routed);
    case misfit::channel_bias:
      return history && per_channel && !how.multiplies_decay;
    case misfit::bias_on_a_mean:
      return history && which.compressed && gate.decays;
    case misfit::unstabilised_logarithm:
      return !stabilised && gate.log_write;
    case misfit::channels_of_one_maximum:
      return stabilised && per_channel;
    case misfit::plain_write_to_weights:
      return stabilised && gate.writes && !gate.log_write;
    default:
      return false;
    }
  }
};

template <class State, class Gate, class Selector>
consteval misfit first_misfit() {
  if constexpr (!state<State>) {
    return misfit::not_a_state;
  } else if constexpr (!gate<Gate>) {
    return misfit::not_a_gate;
  } else if constexpr (!is_selector<Selector>) {
    return misfit::not_a_selector;
  } else {
    for (int rule = int(misfit::hard_choice_in_chunks); rule <= int(misfit::plain_write_to_weights); ++rule)
      if (rules<State, Gate, Selector>::breaks(misfit(rule))) return misfit(rule);
    return misfit::none;
  }
}

}  // namespace mixer_detail

/// Why state x gate x selector makes no sense, misfit::none if it does. The selector may be a half (`as_selector`).
/// Nothing is instantiated beyond the policies themselves, so asking is never an error.
template <class State, class Gate, class Selector>
inline constexpr misfit misfit_of = mixer_detail::first_misfit<State, Gate, Selector>();

/// Whether `mixer<State, Gate, selectors::as_selector<Selector>>` compiles.
template <class State, class Gate, class Selector>
inline constexpr bool pairs_v = misfit_of<State, Gate, Selector> == misfit::none;

/// The same in prose: one sentence for every rule that the cell breaks, as an error of the compiler.
template <class State, class Gate, class Selector>
consteval bool explain_pairing() {
  static_assert(state<State>, "seqmix mixer: the first policy must satisfy seqmix::state");
  static_assert(
      gate<Gate>,
      "seqmix mixer: the second policy must satisfy seqmix::gate; explain_gate<G>() says what is missing");
  static_assert(mixer_detail::is_selector<Selector>,
                "seqmix mixer: the third policy must be a seqmix::select or one of its halves");
  using rules = mixer_detail::rules<State, Gate, Selector>;
  static_assert(!rules::breaks(misfit::choice_from_a_matrix),
                "seqmix pairing: a matrix state keeps no single keys, so nothing can be selected from it; take "
                "selectors::linear, or states::history for softmax, top1 and chunks");
  static_assert(
      !rules::breaks(misfit::part_of_a_matrix),
      "seqmix pairing: a matrix state cannot be read through a window or by chunks; take states::history, or let "
      "a gate forget");
  static_assert(!rules::breaks(misfit::channel_bias),
                "seqmix pairing: a per-channel gate is no score bias; take a per-head gate or outer_product");
  static_assert(
      !rules::breaks(misfit::bias_on_a_mean),
      "seqmix pairing: the mean of a chunk has no place of its own for a gate to bias; take gates::none, or "
      "a selector of tokens");
  static_assert(!rules::breaks(misfit::unstabilised_logarithm),
                "seqmix pairing: a gate whose write scale is a logarithm needs a state kept relative to a running "
                "maximum; take states::mlstm or states::wkv, or a gate that writes plain numbers");
  static_assert(
      !rules::breaks(misfit::channels_of_one_maximum),
      "seqmix pairing: a stabilised state keeps one running maximum per head, so it takes a gate per head; "
      "for a decay per channel take outer_product, or wkv with one head per channel");
  static_assert(!rules::breaks(misfit::plain_write_to_weights),
                "seqmix pairing: a stabilised state is written with weights e^write; take a gate whose write scale "
                "is a logarithm, or one without a write scale");
  return true;
}

}  // namespace seqmix::inline v0
