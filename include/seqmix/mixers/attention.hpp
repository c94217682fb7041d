#pragma once

#include <seqmix/gates/none.hpp>
#include <seqmix/kernels/cpu/attention.hpp>
#include <seqmix/kernels/cpu/attention_channels.hpp>
#include <seqmix/kernels/cpu/attention_compressed.hpp>
#include <seqmix/kernels/cpu/routed_attention.hpp>
#include <seqmix/kernels/cuda_kernels.hpp>
#include <seqmix/kernels/reference/attention.hpp>
#include <seqmix/mixers/mixer.hpp>

namespace seqmix::inline v0 {

namespace mixer_detail {

/// Past keys, values and log-decays (steps of a factored gate) of N sequences, oldest first, and how many there
/// are. A window keeps the `window - 1` tokens that a next query can still see.
template <class T, class Gate>
struct history_cache {
  static constexpr bool gated = Gate::spec.decays && !Gate::spec.constant();
  using number = accumulator_t<T>;
  view4<T> k_nlhk, v_nlhv;
  view4<number> g_nlhk;
  index_t* length = nullptr;  ///< [N]

  static history_cache carve(arena& a, mixer_shape const& s, index_t capacity) {
    index_t const N = s.seq.count();
    history_cache c;
    c.k_nlhk = a.take_view<T, 4>({N, capacity, s.key_heads, s.key_dim});
    c.v_nlhv = a.take_view<T, 4>({N, capacity, s.value_heads, s.value_dim});
    if constexpr (gated) c.g_nlhk = a.take_view<number, 4>({N, capacity, s.gate_heads, decays(s)});
    c.length = a.take<index_t>(N);
    return c;
  }
  static index_t elements(mixer_shape const& s, index_t capacity) {
    index_t const token =
        s.key_heads * s.key_dim + s.value_heads * s.value_dim + (gated ? s.gate_heads * decays(s) : 0);
    return s.seq.count() * capacity * token;
  }
  /// Numbers that a token's decay has in one head.
  static index_t decays(mixer_shape const& s) noexcept {
    return Gate::spec.decay == axis::head_key && !Gate::spec.factored ? s.key_dim : 1;
  }
  index_t capacity() const noexcept { return k_nlhk.extent[1]; }
  void clear() { std::fill_n(length, k_nlhk.extent[0], index_t(0)); }
};

/// Copies one token's channels of all heads.
template <class T>
void copy_token(view3<T const> from_rhc, index_t row, view4<T> to_nlhc, index_t n, index_t slot) {
  for (index_t h = 0; h < to_nlhc.extent[2]; ++h)
    for (index_t c = 0; c < to_nlhc.extent[3]; ++c) to_nlhc(n, slot, h, c) = from_rhc(row, h, c);
}
/// [L,H,C] of sequence n.
template <class T>
view3<T> of_sequence(view4<T> x_nlhc, index_t n) {
  return {x_nlhc.at(n),
          {x_nlhc.extent[1], x_nlhc.extent[2], x_nlhc.extent[3]},
          {x_nlhc.stride[1], x_nlhc.stride[2], x_nlhc.stride[3]}};
}

/// A gate that only biases scores.
template <class Gate>
inline constexpr bool biases_scores =
    !Gate::spec.writes && !(Gate::spec.decays && Gate::spec.decay == axis::head_key);
/// void where there are no CUDA kernels.
template <class Gate, class Selector, class T>
using cuda_attention = std::conditional_t<
    biases_scores<Gate>,
    typename kernels::cuda_attention_of<typename Selector::which_type, typename Selector::how_type, T>::type, void>;

}  // namespace mixer_detail

/// Attention over every key and value: softmax, linear, hard, routed and compressed selection, with a per-head gate
/// as score bias, or as factor of linear weights; a gate per key channel decays each product of their scores.
/// State: the cache of past keys and values. Saved: a few numbers a row. Memory is linear in T. Deterministic on
/// the CPU for any number of threads; ties take the lowest index.
template <class State, class Gate, class Selector>
requires(State::spec.kind == state_kind::history) struct mixer<State, Gate, Selector> {
  static_assert(explain_pairing<State, Gate, Selector>());
  using state_type = State;
  using gate_type = Gate;
  using selector_type = Selector;
  using which_type = typename Selector::which_type;
  using how_type = typename Selector::how_type;
  static constexpr bool routed = which_type::spec.routed;
  static constexpr bool compressed = which_type::spec.compressed;
  static_assert(
      !compressed || !Gate::spec.decays,
      "seqmix pairing: the mean of a chunk has no place of its own for a gate to bias; take gates::none, or "
      "a selector of tokens");
  static constexpr bool token_gate = Gate::spec.decays && !Gate::spec.constant();
  static constexpr bool channel_gate = Gate::spec.decays && Gate::spec.decay == axis::head_key;
  static constexpr bool windowed = which_type::spec.windowed && !routed;

  static std::string name() {
    std::string text = "attention[which=" + std::string(which_type::name) + ",how=" + std::string(how_type::name);
    if constexpr (requires { how_type::details(); }) text += "," + how_type::details();
    if constexpr (requires { which_type::details(); }) text += "," + which_type::details();
    return text + ",gate=" + std::string(Gate::name) + "]";
  }

  template <class T>
  struct state : mixer_detail::history_cache<T, Gate> {
    using cache = mixer_detail::history_cache<T, Gate>;
    static state carve(arena& a, mixer_shape const& s) { return {cache::carve(a, s, tokens(s))}; }
    static index_t elements(mixer_shape const& s) { return cache::elements(s, tokens(s)); }
    static index_t tokens(mixer_shape const& s) {
      return windowed ? (std::min)(s.capacity, s.select.window - 1) : s.capacity;
    }
  };
  template <class T>
  struct saved {
    using kernel_type =
        typename std::conditional_t<routed, std::type_identity<kernels::routed_saved<which_type, accumulator_t<T>>>,
                                    std::type_identity<kernels::attention_saved<how_type, accumulator_t<T>>>>::type;
    kernel_type kernel;
    template <class Isa>
    static saved carve(arena& a, mixer_shape const& s) {
      return {kernel_type::carve(a, kernel_shape(s))};
    }
  };

  template <class Isa, class Threads, class T>
  static void forward(device::basic_cpu<Isa, Threads> dev, mixer_shape const& s, mixer_input<T> const& in,
                      view3<same<T>> o_rhv, state<same<T>> const* before, state<same<T>>* after,
                      saved<same<T>> const* keep, arena& ws, attention_record const& record = {}) {
    arena_scope const scope(ws);
    auto const x = kernel_input(s, in, before, scaled_values(dev, s, in, ws));
    if constexpr (routed)
      kernels::routed_attention_forward<which_type>(dev, kernel_shape(s), x, o_rhv, keep ? &keep->kernel : nullptr,
                                                    record, ws);
    else if constexpr (compressed)
      kernels::compressed_attention_forward<which_type, how_type>(dev, kernel_shape(s), x, o_rhv,
                                                                  keep ? &keep->kernel : nullptr, record, ws);
    else if constexpr (channel_gate)
      kernels::channel_attention_forward<which_type, how_type>(dev, kernel_shape(s), x, o_rhv,
                                                               keep ? &keep->kernel : nullptr, record, ws);
    else
      kernels::attention_forward<which_type, how_type>(dev, kernel_shape(s), x, o_rhv,
                                                       keep ? &keep->kernel : nullptr, record, ws);
    if (after) expect_cache(s, *after);
    if (after && !dev.dry) remember(s, x, before, *after);
  }
  template <class T>
  static void forward(device::reference dev, mixer_shape const& s, mixer_input<T> const& in, view3<same<T>> o_rhv,
                      state<same<T>> const* before, state<same<T>>* after, saved<same<T>> const*, arena& ws,
                      attention_record const& record = {}) {
    auto const x = kernel_input(s, in, before, scaled_values(dev, s, in, ws));
    kernels::attention_forward<which_type, how_type>(dev, kernel_shape(s), x, o_rhv, record);
    if (after) {
      expect_cache(s, *after);
      remember(s, x, before, *after);
    }
  }

  /// On a device: all views and the cache's lengths lie in its memory (kernels/cuda_kernels.hpp). A cache without
  /// room stays as it is, and that sequence's rows become NaN.
  template <class T>
  static void forward(device::cuda const& dev, mixer_shape const& s, mixer_input<T> const& in, view3<same<T>> o_rhv,
                      state<same<T>> const* before, state<same<T>>* after, saved<same<T>> const* keep, arena& ws,
                      attention_record const& record =
                          {}) requires(!std::is_void_v<mixer_detail::cuda_attention<Gate, Selector, T>>) {
    using kernel = mixer_detail::cuda_attention<Gate, Selector, T>;
    auto const x = kernel_input(s, in, before, in.v_rhv);
    if (after) expect_cache(s, *after);
    kernel::forward(dev, kernel_shape(s), x, o_rhv, keep ? &keep->kernel : nullptr, record, ws);
    if (after)
      kernels::cuda_history<T>::remember(dev, kernel_shape(s), x, windowed, after->k_nlhk, after->v_nlhv,
                                         after->g_nlhk, after->length, o_rhv);
  }

  template <class Isa, class Threads, class T>
  static void backward(device::basic_cpu<Isa, Threads> dev, mixer_shape const& s, mixer_input<T> const& in,
                       view3<same<T> const> o_rhv, saved<same<T>> const& keep, view3<same<T> const> d_o_rhv,
                       state<same<T>> const* before, state<same<T>> const* d_after,
                       mixer_gradient<same<T>> const& d, state<same<T>>* d_before, arena& ws) {
    arena_scope const scope(ws);
    auto const x = kernel_input(s, in, before, scaled_values(dev, s, in, ws));
    if (d_after) expect_cache(s, *d_after);
    auto const dx = kernel_gradient(s, d, d_before);
    if constexpr (routed)
      kernels::routed_attention_backward<which_type>(dev, kernel_shape(s), x, o_rhv, keep.kernel, d_o_rhv, dx, ws);
    else if constexpr (compressed)
      kernels::compressed_attention_backward<which_type, how_type>(dev, kernel_shape(s), x, o_rhv, keep.kernel,
                                                                   d_o_rhv, dx, ws);
    else if constexpr (channel_gate)
      kernels::channel_attention_backward<which_type, how_type>(dev, kernel_shape(s), x, o_rhv, keep.kernel,
                                                                d_o_rhv, dx, ws);
    else
      kernels::attention_backward<which_type, how_type>(dev, kernel_shape(s), x, o_rhv, keep.kernel, d_o_rhv, dx,
                                                        ws);
    if (dev.dry) return;
    if (d_after) add_remembered(s, x, *d_after, dx);
    unscale_values(dev, s, in, d);
  }

  template <class T>
  static void backward(device::cuda const& dev, mixer_shape const& s, mixer_input<T> const& in,
                       view3<same<T> const> o_rhv, saved<same<T>> const& keep, view3<same<T> const> d_o_rhv,
                       state<same<T>> const* before, state<same<T>> const* d_after,
                       mixer_gradient<same<T>> const& d, state<same<T>>* d_before,
                       arena& ws) requires(!std::is_void_v<mixer_detail::cuda_attention<Gate, Selector, T>>) {
    using kernel = mixer_detail::cuda_attention<Gate, Selector, T>;
    auto const x = kernel_input(s, in, before, in.v_rhv);
    if (d_after) expect_cache(s, *d_after);
    auto const dx = kernel_gradient(s, d, d_before);
    kernel::backward(dev, kernel_shape(s), x, o_rhv, keep.kernel, d_o_rhv, dx, ws);
    if (d_after)
      kernels::cuda_history<T>::add_remembered(dev, kernel_shape(s), x, windowed, d_after->k_nlhk, d_after->v_nlhv,
                                               d_after->g_nlhk, dx);
  }

 private:
  static attention_shape kernel_shape(mixer_shape const& s) {
    return {s.seq,     s.heads,     s.key_heads, s.value_heads, s.gate_heads,
            s.key_dim, s.value_dim, s.scale,     s.select,      s.knobs};
  }
  template <class T>
  static attention_input<T> kernel_input(mixer_shape const& s, mixer_input<T> const& in,
                                         state<same<T>> const* before, view3<same<T> const> v_rhv) {
    if (s.query_heads != s.heads)
      throw shape_error("seqmix: attention: one query head per head is needed, got " +
                        std::to_string(s.query_heads) + " query heads for " + std::to_string(s.heads) + " heads");
    attention_input<T> x{in.q_rhk, in.k_rhk, v_rhv, in.g_rhk};
    x.sink_h = in.sink_h;
    x.rate_hk = in.rate_hk;
    if (before) {
      expect_cache(s, *before);
      x.past_k_nlhk = before->k_nlhk;
      x.past_v_nlhv = before->v_nlhv;
      x.past_g_nlhk = before->g_nlhk;
      x.past_length = before->length;
    }
    return x;
  }

  template <class T>
  static attention_gradient<T> kernel_gradient(mixer_shape const& s, mixer_gradient<T> const& d,
                                               state<same<T>> const* d_before) {
    attention_gradient<T> dx{d.q_rhk, d.k_rhk, d.v_rhv, d.g_rhk};
    dx.sink_h = d.sink_h;
    dx.rate_hk = d.rate_hk;
    if (!d_before) return dx;
    expect_cache(s, *d_before);
    dx.past_k_nlhk = d_before->k_nlhk;
    dx.past_v_nlhv = d_before->v_nlhv;
    dx.past_g_nlhk = d_before->g_nlhk;
    return dx;
  }

  template <class T>
  static void expect_cache(mixer_shape const& s, state<T> const& cache) {
    index_t const N = s.seq.count(), capacity = cache.capacity();
    expect_shape("attention state, keys", cache.k_nlhk, {N, capacity, s.key_heads, s.key_dim});
    expect_shape("attention state, values", cache.v_nlhv, {N, capacity, s.value_heads, s.value_dim});
    if constexpr (token_gate)
      expect_shape("attention state, log-decays", cache.g_nlhk,
                   {N, capacity, s.gate_heads, state<T>::cache::decays(s)});
  }

  /// write_h v, where a gate scales what is written; values keep their heads, or get one per gate head.
  template <class Device, class T>
  static view3<T const> scaled_values(Device dev, mixer_shape const& s, mixer_input<T> const& in, arena& ws) {
    if constexpr (!Gate::spec.writes) return in.v_rhv;
    if (s.value_heads != s.gate_heads)
      throw shape_error("seqmix: attention: a gate that scales values needs one gate head per value head, got " +
                        std::to_string(s.gate_heads) + " and " + std::to_string(s.value_heads));
    auto const v = ws.take_view<T, 3>({in.v_rhv.extent[0], s.value_heads, s.value_dim});
    parallel_for(dev, v.extent[0], [&](index_t r, int) {
      for (index_t h = 0; h < s.value_heads; ++h)
        for (index_t c = 0; c < s.value_dim; ++c) v(r, h, c) = in.write_rh(r, h) * in.v_rhv(r, h, c);
    });
    return v;
  }
  template <class Device, class T>
  static void unscale_values(Device dev, mixer_shape const& s, mixer_input<T> const& in,
                             mixer_gradient<same<T>> const& d) {
    if constexpr (Gate::spec.writes)
      parallel_for(dev, in.v_rhv.extent[0], [&](index_t r, int) {
        for (index_t h = 0; h < s.value_heads; ++h) {
          T sum(0);
          for (index_t c = 0; c < s.value_dim; ++c) {
            sum += d.v_rhv(r, h, c) * in.v_rhv(r, h, c);
            d.v_rhv(r, h, c) *= in.write_rh(r, h);
          }
          d.write_rh(r, h) = sum;
        }
      });
  }

  /// Appends this call's tokens; a window drops what no later query sees. `before` and `after` may be the same
  /// memory.
  template <class T>
  static void remember(mixer_shape const& s, attention_input<T> const& x, state<same<T>> const* before,
                       state<same<T>>& after) {
    for (index_t n = 0; n < s.seq.count(); ++n) {
      index_t const past = x.past(n), all = past + s.seq.length(n), kept = keep(all, after.capacity(), n);
      for (index_t slot = 0; slot < kept; ++slot) {
        index_t const token = all - kept + slot, row = s.seq.begin(n) + token - past;
        auto const copy = [&](view3<T const> now, view4<T const> then, view4<T> to) {
          if (token >= past)
            mixer_detail::copy_token(now, row, to, n, slot);
          else if (slot != token || before->k_nlhk.data != after.k_nlhk.data)
            mixer_detail::copy_token(mixer_detail::of_sequence(then, n), token, to, n, slot);
        };
        copy(x.k_rhk, x.past_k_nlhk, after.k_nlhk);
        copy(x.v_rhv, x.past_v_nlhv, after.v_nlhv);
        if constexpr (token_gate) copy(x.g_rhk, x.past_g_nlhk, after.g_nlhk);
      }
      after.length[n] = kept;
    }
  }
  static index_t keep(index_t all, index_t capacity, index_t n) {
    if (windowed) return (std::min)(all, capacity);
    if (all > capacity)
      throw shape_error("seqmix: history state: sequence " + std::to_string(n) + " needs room for " +
                        std::to_string(all) + " tokens, the state holds " + std::to_string(capacity));
    return all;
  }
  /// The derivative of the final cache reaches the tokens that were put into it.
  template <class T>
  static void add_remembered(mixer_shape const& s, attention_input<T> const& x, state<same<T>> const& d_after,
                             attention_gradient<same<T>> const& dx) {
    for (index_t n = 0; n < s.seq.count(); ++n) {
      index_t const past = x.past(n), all = past + s.seq.length(n), kept = keep(all, d_after.capacity(), n);
      for (index_t slot = 0; slot < kept; ++slot) {
        index_t const token = all - kept + slot, row = s.seq.begin(n) + token - past;
        auto const add = [&](view4<T const> d, view3<T> now, view4<T> then) {
          auto const to = token >= past ? now : (then ? mixer_detail::of_sequence(then, n) : view3<T>{});
          if (!to) return;
          for (index_t h = 0; h < d.extent[2]; ++h)
            for (index_t c = 0; c < d.extent[3]; ++c) to(token >= past ? row : token, h, c) += d(n, slot, h, c);
        };
        add(d_after.k_nlhk, dx.k_rhk, dx.past_k_nlhk);
        add(d_after.v_nlhv, dx.v_rhv, dx.past_v_nlhv);
        if constexpr (token_gate) add(d_after.g_nlhk, dx.g_rhk, dx.past_g_nlhk);
      }
    }
  }
};

/// Attention with a selector (or half of one) and an optional gate.
template <class Selector = selectors::softmax, class Gate = gates::none>
using attention = mixer<states::history, Gate, selectors::as_selector<Selector>>;

}  // namespace seqmix::inline v0
