#pragma once

#include <seqmix/tensor/view.hpp>

namespace seqmix::inline v0 {

/// The instruction set a kernel is compiled for: bytes of one vector register, how many registers, and the
/// compiler's feature bits. A template argument of `device::cpu`, so that two translation units built with
/// different flags instantiate different symbols instead of sharing one by chance.
template <int VectorBytes, int Registers, unsigned Features>
struct instruction_set {
  static constexpr int vector_bytes = VectorBytes;
  static constexpr int registers = Registers;
  template <class T>
  static constexpr int lanes = VectorBytes / int(sizeof(T));
};

/// What every compiler target has: the widest vectors that any flag set supports. Concepts are checked with it.
using portable_isa = instruction_set<16, 16, 0>;

/// Who runs the blocks of a parallel loop.
struct serial_threads {};
struct openmp_threads {};

namespace detail {
// The only place where compiler macros choose anything: they name a type, they change no body.
#if defined(__AVX512F__) && defined(__AVX512DQ__)
using native_isa = instruction_set<64, 32, 7>;
#elif defined(__AVX2__) && defined(__FMA__)
using native_isa = instruction_set<32, 16, 3>;
#elif defined(__AVX__)
using native_isa = instruction_set<32, 16, 1>;
#elif defined(__aarch64__)
using native_isa = instruction_set<16, 32, 8>;
#else
using native_isa = instruction_set<16, 16, 0>;
#endif
#if defined(_OPENMP)
using native_threads = openmp_threads;
#else
using native_threads = serial_threads;
#endif
}  // namespace detail

namespace device {

/// The fast kernels. `threads` says how many compute; results have the same bits for any number.
template <class Isa, class Threads>
struct basic_cpu {
  using isa = Isa;
  using threading = Threads;
  int threads = 1;
  bool dry =
      false;  ///< parallel loops do nothing: with a measuring arena, a dry run plans the memory of a real one
};
using cpu = basic_cpu<seqmix::detail::native_isa, seqmix::detail::native_threads>;

/// The plain loops of kernels/reference, for any scalar (double, dual numbers): the oracle.
struct reference {
  static constexpr int threads = 1;
  static constexpr bool dry = false;
};

/// The kernels of kernels/cuda: views, states and the arena lie in device memory, `sequences` and shapes are read
/// on the host. Nothing synchronises: work is put on `stream`, a cudaStream_t, opaque here so that no CUDA header
/// is needed. Run-to-run deterministic: no floating-point atomics.
struct cuda {
  /// What is saved for a backward has no padding on a device.
  using isa = instruction_set<4, 255, 1U << 16>;
  void* stream = nullptr;
  /// A copy of packed sequences' offsets [N+1] in device memory; not read for batches of equal lengths.
  std::ptrdiff_t const* offsets = nullptr;
  bool dry = false;  ///< launches nothing: with a measuring arena, a dry run plans the memory of a real one
};

}  // namespace device

template <class D>
inline constexpr bool is_cpu = false;
template <class Isa, class Threads>
inline constexpr bool is_cpu<device::basic_cpu<Isa, Threads>> = true;

template <class D>
inline constexpr bool is_cuda = false;
template <>
inline constexpr bool is_cuda<device::cuda> = true;

}  // namespace seqmix::inline v0
