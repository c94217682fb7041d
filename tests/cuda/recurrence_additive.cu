#include <seqmix/kernels/cuda/recurrence.cuh>

namespace seqmix::kernels {
template struct cuda_recurrence<states::outer_product, false, float>;
template struct cuda_recurrence<states::outer_product, true, float>;
template struct cuda_recurrence<states::outer_product, false, bfloat16>;
template struct cuda_recurrence<states::outer_product, true, bfloat16>;
}  // namespace seqmix::kernels
