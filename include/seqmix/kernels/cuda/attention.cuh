#pragma once

#include <seqmix/kernels/cuda/attention_backward.cuh>
#include <seqmix/kernels/cuda/attention_forward.cuh>
#include <seqmix/kernels/cuda_kernels.hpp>

/// Softmax attention on a device; what it computes is told in kernels/cuda_kernels.hpp. Tiles of 64 keys, sums in
/// float, sixteen-bit products on tensor cores. Heads of up to 128 channels (64 of floats) in one slice; more are
/// cut into slices, whose scores are computed for each slice of the values again.
namespace seqmix::inline v0::kernels {

/// Memory in `ws`: the running log-decays (running_decays), and of few rows with many keys the parts, 64 (V + 2)
/// bytes per head, block of rows and part.
template <class Which, class T>
void cuda_attention<Which, T>::forward(device::cuda const& dev, attention_shape const& s,
                                       attention_input<T> const& in, view3<T> o_rhv, saved const* keep,
                                       attention_record const& record, arena& ws) {
  validate(s, Which::spec);
  validate_input(s, in);
  validate_sink(s, selectors::softmax::spec, in.sink_h);
  expect_shape("attention output o", o_rhv, {s.seq.rows(), s.heads, s.value_dim});
  expect_contiguous("attention output o", o_rhv);
  arena_scope const scope(ws);
  constexpr bool windowed = Which::spec.windowed;
  auto const bias = cuda::running_decays(dev, s, in, ws);
  cuda::attention_problem<T> const problem(dev, s, in, bias, windowed);
  static_assert(sizeof(selectors::softmax::saved<number>) == sizeof(float));
  cuda::attention_output<T> const out{o_rhv, keep ? reinterpret_cast<float*>(keep->row) : nullptr, record.lse_rh,
                                      record.choice_rh};
  cuda::with_slice<T>(s.key_dim > s.value_dim ? s.key_dim : s.value_dim, [&](auto width) {
    cuda::detail::attention_forward<T, decltype(width)::value>(dev, s, in, problem, windowed, out, ws);
  });
}

/// Memory in `ws`: 4 H R bytes; of shared key heads 4 H K (R + N capacity), of shared value heads 4 H V (R + N
/// capacity); of gates running_decays and take_bias_sums.
template <class Which, class T>
void cuda_attention<Which, T>::backward(device::cuda const& dev, attention_shape const& s,
                                        attention_input<T> const& in, view3<T const> o_rhv, saved const& keep,
                                        view3<T const> d_o_rhv, attention_gradient<T> const& d, arena& ws) {
  validate(s, Which::spec);
  validate_input(s, in);
  validate_sink(s, selectors::softmax::spec, in.sink_h);
  expect_shape("attention output derivative d_o", d_o_rhv, {s.seq.rows(), s.heads, s.value_dim});
  expect_contiguous("attention output derivative d_o", d_o_rhv);
  expect_contiguous("attention output o", o_rhv);
  if (!dev.dry) validate_gradient<T>(s, d, in.queries_alone);
  arena_scope const scope(ws);
  auto const bias = cuda::running_decays(dev, s, in, ws);
  cuda::attention_problem<T> const problem(dev, s, in, bias, Which::spec.windowed);
  index_t const rows = s.seq.rows(), places = problem.places.count;
  cuda::attention_upstream<T> const up{d_o_rhv, reinterpret_cast<float const*>(keep.row),
                                       ws.take<float>(s.heads * rows), rows};
  auto const target = [&](view3<T> now, view4<T> before, index_t shared_heads, index_t channels) {
    cuda::token_target<T> t{now, before, nullptr, int(channels), int(s.heads / shared_heads)};
    if (t.group > 1) t.per_head = ws.take<float>(s.heads * places * channels);
    return t;
  };
  auto const d_k = target(d.k_rhk, d.past_k_nlhk, s.key_heads, s.key_dim);
  auto const d_v = target(d.v_rhv, d.past_v_nlhv, s.value_heads, s.value_dim);
  auto sums = cuda::take_bias_sums(s, in, ws);
  sums.wanted = sums.wanted && (d.g_rhk || d.past_g_nlhk);
  bool const past_wanted =
      d.past_k_nlhk || d.past_v_nlhv || d.past_g_nlhk || (cuda::has_constant_gate(in) && d.g_rhk);
  cuda::with_slice<T>(s.key_dim > s.value_dim ? s.key_dim : s.value_dim, [&](auto width) {
    cuda::detail::attention_backward<T, decltype(width)::value>(dev, s, problem, in.queries_alone, o_rhv, up, d_k,
                                                                d_v, d.q_rhk, sums, past_wanted);
  });
  cuda::write_decay_gradient(dev, s, in, sums, d);
  if (in.sink_h && d.sink_h)
    cuda::launch(dev, "attention backward: sink", &cuda::detail::pull_back_sink<256>, cuda::blocks(s.heads), 256, 0,
                 in.sink_h.data, in.sink_h.stride[0], up.lse, static_cast<float const*>(up.product), rows,
                 d.sink_h.data, d.sink_h.stride[0]);
}

}  // namespace seqmix::inline v0::kernels
