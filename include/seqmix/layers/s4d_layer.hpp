#pragma once

#include <cmath>

#include <seqmix/kernels/cpu/output_gate.hpp>
#include <seqmix/kernels/cpu/s4d.hpp>
#include <seqmix/layers/norm.hpp>
#include <seqmix/layers/pass.hpp>
#include <seqmix/layers/projection.hpp>

namespace seqmix::inline v0 {

namespace layer_detail {
template <class Device, class T>
concept s4d_forward_on = requires(Device dev, s4d_shape const& s, s4d_input<T> const& in, view2<T> y, arena& ws) {
  kernels::s4d_forward(dev, s, in, y, nullptr, view4<T>{}, ws);
}
|| requires(Device dev, s4d_shape const& s, s4d_input<T> const& in, view2<T> y) {
  kernels::s4d_forward(dev, s, in, y, view4<T>{});
};
template <class Device, class T>
concept s4d_backward_on = requires(Device dev, s4d_shape const& s, s4d_input<T> const& in,
                                   kernels::s4d_saved<T> const& keep, view2<T> y, s4d_gradient<T> const& d,
                                   arena& ws) {
  kernels::s4d_backward(dev, s, in, keep, y, view4<T>{}, d, ws);
};
}  // namespace layer_detail

/// Sizes and numbers of an S4D layer; the defaults are the published ones. Its width is d_model.
struct s4d_layer_options {
  index_t states = 64;            ///< complex states a channel, an even number: one of each conjugate pair is kept
  index_t recurrence_chunk = 64;  ///< tokens between two states that are kept for backward
  double norm_eps = 1e-5;
  double decay_offset = 0.0;  ///< added to the start values of log_A_real
  initialiser out{};          ///< of the projection's weight; none: the published rule
};
template <class Add>
void each_option(s4d_layer_options const& o, Add const& add) {
  add("states", o.states);
  add("recurrence_chunk", o.recurrence_chunk);
  add("norm_eps", o.norm_eps);
}

/// x + a sigmoid(b), [a | b] = W gelu(s4d(n)) + bias, n = norm(x): every channel a linear system of its own with
/// complex diagonal states and the skip D u (kernels/reference/s4d.hpp), then erf-GELU and a GLU over a projection
/// to 2 d_model. Nothing in the system depends on the token. The knob decay_offset multiplies -Re A by its e^delta.
/// Start values: dt log-uniform in [1e-3, 1e-1], A = -1/2 + i pi n, C complex normal, D normal ("S4D-Lin"); no
/// weight decay on dt and A. `Norm`, `Residual`: none and false give the mixing part alone.
/// Saved per row: the system's output and the projection, 3 d_model numbers, and states d_model numbers for every
/// chunk and sequence. Deterministic on the CPU for any number of threads.
/// Source: Gu et al., "On the Parameterization and Initialization of Diagonal State Space Models" (arXiv
/// 2206.11893), sections 3 and 4, and the layer of its authors' code.
template <norm_kind Norm = norm_kind::rms, bool Residual = true>
class s4d_layer {
 public:
  using options = s4d_layer_options;

  static std::string name() {
    std::string text;
    if (Norm != norm_kind::rms) text += Norm == norm_kind::layer ? ",norm=layer" : ",norm=none";
    if (!Residual) text += ",branch";
    return text.empty() ? "s4d" : "s4d[" + text.substr(1) + "]";
  }

  s4d_layer(options const& o, index_t d_model, parameter_room room) : o_(o), d_(d_model) {
    check();
    auto in = room.inner("mixer");
    norm_ = norm<Norm>(in.inner("norm"), d_, o_.norm_eps);
    index_t const n = d_ * pairs();
    double const bound = 1.0 / std::sqrt(double(d_));
    log_dt_ = in.vector("log_dt", d_, init::uniform(std::log(1e-3), std::log(1e-1)));
    log_A_real_ =
        in.vector("log_A_real", n, init::constant(std::log(0.5) + o_.decay_offset), false, true, /*log_rate=*/true);
    A_imag_ = in.vector("A_imag", n, {frequency, double(pairs())});
    C_ = in.vector("C", 2 * n, init::normal(std::sqrt(0.5)), true);
    D_ = in.vector("D", d_, init::normal(1.0), true);
    out_ = in.matrix("out", 2 * d_, d_, o_.out ? o_.out : init::fan_in());
    out_bias_ = column_bias(in, "out.bias", 2 * d_, init::uniform(-bound, bound));
  }

