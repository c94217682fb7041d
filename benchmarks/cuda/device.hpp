#pragma once

#include <cstdint>

#include <seqmix/tensor/storage.hpp>
#include <seqmix/tensor/view.hpp>

/// What the measurements need on the device beside the kernels. Pointers lead to device memory; all is put on the
/// default stream.
namespace seqmix::benchmarks {

/// x[i] = low + (high - low) u, or scale times a bell-shaped number, of a hash of seed and i.
template <class T>
void fill_uniform(T* x, index_t count, std::uint32_t seed, float low, float high);
template <class T>
void fill_normal(T* x, index_t count, std::uint32_t seed, float scale);

/// Adds to *count how many of the numbers are infinite or NaN.
template <class T>
void add_not_finite(T const* x, index_t numbers, unsigned long long* count);

/// to[i] = from[i], 16 bytes each.
void copy_vectors(void const* from, void* to, index_t vectors);

/// Chains of dependent steps in every thread of a device filled with `blocks` blocks of 256 threads: multiply-adds,
/// or exponentials of base two. Returns how many steps all threads take together; `sink` [256 blocks] receives the
/// ends.
double run_multiply_adds(index_t blocks, int rounds, float* sink);
double run_exponentials(index_t blocks, int rounds, float* sink);

/// FLOP/s of a bfloat16 product of n x n matrices by cuBLASLt; 0 where that library is not there or refuses.
double matrix_peak(index_t n, int repetitions);

}  // namespace seqmix::benchmarks
