// EXPECT: seqmix layer: the skip D v reads plain values; take no map of them
#include <seqmix/models/variants.hpp>

using namespace seqmix;

#ifdef SEQMIX_TWIN
using tried = layer<recurrence<states::elementwise, gates::hgrn>, extras{.skip = true}>;
#else
using tried =
    layer<recurrence<states::elementwise, gates::hgrn>, extras{.value_map = activation::silu, .skip = true}>;
#endif
using model = language_model<pattern<tried>>;
static_assert(sizeof(model) > 0);
tried const* used = nullptr;
auto const size = sizeof(tried);
