#pragma once

#include <seqmix/kernels/cpu/token_shift.hpp>
#include <seqmix/layers/extras.hpp>
#include <seqmix/layers/low_rank.hpp>
#include <seqmix/layers/pass.hpp>

namespace seqmix::inline v0 {

/// What a layer projects its input to; with a token shift each reads its own mixture.
enum target : std::size_t { to_z, to_value, to_key, to_query, to_raw, to_rate };
inline constexpr std::size_t targets = 6;

/// The inputs of a layer's projections: the normed rows themselves, or a mixture with the row before for each
/// target, x + (before - x)(mu + t). Source: RWKV-4's time mix (Peng et al., arXiv 2305.13048, equation 9 with mu
/// for 1 - mu) and RWKV-6's data-dependent one (arXiv 2404.05892, equation 16): t = W_up tanh(W_down (x + (before -
/// x) mu_x)).
template <token_shift Kind>
class shift_room {
 public:
  struct entry {
    std::string_view name;
    bool used = false;
    initialiser mu;
  };
  template <class T>
  using inputs = std::array<view2<T>, targets>;
  /// Which of the inputs a target reads: all the same one without a shift, so that weights may be joined.
  static constexpr std::size_t input(std::size_t t) noexcept { return Kind == token_shift::none ? 0 : t; }

  shift_room() = default;
  shift_room(parameter_room room, index_t d_model, std::array<entry, targets> const& list, index_t rank,
             initialiser down, initialiser up, initialiser mu_x)
      : d_(d_model), rank_(rank) {
    if constexpr (Kind == token_shift::none) return;
    for (std::size_t t = 0; t < targets; ++t)
      if (list[t].used) {
        at_[t] = count_++;
        mu_[t] = room.vector(std::string(list[t].name), d_model, list[t].mu);
      }
    if constexpr (Kind == token_shift::dynamic) {
      mu_x_ = room.vector("input", d_model, mu_x);
      down_ = room.matrix("down", count_ * rank, d_model, down);
      for (std::size_t t = 0; t < targets; ++t)
        if (list[t].used) up_[t] = room.matrix(std::string(list[t].name) + ".up", d_model, rank, up);
    }
  }

  /// `carried` [N,D] are the rows before the first ones (empty: zero), `after` takes the last ones.
  template <class Device, class T>
  inputs<T> forward(pass<Device, T> const& run, view2<same<T>> n_rd, view2<same<T>> carried_nd,
                    view2<same<T>> after_nd, arena& ws) const {
    inputs<T> in;
    in.fill(n_rd);
    if constexpr (Kind != token_shift::none) {
      auto const m = mixtures(run, n_rd, carried_nd, ws);
      kernels::token_shift_forward(run.device, run.seq, view2<T const>(n_rd), m.mu_jd, m.t_jrd, carried_nd, m.y_jrd,
                                   after_nd);
      for (std::size_t t = 0; t < targets; ++t)
        if (mu_[t]) in[t] = row_block(m.y_jrd, at_[t]);
    }
    return in;
  }

  /// dn from the derivatives of the inputs, written. `recomputed` are the rows that forward gave.
  template <class Device, class T>
  void backward(pass<Device, T> const& run, view2<same<T>> n_rd, view2<same<T>> carried_nd,
                inputs<T> const& d_inputs, view2<same<T>> d_after_nd, view2<same<T>> dn_rd,
                view2<same<T>> d_carried_nd, same<T>* d_base, arena& ws) const {
    if constexpr (Kind != token_shift::none) {
      arena_scope const scope(ws);
      auto const m = mixtures(run, n_rd, carried_nd, ws);
      auto const dy = view3<T>{first(d_inputs).data, {count_, n_rd.extent[0], d_}, {n_rd.extent[0] * d_, d_, 1}};
      auto const d_mu = ws.take_view<T, 2>({count_, d_});
      auto const d_t = Kind == token_shift::dynamic ? ws.take_view<T, 3>({count_, n_rd.extent[0], d_}) : view3<T>{};
      if (!run.device.dry) std::fill_n(d_mu.data, d_mu.size(), T(0));
      kernels::token_shift_backward(run.device, run.seq, view2<T const>(n_rd), m.mu_jd, m.t_jrd, carried_nd, dy,
                                    d_after_nd, dn_rd, d_mu, d_t, d_carried_nd, false, ws);
      if (!run.device.dry)
        for (std::size_t t = 0; t < targets; ++t)
          for (index_t c = 0; mu_[t] && c < d_; ++c) mu_[t].data(d_base)[c] += d_mu(at_[t], c);
      if constexpr (Kind == token_shift::dynamic)
        through_mixtures(run, n_rd, carried_nd, m, d_t, dn_rd, d_carried_nd, d_base, ws);
    }
  }
  /// Room for the derivatives of the inputs; one without a shift.
  template <class T>
  inputs<T> carve_inputs(index_t rows, index_t d_model, arena& ws) const {
    inputs<T> d;
    if constexpr (Kind == token_shift::none) {
      d.fill(ws.take_view<T, 2>({rows, d_model}));
    } else {
      auto const all = ws.take_view<T, 3>({count_, rows, d_model});
      for (std::size_t t = 0; t < targets; ++t)
        if (mu_[t]) d[t] = row_block(all, at_[t]);
    }
    return d;
  }

