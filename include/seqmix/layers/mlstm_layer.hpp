#pragma once

#include <cmath>
#include <string>
#include <utility>

#include <seqmix/gates/mlstm.hpp>
#include <seqmix/kernels/cpu/block_diagonal.hpp>
#include <seqmix/kernels/cpu/convolution.hpp>
#include <seqmix/kernels/cpu/output_gate.hpp>
#include <seqmix/layers/centred_norm.hpp>
#include <seqmix/layers/detail/xlstm_start.hpp>
#include <seqmix/layers/gate_room.hpp>
#include <seqmix/layers/projection.hpp>
#include <seqmix/mixers/mixer.hpp>

namespace seqmix::inline v0 {

/// Sizes and numbers of an mLSTM layer; the defaults are the published ones.
struct mlstm_layer_options {
  index_t heads = 4;
  double expand = 2.0;
  index_t width = 0;  ///< inner channels; 0: expand d_model, rounded up to a multiple of 64
  index_t block = 4;  ///< channels that queries, keys and values mix
  index_t conv_width = 4;
  index_t recurrence_chunk = 32;  ///< tokens a recurrence computes together
  double norm_eps = 1e-5, head_norm_eps = 1e-5;
  initialiser gate = init::constant(0.0);  ///< of the gates' weights; their biases start as the gate says
  initialiser in{}, blocks{}, out{};       ///< none: the published rules
};
template <class Add>
void each_option(mlstm_layer_options const& o, Add const& add) {
  add("heads", o.heads);
  add("expand", o.expand);
  add("width", o.width);
  add("block", o.block);
  add("conv_width", o.conv_width);
  add("recurrence_chunk", o.recurrence_chunk);
  add("norm_eps", o.norm_eps);
  add("head_norm_eps", o.head_norm_eps);
}

/// x + W_down ((norm_h(mixer(q, k, v)) + skip u) silu(z)), mLSTM's block: [c | z] = W_up n with n = norm(x),
/// u = silu(conv(c)), q and k from u and v from c by small square blocks, the gates' raw values from [q | k | v].
/// norm_h is LayerNorm over each head with gain 1 + w. `Mixer`: another keyed state kept relative to a running
/// maximum, or another gate. `Norm` (layer: without a shift), `Residual`: none and false give the mixing part
/// alone. Saved per row: about 8 widths. Deterministic on the CPU for any number of threads. Source: Beck et al.,
/// "xLSTM" (arXiv 2405.04517), sections 2.3 and 2.4, and the layer of its authors' code.
template <class Mixer = recurrence<states::mlstm, gates::mlstm>, norm_kind Norm = norm_kind::layer,
          bool Residual = true>
class mlstm_layer {
  static_assert(mixer_type<Mixer>, "seqmix mlstm_layer: the first argument must satisfy seqmix::mixer_type");
  using gate_policy = typename Mixer::gate_type;
  static_assert(
      Mixer::state_type::spec.kind == state_kind::stabilised &&
          Mixer::state_type::spec.read == read_order::inclusive,
      "seqmix mlstm_layer: the mixer reads a normalised state by keys; take recurrence<states::mlstm, gate>");
  static_assert(gate_policy::spec.from == feed::linear || gate_policy::spec.from == feed::nothing,
                "seqmix mlstm_layer: the gate's raw values are one linear function of queries, keys and values");

 public:
  using options = mlstm_layer_options;
  using mixer_type_ = Mixer;
  using gate_type = gate_policy;

  static std::string name() {
    std::string text = "mlstm[mixer=" + Mixer::name();
    if (Norm != norm_kind::layer) text += Norm == norm_kind::rms ? ",norm=rms" : ",norm=none";
    return text + (Residual ? "]" : ",branch]");
  }