  options const& settings() const noexcept { return o_; }

  /// Real and imaginary parts [N,D,states/2,2].
  template <class T>
  struct state {
    view4<T> x_nhpc;
    void clear() { std::fill_n(x_nhpc.data, x_nhpc.size(), T(0)); }
  };
  template <class T, class Device>
  state<T> carve_state(arena& a, pass<Device, T> const& run) const {
    return {a.take_view<T, 4>({run.seq.count(), d_, pairs(), 2})};
  }
  /// Independent of how many tokens were seen.
  index_t state_elements(index_t sequences_count, index_t) const { return sequences_count * d_ * o_.states; }

  template <class T>
  struct saved {
    typename norm<Norm>::template saved<T> norm;
    view2<T> s_rd;  ///< the system's output
    view2<T> p_rc;  ///< the projection, a | b
    kernels::s4d_saved<T> system;
  };
  template <class T, class Device>
  saved<T> carve_saved(arena& a, pass<Device, T> const& run) const {
    index_t const R = run.rows();
    saved<T> keep;
    keep.norm = norm<Norm>::template saved<T>::carve(a, R);
    keep.s_rd = a.take_view<T, 2>({R, d_});
    keep.p_rc = a.take_view<T, 2>({R, 2 * d_});
    if constexpr (is_cpu<Device>)
      if (run.training) keep.system = kernels::s4d_saved<T>::template carve<typename Device::isa>(a, shape(run));
    return keep;
  }

  template <class Device, class T>
  requires layer_detail::s4d_forward_on<Device, T>
  void forward(pass<Device, T> const& run, view2<same<T> const> x_rd, view2<same<T>> y_rd,
               saved<same<T>> const& keep, state<same<T>> const* before, state<same<T>>* after, arena& ws) const {
    arena_scope const scope(ws);
    auto const dev = run.device;
    auto const n = ws.take_view<T, 2>(x_rd.extent), h = ws.take_view<T, 2>(x_rd.extent);
    norm_.forward(dev, run.parameters, x_rd, n, keep.norm);
    auto const in = system_in<T>(n, run.parameters, before);
    auto const final = after ? after->x_nhpc : view4<T>{};
    if constexpr (is_cpu<Device>)
      kernels::s4d_forward(dev, shape(run), in, keep.s_rd, run.training ? &keep.system : nullptr, final, ws);
    else
      kernels::s4d_forward(dev, shape(run), in, keep.s_rd, final);
    kernels::activate(dev, kernels::activation::gelu, view2<T const>(keep.s_rd), h);
    kernels::linear_forward(dev, view2<T const>(h), out_.of(run.parameters), keep.p_rc, false, ws);
    out_bias_.add(dev, run.parameters, keep.p_rc);
    kernels::output_gate_forward(dev, kernels::activation::sigmoid, view2<T const>(half(keep.p_rc, 0)),
                                 half(keep.p_rc, 1), h);
    if constexpr (Residual) kernels::detail::copy(dev, x_rd, y_rd);
    kernels::detail::copy_or_add(dev, view2<T const>(h), y_rd, Residual);
  }

