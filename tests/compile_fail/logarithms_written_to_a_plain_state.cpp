// EXPECT: seqmix pairing: a gate whose write scale is a logarithm needs a state kept relative to a running maximum
#include <seqmix/gates/mlstm.hpp>
#include <seqmix/models/variants.hpp>

using namespace seqmix;

#ifdef SEQMIX_TWIN
using tried = layer<recurrence<states::mlstm, gates::mlstm>, extras{}>;
#else
using tried = layer<recurrence<states::outer_product, gates::mlstm>, extras{}>;
#endif
using model = language_model<pattern<tried>>;
static_assert(sizeof(model) > 0);
tried const* used = nullptr;
auto const size = sizeof(tried);