 private:
  template <class T>
  struct mixture {
    view2<T> mu_jd, x_rd, h_rc;
    view3<T> t_jrd, y_jrd;
  };
  template <class T>
  static view2<T> row_block(view3<T> x_jrd, index_t j) {
    return {x_jrd.data ? x_jrd.at(j) : nullptr, {x_jrd.extent[1], x_jrd.extent[2]}};
  }
  template <class T>
  view2<T> first(inputs<T> const& d) const {
    for (std::size_t t = 0; t < targets; ++t)
      if (mu_[t] && at_[t] == 0) return d[t];
    return {};
  }
  /// mu of all targets behind one another and, where they are dynamic, what is added to them a row.
  template <class Device, class T>
  mixture<T> mixtures(pass<Device, T> const& run, view2<T> n_rd, view2<T> carried_nd, arena& ws) const {
    index_t const R = n_rd.extent[0];
    mixture<T> m;
    m.mu_jd = ws.take_view<T, 2>({count_, d_});
    m.y_jrd = ws.take_view<T, 3>({count_, R, d_});
    if (!run.device.dry)
      for (std::size_t t = 0; t < targets; ++t)
        if (mu_[t]) std::copy_n(mu_[t].data(run.parameters), d_, m.mu_jd.at(at_[t]));
    if constexpr (Kind == token_shift::dynamic) {
      m.x_rd = ws.take_view<T, 2>({R, d_});
      m.h_rc = ws.take_view<T, 2>({R, count_ * rank_});
      m.t_jrd = ws.take_view<T, 3>({count_, R, d_});
      kernels::token_shift_forward(run.device, run.seq, view2<T const>(n_rd), mu_x_row(run.parameters),
                                   view3<T const>{}, carried_nd, as_one(m.x_rd), view2<T>{});
      kernels::linear_forward(run.device, view2<T const>(m.x_rd), down_.of(run.parameters), m.h_rc, false, ws);
      kernels::activate(run.device, kernels::activation::tanh, view2<T const>(m.h_rc), m.h_rc);
      for (std::size_t t = 0; t < targets; ++t)
        if (mu_[t])
          kernels::linear_forward(run.device, view2<T const>(m.h_rc.slice(1, at_[t] * rank_, rank_)),
                                  up_[t].of(run.parameters), row_block(m.t_jrd, at_[t]), false, ws);
    }
    return m;
  }
  template <class T>
  view2<T const> mu_x_row(T const* base) const {
    return {mu_x_.data(base), {1, d_}};
  }
  template <class T>
  static view3<T> as_one(view2<T> x_rd) {
    return {x_rd.data, {1, x_rd.extent[0], x_rd.extent[1]}};
  }
  template <class Device, class T>
  void through_mixtures(pass<Device, T> const& run, view2<T> n_rd, view2<T> carried_nd, mixture<T> const& m,
                        view3<T> d_t, view2<T> dn_rd, view2<T> d_carried_nd, T* d_base, arena& ws) const {
    index_t const R = n_rd.extent[0];
    auto const d_h = ws.take_view<T, 2>({R, count_ * rank_});
    auto const d_x = ws.take_view<T, 2>({R, d_});
    for (std::size_t t = 0; t < targets; ++t)
      if (mu_[t]) {
        auto const dy = view2<T const>(row_block(d_t, at_[t]));
        auto const part = [&](view2<T> x) { return x.slice(1, at_[t] * rank_, rank_); };
        kernels::linear_backward_weight(run.device, dy, part(m.h_rc), up_[t].of(d_base), ws);
        kernels::linear_backward_input(run.device, dy, up_[t].of(run.parameters), part(d_h), false, ws);
      }
    // h holds tanh already: its slope is 1 - h^2.
    kernels::detail::for_row_blocks(run.device, R, [&](index_t, index_t begin, index_t end) {
      for (index_t r = begin; r < end; ++r)
        for (index_t c = 0; c < count_ * rank_; ++c) d_h(r, c) *= T(1) - m.h_rc(r, c) * m.h_rc(r, c);
    });
    kernels::linear_backward_weight(run.device, view2<T const>(d_h), m.x_rd, down_.of(d_base), ws);
    kernels::linear_backward_input(run.device, view2<T const>(d_h), down_.of(run.parameters), d_x, false, ws);
    kernels::token_shift_backward(run.device, run.seq, view2<T const>(n_rd), mu_x_row(run.parameters),
                                  view3<T const>{}, carried_nd, as_one(d_x), view2<T const>{}, dn_rd,
                                  view2<T>{mu_x_.data(d_base), {1, d_}}, view3<T>{}, d_carried_nd, true, ws);
  }

  index_t d_ = 0, rank_ = 0, count_ = 0;
  std::array<index_t, targets> at_{};
  std::array<weight, targets> mu_{}, up_{};
  weight mu_x_, down_;
};

}  // namespace seqmix::inline v0
