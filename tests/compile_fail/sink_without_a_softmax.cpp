// EXPECT: seqmix layer: a sink joins the denominator of a softmax; linear weights have none
#include <seqmix/models/variants.hpp>

using namespace seqmix;

#ifdef SEQMIX_TWIN
using tried = layer<attention<selectors::softmax>, extras{.sink = true}>;
#else
using tried = layer<attention<selectors::linear>, extras{.sink = true}>;
#endif
using model = language_model<pattern<tried>>;
static_assert(sizeof(model) > 0);
tried const* used = nullptr;
auto const size = sizeof(tried);
