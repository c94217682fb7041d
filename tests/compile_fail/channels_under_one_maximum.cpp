// EXPECT: seqmix pairing: a stabilised state keeps one running maximum per head, so it takes a gate per head
#include <seqmix/gates/mlstm.hpp>
#include <seqmix/models/variants.hpp>

using namespace seqmix;

#ifdef SEQMIX_TWIN
using tried = layer<recurrence<states::mlstm, gates::mlstm>, extras{}>;
#else
using tried = layer<recurrence<states::mlstm, gates::gla>, extras{}>;
#endif
using model = language_model<pattern<tried>>;
static_assert(sizeof(model) > 0);
tried const* used = nullptr;
auto const size = sizeof(tried);
