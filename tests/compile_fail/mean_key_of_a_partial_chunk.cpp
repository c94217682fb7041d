// EXPECT: seqmix selector: exactly_one with mean_key would average keys of the future in the query's own chunk;
// take
#include <seqmix/selectors/select.hpp>

using namespace seqmix;
#ifdef SEQMIX_TWIN
using chunks = selectors::exactly_one<chunk_score::mean_key_prefix>;
#else
using chunks = selectors::exactly_one<chunk_score::mean_key>;
#endif
auto const name = chunks::name;
