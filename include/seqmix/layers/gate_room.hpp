#pragma once

#include <limits>

#include <seqmix/concepts/gate.hpp>
#include <seqmix/kernels/cpu/rows.hpp>
#include <seqmix/layers/parameters.hpp>
#include <seqmix/layers/pass.hpp>

namespace seqmix::inline v0 {

/// The surrounding of a gate's formula: its parameters, the bias of its raw values, and the gathering and reducing
/// between axes. The projection that makes the raw values belongs to the layer.
template <gate G>
class gate_room {
 public:
  static constexpr std::size_t raws = gate_detail::raws<G>;
  static constexpr std::size_t parameters = gate_detail::parameters<G>;
  static constexpr bool active = G::spec.decays || G::spec.writes;
  static constexpr bool per_token = active && G::spec.raws > 0;
  static_assert(!G::spec.writes || G::spec.raw == axis::head,
                "seqmix gate: the write scale is one number per head; declare raw = axis::head");
  static_assert(
      !G::spec.writes || G::spec.factored || G::spec.decay == axis::head,
      "seqmix gate: the write scale is one number per head; declare decay = axis::head, or factor the decay");
  static_assert(G::spec.raws <= 2, "seqmix gate: a formula takes at most two raw values");
  static_assert(
      !(G::spec.raw == axis::head_key && G::spec.decay == axis::head),
      "seqmix gate: raw values per key channel need a decay per key channel; declare decay = axis::head_key");
  static_assert(
      !G::spec.factored || (G::spec.raw == axis::head && G::spec.decay == axis::head_key && G::spec.decays),
      "seqmix gate: a factored decay is a rate per key channel times a step per head; declare raw = axis::head and "
      "decay = axis::head_key");
  static_assert(
      (G::spec.raws == 0) == (G::spec.from == feed::nothing),
      "seqmix gate: raw values need a feed, and a feed needs raw values; set spec.raws and spec.from together");

  gate_room() = default;
  /// `decay_offset` is added to the start values of the parameters that are logarithms of a decay rate.
  gate_room(parameter_room room, index_t heads, index_t keys, double decay_offset)
      : heads_(heads), keys_(keys), layer_(room.position()) {
    bool shifted = decay_offset == 0.0;
    for (std::size_t i = 0; i < parameters; ++i) {
      auto const& p = G::parameters[i];
      initialiser const initial{start_value<0>(i), double(heads), double(keys), p.log_rate ? decay_offset : 0.0};
      if (p.source == parameter_source::own)
        p_[i] = room.vector(p.name, elements(p.on), initial, p.weight_decay, p.trained, p.log_rate);
      else
        p_[i] = room.shared_matrix(std::string("gate.") + std::string(p.name), layer_.count, elements(p.on),
                                   initial, p.weight_decay);
      shifted = shifted || p.log_rate;
    }
    if (!shifted)
      throw option_error(
          "seqmix: layer: decay_offset shifts a parameter that is the logarithm of a decay rate; gate " +
          std::string(G::name) + " has none; use the knob decay_offset of a run");
    if constexpr (G::spec.bias)
      bias_ = room.vector("bias", raw_width(), {bias_value(), double(heads), double(keys)});
  }

  /// Columns of the raw projection.
  index_t raw_width() const noexcept { return index_t(raws) * elements(G::spec.raw); }
  index_t decay_keys() const noexcept { return G::spec.decay == axis::head_key && !G::spec.factored ? keys_ : 1; }

  /// Log-decays and write scales, one row a token, or one row in all when the gate is constant; the rates of a
  /// factored decay; what parameters of another source come to, in order.
  template <class T>
  struct values {
    view3<T> g_rhk;
    view2<T> write_rh, rate_hk;
    T* log_rate_h = nullptr;  ///< of each head's fastest channel, where the decay is factored
    std::array<T*, parameters> derived{};
  };
  template <class T>
  values<T> carve(arena& a, index_t rows) const {
    values<T> v;
    index_t const r = per_token ? rows : 1;
    if constexpr (G::spec.decays) v.g_rhk = a.take_view<T, 3>({r, heads_, decay_keys()});
    if constexpr (G::spec.writes) v.write_rh = a.take_view<T, 2>({r, heads_});
    if constexpr (G::spec.factored)
      v.rate_hk = a.take_view<T, 2>({heads_, keys_}), v.log_rate_h = a.take<T>(heads_);
    for (std::size_t i = 0; i < parameters; ++i)
      if (G::parameters[i].source != parameter_source::own) v.derived[i] = a.take<T>(elements(G::parameters[i].on));
    if constexpr (!per_token) {
      v.g_rhk.extent[0] = v.write_rh.extent[0] = rows;
      v.g_rhk.stride[0] = v.write_rh.stride[0] = 0;
    }
    return v;
  }

