#pragma once

#include <seqmix/concepts/mixer.hpp>
#include <seqmix/mixers/pairing.hpp>
#include <seqmix/states/delta_rule.hpp>
#include <seqmix/states/diagonal_plus_low_rank.hpp>
#include <seqmix/states/elementwise.hpp>
#include <seqmix/states/exclusive.hpp>
#include <seqmix/states/history.hpp>
#include <seqmix/states/outer_product.hpp>

namespace seqmix::inline v0 {

/// The product of the four policies: attention for `history`, a recurrence for bounded states.
template <class State, class Gate, class Selector>
struct mixer;

}  // namespace seqmix::inline v0

#include <seqmix/mixers/attention.hpp>
#include <seqmix/mixers/recurrence.hpp>
#include <seqmix/mixers/stabilised.hpp>
