#pragma once

#include <seqmix/kernels/cpu/stabilised_channels.hpp>

namespace seqmix::inline v0::kernels {

namespace detail {

/// States that the form over channels can compute where the shape allows it too.
template <class State>
inline constexpr bool has_channels = !State::stabilised.keyed && !State::stabilised.floor &&
                                     State::stabilised.eps == 0.0 && State::spec.read == read_order::exclusive;

/// Throws unless neighbouring heads are neighbours in memory, which the form over channels asks for.
template <class T, std::size_t Rank>
void expect_dense_heads(char const* what, view<T, Rank> const& x) {
  if (!x || x.extent[1] <= 1 || x.stride[1] == 1) return;
  throw shape_error(std::string("seqmix: ") + what + ": heads must be contiguous, their stride is " +
                    std::to_string(x.stride[1]) + "; copy it first");
}
template <class T>
void expect_dense_channels(recurrence_shape const& s, stabilised_input<T> const& in, view3<same<T const>> o_rhv) {
  expect_dense_heads("stabilised value v", in.v_rhv);
  expect_dense_heads("stabilised log-decay g", in.g_rhk);
  expect_dense_heads("stabilised log-weight", in.write_rh);
  expect_dense_heads("stabilised output o", o_rhv);
  if (in.bonus_hk && s.heads > 1 && in.bonus_hk.stride[0] != 1)
    throw shape_error("seqmix: stabilised bonus: heads must be contiguous, their stride is " +
                      std::to_string(in.bonus_hk.stride[0]) + "; copy it first");
}

template <class Scratch>
Scratch* stabilised_scratch_per_thread(arena& ws, int threads, recurrence_shape const& s, bool backward) {
  Scratch* const all = ws.take<Scratch>(threads);
  for (int t = 0; t < threads; ++t) {
    auto const one = Scratch::carve(ws, s, backward);
    if (all) all[t] = one;
  }
  return all;
}

/// Sums over sequences of partial sums [N,H] to one number per gate head, or per head.
template <class T, class At>
void sum_sequences(double const* partial, index_t sequences, index_t heads, index_t targets, At const& at) {
  for (index_t h = 0; h < targets; ++h) at(h) = T(0);
  for (index_t h = 0; h < heads; ++h) {
    double sum = 0.0;
    for (index_t n = 0; n < sequences; ++n) sum += partial[n * heads + h];
    at(h * targets / heads) += T(sum);
  }
}

}  // namespace detail

/// Room for what forward keeps for backward.
template <class State, class Isa, class T>
stabilised_saved<T> carve_stabilised_saved(arena& a, recurrence_shape const& s) {
  if constexpr (detail::has_channels<State>) {
    using channels = detail::stabilised_channels<State, Isa, T>;
    if (channels::fits(s)) return channels::carve(a, s);
  }
  return detail::stabilised_head<State, Isa, T>::carve(a, s);
}

/// The stabilised recurrence of kernels/stabilised_shape.hpp: o [R,H,V] and the final state (empty: not wanted).
/// `saved` is nullptr when no backward follows. Work: 2 (chunk (K + V) + 2 K V) flops and chunk + 2 exponentials a
/// token and head; without keys and with one value per head 2 exponentials. Deterministic: the same bits for any
/// number of threads; the chunk size changes rounding only.
template <class State, class Isa, class Threads, class T>
void stabilised_forward(device::basic_cpu<Isa, Threads> dev, recurrence_shape const& s,
                        stabilised_input<T> const& in, view3<same<T>> o_rhv, stabilised_saved<same<T>> const* saved,
                        stabilised_state<same<T>> const& final, arena& ws) {
  validate<State>(s, in);
  expect_shape("stabilised output o", o_rhv, {s.seq.rows(), s.heads, s.value_dim});
  expect_contiguous("stabilised output o", o_rhv);
  validate_state("stabilised final state", s, final);
  arena_scope const scope(ws);
  auto const run = [&]<class Heads, class Scratch>(std::type_identity<Heads>, std::type_identity<Scratch>,
                                                   index_t units) {
    auto* const scratch = detail::stabilised_scratch_per_thread<Scratch>(ws, thread_count(dev), s, false);
    parallel_for(dev, s.seq.count() * units, [&](index_t unit, int thread) {
      Heads(s, in, unit / units, unit % units, scratch[thread]).forward(o_rhv, saved, final);
    });
  };
  if constexpr (detail::has_channels<State>) {
    using channels = detail::stabilised_channels<State, Isa, T>;
    if (channels::fits(s)) {
      detail::expect_dense_channels<T>(s, in, o_rhv);
      return run(std::type_identity<channels>{}, std::type_identity<typename channels::scratch>{},
                 channels::blocks(s));
    }
  }
  run(std::type_identity<detail::stabilised_head<State, Isa, T>>{},
      std::type_identity<detail::stabilised_scratch<Isa, T>>{}, s.heads);
}

/// The derivatives of stabilised_forward, from its o, d_o and the derivative of the final state (empty: zero).
template <class State, class Isa, class Threads, class T>
void stabilised_backward(device::basic_cpu<Isa, Threads> dev, recurrence_shape const& s,
                         stabilised_input<T> const& in, view3<same<T> const> o_rhv,
                         stabilised_saved<same<T>> const& saved, view3<same<T> const> d_o_rhv,
                         stabilised_state<same<T> const> const& d_final, stabilised_gradient<same<T>> const& d,
                         arena& ws) {
  validate<State>(s, in);
  for (auto const& x : {o_rhv, d_o_rhv}) {
    expect_shape("stabilised output and its derivative", x, {s.seq.rows(), s.heads, s.value_dim});
    expect_contiguous("stabilised output and its derivative", x);
  }
  validate_state("stabilised final state derivative", s, d_final);
  if (!dev.dry) validate_gradient<State, T>(s, d);
  arena_scope const scope(ws);
  index_t const N = s.seq.count(), H = s.heads;
  double* const d_constant = ws.take<double>(N * H);
  double* const d_bonus = ws.take<double>(N * H);
  if (!dev.dry) std::fill_n(d_constant, N * H, 0.0), std::fill_n(d_bonus, N * H, 0.0);
  bool done = false;
  if constexpr (detail::has_channels<State>) {
    using channels = detail::stabilised_channels<State, Isa, T>;
    if (done = channels::fits(s); done) {
      detail::expect_dense_channels<T>(s, in, d_o_rhv);
      if (!dev.dry) {
        detail::expect_dense_heads("stabilised value derivative d_v", d.v_rhv);
        detail::expect_dense_heads("stabilised log-decay derivative d_g", d.g_rhk);
        detail::expect_dense_heads("stabilised log-weight derivative", d.write_rh);
      }
      auto* const scratch =
          detail::stabilised_scratch_per_thread<typename channels::scratch>(ws, thread_count(dev), s, true);
      index_t const units = channels::blocks(s);
      parallel_for(dev, N * units, [&](index_t unit, int thread) {
        index_t const n = unit / units;
        channels(s, in, n, unit % units, scratch[thread])
            .backward(saved, o_rhv, d_o_rhv, d_final, d, d_constant + n * H, d_bonus + n * H);
      });
    }
  }
  if (!done) {
    auto* const scratch =
        detail::stabilised_scratch_per_thread<detail::stabilised_scratch<Isa, T>>(ws, thread_count(dev), s, true);
    index_t const shared = State::stabilised.keyed ? std::gcd(s.query_heads, s.key_heads) : H;
    index_t const groups = std::gcd(shared, std::gcd(s.value_heads, s.gate_heads)), group = H / groups;
    parallel_for(dev, N * groups, [&](index_t unit, int thread) {
      index_t const n = unit / groups;
      for (index_t h = unit % groups * group; h < (unit % groups + 1) * group; ++h)
        detail::stabilised_head<State, Isa, T>(s, in, n, h, scratch[thread])
            .backward(saved, o_rhv, d_o_rhv, d_final, d, d_constant[n * H + h], d_bonus[n * H + h]);
    });
  }
  if (dev.dry) return;
  if (d.bonus_hk) detail::sum_sequences<T>(d_bonus, N, H, H, [&](index_t h) -> T& { return d.bonus_hk(h, 0); });
  if (in.g_rhk && in.g_rhk.stride[0] == 0 && d.g_rhk)
    detail::sum_sequences<T>(d_constant, N, H, s.gate_heads, [&](index_t h) -> T& { return d.g_rhk(0, h, 0); });
}

}  // namespace seqmix::inline v0::kernels
