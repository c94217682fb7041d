#pragma once

#include <algorithm>

#include <seqmix/kernels/cpu/own_token.hpp>
#include <seqmix/kernels/cpu/rotation.hpp>
#include <seqmix/mixers/mixer.hpp>

namespace seqmix::inline v0 {

/// Sizes of a trapezoidal recurrence: H = `heads` states [K,V]; plain queries and keys have `key_heads` heads, the
/// speeds of the angles `angle_heads`, both dividing H; `pairs` of the K channels turn.
struct trapezoid_shape {
  sequences seq{};
  index_t heads = 1, key_heads = 1, angle_heads = 1;
  index_t key_dim = 1, value_dim = 1, pairs = 0;
  index_t chunk = 64;
};

/// What it reads: queries and keys [R,Hk,K] before their biases [H,K], values [R,H,V], log-decays [R,H,1], steps
/// Delta and raw lambdas [R,H], raw speeds of the angles [R,Ha,S].
template <class T>
struct trapezoid_input {
  view3<T const> q_rhk{}, k_rhk{}, v_rhv{}, g_rhk{};
  view2<T const> delta_rh{}, raw_rh{};
  view3<T const> angle_rhs{};
  T const *q_bias = nullptr, *k_bias = nullptr;
};

/// Where the derivatives go: written, but for the biases', which accumulate.
template <class T>
struct trapezoid_gradient {
  view3<T> q_rhk{}, k_rhk{}, v_rhv{}, g_rhk{};
  view2<T> delta_rh{}, raw_rh{};
  view3<T> angle_rhs{};
  T *q_bias = nullptr, *k_bias = nullptr;
};

namespace layer_detail {
/// What a trapezoidal recurrence needs beside its mixer.
template <class Device, class T>
concept turns_on = requires(Device dev, view3<T const> x, view3<T> y, arena& ws) {
  kernels::rotation_angles_forward(dev, sequences{}, x, view2<T>{}, x, y, y, ws);
  kernels::rotate_forward(dev, x, nullptr, x, y);
  kernels::own_token_forward(dev, kernels::own_token<T>{}, y);
};
template <class Device, class T>
concept turns_back_on = requires(Device dev, view3<T const> x, view3<T> y, arena& ws) {
  kernels::rotation_angles_backward(dev, sequences{}, x, view2<T>{}, x, y, y, view2<T>{}, y, ws);
  kernels::rotate_backward(dev, x, x, x, y, nullptr, y, true, ws);
};
}  // namespace layer_detail

/// Mamba-3's mixing of tokens. Queries and keys are biased and turned by the summed angles theta_t = theta_(t-1) +
/// pi tanh(speed_t) Delta_t; a state takes both ends of each step by the trapezoid's rule, lambda = sigmoid(raw):
///   S_t = e^g_t (S_(t-1) + (1 - lambda_t) Delta_t k_(t-1) v_(t-1)') + lambda_t Delta_t k_t v_t',   o_t = S_t' q_t
/// Computed by a recurrence that writes each token one step late, with all of its weight, and an own-token term:
///   L_t = e^g_t (L_(t-1) + (lambda_(t-1) Delta_(t-1) + (1 - lambda_t) Delta_t) k_(t-1) v_(t-1)')
///   o_t = L_t' q_t + lambda_t Delta_t (q_t.k_t) v_t
/// The published parallel form, with the weight lambda_t Delta_t + (1 - lambda_(t+1)) Delta_(t+1) at token t and a
/// correction of its own output, is the same sum but looks one token ahead, and an output would be rounded
/// differently when the next token changes.
/// State: S_t, theta_t and the last token's turned key and value, from which the next call writes what is missing.
/// Source: Lahoti et al., "Mamba-3" (arXiv 2603.15569), and its authors' code.
template <class Gate>
class trapezoid {
 public:
  using mixer_type = recurrence<states::outer_product, Gate>;

