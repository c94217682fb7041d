#include <seqmix/kernels/cuda/history.cuh>

template struct seqmix::kernels::cuda_history<float>;
template struct seqmix::kernels::cuda_history<seqmix::bfloat16>;