  mlstm_layer(options const& o, index_t d_model, parameter_room room) : o_(o) {
    if (o_.width == 0) o_.width = detail::expanded_width(o_.expand, d_model);
    check();
    auto in = room.inner("mixer");
    auto const small = detail::small_start(d_model);
    norm_ = front_norm<Norm>(in.inner("norm"), d_model, o_.norm_eps);
    gate_ = gate_room<gate_policy>(in.inner("gate"), o_.heads, head_dim(), 0.0);
    in_.add(in, "inner", o_.width, d_model, detail::start_or(o_.in, small));
    in_.add(in, "z", o_.width, d_model, detail::start_or(o_.in, small));
    double const bound = 1.0 / std::sqrt(double(o_.conv_width));
    taps_ = in.taps("conv.weight", o_.width, o_.conv_width, init::uniform(-bound, bound));
    conv_bias_ = in.vector("conv.bias", o_.width, init::uniform(-bound, bound));
    for (auto [name, blocks] : {std::pair("query", &q_), std::pair("key", &k_), std::pair("value", &v_)})
      *blocks = in.matrix(name, o_.width, o_.block, detail::start_or(o_.blocks, small));
    if (gate_.raw_width() > 0) raw_ = in.matrix("gate.raw", gate_.raw_width(), 3 * o_.width, o_.gate);
    head_norm_ = centred_norm(in.inner("head_norm"), o_.width, o_.head_norm_eps, o_.heads);
    skip_ = in.vector("skip", o_.width, init::constant(1.0));
    out_ = in.matrix("out", d_model, o_.width, detail::start_or(o_.out, detail::output_start(d_model)));
  }

  options const& settings() const noexcept { return o_; }

  /// The mixer's part and the convolution's window [N,C,W-1].
  template <class T>
  struct state {
    typename Mixer::template state<T> mixer;
    view3<T> window_ncj;
    void clear() {
      mixer.clear();
      std::fill_n(window_ncj.data, window_ncj.size(), T(0));
    }
  };
  template <class T, class Device>
  state<T> carve_state(arena& a, pass<Device, T> const& run) const {
    return {Mixer::template state<T>::carve(a, shape(run.seq)),
            a.take_view<T, 3>({run.seq.count(), o_.width, o_.conv_width - 1})};
  }
  /// Independent of how many tokens were seen.
  index_t state_elements(index_t sequences_count, index_t) const {
    return Mixer::template state<float>::elements(shape(sequences::batch(sequences_count, 0))) +
           sequences_count * o_.width * (o_.conv_width - 1);
  }

  template <class T>
  struct saved {
    typename front_norm<Norm>::template saved<T> norm;
    view2<T> p_rc;    ///< inner channels c | z
    view2<T> u_rc;    ///< convolved
    view2<T> qkv_rc;  ///< queries | keys | values
    view2<T> raw_rc;
    typename gate_room<gate_policy>::template values<T> gate;
    typename Mixer::template saved<T> mixer;
    view2<T> o_rc;
    centred_norm::saved<T> head_norm;
  };
  template <class T, class Device>
  saved<T> carve_saved(arena& a, pass<Device, T> const& run) const {
    index_t const R = run.rows(), C = o_.width;
    saved<T> s;
    s.norm = front_norm<Norm>::template saved<T>::carve(a, R);
    s.p_rc = a.take_view<T, 2>({R, 2 * C});
    s.u_rc = a.take_view<T, 2>({R, C});
    s.qkv_rc = a.take_view<T, 2>({R, 3 * C});
    s.raw_rc = a.take_view<T, 2>({R, gate_.raw_width()});
    s.gate = gate_.template carve<T>(a, R);
    if constexpr (is_cpu<Device>)
      s.mixer = Mixer::template saved<T>::template carve<typename Device::isa>(a, shape(run.seq));
    s.o_rc = a.take_view<T, 2>({R, C});
    s.head_norm = centred_norm::saved<T>::carve(a, R, o_.heads);
    return s;
  }

