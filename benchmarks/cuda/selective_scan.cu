#include <seqmix/kernels/cuda/selective_scan.cuh>

namespace seqmix::kernels {
template struct cuda_selective_scan<float>;
template struct cuda_selective_scan<bfloat16>;
}  // namespace seqmix::kernels
