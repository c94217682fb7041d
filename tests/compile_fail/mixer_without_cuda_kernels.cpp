// EXPECT: seqmix cuda: this cell has no CUDA kernels
// EXPECT: take device::cpu
#include <seqmix/mixers/cuda_instance.hpp>
#include <seqmix/selectors/linear.hpp>

using namespace seqmix;

#ifdef SEQMIX_TWIN
static_assert(explain_on_cuda<attention<selectors::softmax>, bfloat16>());
#else
static_assert(explain_on_cuda<attention<selectors::linear>, bfloat16>());
#endif
