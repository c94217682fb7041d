#include <seqmix/kernels/cuda/recurrence.cuh>

namespace seqmix::kernels {
template struct cuda_recurrence<states::delta_rule, false, float>;
template struct cuda_recurrence<states::delta_rule, true, float>;
template struct cuda_recurrence<states::delta_rule, false, float16>;
template struct cuda_recurrence<states::delta_rule, true, bfloat16>;
}  // namespace seqmix::kernels