  template <class Device, class T>
  requires mixer_detail::has_forward_on<Mixer, Device, T>
  void forward(pass<Device, T> const& run, view2<same<T> const> x_rd, view2<same<T>> y_rd,
               saved<same<T>> const& keep, state<same<T>> const* before, state<same<T>>* after, arena& ws) const {
    arena_scope const scope(ws);
    auto const dev = run.device;
    auto const n = ws.take_view<T, 2>({run.rows(), x_rd.extent[1]}), y = ws.take_view<T, 2>(keep.o_rc.extent);
    norm_.forward(dev, run.parameters, x_rd, n, keep.norm);
    in_.forward(dev, run.parameters, n, keep.p_rc, ws);
    kernels::conv_forward(dev, run.seq, view2<T const>(inner(keep.p_rc)), taps_.of(run.parameters),
                          conv_bias_.data(run.parameters), true,
                          before ? view3<T const>(before->window_ncj) : view3<T const>{}, keep.u_rc,
                          after ? after->window_ncj : view3<T>{}, ws);
    each_block(keep, [&](index_t i, weight const& w, view2<T> from) {
      kernels::block_diagonal_forward(dev, view2<T const>(from), blocks(w, run.parameters), part(keep.qkv_rc, i),
                                      false, ws);
    });
    if (raw_)
      kernels::linear_forward(dev, view2<T const>(keep.qkv_rc), raw_.of(run.parameters), keep.raw_rc, false, ws);
    gate_.forward(run, view2<T const>(keep.raw_rc), keep.gate);
    Mixer::forward(dev, shape(run.seq), mixer_in(keep), heads(keep.o_rc), before ? &before->mixer : nullptr,
                   after ? &after->mixer : nullptr, run.training ? &keep.mixer : nullptr, ws);
    normed_with_skip(run, keep, y);
    kernels::output_gate_forward(dev, kernels::activation::silu, view2<T const>(y), z(keep.p_rc), y);
    if constexpr (Residual)
      kernels::detail::add_linear(dev, x_rd, view2<T const>(y), out_.of(run.parameters), y_rd, ws);
    else
      kernels::linear_forward(dev, view2<T const>(y), out_.of(run.parameters), y_rd, false, ws);
  }

