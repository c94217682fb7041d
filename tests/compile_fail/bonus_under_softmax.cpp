// EXPECT: seqmix layer: an own-token term u (q.k) v belongs to linear weights with queries and keys
#include <seqmix/models/variants.hpp>

using namespace seqmix;

#ifdef SEQMIX_TWIN
using tried = layer<recurrence<states::outer_product, gates::none>, extras{.own = own_token::bonus}>;
#else
using tried = layer<attention<selectors::softmax>, extras{.own = own_token::bonus}>;
#endif
using model = language_model<pattern<tried>>;
static_assert(sizeof(model) > 0);
tried const* used = nullptr;
auto const size = sizeof(tried);
