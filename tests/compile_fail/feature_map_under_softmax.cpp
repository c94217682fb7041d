// EXPECT: seqmix layer: feature maps stand for a softmax; take them with linear weights
#include <seqmix/models/variants.hpp>

using namespace seqmix;

#ifdef SEQMIX_TWIN
using tried = layer<recurrence<states::outer_product, gates::none>, extras{.features = feature_map::taylor}>;
#else
using tried = layer<attention<selectors::softmax>, extras{.features = feature_map::taylor}>;
#endif
using model = language_model<pattern<tried>>;
static_assert(sizeof(model) > 0);
tried const* used = nullptr;
auto const size = sizeof(tried);
