#pragma once

#include <numeric>

#include <seqmix/kernels/cpu/recurrence_channels.hpp>
#include <seqmix/kernels/cpu/recurrence_chunkwise.hpp>
#include <seqmix/kernels/cpu/recurrence_generic.hpp>
#include <seqmix/kernels/cpu/recurrence_sequential.hpp>

namespace seqmix::inline v0::kernels {

/// How a recurrence is computed. All forms give the same numbers up to rounding.
enum class recurrence_form {
  chunkwise,              ///< chunk by chunk: any state, at most one decay per head
  chunkwise_per_channel,  ///< chunk by chunk: any state, any decays
  sequential,             ///< token by token: everything
  channels  ///< lanes are channels of many heads: additive states read inclusively that are small (K = 1, V = 1)
};

namespace detail {

/// Additive states with at most one decay per head share their products q.k between heads.
template <recurrence_form Form, class State, class Isa, class T>
struct recurrence_parts {
  using heads = generic_heads<State, Isa, T>;
  using scratch = generic_scratch<State, Isa, T>;
};
template <class State>
inline constexpr bool plainly_additive =
    !State::spec.low_rank && State::spec.read == read_order::inclusive && State::spec.kind == state_kind::matrix;
/// Whether a form goes token by token, in strips.
template <recurrence_form Form, class State>
inline constexpr bool walks_tokens = Form == recurrence_form::chunkwise_per_channel ||
                                     (Form == recurrence_form::chunkwise && !plainly_additive<State>);
template <class State, class Isa, class T>
requires plainly_additive<State>
struct recurrence_parts<recurrence_form::chunkwise, State, Isa, T> {
  using heads = chunkwise_heads<Isa, T>;
  using scratch = chunk_scratch<Isa, T>;
};
template <class State, class Isa, class T>
struct recurrence_parts<recurrence_form::sequential, State, Isa, T> {
  using heads = sequential_heads<State, Isa, T>;
  using scratch = token_scratch<Isa, T>;
};

template <class Scratch>
Scratch* scratch_per_thread(arena& ws, int threads, recurrence_shape const& s, index_t heads, bool backward) {
  Scratch* const all = ws.take<Scratch>(threads);
  for (int t = 0; t < threads; ++t) {
    auto const one = Scratch::carve(ws, s, heads, backward);
    if (all) all[t] = one;
  }
  return all;
}

/// How many heads a thread walks through side by side: several, so that rows are read in long runs, as long as
/// every thread has work. A multiple of `sharing` that divides all heads, or less than that where a set of heads
/// may be split to give all threads something to do; results do not depend on it.
inline index_t heads_together(recurrence_shape const& s, index_t sharing, bool split, int threads) {
  constexpr index_t most = 8;
  auto const enough = [&](index_t h) { return s.seq.count() * (s.heads / h) >= threads; };
  index_t together = sharing;
  for (index_t h = 2 * sharing; h <= (std::min)(most, s.heads); h += sharing)
    if (s.heads % h == 0 && enough(h)) together = h;
  while (split && together % 2 == 0 && !enough(together)) together /= 2;
  return together;
}

/// Sums of every sequence and head, zero before a backward.
class decay_sum_table {
 public:
  template <class T>
  decay_sum_table(recurrence_shape const& s, recurrence_input<T> const& in, arena& ws)
      : heads_(s.heads), constant_keys_((std::max)(index_t(1), in.g_rhk.extent[2])),
        rate_keys_(in.rate_hk ? s.key_dim : 0),
        constant_(ws.take<double>(s.seq.count() * s.heads * constant_keys_)),
        rate_(ws.take<double>(s.seq.count() * s.heads * rate_keys_)) {}

  decay_sums at(index_t n, index_t h) const noexcept {
    return {constant_ + (n * heads_ + h) * constant_keys_,
            rate_keys_ > 0 ? rate_ + (n * heads_ + h) * rate_keys_ : nullptr};
  }
  void start(index_t n, index_t h) const noexcept {
    decay_sums const d = at(n, h);
    std::fill_n(d.constant, constant_keys_, 0.0);
    if (d.rate) std::fill_n(d.rate, rate_keys_, 0.0);
  }
  template <class T>
  void add_up(recurrence_shape const& s, recurrence_input<T> const& in,
              recurrence_gradient<same<T>> const& d) const {
    if (rate_keys_ > 0 && d.rate_hk) add_up_groups<T>(s, s.seq.count(), rate_keys_, rate_, d.rate_hk);
    if (in.g_rhk && in.g_rhk.stride[0] == 0 && d.g_rhk)
      add_up_groups<T>(s, s.seq.count(), constant_keys_, constant_,
                       [&](index_t h, index_t k) -> T& { return d.g_rhk(0, h, k); });
  }

