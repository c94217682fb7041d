#include <seqmix/kernels/cuda/attention.cuh>
#include <seqmix/kernels/cuda/history.cuh>
#include <seqmix/selectors/all.hpp>
#include <seqmix/selectors/window.hpp>

template struct seqmix::kernels::cuda_attention<seqmix::selectors::all, float>;
template struct seqmix::kernels::cuda_attention<seqmix::selectors::window, float>;
template struct seqmix::kernels::cuda_history<float>;
