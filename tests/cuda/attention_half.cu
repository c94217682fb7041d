#include <seqmix/kernels/cuda/attention.cuh>
#include <seqmix/selectors/all.hpp>
#include <seqmix/selectors/window.hpp>

template struct seqmix::kernels::cuda_attention<seqmix::selectors::all, seqmix::bfloat16>;
template struct seqmix::kernels::cuda_attention<seqmix::selectors::window, seqmix::float16>;