  template <class Device, class T>
  void forward(pass<Device, T> const& run, view2<same<T> const> raw_rc, values<same<T>> const& out) const {
    if constexpr (!active) return;
    if (!run.device.dry) derive(run.parameters, out);
    if constexpr (G::spec.factored)
      if (!run.device.dry) rates(run.parameters, out);
    T const scale = rate_scale(run);
    index_t const rows = per_token ? raw_rc.extent[0] : 1;
    kernels::detail::for_row_blocks(run.device, rows, [&](index_t, index_t begin, index_t end) {
      for (index_t r = begin; r < end; ++r) {
        bool const first = starts(run, r);
        for (index_t h = 0; h < heads_; ++h)
          for (index_t k = 0; k < decay_keys(); ++k) {
            auto const raw = gather_raw(run.parameters, raw_rc, r, h, k);
            auto const p = gather(run.parameters, out, h, k);
            auto const value = formula<T>(first, raw, p);
            if constexpr (G::spec.factored)
              out.g_rhk(r, h, 0) = finite(-scale * exp(out.log_rate_h[h] + G::template log_step<T>(raw, p)));
            else if constexpr (G::spec.decays)
              out.g_rhk(r, h, k) = bounded_log_decay(scale * value.log_decay);
            if constexpr (G::spec.writes) out.write_rh(r, h) = value.write;
          }
      }
    });
  }

  /// d_raw is written; parameter derivatives are added to, one partial sum a block of rows in order.
  template <class Device, class T>
  void backward(pass<Device, T> const& run, view2<same<T> const> raw_rc, values<same<T>> const& v,
                values<same<T>> const& d, view2<same<T>> d_raw_rc, same<T>* d_base, arena& ws) const {
    if constexpr (!active) return;
    arena_scope const scope(ws);
    index_t const rows = per_token ? raw_rc.extent[0] : 1,
                  count = kernels::detail::blocks(rows, kernels::detail::rows_per_block);
    index_t const width = partial_width();
    T* const partial = ws.take<T>((count + 1) * width);
    if (ws.measuring()) return;
    kernels::detail::for_row_blocks(run.device, rows, [&](index_t b, index_t begin, index_t end) {
      T* const sums = partial + b * width;
      std::fill_n(sums, width, T(0));
      for (index_t r = begin; r < end; ++r) {
        if constexpr (raws > 0) std::fill_n(d_raw_rc.at(r), raw_width(), T(0));
        for (index_t h = 0; h < heads_; ++h)
          for (index_t k = 0; k < decay_keys(); ++k) element_backward(run, raw_rc, v, d, r, h, k, d_raw_rc, sums);
      }
    });
    T* const all = partial + count * width;
    std::fill_n(all, width, T(0));
    for (index_t b = 0; b < count; ++b)
      for (index_t i = 0; i < width; ++i) all[i] += partial[b * width + i];
    if constexpr (G::spec.factored) rates_backward(run.parameters, v, d, all);
    spread(all, v, run.parameters, d_base);
  }

 private:
  index_t elements(axis on) const noexcept { return on == axis::head ? heads_ : heads_ * keys_; }
  index_t at(axis on, index_t h, index_t k) const noexcept { return on == axis::head ? h : h * keys_ + k; }

  static gate_element element(initial_element const& e, index_t place, bool per_key) {
    auto const heads = index_t(e.a), keys = index_t(e.b);
    return {per_key ? place / keys : place, heads, per_key ? place % keys : 0, keys, e.layer, e.layers, e.uniform};
  }
  /// A function pointer for parameter i, made from the gate's `initial`.
  template <std::size_t I>
  static auto start_value(std::size_t i) -> double (*)(initial_element const&) {
    if constexpr (I < parameters) {
      if (i == I)
        return [](initial_element const& e) {
          bool const own = G::parameters[I].source == parameter_source::own;
          return G::initial(I, element(e, own ? e.row : e.column, G::parameters[I].on == axis::head_key)) + e.c;
        };
      return start_value<I + 1>(i);
    } else {
      return nullptr;
    }
  }
  static auto bias_value() -> double (*)(initial_element const&) {
    return [](initial_element const& e) {
      if constexpr (gate_detail::has_bias_initial<G>) {
        bool const per_key = G::spec.raw == axis::head_key;
        index_t const width = index_t(e.a) * (per_key ? index_t(e.b) : 1);
        return G::bias_initial(std::size_t(e.row / width), element(e, e.row % width, per_key));
      } else {
        return e.c;
      }
    };
  }

