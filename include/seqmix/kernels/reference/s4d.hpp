#pragma once

#include <seqmix/kernels/reference/rotation.hpp>
#include <seqmix/tensor/device.hpp>
#include <seqmix/tensor/formulas.hpp>
#include <seqmix/tensor/sequences.hpp>

/// S4D's kernel: per channel a linear system with a complex diagonal that does not depend on the token, one of each
/// conjugate pair of states kept. With A = -e^(log_A_real) + i A_imag, dt = e^(log_dt) and zero-order hold,
///   Abar = e^(dt A),  Bbar = (Abar - 1) / A
///   x_t = Abar x_{t-1} + Bbar u_t
///   y_t = 2 Re sum_n C_n x_{t,n} + D u_t
/// Abar is kept as E = Abar - 1 and x_t is x_{t-1} + E x_{t-1} + Bbar u_t: a slow decay keeps its digits in float.
/// Decays are multiplied and never summed as logarithms, so that they need no bound.
/// Source: Gu et al., "On the Parameterization and Initialization of Diagonal State Space Models" (arXiv
/// 2206.11893), sections 3.1 and 3.2, and its authors' code.
namespace seqmix::inline v0 {

struct s4d_shape {
  sequences seq{};
  index_t channels = 1, pairs = 1;  ///< a channel's states are `pairs` conjugate pairs
  double decay_offset = 0.0;        ///< added to log_A_real
  index_t chunk = 64;               ///< tokens between two states that forward keeps for backward

  index_t state_elements() const noexcept { return seq.count() * channels * pairs * 2; }
};

/// u [R,H]; log_dt, D [H]; log_A_real, A_imag [H,P]; C [H,P,2] (real, imaginary). `initial` [N,H,P,2] is the state
/// before the first token, empty for zero.
template <class T>
struct s4d_input {
  view2<T const> u_rh{};
  view1<T const> log_dt_h{};
  view2<T const> log_A_real_hp{}, A_imag_hp{};
  view3<T const> C_hpc{};
  view1<T const> D_h{};
  view4<T const> initial_nhpc{};
};

/// Where the derivatives go: those of u and of the initial state (may be empty) are written, those of the
/// parameters accumulate.
template <class T>
struct s4d_gradient {
  view2<T> u_rh{};
  view1<T> log_dt_h{};
  view2<T> log_A_real_hp{}, A_imag_hp{};
  view3<T> C_hpc{};
  view1<T> D_h{};
  view4<T> initial_nhpc{};
};

namespace kernels::detail {

/// Checks rows [R,H] and a state [N,H,P,2] (empty: not there).
template <class T>
void check_s4d_rows(char const* what, s4d_shape const& s, view2<T> const& x_rh) {
  expect_shape(what, x_rh, {s.seq.rows(), s.channels});
  expect_contiguous(what, x_rh);
}
template <class T>
void check_s4d_state(char const* what, s4d_shape const& s, view4<T> const& x_nhpc) {
  if (!x_nhpc) return;
  expect_shape(what, x_nhpc, {s.seq.count(), s.channels, s.pairs, 2});
  expect_contiguous(what, x_nhpc);
}

}  // namespace kernels::detail

/// Checks every view of an S4D kernel, or of its derivatives; names the one that does not fit.
template <template <class> class Views, class T>
void validate(s4d_shape const& s, Views<T> const& x) requires requires {
  x.A_imag_hp;
}
{
  if (s.channels < 1 || s.pairs < 1 || s.chunk < 1)
    throw shape_error("seqmix: S4D: channels, pairs and chunk must be at least 1, got " +
                      std::to_string(s.channels) + ", " + std::to_string(s.pairs) + " and " +
                      std::to_string(s.chunk));
  kernels::detail::check_s4d_rows("S4D input u", s, x.u_rh);
  expect_shape("S4D log_dt", x.log_dt_h, {s.channels});
  expect_shape("S4D log_A_real", x.log_A_real_hp, {s.channels, s.pairs});
  expect_shape("S4D A_imag", x.A_imag_hp, {s.channels, s.pairs});
  expect_shape("S4D C", x.C_hpc, {s.channels, s.pairs, 2});
  expect_shape("S4D D", x.D_h, {s.channels});
  kernels::detail::check_s4d_state("S4D initial state", s, x.initial_nhpc);
}

namespace kernels::detail {

/// A complex number of any scalar.
template <class T>
struct complex_pair {
  T re{}, im{};

