#pragma once

#include <cuda_runtime.h>
#include <string>

#include <seqmix/tensor/device.hpp>
#include <seqmix/tensor/error.hpp>
#include <seqmix/tensor/sequences.hpp>

/// How kernels are started and what they know of the rows.
namespace seqmix::inline v0::kernels::cuda {

inline constexpr int warp = 32;

/// Throws device_error with the runtime's own words.
inline void check(cudaError_t status, char const* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // what is reported here must not be reported again by the next launch
  throw device_error(std::string("seqmix: ") + what + ": the CUDA runtime reports \"" + cudaGetErrorString(status) +
                     "\"");
}

/// Puts one kernel on the stream and checks that it was accepted; an empty grid or a dry run starts nothing. Shared
/// memory beyond 48 KiB is asked for where it is needed.
template <class... Parameters, class... Arguments>
void launch(device::cuda const& dev, char const* name, void (*kernel)(Parameters...), dim3 blocks, int threads,
            std::size_t shared_bytes, Arguments const&... arguments) {
  if (dev.dry || blocks.x == 0 || blocks.y == 0 || blocks.z == 0) return;
  if (shared_bytes > 48 * 1024)
    check(cudaFuncSetAttribute(reinterpret_cast<void const*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                               int(shared_bytes)),
          name);
  kernel<<<blocks, unsigned(threads), shared_bytes, static_cast<cudaStream_t>(dev.stream)>>>(arguments...);
  check(cudaGetLastError(), name);
}

/// A grid of x by y blocks; y may exceed what one axis of a grid holds where x does not.
inline dim3 blocks(index_t x, index_t y = 1, index_t z = 1) {
  if (x > 2147483647 || y > 65535 || z > 65535)
    throw device_error("seqmix: a grid of " + std::to_string(x) + " x " + std::to_string(y) + " x " +
                       std::to_string(z) + " blocks is more than a device takes (2147483647 x 65535 x 65535)");
  return {unsigned(x), unsigned(y), unsigned(z)};
}

constexpr __host__ __device__ index_t divided_up(index_t n, index_t by) { return (n + by - 1) / by; }

/// Where sequence n's rows are, in device code.
struct row_ranges {
  index_t const* offsets;
  index_t length_;

  row_ranges(device::cuda const& dev, sequences const& seq) : offsets(nullptr), length_(0) {
    if (seq.is_batch()) {
      length_ = seq.count() > 0 ? seq.length(0) : 0;
      return;
    }
    offsets = dev.offsets;
    if (!offsets && !dev.dry)
      throw value_error("seqmix: packed sequences on a device need device::cuda::offsets, a copy of the offsets in "
                        "device memory");
  }
  __device__ index_t begin(index_t n) const { return offsets ? offsets[n] : n * length_; }
  __device__ index_t length(index_t n) const { return offsets ? offsets[n + 1] - offsets[n] : length_; }
};

/// [R,H,C] in device code, channels contiguous. No data: nothing was given.
template <class T>
struct heads {
  T* data = nullptr;
  index_t row = 0, head = 0;

  heads() = default;
  template <class U>
  heads(view3<U> x_rhc) : data(x_rhc.data), row(x_rhc.stride[0]), head(x_rhc.stride[1]) {}
  __device__ T* at(index_t r, index_t h) const { return data + r * row + h * head; }
};
/// [R,H], or [H,K], in device code.
template <class T>
struct table {
  T* data = nullptr;
  index_t row = 0, column = 0;

  table() = default;
  template <class U>
  table(view2<U> x) : data(x.data), row(x.stride[0]), column(x.stride[1]) {}
  __device__ T& operator()(index_t r, index_t c) const { return data[r * row + c * column]; }
};

}  // namespace seqmix::inline v0::kernels::cuda
