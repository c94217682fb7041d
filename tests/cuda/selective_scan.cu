#include <seqmix/kernels/cuda/selective_scan.cuh>

template struct seqmix::kernels::cuda_selective_scan<float>;
template struct seqmix::kernels::cuda_selective_scan<seqmix::bfloat16>;
