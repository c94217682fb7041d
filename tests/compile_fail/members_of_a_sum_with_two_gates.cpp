// EXPECT: seqmix pairing: the members of a gated sum read the same log-decays; give all of them one gate
#include <seqmix/gates/alibi.hpp>
#include <seqmix/mixers/gated_sum.hpp>

using namespace seqmix;

#ifdef SEQMIX_TWIN
using second = attention<selectors::window, gates::alibi>;
#else
using second = attention<selectors::window>;
#endif
using tried = gated_sum<attention<selectors::softmax, gates::alibi>, second>;
static_assert(sizeof(tried) > 0);