 private:
  index_t heads_, constant_keys_, rate_keys_;
  double *constant_, *rate_;
};

/// Products between tokens pay forward where heads share queries and keys, or the state is large.
inline bool walks_faster(recurrence_shape const& s) noexcept {
  return std::lcm(s.query_heads, s.key_heads) == s.heads && s.key_dim * s.value_dim <= 128 * 64;
}

template <class Parts, class Isa, class Threads, class T>
void forward_heads(device::basic_cpu<Isa, Threads> dev, recurrence_shape const& s, recurrence_input<T> const& in,
                   view3<T> o_rhv, recurrence_saved<T> const* saved, view4<T> final_nhkv, arena& ws) {
  using heads = typename Parts::heads;
  arena_scope const scope(ws);
  index_t const together = heads_together(s, heads::sharing(s), true, thread_count(dev)),
                units = s.heads / together;
  auto* const scratch = scratch_per_thread<typename Parts::scratch>(ws, thread_count(dev), s, together, false);
  parallel_for(dev, s.seq.count() * units, [&](index_t unit, int thread) {
    heads(s, in, unit / units, unit % units * together, together, scratch[thread])
        .forward(o_rhv, saved, final_nhkv);
  });
}

template <recurrence_form Form, class State, class T>
void validate_form(recurrence_shape const& s, recurrence_input<T> const& in) {
  validate(s, in, State::spec);
  static_assert(Form != recurrence_form::channels ||
                    (!State::spec.low_rank && State::spec.read == read_order::inclusive),
                "seqmix recurrence: the form `channels` is for additive states read inclusively");
  if (Form == recurrence_form::chunkwise && in.decays_per_channel())
    throw shape_error(
        "seqmix: recurrence log-decay g: expected one per head, got one per key channel; take the form "
        "chunkwise_per_channel");
}

}  // namespace detail

/// o [R,H,V] and the final state [N,H,K,V] (empty view: not wanted). `saved` is nullptr when no backward follows.
/// Work a token and head: chunkwise 2 (chunk (K + V) + 2 K V) flops, twice that for states that erase; sequential
/// 6 K V, or 10 K V. Deterministic: the same bits for any number of threads; the chunk size changes rounding only.
template <recurrence_form Form, class State, class Isa, class Threads, class T>
void recurrence_forward(device::basic_cpu<Isa, Threads> dev, recurrence_shape const& s,
                        recurrence_input<T> const& in, view3<same<T>> o_rhv, recurrence_saved<same<T>> const* saved,
                        view4<same<T>> final_nhkv, arena& ws) {
  detail::validate_form<Form, State>(s, in);
  expect_shape("recurrence output o", o_rhv, {s.seq.rows(), s.heads, s.value_dim});
  expect_contiguous("recurrence output o", o_rhv);
  validate_state("recurrence final state", s, final_nhkv);
  if constexpr (Form == recurrence_form::channels) {
    detail::channels_forward(dev, s, in, o_rhv, saved, final_nhkv, ws);
  } else {
    using parts = detail::recurrence_parts<Form, State, Isa, T>;
    using walks = detail::recurrence_parts<recurrence_form::chunkwise_per_channel, State, Isa, T>;
    if (detail::walks_tokens<Form, State> || (Form == recurrence_form::chunkwise && detail::walks_faster(s)))
      detail::forward_heads<walks>(dev, s, in, o_rhv, saved, final_nhkv, ws);
    else
      detail::forward_heads<parts>(dev, s, in, o_rhv, saved, final_nhkv, ws);
  }
}

/// The derivatives of recurrence_forward, from d_o and the derivative of the final state (empty: zero).
template <recurrence_form Form, class State, class Isa, class Threads, class T>
void recurrence_backward(device::basic_cpu<Isa, Threads> dev, recurrence_shape const& s,
                         recurrence_input<T> const& in, recurrence_saved<same<T>> const& saved,
                         view3<same<T> const> d_o_rhv, view4<same<T> const> d_final_nhkv,
                         recurrence_gradient<same<T>> const& d, arena& ws) {
  detail::validate_form<Form, State>(s, in);
  expect_shape("recurrence output derivative d_o", d_o_rhv, {s.seq.rows(), s.heads, s.value_dim});
  expect_contiguous("recurrence output derivative d_o", d_o_rhv);
  validate_state("recurrence final state derivative", s, d_final_nhkv);
  if (!dev.dry) validate_gradient<T>(s, d, State::spec);
  if constexpr (Form == recurrence_form::channels) {
    detail::channels_backward(dev, s, in, saved, d_o_rhv, d_final_nhkv, d, ws);
  } else {
    using parts = detail::recurrence_parts<Form, State, Isa, T>;
    arena_scope const scope(ws);
    index_t const groups = std::gcd(std::gcd(s.query_heads, s.key_heads), std::gcd(s.value_heads, s.gate_heads));
    index_t const together = detail::heads_together(s, s.heads / groups, false, thread_count(dev)),
                  units = s.heads / together;
    auto* const scratch =
        detail::scratch_per_thread<typename parts::scratch>(ws, thread_count(dev), s, together, true);
    detail::decay_sum_table const sums(s, in, ws);
    parallel_for(dev, s.seq.count() * units, [&](index_t unit, int thread) {
      index_t const n = unit / units, first = unit % units * together;
      for (index_t h = first; h < first + together; ++h) sums.start(n, h);
      typename parts::heads heads(s, in, n, first, together, scratch[thread]);
      heads.backward(saved, d_o_rhv, d_final_nhkv, d, sums);
    });
    if (!dev.dry) sums.add_up(s, in, d);
  }
}

}  // namespace seqmix::inline v0::kernels
