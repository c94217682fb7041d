#pragma once

#include <string>
#include <tuple>

#include <seqmix/gates/mamba3.hpp>
#include <seqmix/kernels/cpu/head_norm.hpp>
#include <seqmix/kernels/cpu/output_gate.hpp>
#include <seqmix/layers/gate_room.hpp>
#include <seqmix/layers/norm.hpp>
#include <seqmix/layers/projection.hpp>
#include <seqmix/layers/trapezoid.hpp>

namespace seqmix::inline v0 {

/// Sizes and numbers of a Mamba-3 layer; the defaults are the published ones.
struct mamba3_layer_options {
  index_t heads = 0;  ///< 0: expand d_model / value_dim
  index_t expand = 2;
  index_t key_heads = 1;  ///< groups of heads that share B and C
  index_t key_dim = 128;  ///< numbers of B and C, the state's size
  index_t value_dim = 64;
  double rotated = 0.5;           ///< part of the key channels that turn
  index_t recurrence_chunk = 64;  ///< tokens a recurrence computes together
  double norm_eps = 1e-5;
  double qk_norm_eps = 1e-5;  ///< of the norms of B and C
  double decay_offset = 0.0;  ///< added to the start values of logarithms of decay rates
  initialiser in = init::fan_in(), out = init::fan_in_per_layer();
};
template <class Add>
void each_option(mamba3_layer_options const& o, Add const& add) {
  add("heads", o.heads);
  add("expand", o.expand);
  add("key_heads", o.key_heads);
  add("key_dim", o.key_dim);
  add("value_dim", o.value_dim);
  add("rotated", o.rotated);
  add("recurrence_chunk", o.recurrence_chunk);
  add("norm_eps", o.norm_eps);
  add("qk_norm_eps", o.qk_norm_eps);
}

/// x + W_out (o silu(z)) with o = trapezoid(C, B, x) + D x: Mamba-3 with one input and one output (SISO). z, x, B,
/// C, the gate's raw values, the trapezoid's lambda and the angles' speeds are projected from norm(x); B and C are
/// RMS-normed and biased, the angles shared by all heads. Another gate that writes per token may stand for the
/// published one. `Norm`, `Residual`: none and false give the mixing part alone.
/// Saved per row: the projections, the turned B and C, the angles, the mixer's output and a few numbers a head.
/// Deterministic on the CPU for any number of threads. Source: Lahoti et al. (arXiv 2603.15569) and the layer of
/// its authors' code.
template <gate Gate = gates::mamba3, norm_kind Norm = norm_kind::rms, bool Residual = true>
class mamba3_layer {
  static_assert(Gate::spec.writes && !Gate::spec.log_write && Gate::spec.decay == axis::head &&
                    Gate::spec.from == feed::linear && Gate::spec.source == feed_source::input,
                "seqmix mamba3_layer: the trapezoid divides a gate's write scale per head and token between two "
                "tokens; take gates::mamba3, gates::mamba2 or another gate with a write scale fed by its input");
  using mixing_type = trapezoid<Gate>;

 public:
  using options = mamba3_layer_options;
  using mixer_type_ = typename mixing_type::mixer_type;
  using gate_type = Gate;

  static std::string name() {
    std::string text = "mamba3[gate=" + std::string(Gate::name);
    if (Norm != norm_kind::rms) text += Norm == norm_kind::layer ? ",norm=layer" : ",norm=none";
    return text + (Residual ? "]" : ",branch]");
  }

