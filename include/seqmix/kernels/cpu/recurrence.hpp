#pragma once

#include <seqmix/kernels/cpu/recurrence_sequential.hpp>

namespace seqmix::inline v0::kernels {

/// How a recurrence is computed: chunk by chunk (one decay per head, additive states) or token by token
/// (everything).
enum class recurrence_form { chunkwise, sequential };

namespace detail {

template <recurrence_form Form, class State, class Isa, class T>
struct recurrence_parts {
  using heads = chunkwise_heads<Isa, T>;
  using scratch = chunk_scratch<Isa, T>;
};
template <class State, class Isa, class T>
struct recurrence_parts<recurrence_form::sequential, State, Isa, T> {
  using heads = sequential_head<State, Isa, T>;
  using scratch = token_scratch<Isa, T>;
};

template <class Scratch>
Scratch* scratch_per_thread(arena& ws, int threads, recurrence_shape const& s, bool backward) {
  Scratch* const all = ws.take<Scratch>(threads);
  for (int t = 0; t < threads; ++t) {
    auto const one = Scratch::carve(ws, s, backward);
    if (all) all[t] = one;
  }
  return all;
}

}  // namespace detail

/// o [R,H,V] and the final state [N,H,K,V] (empty view: not wanted). `saved` is nullptr when no backward follows.
/// Work: chunkwise 2 (chunk (K + V) + 2 K V) flops a token and head, sequential 6 K V.
/// Deterministic: the same bits for any number of threads; the chunk size changes rounding only.
template <recurrence_form Form, class State, class Isa, class Threads, class T>
void recurrence_forward(device::basic_cpu<Isa, Threads> dev, recurrence_shape const& s,
                        recurrence_input<T> const& in, view3<same<T>> o_rhv, recurrence_saved<same<T>> const* saved,
                        view4<same<T>> final_nhkv, arena& ws) {
  using parts = detail::recurrence_parts<Form, State, Isa, T>;
  validate(s, in);
  expect_shape("recurrence output o", o_rhv, {s.seq.rows(), s.heads, s.value_dim});
  expect_contiguous("recurrence output o", o_rhv);
  validate_state("recurrence final state", s, final_nhkv);
  arena_scope const scope(ws);
  auto* const scratch = detail::scratch_per_thread<typename parts::scratch>(ws, thread_count(dev), s, false);
  index_t const together = parts::heads::together(s), units = s.heads / together;
  parallel_for(dev, s.seq.count() * units, [&](index_t unit, int thread) {
    typename parts::heads heads(s, in, unit / units, unit % units * together, scratch[thread]);
    heads.forward(o_rhv, saved, final_nhkv);
  });
}

/// The derivatives of recurrence_forward, from d_o and the derivative of the final state (empty: zero).
template <recurrence_form Form, class State, class Isa, class Threads, class T>
void recurrence_backward(device::basic_cpu<Isa, Threads> dev, recurrence_shape const& s,
                         recurrence_input<T> const& in, recurrence_saved<same<T>> const& saved,
                         view3<same<T> const> d_o_rhv, view4<same<T> const> d_final_nhkv,
                         recurrence_gradient<same<T>> const& d, arena& ws) {
  using parts = detail::recurrence_parts<Form, State, Isa, T>;
  validate(s, in);
  expect_shape("recurrence output derivative d_o", d_o_rhv, {s.seq.rows(), s.heads, s.value_dim});
  expect_contiguous("recurrence output derivative d_o", d_o_rhv);
  validate_state("recurrence final state derivative", s, d_final_nhkv);
  if (!dev.dry) validate_gradient<T>(s, d);
  arena_scope const scope(ws);
  auto* const scratch = detail::scratch_per_thread<typename parts::scratch>(ws, thread_count(dev), s, true);
  index_t const decay_keys = (std::max)(index_t(1), in.g_rhk.extent[2]);
  double* const d_constant = ws.take<double>(s.seq.count() * s.heads * decay_keys);
  index_t const groups = std::gcd(std::gcd(s.query_heads, s.key_heads), std::gcd(s.value_heads, s.gate_heads));
  index_t const group = s.heads / groups, together = parts::heads::together(s);
  parallel_for(dev, s.seq.count() * groups, [&](index_t unit, int thread) {
    index_t const n = unit / groups;
    for (index_t h = unit % groups * group; h < (unit % groups + 1) * group; h += together) {
      typename parts::heads heads(s, in, n, h, scratch[thread]);
      heads.backward(saved, d_o_rhv, d_final_nhkv, d, d_constant + (n * s.heads + h) * decay_keys);
    }
  });
  if (dev.dry || !in.g_rhk || in.g_rhk.stride[0] != 0 || !d.g_rhk) return;
  for (index_t h = 0; h < s.gate_heads; ++h)
    for (index_t k = 0; k < decay_keys; ++k) d.g_rhk(0, h, k) = T(0);
  for (index_t h = 0; h < s.heads; ++h)
    for (index_t k = 0; k < decay_keys; ++k) {
      double sum = 0.0;
      for (index_t n = 0; n < s.seq.count(); ++n) sum += d_constant[(n * s.heads + h) * decay_keys + k];
      d.g_rhk(0, h * s.gate_heads / s.heads, k) += T(sum);
    }
}

}  // namespace seqmix::inline v0::kernels
