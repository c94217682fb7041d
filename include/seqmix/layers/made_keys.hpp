#pragma once

#include <seqmix/layers/extras.hpp>
#include <seqmix/layers/pass.hpp>

namespace seqmix::inline v0 {

/// Keys that are not projected: 1 - e^g of the gate's decays (HGRN2), or rows of a table by position or head, fixed
/// and random or trained, the ablations that take a query's relation to the tokens away.
template <key_source Keys>
class made_keys {
  static constexpr bool by_position = Keys == key_source::random_positions || Keys == key_source::trained_positions;

 public:
  static constexpr bool table = by_position || Keys == key_source::random_head;

  made_keys() = default;
  /// `positions`: rows of a table by position, the longest sequence.
  made_keys(parameter_room& room, index_t heads, index_t keys, index_t positions) : heads_(heads), keys_(keys) {
    if constexpr (table)
      table_ = room.table("key_table", by_position ? positions : 1, heads * keys, init::normal(1.0),
                          Keys == key_source::trained_positions);
  }

  /// Errors: shape_error for a sequence that is longer than the table.
  template <class Device, class T>
  void forward(pass<Device, T> const& run, view3<same<T> const> g_rhk, view3<same<T>> k_rhk) const {
    if constexpr (Keys == key_source::one_minus_decay)
      each(run, [&](index_t r, index_t h, index_t k) { k_rhk(r, h, k) = one_minus_exp(g_rhk(r, h, k)); });
    if constexpr (table) {
      check(run);
      auto const rows = table_.of(run.parameters);
      each(run, [&](index_t r, index_t h, index_t k) { k_rhk(r, h, k) = rows(row(run, r), h * keys_ + k); });
    }
  }
  /// Adds to the derivative of the decays or of a trained table; its rows in order, so that the sums have one
  /// order.
  template <class Device, class T>
  void backward(pass<Device, T> const& run, view3<same<T> const> g_rhk, view3<same<T> const> dk_rhk,
                view3<same<T>> dg_rhk, same<T>* d_base) const {
    if constexpr (Keys == key_source::one_minus_decay)
      each(run, [&](index_t r, index_t h, index_t k) { dg_rhk(r, h, k) -= dk_rhk(r, h, k) * exp(g_rhk(r, h, k)); });
    if constexpr (Keys == key_source::trained_positions) {
      auto const rows = table_.of(d_base);
      for (index_t r = 0; !run.device.dry && r < run.rows(); ++r)
        for (index_t h = 0; h < heads_; ++h)
          for (index_t k = 0; k < keys_; ++k) rows(row(run, r), h * keys_ + k) += dk_rhk(r, h, k);
    }
  }

 private:
  template <class Device, class T, class F>
  void each(pass<Device, T> const& run, F const& f) const {
    kernels::detail::for_row_blocks(run.device, run.rows(), [&](index_t, index_t begin, index_t end) {
      for (index_t r = begin; r < end; ++r)
        for (index_t h = 0; h < heads_; ++h)
          for (index_t k = 0; k < keys_; ++k) f(r, h, k);
    });
  }
  template <class Device, class T>
  static index_t row(pass<Device, T> const& run, index_t r) {
    if (!by_position) return 0;
    index_t const n = run.seq.holder(r);
    return r - run.seq.begin(n) + (run.position ? run.position[n] : 0);
  }
  template <class Device, class T>
  void check(pass<Device, T> const& run) const {
    for (index_t n = 0; by_position && !run.device.dry && n < run.seq.count(); ++n) {
      index_t const end = run.seq.length(n) + (run.position ? run.position[n] : 0);
      if (end > table_.rows)
        throw shape_error("seqmix: layer: sequence " + std::to_string(n) + " reaches position " +
                          std::to_string(end) + ", the table of keys has " + std::to_string(table_.rows));
    }
  }

  index_t heads_ = 1, keys_ = 1;
  weight table_;
};

}  // namespace seqmix::inline v0
