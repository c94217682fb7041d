// EXPECT: seqmix selector: selected_weight differentiates the weight of the chosen value, which a hard output does
#include <seqmix/selectors/select.hpp>

using namespace seqmix::selectors;
#ifdef SEQMIX_TWIN
using chosen = top1<top1_output::weighted, top1_gradient::selected_weight>;
#else
using chosen = top1<top1_output::hard, top1_gradient::selected_weight>;
#endif
auto const name = chosen::name;
