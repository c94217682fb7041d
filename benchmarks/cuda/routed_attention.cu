#include <seqmix/kernels/cuda/routed_attention.cuh>
#include <seqmix/selectors/select.hpp>

namespace seqmix::kernels {
template struct cuda_routed_attention<selectors::top1_chunk<>::which_type, float>;
template struct cuda_routed_attention<selectors::top1_chunk<>::which_type, bfloat16>;
}  // namespace seqmix::kernels
