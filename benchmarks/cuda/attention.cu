#include <seqmix/kernels/cuda/attention.cuh>
#include <seqmix/selectors/all.hpp>

namespace seqmix::kernels {
template struct cuda_attention<selectors::all, float>;
template struct cuda_attention<selectors::all, bfloat16>;
}  // namespace seqmix::kernels
