// EXPECT: seqmix layer: gate_before_norm orders an output gate that is not there; set extras::output_gate
#include <seqmix/layers/layer.hpp>

using namespace seqmix;
#ifdef SEQMIX_TWIN
constexpr extras around{.head_norm = output_norm::full_width, .output_gate = true, .gate_before_norm = true};
#else
constexpr extras around{.head_norm = output_norm::full_width, .gate_before_norm = true};
#endif
auto const name = layer<recurrence<states::outer_product, gates::none>, around>::name();