  template <class Device, class T>
  static bool starts(pass<Device, T> const& run, index_t r) noexcept {
    return gate_detail::has_first<G> && per_token && run.starts(r);
  }
  template <class Device, class T>
  static T rate_scale(pass<Device, T> const& run) noexcept {
    return T(std::exp(run.knobs.decay_offset));
  }
  template <class T, class Raw, class P>
  static gate_value<T> formula(bool first, Raw const& raw, P const& p) noexcept {
    if constexpr (gate_detail::has_first<G>)
      if (first) return G::template first<T>(raw, p);
    return G::template forward<T>(raw, p);
  }
  /// A step so long that it has no number still decays everything that has a rate.
  template <class T>
  static T finite(T const& g) noexcept {
    using real = decltype(value_of(g));
    return value_of(g) < -(std::numeric_limits<real>::max)() ? T(-(std::numeric_limits<real>::max)()) : g;
  }

  template <class T>
  std::array<T, parameters> gather(T const* base, values<T> const& v, index_t h, index_t k) const noexcept {
    std::array<T, parameters> p{};
    for (std::size_t i = 0; i < parameters; ++i)
      p[i] = (v.derived[i] ? v.derived[i] : base + p_[i].offset)[at(G::parameters[i].on, h, k)];
    return p;
  }
  index_t raw_column(std::size_t i, index_t h, index_t k) const noexcept {
    return index_t(i) * elements(G::spec.raw) + at(G::spec.raw, h, k);
  }
  template <class T>
  std::array<T, raws> gather_raw(T const* base, view2<T const> raw_rc, index_t r, index_t h,
                                 index_t k) const noexcept {
    std::array<T, raws> raw{};
    for (std::size_t i = 0; i < raws; ++i) {
      raw[i] = raw_rc(r, raw_column(i, h, k));
      if constexpr (G::spec.bias) raw[i] += base[bias_.offset + raw_column(i, h, k)];
    }
    return raw;
  }

  /// Lower bounds that grow from layer to layer: sum over 1 <= m <= layer of softmax over layers.
  template <class T>
  void derive(T const* base, values<T> const& v) const {
    for (std::size_t i = 0; i < parameters; ++i)
      for (index_t e = 0; v.derived[i] && e < elements(G::parameters[i].on); ++e) {
        T below(0), all(0);
        for (index_t l = 0; l < layer_.count; ++l) {
          T const weight = layer_weight(base, i, l, e);
          all += weight;
          if (l > 0 && l <= layer_.index) below += weight;
        }
        v.derived[i][e] = below / all;
      }
  }
  /// e^(entry - greatest entry of the column)
  template <class T>
  T layer_weight(T const* base, std::size_t i, index_t l, index_t e) const noexcept {
    T const* const column = base + p_[i].offset + e;
    index_t const width = elements(G::parameters[i].on);
    auto most = value_of(column[0]);
    for (index_t m = 1; m < layer_.count; ++m) most = (std::max)(most, value_of(column[m * width]));
    return exp(column[l * width] - T(most));
  }

  /// Relative to the head's fastest channel, so that a huge rate and a tiny step never meet as inf * 0.
  template <class T>
  void rates(T const* base, values<T> const& v) const {
    for (index_t h = 0; h < heads_; ++h) {
      auto const log_rate = [&](index_t k) { return G::template log_rate<T>(gather(base, v, h, k)); };
      auto most = value_of(log_rate(0));
      for (index_t k = 1; k < keys_; ++k) most = (std::max)(most, value_of(log_rate(k)));
      v.log_rate_h[h] = T(most);
      for (index_t k = 0; k < keys_; ++k) v.rate_hk(h, k) = exp(log_rate(k) - T(most));
    }
  }

