#pragma once

#include <seqmix/concepts/gate.hpp>
#include <seqmix/kernels/cpu/rows.hpp>
#include <seqmix/layers/parameters.hpp>

namespace seqmix::inline v0 {

/// The surrounding of a gate's formula: its parameters, its raw values, and the gathering and reducing between
/// axes.
template <gate G>
class gate_room {
 public:
  static constexpr std::size_t raws = gate_detail::raws<G>;
  static constexpr std::size_t parameters = gate_detail::parameters<G>;
  static constexpr bool active = G::spec.decays || G::spec.writes;
  static constexpr bool per_token = active && G::spec.raws > 0;
  static_assert(!G::spec.writes || G::spec.decay == axis::head,
                "seqmix gate: the write scale is one number per head; declare decay = axis::head");
  static_assert(G::spec.raws <= 2, "seqmix gate: a formula takes at most two raw values");
  static_assert(
      !(G::spec.raw == axis::head_key && G::spec.decay == axis::head),
      "seqmix gate: raw values per key channel need a decay per key channel; declare decay = axis::head_key");
  static_assert(
      (G::spec.raws == 0) == (G::spec.from == feed::nothing),
      "seqmix gate: raw values need a feed, and a feed needs raw values; set spec.raws and spec.from together");

  gate_room() = default;
  gate_room(parameter_room room, index_t heads, index_t keys) : heads_(heads), keys_(keys) {
    for (std::size_t i = 0; i < parameters; ++i) {
      auto const& p = G::parameters[i];
      p_[i] = room.vector(p.name, elements(p.on), {start_value<0>(i), double(heads), double(keys)}, p.weight_decay,
                          p.trained);
    }
    if constexpr (G::spec.bias) bias_ = room.vector("bias", raw_width(), init::constant(0.0));
  }

  /// Columns of the raw projection.
  index_t raw_width() const noexcept { return index_t(raws) * elements(G::spec.raw); }
  index_t decay_keys() const noexcept { return G::spec.decay == axis::head_key ? keys_ : 1; }

  /// Log-decays and write scales, one row a token, or one row in all when the gate is constant.
  template <class T>
  struct values {
    view3<T> g_rhk;
    view2<T> write_rh;
  };
  template <class T>
  values<T> carve(arena& a, index_t rows) const {
    values<T> v;
    index_t const r = per_token ? rows : 1;
    if constexpr (G::spec.decays) v.g_rhk = a.take_view<T, 3>({r, heads_, decay_keys()});
    if constexpr (G::spec.writes) v.write_rh = a.take_view<T, 2>({r, heads_});
    if constexpr (!per_token) {
      v.g_rhk.extent[0] = v.write_rh.extent[0] = rows;
      v.g_rhk.stride[0] = v.write_rh.stride[0] = 0;
    }
    return v;
  }

  template <class Device, class T>
  void forward(Device dev, T const* base, view2<same<T> const> raw_rc, values<T> const& out) const {
    if constexpr (!active) return;
    index_t const rows = per_token ? raw_rc.extent[0] : 1;
    kernels::detail::for_row_blocks(dev, rows, [&](index_t, index_t begin, index_t end) {
      for (index_t r = begin; r < end; ++r)
        for (index_t h = 0; h < heads_; ++h)
          for (index_t k = 0; k < decay_keys(); ++k) {
            auto const value = G::template forward<T>(gather_raw(base, raw_rc, r, h, k), gather(base, h, k));
            if constexpr (G::spec.decays) out.g_rhk(r, h, k) = bounded_log_decay(value.log_decay);
            if constexpr (G::spec.writes) out.write_rh(r, h) = value.write;
          }
    });
  }