  template <class T>
  struct state {
    typename mixer_type::template state<T> mixer;
    view3<T> theta_nhs, key_nhk, value_nhv;
    static state carve(arena& a, trapezoid_shape const& s) {
      index_t const N = s.seq.count();
      return {mixer_type::template state<T>::carve(a, mixing(s)), a.take_view<T, 3>({N, s.heads, s.pairs}),
              a.take_view<T, 3>({N, s.heads, s.key_dim}), a.take_view<T, 3>({N, s.heads, s.value_dim})};
    }
    static index_t elements(trapezoid_shape const& s) {
      return mixer_type::template state<T>::elements(mixing(s)) +
             s.seq.count() * s.heads * (s.pairs + s.key_dim + s.value_dim);
    }
    void clear() {
      mixer.clear();
      for (auto* part : {&theta_nhs, &key_nhk, &value_nhv}) std::fill_n(part->data, part->size(), T(0));
    }
  };

  template <class T>
  struct saved {
    view3<T> theta_rhs, q_rhk, k_rhk;  ///< angles, turned queries and keys
    view2<T> write_rh, own_rh;         ///< weights of the token before and of the own one
    typename mixer_type::template saved<T> mixer;
    template <class Device>
    static saved carve(arena& a, trapezoid_shape const& s) {
      index_t const R = s.seq.rows();
      saved x;
      x.theta_rhs = a.take_view<T, 3>({R, s.heads, s.pairs});
      for (auto* part : {&x.q_rhk, &x.k_rhk}) *part = a.take_view<T, 3>({R, s.heads, s.key_dim});
      for (auto* part : {&x.write_rh, &x.own_rh}) *part = a.take_view<T, 2>({R, s.heads});
      if constexpr (is_cpu<Device>)
        x.mixer = mixer_type::template saved<T>::template carve<typename Device::isa>(a, mixing(s));
      return x;
    }
  };

  /// o [R,H,V] and the state behind the last tokens (nullptr: not wanted); both states may be the same.
  template <class Device, class T>
  static void forward(Device dev, trapezoid_shape const& s, trapezoid_input<T> const& in, view3<same<T>> o_rhv,
                      state<same<T>> const* before, state<same<T>>* after, saved<same<T>> const& keep,
                      bool training, arena& ws) {
    arena_scope const scope(ws);
    kernels::rotation_angles_forward(dev, s.seq, in.angle_rhs, in.delta_rh,
                                     before ? view3<T const>(before->theta_nhs) : view3<T const>{}, keep.theta_rhs,
                                     after ? after->theta_nhs : view3<T>{}, ws);
    kernels::rotate_forward(dev, in.q_rhk, in.q_bias, keep.theta_rhs, keep.q_rhk);
    kernels::rotate_forward(dev, in.k_rhk, in.k_bias, keep.theta_rhs, keep.k_rhk);
    weights(dev, s, in, keep);
    auto const late = late_tokens(dev, s, in, keep, before, ws);
    mixer_type::forward(dev, mixing(s), mixer_in(in, keep, late), o_rhv, before ? &before->mixer : nullptr,
                        after ? &after->mixer : nullptr, training ? &keep.mixer : nullptr, ws);
    kernels::own_token_forward(dev, own(in, keep), o_rhv);
    if (after) finish(dev, s, in, keep, before, *after);
  }