  index_t partial_width() const noexcept {
    index_t width = G::spec.bias ? raw_width() : 0;
    for (auto const& p : G::parameters) width += elements(p.on);
    return width;
  }
  template <class Device, class T>
  void element_backward(pass<Device, T> const& run, view2<T const> raw_rc, values<T> const& v, values<T> const& d,
                        index_t r, index_t h, index_t k, view2<T> d_raw_rc, T* sums) const {
    std::array<T, raws> d_raw{};
    std::array<T, parameters> d_p{};
    T const d_decay = G::spec.decays ? d.g_rhk(r, h, k) : T(0), d_write = G::spec.writes ? d.write_rh(r, h) : T(0);
    auto const raw = gather_raw(run.parameters, raw_rc, r, h, k);
    auto const p = gather(run.parameters, v, h, k);
    if constexpr (G::spec.factored) {
      T const g = v.g_rhk(r, h, 0);
      step_pullback(raw, p, g > -(std::numeric_limits<T>::max)() ? d_decay * g : T(0), d_write, d_raw, d_p);
    } else if (starts(run, r) || run.knobs.decay_offset != 0.0) {
      scaled_pullback(starts(run, r), rate_scale(run), raw, p, d_decay, d_write, d_raw, d_p);
    } else {
      gate_pullback<G, T>(raw, p, d_decay, d_write, d_raw, d_p);
    }
    for (std::size_t i = 0; i < parameters; ++i) {
      sums[at(G::parameters[i].on, h, k)] += d_p[i];
      sums += elements(G::parameters[i].on);
    }
    for (std::size_t i = 0; i < raws; ++i) {
      d_raw_rc(r, raw_column(i, h, k)) += d_raw[i];
      if constexpr (G::spec.bias) sums[raw_column(i, h, k)] += d_raw[i];
    }
  }
  template <class T, class Raw, class P>
  static void scaled_pullback(bool first, T scale, Raw const& raw, P const& p, T d_decay, T d_write, Raw& d_raw,
                              P& d_p) noexcept {
    using number = dual<T, raws + parameters>;
    if constexpr (raws + parameters > 0)
      gate_detail::dual_pullback<G>(
          raw, p, d_raw, d_p,
          [&](auto const& raw_dual, auto const& p_dual) { return formula<number>(first, raw_dual, p_dual); },
          [&](auto const& out, std::size_t i) {
            return gate_detail::through(d_decay, bounded_log_decay(number(scale) * out.log_decay).slope[i]) +
                   gate_detail::through(d_write, out.write.slope[i]);
          });
  }
  /// Through the step of a factored decay and the write scale.
  template <class T, class Raw, class P>
  static void step_pullback(Raw const& raw, P const& p, T d_log_step, T d_write, Raw& d_raw, P& d_p) noexcept {
    using number = dual<T, raws + parameters>;
    gate_detail::dual_pullback<G>(
        raw, p, d_raw, d_p,
        [](auto const& raw_dual, auto const& p_dual) {
          return std::pair(G::template log_step<number>(raw_dual, p_dual),
                           G::template forward<number>(raw_dual, p_dual).write);
        },
        [&](auto const& out, std::size_t i) {
          return gate_detail::through(d_log_step, out.first.slope[i]) +
                 gate_detail::through(d_write, out.second.slope[i]);
        });
  }
  /// Through the rates; the level they are relative to has no influence on their products with the steps.
  template <class T>
  void rates_backward(T const* base, values<T> const& v, values<T> const& d, T* sums) const {
    using number = dual<T, parameters>;
    for (index_t h = 0; h < heads_; ++h)
      for (index_t k = 0; k < keys_; ++k) {
        auto const p = gather(base, v, h, k);
        std::array<number, parameters> p_dual{};
        for (std::size_t i = 0; i < parameters; ++i) p_dual[i] = number(p[i]), p_dual[i].slope[i] = T(1);
        auto const log_rate = G::template log_rate<number>(p_dual);
        T* to = sums;
        for (std::size_t i = 0; i < parameters; ++i) {
          to[at(G::parameters[i].on, h, k)] +=
              gate_detail::through(d.rate_hk(h, k) * v.rate_hk(h, k), log_rate.slope[i]);
          to += elements(G::parameters[i].on);
        }
      }
  }
  /// Adds the sums to the tensors they belong to.
  template <class T>
  void spread(T const* sums, values<T> const& v, T const* base, T* d_base) const {
    for (std::size_t i = 0; i < parameters; ++i) {
      index_t const n = elements(G::parameters[i].on);
      for (index_t e = 0; e < n; ++e)
        if (!v.derived[i])
          d_base[p_[i].offset + e] += sums[e];
        else
          derived_backward(base, i, e, v.derived[i][e], sums[e], d_base);
      sums += n;
    }
    if constexpr (G::spec.bias)
      for (index_t e = 0; e < raw_width(); ++e) d_base[bias_.offset + e] += sums[e];
  }
  template <class T>
  void derived_backward(T const* base, std::size_t i, index_t e, T bound, T d, T* d_base) const {
    T all(0);
    for (index_t l = 0; l < layer_.count; ++l) all += layer_weight(base, i, l, e);
    for (index_t l = 0; l < layer_.count; ++l) {
      T const share = layer_weight(base, i, l, e) / all, counted = l > 0 && l <= layer_.index ? T(1) : T(0);
      d_base[p_[i].offset + l * elements(G::parameters[i].on) + e] += d * share * (counted - bound);
    }
  }

  index_t heads_ = 1, keys_ = 1;
  layer_position layer_;
  std::array<weight, parameters> p_{};
  weight bias_;
};

/// Multiplies every decay rate of a model by e^delta through the parameters that are their logarithms (Mamba's
/// A_log, a constant gate's log_rate); returns how many numbers were shifted. Source: scaling the gates of a
/// trained model, Tong et al. (arXiv 2609.16540), section 5.
template <class T>
index_t shift_decay_rates(parameter_list const& list, T* parameters, double delta) {
  index_t shifted = 0;
  for (auto const& p : list.all())
    for (index_t i = 0; p.log_rate && i < p.size(); ++i, ++shifted) parameters[p.offset + i] += T(delta);
  return shifted;
}

}  // namespace seqmix::inline v0