  mamba3_layer(options const& o, index_t d_model, parameter_room room) : o_(o) {
    if (o_.heads == 0) o_.heads = o_.value_dim > 0 ? o_.expand * d_model / o_.value_dim : 0;
    check();
    pairs_ = index_t(o_.rotated * double(o_.key_dim)) / 2;
    auto in = room.inner("mixer");
    norm_ = norm<Norm>(in.inner("norm"), d_model, o_.norm_eps);
    gate_ = gate_room<Gate>(in.inner("gate"), o_.heads, o_.key_dim, o_.decay_offset);
    auto const add = [&](std::string_view name, index_t rows) { return in_.add(in, name, rows, d_model, o_.in); };
    z_ = add("z", inner_width());
    v_ = add("value", inner_width());
    k_ = add("key", o_.key_heads * o_.key_dim);
    q_ = add("query", o_.key_heads * o_.key_dim);
    raw_ = add("gate.raw", gate_.raw_width());
    trap_ = add("trapezoid", o_.heads);
    angle_ = add("angle", pairs_);
    for (auto [name, gain, bias] :
         {std::tuple("key", &k_gain_, &k_bias_), std::tuple("query", &q_gain_, &q_bias_)}) {
      *gain = in.vector(std::string(name) + "_norm.weight", o_.key_dim, init::constant(1.0));
      *bias = in.vector(std::string(name) + ".bias", o_.heads * o_.key_dim, init::constant(1.0));
    }
    skip_ = in.vector("skip", o_.heads, init::constant(1.0));
    out_ = in.matrix("out", d_model, inner_width(), o_.out);
  }

  options const& settings() const noexcept { return o_; }

  template <class T>
  using state = typename mixing_type::template state<T>;
  template <class T, class Device>
  state<T> carve_state(arena& a, pass<Device, T> const& run) const {
    return state<T>::carve(a, shape(run.seq));
  }
  /// Independent of how many tokens were seen.
  index_t state_elements(index_t sequences_count, index_t) const {
    return state<float>::elements(shape(sequences::batch(sequences_count, 0)));
  }

  template <class T>
  struct saved {
    typename norm<Norm>::template saved<T> norm;
    view2<T> p_rc;
    T *k_norm = nullptr, *q_norm = nullptr;
    typename gate_room<Gate>::template values<T> gate;
    typename mixing_type::template saved<T> mixing;
    view3<T> o_rhv;
  };
  template <class T, class Device>
  saved<T> carve_saved(arena& a, pass<Device, T> const& run) const {
    index_t const R = run.rows(), numbers = kernels::head_norm_saved(qk_norm(), R, o_.key_heads);
    saved<T> s;
    s.norm = norm<Norm>::template saved<T>::carve(a, R);
    s.p_rc = a.take_view<T, 2>({R, in_.width()});
    s.k_norm = a.take<T>(numbers);
    s.q_norm = a.take<T>(numbers);
    s.gate = gate_.template carve<T>(a, R);
    s.mixing = mixing_type::template saved<T>::template carve<Device>(a, shape(run.seq));
    s.o_rhv = a.take_view<T, 3>({R, o_.heads, o_.value_dim});
    return s;
  }

  template <class Device, class T>
  requires layer_detail::turns_on<Device, T> && mixer_detail::has_forward_on<mixer_type_, Device, T>
  void forward(pass<Device, T> const& run, view2<same<T> const> x_rd, view2<same<T>> y_rd,
               saved<same<T>> const& keep, state<same<T>> const* before, state<same<T>>* after, arena& ws) const {
    arena_scope const scope(ws);
    auto const dev = run.device;
    auto const n = ws.take_view<T, 2>({run.rows(), x_rd.extent[1]});
    auto const y = ws.take_view<T, 2>({run.rows(), inner_width()});
    auto const k = ws.take_view<T, 3>(keys(keep.p_rc, k_).extent), q = ws.take_view<T, 3>(k.extent);
    norm_.forward(dev, run.parameters, x_rd, n, keep.norm);
    in_.forward(dev, run.parameters, n, keep.p_rc, ws);
    gate_.forward(run, raw(keep.p_rc), keep.gate);
    kernels::head_norm_forward(dev, qk_norm(), view3<T const>(keys(keep.p_rc, k_)), k_gain_.data(run.parameters),
                               nullptr, k, keep.k_norm);
    kernels::head_norm_forward(dev, qk_norm(), view3<T const>(keys(keep.p_rc, q_)), q_gain_.data(run.parameters),
                               nullptr, q, keep.q_norm);
    auto in = input(run, keep);
    in.k_rhk = k, in.q_rhk = q;
    mixing_type::forward(dev, shape(run.seq), in, keep.o_rhv, before, after, keep.mixing, run.training, ws);
    kernels::skip_forward(dev, view3<T const>(values(keep.p_rc)), skip_.data(run.parameters), keep.o_rhv);
    kernels::output_gate_forward(dev, kernels::activation::silu, flat<T const>(keep.o_rhv), z(keep.p_rc), y);
    if constexpr (Residual)
      kernels::detail::add_linear(dev, x_rd, view2<T const>(y), out_.of(run.parameters), y_rd, ws);
    else
      kernels::linear_forward(dev, view2<T const>(y), out_.of(run.parameters), y_rd, false, ws);
  }

