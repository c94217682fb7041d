#pragma once

#include <seqmix/kernels/cuda/scan_launch.cuh>
#include <seqmix/kernels/cuda_kernels.hpp>

namespace seqmix::inline v0::kernels {

namespace cuda {
/// Blocks must not leave a query or key head; 0 where there are none.
inline index_t shared_heads(recurrence_shape const& s, bool keyed) {
  return keyed ? s.heads / std::gcd(s.heads / s.query_heads, s.heads / s.key_heads) : 0;
}
template <class T>
scan_inputs<T> scan_inputs_of(device::cuda const& dev, recurrence_shape const& s, recurrence_input<T> const& in) {
  return {row_ranges(dev, s.seq),
          {s.heads, s.value_dim, 1, 0, 1},
          {1, 1},
          s.key_dim,
          s.query_heads,
          s.key_heads,
          s.value_heads,
          s.gate_heads,
          float(s.scale),
          in.q_rhk,
          in.k_rhk,
          in.v_rhv,
          in.g_rhk,
          in.g_rhk.extent[2] > 1,
          in.write_rh,
          in.rate_hk,
          {},
          {},
          nullptr,
          nullptr};
}
inline void expect_both(bool q, bool k) {
  if (q != k) throw shape_error("seqmix: recurrence: expected both queries and keys, or neither; got only one");
}
}  // namespace cuda

/// Bytes: 4 H V K for every 256 tokens.
template <class T>
typename cuda_affine_scan<T>::saved cuda_affine_scan<T>::carve(arena& a, recurrence_shape const& s) {
  return {a.take<number>(cuda::saved_states(s.seq, s.heads * s.value_dim, s.key_dim))};
}

/// One exponential and a scan step of three multiply-adds a token, key and channel.
template <class T>
void cuda_affine_scan<T>::forward(device::cuda const& dev, recurrence_shape const& s, recurrence_input<T> const& in,
                                  view3<T> o_rhv, saved const* keep, view4<number> final_nhkv, arena& ws) {
  bool const keyed = in.k_rhk.extent[2] > 0;
  validate(s, in, {.kind = keyed ? state_kind::matrix : state_kind::elementwise});
  cuda::expect_both(in.q_rhk.extent[2] > 0, keyed);
  expect_shape("recurrence output o", o_rhv, {s.seq.rows(), s.heads, s.value_dim});
  expect_contiguous("recurrence output o", o_rhv);
  validate_state("recurrence initial state", s, in.initial_nhkv);
  validate_state("recurrence final state", s, final_nhkv);
  cuda::run_scan_forward<false>(dev, s.seq, cuda::scan_inputs_of(dev, s, in), cuda::shared_heads(s, keyed),
                                cuda::heads<T>(o_rhv), in.initial_nhkv.data, keep ? keep->states : nullptr,
                                final_nhkv.data, ws);
}

/// Twice the exponentials of forward, two scans and nine multiply-adds a token, key and channel.
template <class T>
void cuda_affine_scan<T>::backward(device::cuda const& dev, recurrence_shape const& s,
                                   recurrence_input<T> const& in, saved const& keep, view3<T const> d_o_rhv,
                                   view4<number const> d_final_nhkv, recurrence_gradient<T> const& d, arena& ws) {
  bool const keyed = in.k_rhk.extent[2] > 0;
  state_spec const spec{.kind = keyed ? state_kind::matrix : state_kind::elementwise};
  validate(s, in, spec);
  cuda::expect_both(in.q_rhk.extent[2] > 0, keyed);
  expect_shape("recurrence output derivative d_o", d_o_rhv, {s.seq.rows(), s.heads, s.value_dim});
  expect_contiguous("recurrence output derivative d_o", d_o_rhv);
  validate_state("recurrence final state derivative", s, d_final_nhkv);
  if (!dev.dry) validate_gradient<T>(s, d, spec);
  arena_scope const scope(ws);
  auto x = cuda::scan_inputs_of(dev, s, in);
  bool const gated = in.g_rhk.extent[2] > 0, constant = gated && in.g_rhk.stride[0] == 0;
  cuda::scan_outputs<T> out{};
  out.v = d.v_rhv;
  out.initial = d.initial_nhkv.data;
  index_t const R = s.seq.rows(), K = s.key_dim;
  index_t const sums = cuda::run_scan_backward<false>(dev, s.seq, x, cuda::shared_heads(s, keyed),
                                                      cuda::heads<T const>(d_o_rhv), keep.states, d_final_nhkv.data,
                                                      {.keys = keyed,
                                                       .decay = gated,
                                                       .constant_decay = constant,
                                                       .write = in.write_rh.extent[1] > 0,
                                                       .rate = in.rate_hk.extent[1] > 0},
                                                      out, ws);
  if (dev.dry) return;
  if (d.q_rhk && keyed) cuda::add_blocks<T>(dev, out.q_part, d.q_rhk, R, s.query_heads, x.cut.blocks, K);
  if (d.k_rhk && keyed) cuda::add_blocks<T>(dev, out.k_part, d.k_rhk, R, s.key_heads, x.cut.blocks, K);
  if (out.v_part)
    cuda::launch(dev, "affine scan backward, shared values", cuda::add_neighbours<T>,
                 cuda::plain_blocks(R * s.value_heads * s.value_dim), cuda::plain_threads, 0, out.v_part,
                 cuda::heads<T>(d.v_rhv), R, s.value_heads, s.heads / s.value_heads, s.value_dim);
  index_t const columns = x.per_key ? K : 1, channels = s.heads * s.value_dim;
  if (d.g_rhk && out.g_part)
    cuda::launch(dev, "affine scan backward, log-decays", cuda::add_neighbours<float>,
                 cuda::plain_blocks(R * s.gate_heads * columns), cuda::plain_threads, 0, out.g_part,
                 cuda::heads<float>(d.g_rhk), R, s.gate_heads, x.cut.slots() / s.gate_heads, columns);
  if (d.g_rhk && out.g_sum)
    cuda::launch(dev, "affine scan backward, constant log-decays", cuda::add_sequences<false>,
                 cuda::plain_blocks(s.gate_heads * columns), cuda::plain_threads, 0, out.g_sum, d.g_rhk.data,
                 d.g_rhk.stride[1], d.g_rhk.stride[2], sums, s.gate_heads, channels / s.gate_heads, columns);
  if (d.write_rh && out.write_part) {
    view3<float> const to(d.write_rh.data, {R, s.gate_heads, 1}, {d.write_rh.stride[0], d.write_rh.stride[1], 1});
    cuda::launch(dev, "affine scan backward, write scales", cuda::add_neighbours<float>,
                 cuda::plain_blocks(R * s.gate_heads), cuda::plain_threads, 0, out.write_part,
                 cuda::heads<float>(to), R, s.gate_heads, x.cut.slots() / s.gate_heads, index_t(1));
  }
  if (d.rate_hk && out.rate_sum)
    cuda::launch(dev, "affine scan backward, decay rates", cuda::add_sequences<false>,
                 cuda::plain_blocks(s.gate_heads * K), cuda::plain_threads, 0, out.rate_sum, d.rate_hk.data,
                 d.rate_hk.stride[0], d.rate_hk.stride[1], sums, s.gate_heads, channels / s.gate_heads, K);
}

}  // namespace seqmix::inline v0::kernels
