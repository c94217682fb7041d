// EXPECT: seqmix layer: gate_before_norm is Mamba-2's order: a SiLU gate in front of an RMS norm
#include <seqmix/models/variants.hpp>

using namespace seqmix;

#ifdef SEQMIX_TWIN
using tried = layer<recurrence<states::outer_product, gates::none>,
                    extras{.head_norm = output_norm::per_head, .output_gate = true, .gate_before_norm = true}>;
#else
using tried = layer<recurrence<states::outer_product, gates::none>, extras{.head_norm = output_norm::per_head,
                                                                           .output_gate = true,
                                                                           .gate_map = activation::sigmoid,
                                                                           .gate_before_norm = true}>;
#endif
using model = language_model<pattern<tried>>;
static_assert(sizeof(model) > 0);
tried const* used = nullptr;
auto const size = sizeof(tried);