  template <class Device, class T>
  requires layer_detail::turns_back_on<Device, T> && mixer_detail::has_backward_on<mixer_type_, Device, T>
  void backward(pass<Device, T> const& run, view2<same<T> const> x_rd, saved<same<T>> const& keep,
                view2<same<T> const> dy_rd, view2<same<T>> dx_rd, state<same<T>> const* before,
                state<same<T>> const* d_after, state<same<T>>* d_before, same<T>* d_base, arena& ws) const {
    arena_scope const scope(ws);
    auto const dev = run.device;
    index_t const R = run.rows();
    auto const n = ws.take_view<T, 2>({R, x_rd.extent[1]}), dn = ws.take_view<T, 2>(n.extent);
    auto const y = ws.take_view<T, 2>({R, inner_width()}), dy = ws.take_view<T, 2>(y.extent);
    auto const d_o = ws.take_view<T, 3>(keep.o_rhv.extent);
    auto const dp = ws.take_view<T, 2>(keep.p_rc.extent);
    auto const dk = ws.take_view<T, 3>(keys(dp, k_).extent), dq = ws.take_view<T, 3>(dk.extent);
    auto const d_gate = gate_.template carve<T>(ws, R);

    kernels::linear_backward_input(dev, view2<T const>(dy_rd), out_.of(run.parameters), dy, false, ws);
    kernels::output_gate_backward(dev, kernels::activation::silu, flat<T const>(keep.o_rhv), z(keep.p_rc), dy,
                                  flat<T>(d_o), z(dp), y);
    kernels::linear_backward_weight(dev, view2<T const>(dy_rd), y, out_.of(d_base), ws);
    mixing_type::backward(dev, shape(run.seq), input(run, keep), keep.mixing, d_o, before, d_after,
                          {.q_rhk = dq,
                           .k_rhk = dk,
                           .v_rhv = values(dp),
                           .g_rhk = d_gate.g_rhk,
                           .delta_rh = d_gate.write_rh,
                           .raw_rh = dp.slice(1, trap_, o_.heads),
                           .angle_rhs = angles(dp),
                           .q_bias = q_bias_.data(d_base),
                           .k_bias = k_bias_.data(d_base)},
                          d_before, ws);
    kernels::skip_backward(dev, view3<T const>(values(keep.p_rc)), skip_.data(run.parameters), d_o, values(dp),
                           skip_.data(d_base), ws);
    kernels::head_norm_backward(dev, qk_norm(), view3<T const>(keys(keep.p_rc, k_)), k_gain_.data(run.parameters),
                                keep.k_norm, dk, keys(dp, k_), false, k_gain_.data(d_base), nullptr, ws);
    kernels::head_norm_backward(dev, qk_norm(), view3<T const>(keys(keep.p_rc, q_)), q_gain_.data(run.parameters),
                                keep.q_norm, dq, keys(dp, q_), false, q_gain_.data(d_base), nullptr, ws);
    gate_.backward(run, raw(keep.p_rc), keep.gate, d_gate, raw(dp), d_base, ws);
    norm_.forward(dev, run.parameters, x_rd, n, keep.norm);
    in_.backward(dev, run.parameters, n, dp, dn, d_base, ws);
    if constexpr (Residual) kernels::detail::copy(dev, dy_rd, dx_rd);
    norm_.backward(dev, run.parameters, x_rd, keep.norm, dn, dx_rd, Residual, d_base, ws);
  }

