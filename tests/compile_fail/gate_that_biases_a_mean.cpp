// EXPECT: seqmix pairing: the mean of a chunk has no place of its own for a gate to bias; take gates::none, or a selector of tokens
#include <seqmix/gates/alibi.hpp>
#include <seqmix/mixers/native_sparse.hpp>

using namespace seqmix;

#ifdef SEQMIX_TWIN
using tried = attention<selectors::compressed>;
#else
using tried = attention<selectors::compressed, gates::alibi>;
#endif
auto const name = tried::name();
