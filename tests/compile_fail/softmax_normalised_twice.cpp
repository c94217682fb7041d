// EXPECT: seqmix layer: softmax weights have sum 1 already; normalise is for linear weights
#include <seqmix/models/variants.hpp>

using namespace seqmix;

#ifdef SEQMIX_TWIN
using tried = layer<attention<selectors::linear>, extras{.normalise = true}>;
#else
using tried = layer<attention<selectors::softmax>, extras{.normalise = true}>;
#endif
using model = language_model<pattern<tried>>;
static_assert(sizeof(model) > 0);
tried const* used = nullptr;
auto const size = sizeof(tried);
