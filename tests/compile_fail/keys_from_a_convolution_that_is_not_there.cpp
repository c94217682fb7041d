// EXPECT: seqmix layer: keys projected from convolved values need a convolution; set extras::conv
#include <seqmix/models/variants.hpp>

using namespace seqmix;

#ifdef SEQMIX_TWIN
using tried = layer<recurrence<states::outer_product, gates::none>,
                    extras{.conv = true, .keys_from = feed_source::convolved}>;
#else
using tried = layer<recurrence<states::outer_product, gates::none>, extras{.keys_from = feed_source::convolved}>;
#endif
using model = language_model<pattern<tried>>;
static_assert(sizeof(model) > 0);
tried const* used = nullptr;
auto const size = sizeof(tried);