  /// Plain queries and keys of `in` are not read again. `d_after` is the derivative of the final state (nullptr:
  /// none), `d_before` takes that of the initial one.
  template <class Device, class T>
  static void backward(Device dev, trapezoid_shape const& s, trapezoid_input<T> const& in,
                       saved<same<T>> const& keep, view3<same<T> const> d_o_rhv, state<same<T>> const* before,
                       state<same<T>> const* d_after, trapezoid_gradient<same<T>> const& d,
                       state<same<T>>* d_before, arena& ws) {
    arena_scope const scope(ws);
    index_t const R = s.seq.rows();
    auto const late = late_tokens(dev, s, in, keep, before, ws);
    auto const d_late = carve_tokens<T>(s, ws), d_token = tokens<T>{ws.take_view<T, 3>(late.k_rhk.extent), d.v_rhv};
    auto const d_q = ws.take_view<T, 3>(late.k_rhk.extent), d_theta = ws.take_view<T, 3>(keep.theta_rhs.extent);
    auto const d_write = ws.take_view<T, 2>({R, s.heads}), d_own = ws.take_view<T, 2>({R, s.heads});
    mixer_type::backward(
        dev, mixing(s), mixer_in(in, keep, late), view3<T const>{}, keep.mixer, d_o_rhv,
        before ? &before->mixer : nullptr, d_after ? &d_after->mixer : nullptr,
        mixer_gradient<T>{
            .q_rhk = d_q, .k_rhk = d_late.k_rhk, .v_rhv = d_late.v_rhv, .g_rhk = d.g_rhk, .write_rh = d_write},
        d_before ? &d_before->mixer : nullptr, ws);
    earlier(dev, s, d_late.k_rhk, d_after ? d_after->key_nhk : view3<T>{}, d_token.k_rhk,
            d_before ? d_before->key_nhk : view3<T>{});
    earlier(dev, s, d_late.v_rhv, d_after ? d_after->value_nhv : view3<T>{}, d_token.v_rhv,
            d_before ? d_before->value_nhv : view3<T>{});
    kernels::own_token_backward(dev, own(in, keep), d_o_rhv, {d_q, d_token.k_rhk, d_token.v_rhv, nullptr, d_own},
                                ws);
    if (d_after) finish_backward(dev, s, in, keep, *d_after, d_token, d_own);
    kernels::rotate_backward(dev, view3<T const>(keep.q_rhk), keep.theta_rhs, d_q, d.q_rhk, d.q_bias, d_theta,
                             false, ws);
    kernels::rotate_backward(dev, view3<T const>(keep.k_rhk), keep.theta_rhs, d_token.k_rhk, d.k_rhk, d.k_bias,
                             d_theta, true, ws);
    kernels::rotation_angles_backward(dev, s.seq, in.angle_rhs, in.delta_rh,
                                      d_after ? view3<T const>(d_after->theta_nhs) : view3<T const>{}, d_theta,
                                      d.angle_rhs, d.delta_rh, d_before ? d_before->theta_nhs : view3<T>{}, ws);
    weights_backward(dev, s, in, keep, d_write, d_own, d);
  }

 private:
  template <class T>
  struct tokens {
    view3<T> k_rhk, v_rhv;
  };
  template <class T>
  static tokens<T> carve_tokens(trapezoid_shape const& s, arena& ws) {
    return {ws.take_view<T, 3>({s.seq.rows(), s.heads, s.key_dim}),
            ws.take_view<T, 3>({s.seq.rows(), s.heads, s.value_dim})};
  }
  static mixer_shape mixing(trapezoid_shape const& s) noexcept {
    mixer_shape m;
    m.seq = s.seq;
    m.heads = m.query_heads = m.key_heads = m.value_heads = m.gate_heads = s.heads;
    m.key_dim = s.key_dim, m.value_dim = s.value_dim, m.chunk = s.chunk;
    return m;
  }
  template <class T>
  static mixer_input<T> mixer_in(trapezoid_input<T> const& in, saved<T> const& keep, tokens<T> const& late) {
    return {.q_rhk = keep.q_rhk,
            .k_rhk = late.k_rhk,
            .v_rhv = late.v_rhv,
            .g_rhk = in.g_rhk,
            .write_rh = keep.write_rh};
  }
  template <class T>
  static kernels::own_token<T> own(trapezoid_input<T> const& in, saved<T> const& keep) {
    return {.q_rhk = keep.q_rhk, .k_rhk = keep.k_rhk, .v_rhv = in.v_rhv, .s_rh = keep.own_rh};
  }