  /// d_raw is written; parameter derivatives are added to, one partial sum a block of rows in order.
  template <class Device, class T>
  void backward(Device dev, T const* base, view2<same<T> const> raw_rc, values<T> const& d, view2<same<T>> d_raw_rc,
                same<T>* d_base, arena& ws) const {
    if constexpr (!active) return;
    arena_scope const scope(ws);
    index_t const rows = per_token ? raw_rc.extent[0] : 1,
                  count = kernels::detail::blocks(rows, kernels::detail::rows_per_block);
    index_t const width = partial_width();
    T* const partial = ws.take<T>(count * width);
    if (ws.measuring()) return;
    kernels::detail::for_row_blocks(dev, rows, [&](index_t b, index_t begin, index_t end) {
      T* const sums = partial + b * width;
      std::fill_n(sums, width, T(0));
      for (index_t r = begin; r < end; ++r) {
        if constexpr (raws > 0) std::fill_n(d_raw_rc.at(r), raw_width(), T(0));
        for (index_t h = 0; h < heads_; ++h)
          for (index_t k = 0; k < decay_keys(); ++k) element_backward(base, raw_rc, d, r, h, k, d_raw_rc, sums);
      }
    });
    reduce(partial, count, d_base);
  }

 private:
  index_t elements(axis on) const noexcept { return on == axis::head ? heads_ : heads_ * keys_; }
  index_t at(axis on, index_t h, index_t k) const noexcept { return on == axis::head ? h : h * keys_ + k; }

  /// A function pointer for parameter i, made from the gate's `initial`.
  template <std::size_t I>
  static auto start_value(std::size_t i) -> double (*)(initial_element const&) {
    if constexpr (I < parameters) {
      if (i == I)
        return [](initial_element const& e) {
          auto const heads = index_t(e.a), keys = index_t(e.b);
          bool const per_key = G::parameters[I].on == axis::head_key;
          return G::initial(I, gate_element{per_key ? e.row / keys : e.row, heads, per_key ? e.row % keys : 0, keys,
                                            e.layer, e.layers, e.uniform});
        };
      return start_value<I + 1>(i);
    } else {
      return nullptr;
    }
  }

  template <class T>
  std::array<T, parameters> gather(T const* base, index_t h, index_t k) const noexcept {
    std::array<T, parameters> p{};
    for (std::size_t i = 0; i < parameters; ++i) p[i] = base[p_[i].offset + at(G::parameters[i].on, h, k)];
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

  index_t partial_width() const noexcept {
    index_t width = G::spec.bias ? raw_width() : 0;
    for (auto const& p : G::parameters) width += elements(p.on);
    return width;
  }
  template <class T>
  void element_backward(T const* base, view2<T const> raw_rc, values<T> const& d, index_t r, index_t h, index_t k,
                        view2<T> d_raw_rc, T* sums) const {
    std::array<T, raws> d_raw{};
    std::array<T, parameters> d_p{};
    gate_pullback<G, T>(gather_raw(base, raw_rc, r, h, k), gather(base, h, k),
                        G::spec.decays ? d.g_rhk(r, h, k) : T(0), G::spec.writes ? d.write_rh(r, h) : T(0), d_raw,
                        d_p);
    for (std::size_t i = 0; i < parameters; ++i) {
      sums[at(G::parameters[i].on, h, k)] += d_p[i];
      sums += elements(G::parameters[i].on);
    }
    for (std::size_t i = 0; i < raws; ++i) {
      d_raw_rc(r, raw_column(i, h, k)) += d_raw[i];
      if constexpr (G::spec.bias) sums[raw_column(i, h, k)] += d_raw[i];
    }
  }
  template <class T>
  void reduce(T const* partial, index_t count, T* d_base) const {
    index_t const width = partial_width();
    for (index_t b = 0; b < count; ++b) {
      T const* sums = partial + b * width;
      auto const add = [&](weight const& w, index_t n) {
        for (index_t i = 0; i < n; ++i) d_base[w.offset + i] += sums[i];
        sums += n;
      };
      for (std::size_t i = 0; i < parameters; ++i) add(p_[i], elements(G::parameters[i].on));
      if constexpr (G::spec.bias) add(bias_, raw_width());
    }
  }

  index_t heads_ = 1, keys_ = 1;
  std::array<weight, parameters> p_{};
  weight bias_;
};

}  // namespace seqmix::inline v0
