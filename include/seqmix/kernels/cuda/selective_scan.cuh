#pragma once

#include <seqmix/kernels/cuda/scan_launch.cuh>
#include <seqmix/kernels/cuda_kernels.hpp>

namespace seqmix::inline v0::kernels {

namespace cuda {
/// [R,D] as [R,1,D].
template <class T>
heads<T> one_head(view2<T> x) {
  return view3<T>(x.data, {x.extent[0], 1, x.extent[1]}, {x.stride[0], x.extent[1], 1});
}
/// [R,D] as [R,D,1]: a channel is a head.
template <class T>
heads<T> channel_heads(view2<T> x) {
  return view3<T>(x.data, {x.extent[0], x.extent[1], 1}, {x.stride[0], 1, 1});
}
template <class T>
scan_inputs<T> scan_inputs_of(device::cuda const& dev, selective_scan_shape const& s,
                              selective_scan_input<T> const& in) {
  index_t const D = s.channels;
  return {row_ranges(dev, s.seq),
          {D, 1, 1, 0, 1},
          {1, 1},
          s.states,
          s.groups,
          s.groups,
          D,
          D,
          1.0F,
          in.c_rgk,
          in.b_rgk,
          channel_heads(in.u_rd),
          {},
          false,
          {},
          in.a_log_dk,
          one_head(in.delta_rd),
          one_head(in.z_rd),
          in.delta_bias_d.data,
          in.skip_d.data};
}
}  // namespace cuda

/// Bytes: 4 D K for every 256 tokens.
template <class T>
selective_scan_saved<accumulator_t<T>> cuda_selective_scan<T>::carve(arena& a, selective_scan_shape const& s) {
  return {a.take<number>(cuda::saved_states(s.seq, s.channels, s.states))};
}

/// One exponential and a scan step of three multiply-adds a token, channel and state; B and C are read once for the
/// channels of a block.
template <class T>
void cuda_selective_scan<T>::forward(device::cuda const& dev, selective_scan_shape const& s,
                                     selective_scan_input<T> const& in, view2<T> y_rd,
                                     selective_scan_saved<number> const* keep, view3<number> final_ndk, arena& ws) {
  validate(s, in);
  expect_shape("selective scan y", y_rd, {s.seq.rows(), s.channels});
  expect_contiguous("selective scan y", y_rd);
  if (final_ndk) expect_shape("selective scan final state", final_ndk, {s.seq.count(), s.channels, s.states});
  cuda::run_scan_forward<true>(dev, s.seq, cuda::scan_inputs_of(dev, s, in), s.groups, cuda::channel_heads(y_rd),
                               in.initial_ndk.data, keep ? keep->states : nullptr, final_ndk.data, ws);
}

template <class T>
void cuda_selective_scan<T>::backward(device::cuda const& dev, selective_scan_shape const& s,
                                      selective_scan_input<T> const& in, selective_scan_saved<number> const& keep,
                                      view2<T const> d_y_rd, view3<number const> d_final_ndk,
                                      selective_scan_gradient<T> const& d, arena& ws) {
  validate(s, in);
  index_t const R = s.seq.rows(), D = s.channels, K = s.states;
  expect_shape("selective scan derivative d_y", d_y_rd, {R, D});
  expect_contiguous("selective scan derivative d_y", d_y_rd);
  if (!dev.dry) {
    expect_shape("selective scan derivative d_u", d.u_rd, {R, D});
    expect_shape("selective scan derivative d_delta", d.delta_rd, {R, D});
    if (in.z_rd) expect_shape("selective scan derivative d_z", d.z_rd, {R, D});
    expect_shape("selective scan derivative d_B", d.b_rgk, {R, s.groups, K});
    expect_shape("selective scan derivative d_C", d.c_rgk, {R, s.groups, K});
    expect_shape("selective scan derivative d_A_log", d.a_log_dk, {D, K});
  }
  arena_scope const scope(ws);
  auto x = cuda::scan_inputs_of(dev, s, in);
  cuda::scan_outputs<T> out{};
  out.v = cuda::channel_heads(d.u_rd);
  out.delta = cuda::one_head(d.delta_rd);
  out.z = cuda::one_head(d.z_rd);
  out.initial = d.initial_ndk.data;
  index_t const sums = cuda::run_scan_backward<true>(
      dev, s.seq, x, s.groups, cuda::channel_heads(d_y_rd), keep.states, d_final_ndk.data,
      {.keys = true, .decay = false, .constant_decay = false, .write = false, .rate = true}, out, ws);
  if (dev.dry) return;
  cuda::add_blocks<T>(dev, out.q_part, d.c_rgk, R, s.groups, x.cut.blocks, K);
  cuda::add_blocks<T>(dev, out.k_part, d.b_rgk, R, s.groups, x.cut.blocks, K);
  auto const add = [&](double const* from, number* to, index_t row, index_t column, index_t columns) {
    if (to)
      cuda::launch(dev, "selective scan backward, parameters", cuda::add_sequences<true>,
                   cuda::plain_blocks(D * columns), cuda::plain_threads, 0, from, to, row, column, sums, D,
                   index_t(1), columns);
  };
  add(out.rate_sum, d.a_log_dk.data, d.a_log_dk.stride[0], d.a_log_dk.stride[1], K);
  if (in.delta_bias_d) add(out.bias_sum, d.delta_bias_d.data, d.delta_bias_d.stride[0], 1, 1);
  if (in.skip_d) add(out.skip_sum, d.skip_d.data, d.skip_d.stride[0], 1, 1);
}

}  // namespace seqmix::inline v0::kernels