  /// f(row, first row of its sequence, row behind its last)
  template <class Device, class F>
  static void each_token(Device dev, sequences const& seq, F const& f) {
    kernels::detail::for_row_blocks(dev, seq.rows(), [&](index_t, index_t begin, index_t end) {
      for (index_t r = begin, n = seq.holder(begin); r < end; ++r) {
        while (seq.end(n) <= r) ++n;
        f(r, seq.begin(n), seq.end(n));
      }
    });
  }
  template <class T>
  static T factor(trapezoid_input<T> const& in, index_t r, index_t h) noexcept {
    return in.g_rhk ? exp(in.g_rhk(r, h, 0)) : T(1);
  }
  /// Of the own token lambda Delta; of the one before what it had not yet, unless it was in an earlier call, and
  /// this step's 1 - lambda, both decayed.
  template <class Device, class T>
  static void weights(Device dev, trapezoid_shape const& s, trapezoid_input<T> const& in, saved<T> const& keep) {
    each_token(dev, s.seq, [&](index_t r, index_t begin, index_t) {
      for (index_t h = 0; h < s.heads; ++h) {
        T const lambda = sigmoid(in.raw_rh(r, h)), delta = in.delta_rh(r, h);
        T const had = r > begin ? sigmoid(in.raw_rh(r - 1, h)) * in.delta_rh(r - 1, h) : T(0);
        keep.own_rh(r, h) = lambda * delta;
        keep.write_rh(r, h) = factor(in, r, h) * (had + (T(1) - lambda) * delta);
      }
    });
  }
  /// Adds to what decays and angles got.
  template <class Device, class T>
  static void weights_backward(Device dev, trapezoid_shape const& s, trapezoid_input<T> const& in,
                               saved<T> const& keep, view2<T> d_write, view2<T> d_own,
                               trapezoid_gradient<T> const& d) {
    each_token(dev, s.seq, [&](index_t r, index_t, index_t end) {
      for (index_t h = 0; h < s.heads; ++h) {
        T const lambda = sigmoid(in.raw_rh(r, h)), delta = in.delta_rh(r, h);
        T const rest = factor(in, r, h) * d_write(r, h);
        T const had = r + 1 < end ? d_own(r, h) + factor(in, r + 1, h) * d_write(r + 1, h) : d_own(r, h);
        d.delta_rh(r, h) += lambda * had + (T(1) - lambda) * rest;
        d.raw_rh(r, h) = delta * (had - rest) * lambda * (T(1) - lambda);
        if (d.g_rhk) d.g_rhk(r, h, 0) += keep.write_rh(r, h) * d_write(r, h);
      }
    });
  }

