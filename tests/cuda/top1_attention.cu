#include <seqmix/kernels/cuda/top1_attention.cuh>

namespace seqmix::kernels {

using selectors::top1;
using enum selectors::top1_output;
using enum selectors::top1_gradient;

template struct cuda_top1<selectors::all, top1<hard, straight_through>, float>;
template struct cuda_top1<selectors::all, top1<hard, straight_through_output>, float>;
template struct cuda_top1<selectors::all, top1<hard, none>, float>;
template struct cuda_top1<selectors::all, top1<weighted, straight_through>, float>;
template struct cuda_top1<selectors::all, top1<weighted, straight_through_output>, float>;
template struct cuda_top1<selectors::all, top1<weighted, selected_weight>, float>;
template struct cuda_top1<selectors::all, top1<weighted, none>, float>;
template struct cuda_top1<selectors::window, top1<hard, straight_through>, float>;
template struct cuda_top1<selectors::window, top1<hard, none>, float>;
template struct cuda_top1<selectors::window, top1<weighted, selected_weight>, float>;

}  // namespace seqmix::kernels