  friend constexpr complex_pair operator*(complex_pair const& a, complex_pair const& b) {
    return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
  }
  friend constexpr complex_pair operator*(T const& a, complex_pair const& b) { return {a * b.re, a * b.im}; }
  friend constexpr complex_pair operator+(complex_pair const& a, complex_pair const& b) {
    return {a.re + b.re, a.im + b.im};
  }
  friend constexpr complex_pair operator-(complex_pair const& a, complex_pair const& b) {
    return {a.re - b.re, a.im - b.im};
  }
};
/// conj(a) b
template <class T>
constexpr complex_pair<T> conj_times(complex_pair<T> const& a, complex_pair<T> const& b) {
  return {a.re * b.re + a.im * b.im, a.re * b.im - a.im * b.re};
}

/// One state's discretisation: z = dt A, Abar = e^z, E = Abar - 1, Bbar = E / A, phi(z) = E / z and its derivative.
template <class T>
struct s4d_step {
  T dt;
  complex_pair<T> A, z, decay, E, phi, slope, B;

  s4d_step(T const& log_dt, T const& log_A_real, T const& A_imag, double offset)
      : dt(exp(log_dt)), A{-exp(log_A_real + T(offset)), A_imag}, z(dt * A) {
    if (value_of(square(z)) < 0.25)
      by_series();
    else
      by_exponential();
  }

 private:
  static T square(complex_pair<T> const& a) { return a.re * a.re + a.im * a.im; }
  static complex_pair<T> quotient(complex_pair<T> const& a, complex_pair<T> const& b) {
    return T(1) / square(b) * conj_times(b, a);
  }
  /// phi(z) = 1 + z/2 (1 + z/3 (1 + ...)) and its derivative by Horner's rule: no difference of equal numbers.
  void by_series() {
    phi = {T(1), T(0)};
    slope = {T(0), T(0)};
    for (int k = 17; k > 1; --k) {
      T const part = T(1) / T(k);
      slope = part * (phi + z * slope);
      phi = part * (z * phi);
      phi.re += T(1);
    }
    E = z * phi;
    decay = {E.re + T(1), E.im};
    B = dt * phi;
  }
  /// e^(a + ib) - 1; its real part is (e^a - 1) cos b - 2 sin^2(b/2) where e^a cos b may be near 1.
  void by_exponential() {
    T const size = exp(z.re), cos_b = cosine(z.im), half = sine(T(0.5) * z.im);
    bool const strong = value_of(z.re) < -1;
    decay = {size * cos_b, size * sine(z.im)};
    E.re = strong ? decay.re - T(1) : -one_minus_exp(z.re) * cos_b - T(2) * half * half;
    E.im = decay.im;
    phi = quotient(E, z);
    slope = quotient(decay - phi, z);
    B = quotient(E, A);
  }
};

}  // namespace kernels::detail

namespace kernels {

/// y [R,H] (not u itself) and the final state [N,H,P,2] (empty: not wanted), token by token. The oracle of the fast
/// kernel and, on dual numbers, of its gradients.
template <class T>
void s4d_forward(device::reference, s4d_shape const& s, s4d_input<T> const& in, view2<same<T>> y_rh,
                 view4<same<T>> final_nhpc) {
  validate(s, in);
  detail::check_s4d_rows("S4D output y", s, y_rh);
  detail::check_s4d_state("S4D final state", s, final_nhpc);
  for (index_t n = 0; n < s.seq.count(); ++n)
    for (index_t h = 0; h < s.channels; ++h) {
      for (index_t r = s.seq.begin(n); r < s.seq.end(n); ++r) y_rh(r, h) = in.D_h(h) * in.u_rh(r, h);
      for (index_t p = 0; p < s.pairs; ++p) {
        detail::s4d_step<T> const step(in.log_dt_h(h), in.log_A_real_hp(h, p), in.A_imag_hp(h, p), s.decay_offset);
        detail::complex_pair<T> const out{in.C_hpc(h, p, 0), in.C_hpc(h, p, 1)};
        detail::complex_pair<T> x{T(0), T(0)};
        if (in.initial_nhpc) x = {in.initial_nhpc(n, h, p, 0), in.initial_nhpc(n, h, p, 1)};
        for (index_t r = s.seq.begin(n); r < s.seq.end(n); ++r) {
          x = x + (step.E * x + in.u_rh(r, h) * step.B);
          y_rh(r, h) += T(2) * (out * x).re;
        }
        if (final_nhpc) final_nhpc(n, h, p, 0) = x.re, final_nhpc(n, h, p, 1) = x.im;
      }
    }
}

}  // namespace kernels

}  // namespace seqmix::inline v0
