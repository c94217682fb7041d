// EXPECT: seqmix layer: a state that takes the vectors a and b of each token needs extras::removal_keys
#include <seqmix/models/variants.hpp>

using namespace seqmix;

#ifdef SEQMIX_TWIN
using tried = layer<recurrence<states::diagonal_plus_low_rank, gates::rwkv7>, extras{.removal_keys = true}>;
#else
using tried = layer<recurrence<states::delta_rule, gates::rwkv7>, extras{.removal_keys = true}>;
#endif
using model = language_model<pattern<tried>>;
static_assert(sizeof(model) > 0);
tried const* used = nullptr;
auto const size = sizeof(tried);