  /// The turned key and the value of the token before each.
  template <class Device, class T>
  static tokens<T> late_tokens(Device dev, trapezoid_shape const& s, trapezoid_input<T> const& in,
                               saved<T> const& keep, state<T> const* before, arena& ws) {
    auto const late = carve_tokens<T>(s, ws);
    later(dev, s, view3<T const>(keep.k_rhk), before ? before->key_nhk : view3<T>{}, late.k_rhk);
    later(dev, s, in.v_rhv, before ? before->value_nhv : view3<T>{}, late.v_rhv);
    return late;
  }
  /// Rows moved one token on; `carried` [N,H,C] comes first (empty: zeros).
  template <class Device, class T>
  static void later(Device dev, trapezoid_shape const& s, view3<T const> from_rhc, view3<same<T>> carried_nhc,
                    view3<same<T>> to_rhc) {
    index_t const C = from_rhc.extent[2];
    parallel_for(dev, s.seq.count() * s.heads, [&](index_t unit, int) {
      index_t const n = unit / s.heads, h = unit % s.heads;
      for (index_t r = s.seq.begin(n); r < s.seq.end(n); ++r)
        copy_or_zero(r > s.seq.begin(n) ? from_rhc.at(r - 1, h)
                     : carried_nhc      ? carried_nhc.at(n, h)
                                        : nullptr,
                     C, to_rhc.at(r, h));
    });
  }
  /// The derivative of `later`: rows moved one token back, behind them what the state handed on got (empty: zeros);
  /// the first ones are those of the carried rows (empty: not wanted).
  template <class Device, class T>
  static void earlier(Device dev, trapezoid_shape const& s, view3<T> d_late_rhc, view3<same<T>> d_after_nhc,
                      view3<same<T>> to_rhc, view3<same<T>> d_carried_nhc) {
    index_t const C = d_late_rhc.extent[2];
    parallel_for(dev, s.seq.count() * s.heads, [&](index_t unit, int) {
      index_t const n = unit / s.heads, h = unit % s.heads, begin = s.seq.begin(n), end = s.seq.end(n);
      auto const at = [&](index_t r) {
        return r < end ? d_late_rhc.at(r, h) : d_after_nhc ? d_after_nhc.at(n, h) : nullptr;
      };
      for (index_t r = begin; r < end; ++r) copy_or_zero(at(r + 1), C, to_rhc.at(r, h));
      if (d_carried_nhc) copy_or_zero(at(begin), C, d_carried_nhc.at(n, h));
    });
  }
  template <class T>
  static void copy_or_zero(same<T> const* from, index_t count, T* to) {
    if (from)
      std::copy_n(from, count, to);
    else
      std::fill_n(to, count, T(0));
  }

  /// The last token joins the state with the weight that it has so far and is handed on.
  template <class Device, class T>
  static void finish(Device dev, trapezoid_shape const& s, trapezoid_input<T> const& in, saved<T> const& keep,
                     state<T> const* before, state<T> const& after) {
    parallel_for(dev, s.seq.count() * s.heads, [&](index_t unit, int) {
      index_t const n = unit / s.heads, h = unit % s.heads, r = s.seq.end(n) - 1;
      T *const key = after.key_nhk.at(n, h), *const value = after.value_nhv.at(n, h);
      if (s.seq.length(n) == 0) {
        if (before == &after) return;
        copy_or_zero(before ? before->key_nhk.at(n, h) : nullptr, s.key_dim, key);
        copy_or_zero(before ? before->value_nhv.at(n, h) : nullptr, s.value_dim, value);
        return;
      }
      std::copy_n(keep.k_rhk.at(r, h), s.key_dim, key);
      std::copy_n(in.v_rhv.at(r, h), s.value_dim, value);
      auto const& S = after.mixer.S_nhkv;
      for (index_t k = 0; k < s.key_dim; ++k)
        for (index_t v = 0; v < s.value_dim; ++v) S(n, h, k, v) += keep.own_rh(r, h) * key[k] * value[v];
    });
  }
  /// Adds what the last tokens get through the state that they joined.
  template <class Device, class T>
  static void finish_backward(Device dev, trapezoid_shape const& s, trapezoid_input<T> const& in,
                              saved<T> const& keep, state<T> const& d_after, tokens<T> const& d, view2<T> d_own) {
    parallel_for(dev, s.seq.count() * s.heads, [&](index_t unit, int) {
      index_t const n = unit / s.heads, h = unit % s.heads, r = s.seq.end(n) - 1;
      if (s.seq.length(n) == 0) return;
      T const weight = keep.own_rh(r, h);
      T total(0);
      for (index_t k = 0; k < s.key_dim; ++k) {
        T const *const dS = d_after.mixer.S_nhkv.at(n, h, k), *const value = in.v_rhv.at(r, h);
        T const key = keep.k_rhk(r, h, k);
        T sum(0);
        for (index_t v = 0; v < s.value_dim; ++v) {
          sum += dS[v] * value[v];
          d.v_rhv(r, h, v) += weight * key * dS[v];
        }
        d.k_rhk(r, h, k) += weight * sum;
        total += key * sum;
      }
      d_own(r, h) += total;
    });
  }
};

}  // namespace seqmix::inline v0
