// EXPECT: seqmix layer: this state has no queries and keys to map, rotate or replace
#include <seqmix/models/variants.hpp>

using namespace seqmix;

#ifdef SEQMIX_TWIN
using tried = layer<recurrence<states::outer_product, gates::hgrn>, extras{.rope = true}>;
#else
using tried = layer<recurrence<states::elementwise, gates::hgrn>, extras{.rope = true}>;
#endif
using model = language_model<pattern<tried>>;
static_assert(sizeof(model) > 0);
tried const* used = nullptr;
auto const size = sizeof(tried);
