// EXPECT: buffer(buffer const&) = delete
#include <utility>

#include <seqmix/tensor/buffer.hpp>

seqmix::buffer<float> keep(seqmix::buffer<float>& numbers) {
#ifdef SEQMIX_TWIN
  return std::move(numbers);
#else
  return numbers;
#endif
}