  template <class Device, class T>
  requires mixer_detail::has_backward_on<Mixer, Device, T>
  void backward(pass<Device, T> const& run, view2<same<T> const> x_rd, saved<same<T>> const& keep,
                view2<same<T> const> dy_rd, view2<same<T>> dx_rd, state<same<T>> const* before,
                state<same<T>> const* d_after, state<same<T>>* d_before, same<T>* d_base, arena& ws) const {
    arena_scope const scope(ws);
    auto const dev = run.device;
    index_t const R = run.rows();
    auto const n = ws.take_view<T, 2>({R, x_rd.extent[1]}), dn = ws.take_view<T, 2>(n.extent);
    auto const t = ws.take_view<T, 2>(keep.o_rc.extent), dt = ws.take_view<T, 2>(t.extent);
    auto const y = ws.take_view<T, 2>(t.extent), du = ws.take_view<T, 2>(t.extent);
    auto const dp = ws.take_view<T, 2>(keep.p_rc.extent), d_qkv = ws.take_view<T, 2>(keep.qkv_rc.extent);
    auto const d_raw = ws.take_view<T, 2>(keep.raw_rc.extent);
    auto const d_gate = gate_.template carve<T>(ws, R);

    kernels::linear_backward_input(dev, view2<T const>(dy_rd), out_.of(run.parameters), dt, false, ws);
    normed_with_skip(run, keep, t);
    kernels::output_gate_backward(dev, kernels::activation::silu, view2<T const>(t), z(keep.p_rc), dt, dt, z(dp),
                                  y);
    kernels::linear_backward_weight(dev, view2<T const>(dy_rd), y, out_.of(d_base), ws);
    skip_backward(run, keep, view2<T const>(dt), du, d_base, ws);
    head_norm_.backward(dev, run.parameters, keep.o_rc, keep.head_norm, dt, dt, false, d_base, ws);
    Mixer::backward(dev, shape(run.seq), mixer_in(keep), view3<T const>(heads(keep.o_rc)), keep.mixer,
                    view3<T const>(heads(dt)), before ? &before->mixer : nullptr,
                    d_after ? &d_after->mixer : nullptr,
                    mixer_gradient<T>{.q_rhk = heads(part(d_qkv, 0)),
                                      .k_rhk = heads(part(d_qkv, 1)),
                                      .v_rhv = heads(part(d_qkv, 2)),
                                      .g_rhk = d_gate.g_rhk,
                                      .write_rh = d_gate.write_rh},
                    d_before ? &d_before->mixer : nullptr, ws);
    gate_.backward(run, view2<T const>(keep.raw_rc), keep.gate, d_gate, d_raw, d_base, ws);
    if (raw_) {
      kernels::linear_backward_input(dev, view2<T const>(d_raw), raw_.of(run.parameters), d_qkv, true, ws);
      kernels::linear_backward_weight(dev, view2<T const>(d_raw), keep.qkv_rc, raw_.of(d_base), ws);
    }
    blocks_backward(run, keep, view2<T const>(d_qkv), du, 0, d_base, ws);
    blocks_backward(run, keep, view2<T const>(d_qkv), du, 1, d_base, ws);
    kernels::conv_backward(
        dev, run.seq, view2<T const>(inner(keep.p_rc)), taps_.of(run.parameters), conv_bias_.data(run.parameters),
        true, before ? view3<T const>(before->window_ncj) : view3<T const>{}, du,
        d_after ? view3<T const>(d_after->window_ncj) : view3<T const>{}, inner(dp), taps_.of(d_base),
        conv_bias_.data(d_base), d_before ? d_before->window_ncj : view3<T>{}, ws);
    blocks_backward(run, keep, view2<T const>(d_qkv), inner(dp), 2, d_base, ws);
    norm_.forward(dev, run.parameters, x_rd, n, keep.norm);
    in_.backward(dev, run.parameters, n, dp, dn, d_base, ws);
    if constexpr (Residual) kernels::detail::copy(dev, dy_rd, dx_rd);
    norm_.backward(dev, run.parameters, x_rd, keep.norm, dn, dx_rd, Residual, d_base, ws);
  }

 private:
  void check() const {
    auto const fail = [](std::string const& text) { throw option_error("seqmix: mlstm_layer: " + text); };
    if (o_.heads < 1 || o_.width < 1 || o_.width % o_.heads != 0)
      fail("heads must divide the inner width " + std::to_string(o_.width) + ", got " + std::to_string(o_.heads));
    if (o_.block < 1 || o_.width % o_.block != 0)
      fail("block must divide the inner width " + std::to_string(o_.width) + ", got " + std::to_string(o_.block));
    if (o_.conv_width < 1) fail("conv_width must be at least 1, got " + std::to_string(o_.conv_width));
    if (o_.recurrence_chunk < 1)
      fail("recurrence_chunk must be at least 1, got " + std::to_string(o_.recurrence_chunk));
  }
  index_t head_dim() const noexcept { return o_.width / o_.heads; }
  /// Keys are scaled by 1 / sqrt(head dimension), which is the same as scaling the products.
  mixer_shape shape(sequences const& seq) const noexcept {
    mixer_shape s;
    s.seq = seq;
    s.heads = s.query_heads = s.key_heads = s.value_heads = s.gate_heads = o_.heads;
    s.key_dim = s.value_dim = head_dim();
    s.scale = 1.0 / std::sqrt(double(head_dim()));
    s.chunk = o_.recurrence_chunk;
    return s;
  }

