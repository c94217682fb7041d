#pragma once

#include <seqmix/kernels/cuda/scan_kernels.cuh>
#include <seqmix/tensor/arena.hpp>

/// How the affine scan is started, plain or fused: what both share on the host.
namespace seqmix::inline v0::kernels::cuda {

inline constexpr int forward_channels = 8, backward_channels = 4;

/// The states before every tile of every sequence, [tiles, H V, K].
inline index_t saved_states(sequences const& seq, index_t channels, index_t K) {
  return tiles_at_most(seq) * channels * K;
}

template <bool Fused, class T>
void run_scan_forward(device::cuda const& dev, sequences const& seq, scan_inputs<T> x, index_t shared, heads<T> o,
                      float const* initial, float* saved, float* final, arena& ws) {
  index_t const N = seq.count(), channels = x.cut.heads * x.cut.width;
  arena_scope const scope(ws);
  if (seq.longest() <= 1 && !saved) {
    launch(dev, "affine scan, one token", scan_step<Fused, T>, plain_blocks(N * channels), plain_threads, 0, x, o,
           initial, final, N * channels);
    return;
  }
  x.cut = channel_cut::of(x.cut.heads, x.cut.width, shared, forward_channels);
  x.piece = piece_cut::of(seq, x.cut.blocks);
  index_t const units = N * x.piece.pieces * x.cut.blocks;
  std::size_t const states = std::size_t(x.cut.per_block * x.K) * sizeof(float);
  affine* carry = nullptr;
  if (x.piece.pieces > 1) {
    carry = ws.take<affine>(N * x.piece.pieces * channels * x.K);
    launch(dev, "affine scan, carries", reduce_pieces<false, Fused, forward_channels, T>, blocks(units),
           scan_threads, 2 * states, x, heads<T const>{}, carry);
    launch(dev, "affine scan, chain of carries", chain_pieces<false>, plain_blocks(N * channels * x.K),
           plain_threads, 0, carry, initial, x.piece.pieces, channels * x.K, N * channels * x.K, x.cut.width, x.K);
  }
  launch(dev, "affine scan", scan_forward<Fused, forward_channels, T>, blocks(units), scan_threads, states, x, o,
         initial, static_cast<affine const*>(carry), saved, final);
}

/// Which partial sums a backward needs; known from shapes, so that a dry run takes the same.
struct scan_sums {
  bool keys, decay, constant_decay, write, rate;
};

/// Fills what `d` leaves open from the arena and runs; returns how many (sequence, piece) the sums over tokens
/// have.
template <bool Fused, class T>
index_t run_scan_backward(device::cuda const& dev, sequences const& seq, scan_inputs<T>& x, index_t shared,
                          heads<T const> d_o, float const* saved, float const* d_final, scan_sums const& wanted,
                          scan_outputs<T>& d, arena& ws) {
  x.cut = channel_cut::of(x.cut.heads, x.cut.width, shared, backward_channels);
  x.piece = piece_cut::of(seq, x.cut.blocks);
  index_t const N = seq.count(), R = seq.rows(), channels = x.cut.heads * x.cut.width, K = x.K;
  index_t const sums = N * x.piece.pieces, decays = x.per_key ? K : 1;
  if (wanted.keys) d.q_part = ws.take<float>(R * x.cut.blocks * K);
  if (wanted.keys) d.k_part = ws.take<float>(R * x.cut.blocks * K);
  if (wanted.decay && !wanted.constant_decay) d.g_part = ws.take<float>(R * x.cut.slots() * decays);
  if (wanted.decay && wanted.constant_decay) d.g_sum = ws.take<double>(sums * channels * decays);
  if (wanted.write) d.write_part = ws.take<float>(R * x.cut.slots());
  if (wanted.rate) d.rate_sum = ws.take<double>(sums * channels * K);
  if (x.value_heads != x.cut.heads) d.v_part = ws.take<float>(R * channels);
  if (Fused) d.bias_sum = ws.take<double>(sums * channels);
  if (Fused) d.skip_sum = ws.take<double>(sums * channels);
  index_t const units = sums * x.cut.blocks;
  affine* carry = nullptr;
  if (x.piece.pieces > 1) {
    carry = ws.take<affine>(sums * channels * K);
    launch(dev, "affine scan backward, carries", reduce_pieces<true, Fused, backward_channels, T>, blocks(units),
           scan_threads, std::size_t(x.cut.per_block * K) * sizeof(affine), x, d_o, carry);
    launch(dev, "affine scan backward, chain of carries", chain_pieces<true>, plain_blocks(N * channels * K),
           plain_threads, 0, carry, d_final, x.piece.pieces, channels * K, N * channels * K, x.cut.width, K);
  }
  std::size_t const room =
      std::size_t(x.cut.per_block) * (std::size_t(2 * K + 2) * sizeof(double) + std::size_t(K) * sizeof(float));
  launch(dev, "affine scan backward", scan_backward<Fused, backward_channels, T>, blocks(units), scan_threads, room,
         x, d_o, saved, d_final, static_cast<affine const*>(carry), d);
  return sums;
}

/// The derivatives of queries or keys: sums over the blocks that read a head, in order.
template <class T>
void add_blocks(device::cuda const& dev, float const* part, heads<T> to, index_t rows, index_t count,
                index_t blocks_all, index_t K) {
  launch(dev, "affine scan backward, sums of blocks", add_neighbours<T>, plain_blocks(rows * count * K),
         plain_threads, 0, part, to, rows, count, blocks_all / count, K);
}

}  // namespace seqmix::inline v0::kernels::cuda
