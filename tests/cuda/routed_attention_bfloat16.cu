#include <seqmix/kernels/cuda/routed_attention.cuh>
#include <seqmix/selectors/chunks.hpp>

using namespace seqmix;
using namespace seqmix::selectors;
using enum chunk_score;
using enum chunk_gradient;

#define INSTANCE(...) template struct seqmix::kernels::cuda_routed_attention<__VA_ARGS__, bfloat16>
INSTANCE(own_plus_top1<>);
INSTANCE(own_plus_top1<exact_mass, chunk_straight_through>);
INSTANCE(own_plus_top_k<>);
INSTANCE(own_plus_top_k<mean_key, gated>);
INSTANCE(exactly_one<mean_key_prefix, chunk_straight_through, chunk_probability::score>);
INSTANCE(exactly_one<exact_max>);
INSTANCE(window_plus_top1<>);
