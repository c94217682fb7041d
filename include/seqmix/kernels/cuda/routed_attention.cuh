#pragma once

#include <seqmix/kernels/cuda/chunk_router_backward.cuh>
#include <seqmix/kernels/cuda_kernels.hpp>

/// Softmax attention for the selectors that choose chunks per query, on a device (see cuda_kernels.hpp). Queries
/// are gathered by the chunks they chose, so that a query costs what it sees. Work: 2 K + 2 V flops a visible pair,
/// the router's 2 K a query and chunk (means; twice that for sixteen-bit numbers) or pair of query and key (exact
/// scores). Memory: 4 (choices (V + 3) + 3) bytes a row and head, chunk means, and a table of scores with about as
/// many numbers as queries and values where exact scores or probabilities are needed. Deterministic: ties take the
/// lowest chunk, sums have one order, no floating-point atomics.
namespace seqmix::inline v0::kernels {

namespace cuda::routed {

template <class Which, class T>
void validate_routed(attention_shape const& s, attention_input<T> const& in) {
  static_assert(on_cuda_routed<Which, selectors::softmax>,
                "seqmix attention: this selector has no CUDA kernel for chosen chunks; see cuda_kernels.hpp");
  static_assert(
      blocks_follow_spec<Which>(),
      "seqmix attention: CUDA kernels know a selector by its spec: the chosen chunks, and before them the "
      "own chunk (own_chunk), the last keys (windowed) or nothing (own_competes); these blocks are others");
  validate(s, Which::spec);
  validate_input(s, in);
  validate_sink(s, how_spec{.takes_sink = true}, in.sink_h);
  if (in.queries_alone)
    throw value_error("seqmix: attention: selectors that choose chunks read rows that bring their own keys");
}

}  // namespace cuda::routed

template <class Which, class T>
void cuda_routed_attention<Which, T>::forward(device::cuda const& dev, attention_shape const& s,
                                              attention_input<T> const& in, view3<T> o_rhv, saved const* keep,
                                              attention_record const& record, arena& ws) {
  using namespace cuda::routed;
  constexpr bool gated = Which::spec.gradient == chunk_gradient::gated;
  validate_routed<Which>(s, in);
  index_t const R = s.seq.rows(), count = R * s.heads;
  expect_shape("attention output o", o_rhv, {R, s.heads, s.value_dim});
  expect_contiguous("attention output o", o_rhv);
  expect_contiguous("attention choices", record.choices_rhk);
  arena_scope const scope(ws);
  auto const p = problem_of<Which>(dev, s, in, cuda::running_decays(dev, s, in, ws));
  cuda::row_tiles const rows(dev, s.seq, tile);
  routed_output<T> out;
  out.o = o_rhv;
  out.lse = keep ? keep->lse : nullptr;
  out.chosen.choice = keep ? keep->choice : ws.take<index_t>(count * p.choices);
  out.chosen.weight = keep && gated ? keep->weight : ws.take<float>(count);
  out.recorded_lse = record.lse_rh;
  out.recorded_choice = record.choice_rh;
  out.recorded_choices = record.choices_rhk;
  out.recorded_count = record.choices_rhk ? int(record.choices_rhk.extent[2]) : 0;
  choose_chunks<Which>(dev, s, p, rows, out.chosen, ws);
  attend_chosen(dev, s, p, rows, out, ws);
}

template <class Which, class T>
void cuda_routed_attention<Which, T>::backward(device::cuda const& dev, attention_shape const& s,
                                               attention_input<T> const& in, view3<T const> o_rhv,
                                               saved const& keep, view3<T const> d_o_rhv,
                                               attention_gradient<T> const& d, arena& ws) {
  using namespace cuda::routed;
  index_t const R = s.seq.rows(), count = R * s.heads;
  validate_routed<Which>(s, in);
  expect_shape("attention output o", o_rhv, {R, s.heads, s.value_dim});
  expect_contiguous("attention output o", o_rhv);
  expect_shape("attention output derivative d_o", d_o_rhv, {R, s.heads, s.value_dim});
  expect_contiguous("attention output derivative d_o", d_o_rhv);
  if (!dev.dry) validate_gradient<T>(s, d);
  arena_scope const scope(ws);
  auto const p = problem_of<Which>(dev, s, in, cuda::running_decays(dev, s, in, ws));
  cuda::row_tiles const rows(dev, s.seq, tile);
  auto const sums = cuda::take_bias_sums(s, in, ws);
  clear(dev, sums.of_query, sums.wanted ? s.heads * sums.rows : 0);
  clear(dev, sums.of_key, sums.wanted ? s.heads * sums.places : 0);
  float* const output = ws.take<float>(count);
  routed_upstream<T> const up{d_o_rhv, keep.lse, output, keep.weight};
  auto const width = mean_tiles::of<T>(s.value_dim);
  cuda::launch(dev, "routed attention: g.o", &multiply_outputs<T>, cuda::blocks(rows.count * s.heads), threads,
               2 * std::size_t(tile) * std::size_t(width.row) * sizeof(T), p, rows, width,
               cuda::heads<T const>(o_rhv), cuda::heads<T const>(d_o_rhv), output);
  router_gradient router;
  if constexpr (Which::spec.gradient != chunk_gradient::index_constant)
    router = pull_router<Which>(dev, s, p, rows, up, d_o_rhv, keep.choice, sums, ws);
  auto const lists = order_by_chunk(dev, s, p, keep.choice, ws);
  pull_chosen(dev, p, rows, lists, up, keep.choice, router, token_gradient<T>(d), sums, ws);
  cuda::write_decay_gradient(dev, s, in, sums, d);
  if (in.sink_h && d.sink_h)
    cuda::launch(dev, "routed attention: sinks", &pull_sinks<256>, cuda::blocks(s.heads), 256, 0, in.sink_h.data,
                 in.sink_h.stride[0], keep.lse, output, R, int(s.heads), d.sink_h.data, d.sink_h.stride[0]);
}

}  // namespace seqmix::inline v0::kernels
