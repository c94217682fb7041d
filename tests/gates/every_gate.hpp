#pragma once

#include <seqmix/gates/alibi.hpp>
#include <seqmix/gates/constant.hpp>
#include <seqmix/gates/constant_form.hpp>
#include <seqmix/gates/gdn.hpp>
#include <seqmix/gates/gla.hpp>
#include <seqmix/gates/hgrn.hpp>
#include <seqmix/gates/hgrn2.hpp>
#include <seqmix/gates/kda.hpp>
#include <seqmix/gates/kda_bounded.hpp>
#include <seqmix/gates/log_sigmoid.hpp>
#include <seqmix/gates/mamba1.hpp>
#include <seqmix/gates/mamba2.hpp>
#include <seqmix/gates/mamba3.hpp>
#include <seqmix/gates/min_gru.hpp>
#include <seqmix/gates/min_lstm.hpp>
#include <seqmix/gates/mlstm.hpp>
#include <seqmix/gates/none.hpp>
#include <seqmix/gates/retention.hpp>
#include <seqmix/gates/rg_lru.hpp>
#include <seqmix/gates/rwkv4.hpp>
#include <seqmix/gates/rwkv5.hpp>
#include <seqmix/gates/rwkv6.hpp>
#include <seqmix/gates/rwkv7.hpp>
#include <seqmix/gates/spaced_log_sigmoid.hpp>
#include <seqmix/gates/without_decay.hpp>

namespace seqmix::testing {

/// Calls f.operator()<G>() for every gate of a list.
template <class... G>
struct gate_list {
  template <class F>
  static void each(F const& f) {
    (f.template operator()<G>(), ...);
  }
};

using every_gate =
    gate_list<gates::alibi, gates::constant, gates::gdn, gates::gla, gates::hgrn, gates::hgrn2, gates::kda,
              gates::kda_bounded, gates::log_sigmoid, gates::mamba1, gates::mamba2, gates::mamba3, gates::min_gru,
              gates::min_lstm, gates::mlstm, gates::none, gates::retention, gates::rg_lru, gates::rwkv4,
              gates::rwkv5, gates::rwkv6, gates::rwkv7, gates::spaced_log_sigmoid<>>;

/// Arguments of a gate, and the derivatives of its results.
template <class G, class T>
struct gate_point {
  std::array<T, gate_detail::raws<G>> raw{}, d_raw{};
  std::array<T, gate_detail::parameters<G>> p{}, d_p{};

  gate_value<T> value() const { return G::template forward<T>(raw, p); }
  /// By the gate's own pullback, or by dual numbers where it has none.
  void pull(T d_log_decay, T d_write) { gate_pullback<G, T>(raw, p, d_log_decay, d_write, d_raw, d_p); }
  template <class F>
  void each_derivative(F const& f) const {
    for (T x : d_raw) f(x);
    for (T x : d_p) f(x);
  }
};

/// The formula with dual numbers at the same place, one direction an argument: raw values first.
template <class G, class T>
auto on_dual_numbers(gate_point<G, T> const& at) {
  constexpr auto nr = gate_detail::raws<G>, np = gate_detail::parameters<G>;
  using number = dual<T, nr + np>;
  std::array<number, nr> raw{};
  std::array<number, np> p{};
  for (std::size_t i = 0; i < nr; ++i) raw[i] = number(at.raw[i]), raw[i].slope[i] = T(1);
  for (std::size_t i = 0; i < np; ++i) p[i] = number(at.p[i]), p[i].slope[nr + i] = T(1);
  return G::template forward<number>(raw, p);
}

/// A parameter's value for a number x of any size: bounds lie in [0, 1], log-decays below 0.
template <class T>
T admissible(gate_parameter const& p, double x) {
  if (p.source == parameter_source::cumulative_softmax) return T(1 / (1 + std::exp(-x)));
  return p.name == "log_decay" ? T(-std::abs(x)) : T(x);
}

}  // namespace seqmix::testing
