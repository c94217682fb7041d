// EXPECT: seqmix layer: keys 1 - e^g need a gate with a decay per key channel; take gates::hgrn2
#include <seqmix/models/variants.hpp>

using namespace seqmix;

#ifdef SEQMIX_TWIN
using tried = layer<recurrence<states::outer_product, gates::hgrn2>, extras{.keys = key_source::one_minus_decay}>;
#else
using tried = layer<recurrence<states::outer_product, gates::mamba2>, extras{.keys = key_source::one_minus_decay}>;
#endif
using model = language_model<pattern<tried>>;
static_assert(sizeof(model) > 0);
tried const* used = nullptr;
auto const size = sizeof(tried);
