// EXPECT: seqmix pairing: a matrix state cannot be read through a window or by chunks
#include <seqmix/mixers/mixer.hpp>

using namespace seqmix;
#ifdef SEQMIX_TWIN
using remembered = states::history;
#else
using remembered = states::outer_product;
#endif
auto const name = mixer<remembered, gates::none, seqmix::select<selectors::window, selectors::linear>>::name();