  template <class Device, class T>
  requires layer_detail::s4d_backward_on<Device, T>
  void backward(pass<Device, T> const& run, view2<same<T> const> x_rd, saved<same<T>> const& keep,
                view2<same<T> const> dy_rd, view2<same<T>> dx_rd, state<same<T>> const* before,
                state<same<T>> const* d_after, state<same<T>>* d_before, same<T>* d_base, arena& ws) const {
    arena_scope const scope(ws);
    auto const dev = run.device;
    auto const h = ws.take_view<T, 2>(x_rd.extent), dh = ws.take_view<T, 2>(x_rd.extent);
    auto const dp = ws.take_view<T, 2>(keep.p_rc.extent);
    kernels::output_gate_backward(dev, kernels::activation::sigmoid, view2<T const>(half(keep.p_rc, 0)),
                                  half(keep.p_rc, 1), dy_rd, half(dp, 0), half(dp, 1));
    out_bias_.backward(dev, view2<T const>(dp), d_base, ws);
    kernels::activate(dev, kernels::activation::gelu, view2<T const>(keep.s_rd), h);
    kernels::linear_backward_weight(dev, view2<T const>(dp), h, out_.of(d_base), ws);
    kernels::linear_backward_input(dev, view2<T const>(dp), out_.of(run.parameters), dh, false, ws);
    kernels::activate_backward(dev, kernels::activation::gelu, view2<T const>(keep.s_rd), dh, dh, false);
    auto const n = h;  // GELU's values were read
    auto const dn = ws.take_view<T, 2>(x_rd.extent);
    norm_.forward(dev, run.parameters, x_rd, n, keep.norm);
    kernels::s4d_backward(dev, shape(run), system_in<T>(n, run.parameters, before), keep.system, dh,
                          d_after ? view4<T const>(d_after->x_nhpc) : view4<T const>{},
                          system_gradient<T>(dn, d_base, d_before), ws);
    if constexpr (Residual) kernels::detail::copy(dev, dy_rd, dx_rd);
    norm_.backward(dev, run.parameters, x_rd, keep.norm, dn, dx_rd, Residual, d_base, ws);
  }

 private:
  void check() const {
    auto const fail = [](std::string const& text) { throw option_error("seqmix: s4d_layer: " + text); };
    if (o_.states < 2 || o_.states % 2 != 0)
      fail("states must be an even number of at least 2, conjugate pairs, got " + std::to_string(o_.states));
    if (o_.recurrence_chunk < 1)
      fail("recurrence_chunk must be at least 1, got " + std::to_string(o_.recurrence_chunk));
  }
  /// pi n for state n of a channel.
  static double frequency(initial_element const& e) { return kernels::detail::pi * double(e.row % index_t(e.a)); }
  index_t pairs() const noexcept { return o_.states / 2; }

  template <class Device, class T>
  s4d_shape shape(pass<Device, T> const& run) const noexcept {
    return {run.seq, d_, pairs(), run.knobs.decay_offset, o_.recurrence_chunk};
  }
  template <class T>
  view2<T> half(view2<T> p_rc, index_t which) const {
    return p_rc.slice(1, which * d_, d_);
  }
  /// The parameters' views, or their derivatives'.
  template <class Views, class T>
  Views with_parameters(view2<T> u_rd, same<T>* base) const {
    Views x;
    x.u_rh = u_rd;
    x.log_dt_h = {log_dt_.data(base), {d_}};
    x.log_A_real_hp = {log_A_real_.data(base), {d_, pairs()}};
    x.A_imag_hp = {A_imag_.data(base), {d_, pairs()}};
    x.C_hpc = {C_.data(base), {d_, pairs(), 2}};
    x.D_h = {D_.data(base), {d_}};
    return x;
  }
  template <class T>
  s4d_input<T> system_in(view2<T const> u_rd, T const* base, state<T> const* before) const {
    auto in = with_parameters<s4d_input<T>>(u_rd, base);
    if (before) in.initial_nhpc = before->x_nhpc;
    return in;
  }
  template <class T>
  s4d_gradient<T> system_gradient(view2<T> d_u_rd, T* d_base, state<T>* d_before) const {
    auto d = with_parameters<s4d_gradient<T>>(d_u_rd, d_base);
    if (d_before) d.initial_nhpc = d_before->x_nhpc;
    return d;
  }

  options o_;
  index_t d_;
  norm<Norm> norm_;
  weight log_dt_, log_A_real_, A_imag_, C_, D_, out_;
  column_bias out_bias_;
};

}  // namespace seqmix::inline v0
