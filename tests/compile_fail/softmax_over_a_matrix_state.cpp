// EXPECT: seqmix pairing: a matrix state keeps no single keys, so nothing can be selected from it; take
#include <seqmix/mixers/mixer.hpp>

using namespace seqmix;
#ifdef SEQMIX_TWIN
using reading = selectors::as_selector<selectors::linear>;
#else
using reading = selectors::as_selector<selectors::softmax>;
#endif
auto const name = mixer<states::outer_product, gates::none, reading>::name();
