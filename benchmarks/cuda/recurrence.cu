#include <seqmix/kernels/cuda/recurrence.cuh>

namespace seqmix::kernels {
template struct cuda_recurrence<states::outer_product, false, float>;
template struct cuda_recurrence<states::outer_product, false, bfloat16>;
template struct cuda_recurrence<states::delta_rule, false, float>;
template struct cuda_recurrence<states::delta_rule, false, bfloat16>;
}  // namespace seqmix::kernels
