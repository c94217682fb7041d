#include <seqmix/kernels/cuda/top1_attention.cuh>
#include <seqmix/selectors/all.hpp>
#include <seqmix/selectors/top1.hpp>

namespace seqmix::kernels {
template struct cuda_top1<selectors::all, selectors::top1<>, float>;
template struct cuda_top1<selectors::all, selectors::top1<>, bfloat16>;
}  // namespace seqmix::kernels
