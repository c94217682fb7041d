#pragma once

#include <seqmix/kernels/cpu/stabilised.hpp>
#include <seqmix/kernels/reference/stabilised.hpp>
#include <seqmix/mixers/mixer.hpp>
#include <seqmix/states/mlstm.hpp>
#include <seqmix/states/wkv.hpp>

namespace seqmix::inline v0 {

/// A bounded state written with exponential weights of any size, read as a weighted mean: mLSTM, RWKV-4.
/// State: S [N,H,K,V], its normaliser [N,H,K] and the running maximum of the log-weights [N,H], all relative to it.
/// Saved: one state a chunk and a number a row and head. Deterministic on the CPU for any number of threads.
template <class State, class Gate, class Selector>
requires(State::spec.kind == state_kind::stabilised) struct mixer<State, Gate, Selector> {
  static_assert(explain_pairing<State, Gate, Selector>());
  using state_type = State;
  using gate_type = Gate;
  using selector_type = Selector;

  static std::string name() {
    return "recurrence[state=" + std::string(State::name) + ",gate=" + std::string(Gate::name) + "]";
  }

  template <class T>
  struct state : stabilised_state<T> {
    static state carve(arena& a, mixer_shape const& s) {
      index_t const N = s.seq.count();
      state x;
      x.S_nhkv = a.take_view<T, 4>({N, s.heads, s.key_dim, s.value_dim});
      x.n_nhk = a.take_view<T, 3>({N, s.heads, s.key_dim});
      x.m_nh = a.take_view<T, 2>({N, s.heads});
      return x;
    }
    static index_t elements(mixer_shape const& s) {
      return s.seq.count() * s.heads * (s.key_dim * (s.value_dim + 1) + 1);
    }
    /// Before the first token. m may be -inf.
    void clear() {
      std::fill_n(this->S_nhkv.data, this->S_nhkv.size(), T(0));
      std::fill_n(this->n_nhk.data, this->n_nhk.size(), T(0));
      std::fill_n(this->m_nh.data, this->m_nh.size(), T(kernels::detail::first_maximum<State, double>()));
    }
  };
  template <class T>
  struct saved {
    kernels::stabilised_saved<T> kernel;
    template <class Isa>
    static saved carve(arena& a, mixer_shape const& s) {
      return {kernels::carve_stabilised_saved<State, Isa, T>(a, kernel_shape(s))};
    }
  };

  template <class Isa, class Threads, class T>
  static void forward(device::basic_cpu<Isa, Threads> dev, mixer_shape const& s, mixer_input<T> const& in,
                      view3<same<T>> o_rhv, state<same<T>> const* before, state<same<T>>* after,
                      saved<same<T>> const* keep, arena& ws) {
    kernels::stabilised_forward<State>(dev, kernel_shape(s), kernel_input(in, before), o_rhv,
                                       keep ? &keep->kernel : nullptr, view_of<T>(after), ws);
  }
  template <class T>
  static void forward(device::reference dev, mixer_shape const& s, mixer_input<T> const& in, view3<same<T>> o_rhv,
                      state<same<T>> const* before, state<same<T>>* after, saved<same<T>> const*, arena&) {
    kernels::stabilised_forward<State>(dev, kernel_shape(s), kernel_input(in, before), o_rhv, view_of<T>(after));
  }

  /// `d_after` is the derivative of the final state, nullptr for none; `d_before` takes that of the initial one.
  template <class Isa, class Threads, class T>
  static void backward(device::basic_cpu<Isa, Threads> dev, mixer_shape const& s, mixer_input<T> const& in,
                       view3<same<T> const> o_rhv, saved<same<T>> const& keep, view3<same<T> const> d_o_rhv,
                       state<same<T>> const* before, state<same<T>> const* d_after,
                       mixer_gradient<same<T>> const& d, state<same<T>>* d_before, arena& ws) {
    kernels::stabilised_backward<State>(
        dev, kernel_shape(s), kernel_input(in, before), o_rhv, keep.kernel, d_o_rhv, view_of<T>(d_after),
        stabilised_gradient<T>{d.q_rhk, d.k_rhk, d.v_rhv, d.g_rhk, d.write_rh, d.bonus_hk, view_of<T>(d_before)},
        ws);
  }

 private:
  static recurrence_shape kernel_shape(mixer_shape const& s) {
    recurrence_shape r;
    r.seq = s.seq;
    r.heads = s.heads, r.query_heads = s.query_heads, r.key_heads = s.key_heads;
    r.value_heads = s.value_heads, r.gate_heads = s.gate_heads;
    r.key_dim = s.key_dim, r.value_dim = s.value_dim;
    r.scale = s.scale, r.chunk = s.chunk;
    return r;
  }
  template <class T>
  static stabilised_state<T> view_of(state<T> const* x) {
    return x ? stabilised_state<T>(*x) : stabilised_state<T>{};
  }
  template <class T>
  static stabilised_input<T> kernel_input(mixer_input<T> const& in, state<same<T>> const* before) {
    return {in.q_rhk, in.k_rhk, in.v_rhv, in.g_rhk, in.write_rh, in.bonus_hk, view_of<T>(before)};
  }
};

}  // namespace seqmix::inline v0
