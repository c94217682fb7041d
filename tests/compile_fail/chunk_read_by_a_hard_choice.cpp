// EXPECT: seqmix pairing: a chosen chunk is read by softmax; take softmax, or top1 over all keys
#include <seqmix/selectors/select.hpp>

using namespace seqmix;
#ifdef SEQMIX_TWIN
using chunks = seqmix::select<selectors::own_plus_top1<>, selectors::softmax>;
#else
using chunks = seqmix::select<selectors::own_plus_top1<>, selectors::top1<>>;
#endif
using half = chunks::which_type;
