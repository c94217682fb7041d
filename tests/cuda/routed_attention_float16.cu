#include <seqmix/kernels/cuda/routed_attention.cuh>
#include <seqmix/selectors/chunks.hpp>

template struct seqmix::kernels::cuda_routed_attention<seqmix::selectors::own_plus_top_k<>, seqmix::float16>;
template struct seqmix::kernels::cuda_routed_attention<seqmix::selectors::exactly_one<>, seqmix::float16>;
