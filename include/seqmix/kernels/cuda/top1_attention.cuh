#pragma once

#include <seqmix/kernels/cuda/top1_attention_backward.cuh>
#include <seqmix/kernels/cuda_kernels.hpp>
#include <seqmix/selectors/all.hpp>
#include <seqmix/selectors/window.hpp>

/// Top-1 attention on a device; what it computes is told in kernels/cuda_kernels.hpp and docs/concepts.md. Scores
/// as in softmax attention (kernels/cuda/attention.cuh): their bits depend on query and key alone, so equal keys
/// tie wherever they stand, and a sequence chooses as its tokens do one by one. A choice of the hard output without
/// surrogate reads no values but those that it takes and computes no exponentials: 2 K flops a visible pair. Keys
/// of one head: fewer than 2^31.
namespace seqmix::inline v0::kernels {

namespace detail {

template <class>
inline constexpr bool is_top1 = false;
template <selectors::top1_output Output, selectors::top1_gradient Gradient>
inline constexpr bool is_top1<selectors::top1<Output, Gradient>> = true;

/// What the kernels do, as far as forward and backward both know it.
template <class Which, class How>
void expect_top1_kernels() {
  static_assert(std::is_same_v<Which, selectors::all> || std::is_same_v<Which, selectors::window>,
                "seqmix: the CUDA kernels of a hard choice see all keys or a window");
  static_assert(is_top1<How>, "seqmix: the CUDA kernels of a hard choice know selectors::top1 alone");
  static_assert(sizeof(typename How::template saved<float>) == sizeof(cuda::saved_choice) &&
                alignof(typename How::template saved<float>) == alignof(cuda::saved_choice));
}

}  // namespace detail

/// Memory in `ws`: the running log-decays (running_decays); of few rows with many keys 512 bytes per head, block of
/// rows and part, and 64 V more where values are averaged.
template <class Which, class How, class T>
void cuda_top1<Which, How, T>::forward(device::cuda const& dev, attention_shape const& s,
                                       attention_input<T> const& in, view3<T> o_rhv, saved const* keep,
                                       attention_record const& record, arena& ws) {
  detail::expect_top1_kernels<Which, How>();
  validate(s, Which::spec);
  validate_input(s, in);
  validate_sink(s, How::spec, in.sink_h);
  expect_shape("attention output o", o_rhv, {s.seq.rows(), s.heads, s.value_dim});
  expect_contiguous("attention output o", o_rhv);
  arena_scope const scope(ws);
  constexpr bool windowed = Which::spec.windowed;
  auto const bias = cuda::running_decays(dev, s, in, ws);
  cuda::attention_problem<T> const problem(dev, s, in, bias, windowed);
  double const forward_temperature = s.knobs.forward(), temperature = s.knobs.temperature;
  cuda::choice_rule const rule{
      float(s.scale / forward_temperature), float(forward_temperature / temperature),
      float(s.knobs.hard_fraction),         How::output == selectors::top1_output::weighted,
      forward_temperature != temperature,   How::soft(s.knobs, keep != nullptr)};
  cuda::choice_output<T> out;
  out.o = o_rhv;
  if (keep) out.row = reinterpret_cast<cuda::saved_choice*>(keep->row);
  if (keep && rule.averages) out.average = keep->soft_rhv;
  out.recorded_lse = record.lse_rh;
  out.recorded_choice = record.choice_rh;
  cuda::detail::choice_forward(dev, s, in, problem, rule, windowed, out, ws);
}

/// Memory in `ws`: 20 H R bytes; of shared key heads 4 H K (R + N capacity), of shared value heads 4 H V (R + N
/// capacity); of gates running_decays and take_bias_sums.
template <class Which, class How, class T>
void cuda_top1<Which, How, T>::backward(device::cuda const& dev, attention_shape const& s,
                                        attention_input<T> const& in, view3<T const> o_rhv, saved const& keep,
                                        view3<T const> d_o_rhv, attention_gradient<T> const& d, arena& ws) {
  using selectors::top1_gradient;
  detail::expect_top1_kernels<Which, How>();
  validate(s, Which::spec);
  validate_input(s, in);
  validate_sink(s, How::spec, in.sink_h);
  expect_shape("attention output o", o_rhv, {s.seq.rows(), s.heads, s.value_dim});
  expect_shape("attention output derivative d_o", d_o_rhv, {s.seq.rows(), s.heads, s.value_dim});
  expect_contiguous("attention output derivative d_o", d_o_rhv);
  if (!dev.dry) validate_gradient<T>(s, d, in.queries_alone);
  arena_scope const scope(ws);
  auto const bias = cuda::running_decays(dev, s, in, ws);
  cuda::attention_problem<T> const problem(dev, s, in, bias, Which::spec.windowed);
  constexpr auto gradient = How::gradient;
  constexpr bool through_output = gradient == top1_gradient::straight_through_output;
  constexpr bool by_score = gradient == top1_gradient::straight_through || through_output;
  float const mixed = float(1.0 - s.knobs.hard_fraction);
  cuda::choice_upstream<T> up;
  up.d_o = d_o_rhv;
  up.saved = reinterpret_cast<cuda::saved_choice const*>(keep.row);
  up.average = keep.soft_rhv;
  up.rows = s.seq.rows();
  up.slope = by_score ? 1.0F : mixed;
  up.share = through_output ? 1.0F : mixed;
  up.hard = float(s.knobs.hard_fraction);
  up.adds_held = !through_output;
  up.through = gradient == top1_gradient::selected_weight;
  up.values = !How::scatters(s.knobs);
  bool const surrogate = How::soft(s.knobs, true);
  if (surrogate) up.terms = ws.take<cuda::choice_terms>(s.heads * up.rows);
  auto const target = [&](view3<T> now, view4<T> before, index_t shared_heads, index_t channels) {
    cuda::token_target<T> t{now, before, nullptr, int(channels), int(s.heads / shared_heads)};
    if (t.group > 1) t.per_head = ws.take<float>(s.heads * problem.places.count * channels);
    return t;
  };
  auto const d_k = target(d.k_rhk, d.past_k_nlhk, s.key_heads, s.key_dim);
  auto const d_v = target(d.v_rhv, d.past_v_nlhv, s.value_heads, s.value_dim);
  auto sums = cuda::take_bias_sums(s, in, ws);
  sums.wanted = sums.wanted && (d.g_rhk || d.past_g_nlhk);
  bool const past_wanted =
      d.past_k_nlhk || d.past_v_nlhv || d.past_g_nlhk || (cuda::has_constant_gate(in) && d.g_rhk);
  auto const keys = cuda::key_blocks::of(dev, s, problem.places, in.queries_alone, past_wanted);
  cuda::detail::choice_backward(dev, s, problem, keys, up, surrogate, d_k, d_v, cuda::heads<T>(d.q_rhk), sums);
  cuda::write_decay_gradient(dev, s, in, sums, d);
}

}  // namespace seqmix::inline v0::kernels
