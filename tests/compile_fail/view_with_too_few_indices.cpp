// EXPECT: sizeof...(Index) == Rank
#include <seqmix/tensor/view.hpp>

float first(seqmix::view2<float> x_rc) {
#ifdef SEQMIX_TWIN
  return x_rc(0, 0);
#else
  return x_rc(0);
#endif
}
