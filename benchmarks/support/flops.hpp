#pragma once

#include <seqmix/layers/parameters.hpp>

/// Floating-point operations counted from shapes: what the mathematics needs, a multiply-add as two. Left out are
/// element-wise work (norms, activations, exponentials), what a backward computes again, and what tiles compute
/// beyond a causal boundary; a kernel that wastes nothing would reach the processor's peak.
namespace seqmix::benchmarks {

/// y [rows,out] = x [rows,in] w'.
inline double linear_flops(index_t rows, index_t in, index_t out) {
  return 2.0 * double(rows) * double(in) * double(out);
}

/// Pairs of a query and a key of its past or itself, T tokens.
inline double causal_pairs(index_t T) { return double(T) * double(T + 1) / 2.0; }

/// Pairs of a query and a key of its own chunk, or of the one earlier chunk it chose.
inline double chunk_pairs(index_t T, index_t chunk) {
  double pairs = 0.0;
  for (index_t t = 0; t < T; ++t) pairs += double(t % chunk + 1) + (t >= chunk ? double(chunk) : 0.0);
  return pairs;
}

/// q.k and the weighted values for every visible pair of every head.
inline double attention_flops(double pairs, index_t heads, index_t key_dim, index_t value_dim) {
  return 2.0 * pairs * double(heads) * double(key_dim + value_dim);
}

/// q.k of every pair alone: a hard choice gathers its value.
inline double hard_attention_flops(double pairs, index_t heads, index_t key_dim) {
  return 2.0 * pairs * double(heads) * double(key_dim);
}

/// The state takes one outer product and gives one product with the query a token and head, whatever form computes
/// it.
inline double recurrence_flops(index_t tokens, index_t heads, index_t key_dim, index_t value_dim) {
  return 4.0 * double(tokens) * double(heads) * double(key_dim) * double(value_dim);
}

inline double convolution_flops(index_t tokens, index_t channels, index_t width) {
  return 2.0 * double(tokens) * double(channels) * double(width);
}

/// Two products of the same size for each one of a forward: the derivatives of both factors.
inline double backward_flops(double forward) { return 2.0 * forward; }

/// Forward and backward of a model over `tokens`: its matrices, the tied embedding once as the last one, and
/// `mixing`, the operations of all mixers and convolutions forward.
inline double training_flops(parameter_list const& parameters, index_t tokens, double mixing) {
  double forward = mixing;
  for (auto const& p : parameters.all())
    if (p.group == optimiser_group::matrix) forward += linear_flops(tokens, p.columns(), p.rows());
  return forward + backward_flops(forward);
}

}  // namespace seqmix::benchmarks
