// EXPECT: seqmix layer: this gate reads the convolved values, so the layer needs a convolution; set extras::conv
#include <seqmix/models/variants.hpp>

using namespace seqmix;

#ifdef SEQMIX_TWIN
using tried = layer<recurrence<states::elementwise, gates::rg_lru>, extras{.conv = true}>;
#else
using tried = layer<recurrence<states::elementwise, gates::rg_lru>, extras{}>;
#endif
using model = language_model<pattern<tried>>;
static_assert(sizeof(model) > 0);
tried const* used = nullptr;
auto const size = sizeof(tried);
