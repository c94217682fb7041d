#pragma once

#include <seqmix/kernels/cuda/recurrence_channels.cuh>
#include <seqmix/kernels/cuda_kernels.hpp>

/// The linear family on a device; what it computes is told in kernels/cuda_kernels.hpp.
namespace seqmix::inline v0::kernels {

namespace cuda::chunks {
template <class State, bool PerChannel, class T>
void validate_form(recurrence_shape const& s, recurrence_input<T> const& in) {
  validate(s, in, State::spec);
  if (!PerChannel && in.decays_per_channel())
    throw shape_error("seqmix: recurrence log-decay g: expected one per head, got one per key channel; take the "
                      "kernels for decays per channel");
}
}  // namespace cuda::chunks

template <class State, bool PerChannel, class T>
auto cuda_recurrence<State, PerChannel, T>::carve(arena& a, recurrence_shape const& s) -> saved {
  return {a.take<number>(cuda::chunks::chunk_grid::slots(s.seq) * s.heads * s.key_dim * s.value_dim)};
}

template <class State, bool PerChannel, class T>
void cuda_recurrence<State, PerChannel, T>::forward(device::cuda const& dev, recurrence_shape const& s,
                                                    recurrence_input<T> const& in, view3<T> o_rhv,
                                                    saved const* keep, view4<number> final_nhkv, arena& ws) {
  namespace chunks = cuda::chunks;
  constexpr bool delta = State::spec.low_rank;
  chunks::validate_form<State, PerChannel>(s, in);
  expect_shape("recurrence output o", o_rhv, {s.seq.rows(), s.heads, s.value_dim});
  expect_contiguous("recurrence output o", o_rhv);
  validate_state("recurrence final state", s, final_nhkv);
  arena_scope const scope(ws);
  chunks::problem<T> const p(dev, s, in);
  if (!keep && s.seq.longest() <= 1) {
    cuda::launch(dev, "recurrence: one token", &chunks::step_states<T, delta>,
                 cuda::blocks(s.seq.count() * s.heads * cuda::divided_up(s.value_dim, cuda::warp)), chunks::threads,
                 0, p, chunks::state_rows<float const>(in.initial_nhkv), chunks::state_rows<float>(final_nhkv),
                 cuda::heads<T>(o_rhv));
    return;
  }
  auto const w = chunks::weigh<State, PerChannel>(dev, s, in, p, false, ws);
  float* const states = keep ? keep->states : carve(ws, s).states;
  chunks::written_rows<T> z{in.v_rhv, p.value_group, in.write_rh};
  if constexpr (delta) z = {chunks::dense<T const>(w.weighed.u, s.heads, s.value_dim), 1, {}};
  chunks::launch_pass<delta, false>(
      dev, s,
      chunks::state_pass<T>{p.grid, p.heads_count, p.key_dim, p.value_dim, z.group, p.gate_group, w.rows,
                            chunks::dense<T const>(w.weighed.w, s.heads, s.key_dim), z.values, z.write, w.weighed.u,
                            in.initial_nhkv, final_nhkv, states});
  cuda::launch(dev, "recurrence: outputs", &chunks::read_states<T, PerChannel>,
               cuda::blocks(p.grid.count * s.heads), chunks::threads, std::size_t(chunks::read_memory<T>::bytes), p,
               w.rows, static_cast<T const*>(w.weighed.read), z, static_cast<float const*>(states),
               cuda::heads<T>(o_rhv));
}

/// Where derivatives go, and room for those of heads that share what they read.
namespace cuda::chunks {

template <class T>
row_target<T> take_target(heads<T> to, recurrence_shape const& s, index_t shared_heads, index_t channels,
                          arena& ws) {
  row_target<T> t{to, nullptr, int(s.heads), int(channels)};
  if (shared_heads < s.heads) t.per_head = ws.take<float>(s.seq.rows() * s.heads * channels);
  return t;
}
template <class T>
void add_shared(device::cuda const& dev, recurrence_shape const& s, row_target<T> const& t, index_t shared_heads) {
  if (!t.per_head || !t.to.data) return;
  index_t const count = s.seq.rows() * shared_heads * t.channels;
  launch(dev, "recurrence backward: shared heads", &add_heads<T>, blocks(divided_up(count, 256)), 256, 0,
         static_cast<float const*>(t.per_head), t.to, int(shared_heads), int(s.heads / shared_heads), t.channels,
         count);
}
inline void add_parts(device::cuda const& dev, recurrence_shape const& s, double const* parts, index_t channels,
                      heads<float> to) {
  if (!parts || !to.data) return;
  launch(dev, "recurrence backward: constant decays", &add_constants<256>, blocks(s.gate_heads * channels), 256, 0,
         parts, chunk_grid::slots(s.seq), int(s.heads), int(s.heads / s.gate_heads), int(channels), to);
}

}  // namespace cuda::chunks

template <class State, bool PerChannel, class T>
void cuda_recurrence<State, PerChannel, T>::backward(device::cuda const& dev, recurrence_shape const& s,
                                                     recurrence_input<T> const& in, saved const& keep,
                                                     view3<T const> d_o_rhv, view4<number const> d_final_nhkv,
                                                     recurrence_gradient<T> const& d, arena& ws) {
  namespace chunks = cuda::chunks;
  using chunks::threads, chunks::dense;
  constexpr bool delta = State::spec.low_rank;
  chunks::validate_form<State, PerChannel>(s, in);
  expect_shape("recurrence output derivative d_o", d_o_rhv, {s.seq.rows(), s.heads, s.value_dim});
  expect_contiguous("recurrence output derivative d_o", d_o_rhv);
  validate_state("recurrence final state derivative", s, d_final_nhkv);
  if (!dev.dry) validate_gradient<T>(s, d, State::spec);
  arena_scope const scope(ws);
  chunks::problem<T> const p(dev, s, in);
  index_t const R = s.seq.rows(), H = s.heads, K = s.key_dim, V = s.value_dim, slots = p.grid.count;

  auto const d_q = chunks::take_target<T>(d.q_rhk, s, s.query_heads, K, ws);
  auto const d_k = chunks::take_target<T>(d.k_rhk, s, s.key_heads, K, ws);
  auto const d_v = chunks::take_target<T>(d.v_rhv, s, s.value_heads, V, ws);
  auto const number_target = [&](view2<number> to) {
    cuda::heads<float> x;
    x.data = to.data, x.row = to.stride[0], x.head = to.stride[1];
    return chunks::take_target<float>(x, s, s.gate_heads, 1, ws);
  };
  auto const d_write = number_target(d.write_rh), d_beta = number_target(d.beta_rh);
  chunks::decay_target d_decay;
  bool const gated = chunks::has_gate(in), constant = gated && in.g_rhk.stride[0] == 0,
             factored = in.rate_hk.extent[1] > 0;
  index_t const decays = p.decay_keys;
  d_decay.wanted = gated && (d.g_rhk || d.rate_hk);
  if (gated && !constant) d_decay.tokens = chunks::take_target<float>(d.g_rhk, s, s.gate_heads, decays, ws);
  if (constant) d_decay.constant = ws.take<double>(slots * H * decays);
  if (factored) d_decay.rate = ws.take<double>(slots * H * K);
  if (gated && !PerChannel) d_decay.crossing = ws.take<float>(R * H);

  auto const w = chunks::weigh<State, PerChannel>(dev, s, in, p, true, ws);
  chunks::pulled_back<T> made;
  made.z = w.weighed.u;
  made.d_z = ws.take<T>(R * H * V);
  made.d_read = ws.take<T>(slots * H * chunks::pairs);
  made.states = carve(ws, s).states;
  if constexpr (delta) {
    made.d_erased = ws.take<T>(slots * H * chunks::pairs);
    made.strength = ws.take<float>(R * H);
  }
  chunks::written_rows<T> z{in.v_rhv, p.value_group, in.write_rh};
  if constexpr (delta) z = {dense<T const>(made.z, H, V), 1, {}};
  auto const solved = dense<T const>(w.weighed.w, H, K);
  cuda::heads<T const> const d_o = d_o_rhv;
  float const* const states = keep.states;
  T const* const read = w.weighed.read;
  constexpr auto square = std::size_t(chunks::tile<T>) * sizeof(T);

  cuda::launch(dev, "recurrence backward: outputs", &chunks::pull_back_outputs<T, delta, PerChannel>,
               cuda::blocks(slots * H), threads, std::size_t(chunks::read_memory<T>::bytes), p, read, z, solved,
               states, d_o, made, d_decay);
  chunks::launch_pass<delta, true>(dev, s,
                                   chunks::state_pass<T>{p.grid,
                                                         p.heads_count,
                                                         p.key_dim,
                                                         p.value_dim,
                                                         1,
                                                         p.gate_group,
                                                         w.rows,
                                                         solved,
                                                         d_o,
                                                         {},
                                                         made.d_z,
                                                         d_final_nhkv,
                                                         d.initial_nhkv,
                                                         made.states});
  if constexpr (delta)
    cuda::launch(dev, "recurrence backward: systems", &chunks::pull_back_systems<T, PerChannel>,
                 cuda::blocks(slots * H), threads, 3 * square, p, static_cast<T const*>(w.weighed.inverse),
                 static_cast<T const*>(w.weighed.erased), made, d_v, d_write, d_decay);
  else
    cuda::launch(dev, "recurrence backward: values", &chunks::pull_back_values<T>, cuda::blocks(slots * H), threads,
                 2 * square, p, w.rows, made, d_v, d_write);
  if constexpr (PerChannel)
    cuda::launch(dev, "recurrence backward: channels", &chunks::pull_back_channels<T, delta>,
                 cuda::blocks(slots * H), threads, std::size_t(chunks::channel_pull_memory<T, delta>::bytes), p, z,
                 states, d_o, made, d_q, d_k, d_beta, d_decay);
  else
    cuda::launch(dev, "recurrence backward: queries and keys", &chunks::pull_back_heads<T, delta>,
                 cuda::blocks(slots * H), threads, 2 * square, p, w.rows, z, states, d_o, made, d_q, d_k, d_beta,
                 d_decay);

  chunks::add_shared(dev, s, d_q, s.query_heads);
  chunks::add_shared(dev, s, d_k, s.key_heads);
  chunks::add_shared(dev, s, d_v, s.value_heads);
  for (auto const& x : {d_write, d_beta, d_decay.tokens}) chunks::add_shared(dev, s, x, s.gate_heads);
  chunks::add_parts(dev, s, d_decay.constant, decays, d.g_rhk);
  cuda::heads<float> d_rate;
  d_rate.data = d.rate_hk.data, d_rate.head = d.rate_hk.stride[0];
  chunks::add_parts(dev, s, d_decay.rate, K, d_rate);
}

}  // namespace seqmix::inline v0::kernels