 private:
  void check() const {
    auto const fail = [](std::string const& text) { throw option_error("seqmix: mamba3_layer: " + text); };
    if (o_.heads < 1 || o_.key_dim < 1 || o_.value_dim < 1)
      fail("heads, key_dim and value_dim must be at least 1, got " + std::to_string(o_.heads) + ", " +
           std::to_string(o_.key_dim) + " and " + std::to_string(o_.value_dim));
    if (o_.key_heads < 1 || o_.heads % o_.key_heads != 0)
      fail("key_heads must divide heads = " + std::to_string(o_.heads) + ", got " + std::to_string(o_.key_heads));
    if (!(o_.rotated >= 0.0 && o_.rotated <= 1.0))
      fail("rotated is a part of the key channels, from 0 to 1, got " + std::to_string(o_.rotated));
    if (o_.recurrence_chunk < 1)
      fail("recurrence_chunk must be at least 1, got " + std::to_string(o_.recurrence_chunk));
  }
  index_t inner_width() const noexcept { return o_.heads * o_.value_dim; }
  kernels::head_norm qk_norm() const noexcept { return {.over = kernels::norm_over::rms, .eps = o_.qk_norm_eps}; }
  trapezoid_shape shape(sequences const& seq) const noexcept {
    return {.seq = seq,
            .heads = o_.heads,
            .key_heads = o_.key_heads,
            .angle_heads = 1,
            .key_dim = o_.key_dim,
            .value_dim = o_.value_dim,
            .pairs = pairs_,
            .chunk = o_.recurrence_chunk};
  }

  // Slices of the projections, of activations and of derivatives alike.
  template <class T>
  view2<T> z(view2<T> p_rc) const {
    return p_rc.slice(1, z_, inner_width());
  }
  template <class T>
  view2<T> raw(view2<T> p_rc) const {
    return p_rc.slice(1, raw_, gate_.raw_width());
  }
  template <class T>
  view3<T> values(view2<T> p_rc) const {
    return as_heads(p_rc.slice(1, v_, inner_width()), o_.heads, o_.value_dim);
  }
  template <class T>
  view3<T> keys(view2<T> p_rc, index_t column) const {
    return as_heads(p_rc.slice(1, column, o_.key_heads * o_.key_dim), o_.key_heads, o_.key_dim);
  }
  template <class T>
  view3<T> angles(view2<T> p_rc) const {
    return as_heads(p_rc.slice(1, angle_, pairs_), 1, pairs_);
  }
  template <class T>
  view2<T> flat(view3<std::remove_const_t<T>> o_rhv) const {
    return {o_rhv.data, {o_rhv.extent[0], inner_width()}};
  }
  template <class Device, class T>
  trapezoid_input<T> input(pass<Device, T> const& run, saved<T> const& keep) const {
    return {.v_rhv = values(keep.p_rc),
            .g_rhk = keep.gate.g_rhk,
            .delta_rh = keep.gate.write_rh,
            .raw_rh = keep.p_rc.slice(1, trap_, o_.heads),
            .angle_rhs = angles(keep.p_rc),
            .q_bias = q_bias_.data(run.parameters),
            .k_bias = k_bias_.data(run.parameters)};
  }

  options o_;
  norm<Norm> norm_;
  projection in_;
  gate_room<Gate> gate_;
  index_t pairs_ = 0, z_ = 0, v_ = 0, k_ = 0, q_ = 0, raw_ = 0, trap_ = 0, angle_ = 0;
  weight k_gain_, q_gain_, k_bias_, q_bias_, skip_, out_;
};

}  // namespace seqmix::inline v0