  template <class T>
  view2<T> part(view2<T> x_rc, index_t i) const {
    return x_rc.slice(1, i * o_.width, o_.width);
  }
  template <class T>
  view2<T> inner(view2<T> p_rc) const {
    return part(p_rc, 0);
  }
  template <class T>
  view2<T> z(view2<T> p_rc) const {
    return part(p_rc, 1);
  }
  template <class T>
  view3<T> heads(view2<T> x_rc) const {
    return as_heads(x_rc, o_.heads, head_dim());
  }
  template <class T>
  view3<T> blocks(weight const& w, T* base) const {
    return {w.data(base), {o_.width / o_.block, o_.block, o_.block}};
  }
  template <class T>
  mixer_input<T> mixer_in(saved<T> const& keep) const {
    return {.q_rhk = heads(part(keep.qkv_rc, 0)),
            .k_rhk = heads(part(keep.qkv_rc, 1)),
            .v_rhv = heads(part(keep.qkv_rc, 2)),
            .g_rhk = keep.gate.g_rhk,
            .write_rh = keep.gate.write_rh};
  }
  /// f(index, blocks, what they read) for queries, keys and values.
  template <class T, class F>
  void each_block(saved<T> const& keep, F const& f) const {
    f(0, q_, keep.u_rc);
    f(1, k_, keep.u_rc);
    f(2, v_, inner(keep.p_rc));
  }
  /// Adds to the derivative of what the i-th blocks read.
  template <class Device, class T>
  void blocks_backward(pass<Device, T> const& run, saved<T> const& keep, view2<T const> d_qkv, view2<T> d_from,
                       index_t i, T* d_base, arena& ws) const {
    each_block(keep, [&](index_t other, weight const& w, view2<T> from) {
      if (other != i) return;
      kernels::block_diagonal_backward_weight(run.device, part(d_qkv, i), from, blocks(w, d_base), ws);
      kernels::block_diagonal_backward_input(run.device, part(d_qkv, i), blocks(w, run.parameters), d_from, true,
                                             ws);
    });
  }

  template <class Device, class T>
  void normed_with_skip(pass<Device, T> const& run, saved<T> const& keep, view2<T> t_rc) const {
    head_norm_.forward(run.device, run.parameters, keep.o_rc, t_rc, keep.head_norm);
    T const* const skip = skip_.data(run.parameters);
    kernels::detail::for_row_blocks(run.device, run.rows(), [&](index_t, index_t begin, index_t end) {
      for (index_t r = begin; r < end; ++r)
        for (index_t c = 0; c < o_.width; ++c) t_rc(r, c) += skip[c] * keep.u_rc(r, c);
    });
  }
  /// du is written. Partial sums over fixed blocks of rows, added in order.
  template <class Device, class T>
  void skip_backward(pass<Device, T> const& run, saved<T> const& keep, view2<T const> dt_rc, view2<T> du_rc,
                     T* d_base, arena& ws) const {
    arena_scope const scope(ws);
    index_t const C = o_.width, count = kernels::detail::blocks(run.rows(), kernels::detail::rows_per_block);
    T const* const skip = skip_.data(run.parameters);
    T* const partial = ws.take<T>(count * C);
    if (ws.measuring()) return;
    kernels::detail::for_row_blocks(run.device, run.rows(), [&](index_t b, index_t begin, index_t end) {
      T* const sums = partial + b * C;
      std::fill_n(sums, C, T(0));
      for (index_t r = begin; r < end; ++r)
        for (index_t c = 0; c < C; ++c) {
          sums[c] += dt_rc(r, c) * keep.u_rc(r, c);
          du_rc(r, c) = dt_rc(r, c) * skip[c];
        }
    });
    kernels::detail::add_partials(partial, count, C, skip_.data(d_base));
  }

  options o_;
  front_norm<Norm> norm_;
  projection in_;
  gate_room<gate_policy> gate_;
  centred_norm head_norm_;
  weight taps_, conv_bias_, q_, k_, v_, raw_, skip_, out_;
};

}  // namespace seqmix::inline v0
