#pragma once

#include <array>

#include <seqmix/concepts/state.hpp>

namespace seqmix::inline v0::states {

namespace detail {
template <class State>
struct exclusive_name {
  static constexpr std::string_view prefix = "exclusive_";
  static constexpr auto text = [] {
    std::array<char, prefix.size() + State::name.size()> all{};
    std::size_t at = 0;
    for (char c : prefix) all[at++] = c;
    for (char c : State::name) all[at++] = c;
    return all;
  }();
};
}  // namespace detail

/// The same state read before it is written: o_t = scale S_{t-1}' q_t, neither decayed by nor holding token t; an
/// own-token term adds what is missing. Source: RWKV-5 and RWKV-6 (arXiv 2404.05892), which read an outer product
/// so.
template <class State>
struct exclusive : State {
  static_assert(state<State>, "seqmix state: exclusive decorates a type that satisfies seqmix::state");
  static_assert(State::spec.kind != state_kind::history,
                "seqmix state: a history is never read before it is written; take a matrix state");
  static constexpr std::string_view name{detail::exclusive_name<State>::text.data(),
                                         detail::exclusive_name<State>::text.size()};
  static constexpr state_spec spec = [] {
    auto s = State::spec;
    s.read = read_order::exclusive;
    return s;
  }();
};

}  // namespace seqmix::inline v0::states
