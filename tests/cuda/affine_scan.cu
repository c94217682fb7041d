#include <seqmix/kernels/cuda/affine_scan.cuh>

template struct seqmix::kernels::cuda_affine_scan<float>;
template struct seqmix::kernels::cuda_affine_scan<seqmix::bfloat16>;
template struct seqmix::kernels::cuda_affine_scan<seqmix::float16>;
