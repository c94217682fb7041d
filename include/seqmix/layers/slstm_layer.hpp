#pragma once

#include <array>
#include <cmath>
#include <string>

#include <seqmix/kernels/cpu/block_diagonal.hpp>
#include <seqmix/kernels/cpu/convolution.hpp>
#include <seqmix/kernels/cpu/slstm.hpp>
#include <seqmix/kernels/reference/slstm.hpp>
#include <seqmix/layers/centred_norm.hpp>
#include <seqmix/layers/detail/xlstm_start.hpp>
#include <seqmix/layers/pass.hpp>
#include <seqmix/layers/projection.hpp>

namespace seqmix::inline v0 {

namespace layer_detail {
template <class Device, class T>
concept slstm_forward_on = requires(Device dev, slstm_shape const& s, slstm_input<T> const& in,
                                    slstm_state<T> const& final, arena& ws) {
  kernels::slstm_forward(dev, s, in, view3<T>{}, nullptr, final, ws);
}
|| requires(Device dev, slstm_shape const& s, slstm_input<T> const& in, slstm_state<T> const& final) {
  kernels::slstm_forward(dev, s, in, view3<T>{}, final);
};
template <class Device, class T>
concept slstm_backward_on = requires(Device dev, slstm_shape const& s, slstm_input<T> const& in,
                                     kernels::slstm_saved<T> const& keep, view3<T const> y,
                                     slstm_state<T const> const& d_final, slstm_gradient<T> const& d, arena& ws) {
  kernels::slstm_backward(dev, s, in, y, keep, y, d_final, d, ws);
};
}  // namespace layer_detail

/// Sizes and numbers of an sLSTM layer; the defaults are the published ones.
struct slstm_layer_options {
  index_t heads = 4;
  index_t conv_width = 4;  ///< 0: no convolution
  double norm_eps = 1e-5, head_norm_eps = 1e-5;
  initialiser recurrent = init::constant(0.0);
  initialiser in{};  ///< of the gates' blocks; none: the published rule
};
template <class Add>
void each_option(slstm_layer_options const& o, Add const& add) {
  add("heads", o.heads);
  add("conv_width", o.conv_width);
  add("norm_eps", o.norm_eps);
  add("head_norm_eps", o.head_norm_eps);
}

/// x + norm_h(sLSTM(i, f, z, o)), sLSTM's block: gates i and f from u = silu(conv(n)), z and o from n = norm(x),
/// each by one block a head; the cell adds R_h y_(t-1) and a bias. norm_h is LayerNorm over each head with gain 1 +
/// w. Every gate reads the output before it, so that tokens go one after another: no product of state, gate and
/// selector. The published code feeds the input gate from a module that it names fgate and the forget gate from
/// igate; here `input` feeds the input gate. `Norm` (layer: without a shift), `Residual`: none and false give
/// the mixing part alone. Saved per row: about 9 d_model. Deterministic on the CPU for any number of threads.
/// Source: Beck et al., "xLSTM" (arXiv 2405.04517), sections 2.2 and 2.4, and the layer of its authors' code.
template <norm_kind Norm = norm_kind::layer, bool Residual = true>
class slstm_layer {
  static constexpr index_t gates = 4;

 public:
  using options = slstm_layer_options;

  static std::string name() {
    std::string text;
    if (Norm != norm_kind::layer) text += Norm == norm_kind::rms ? ",norm=rms" : ",norm=none";
    if (!Residual) text += ",branch";
    return text.empty() ? "slstm" : "slstm[" + text.substr(1) + "]";
  }

  slstm_layer(options const& o, index_t d_model, parameter_room room) : o_(o), d_(d_model) {
    check();
    auto in = room.inner("mixer");
    norm_ = front_norm<Norm>(in.inner("norm"), d_, o_.norm_eps);
    if (convolves()) {
      double const bound = 1.0 / std::sqrt(double(o_.conv_width));
      taps_ = in.taps("conv.weight", d_, o_.conv_width, init::uniform(-bound, bound));
      conv_bias_ = in.vector("conv.bias", d_, init::uniform(-bound, bound));
    }
    char const* const names[gates] = {"input", "forget", "cell", "output"};
    for (index_t g = 0; g < gates; ++g)
      w_[std::size_t(g)] =
          in.matrix(names[g], d_, head_dim(), detail::start_or(o_.in, detail::small_start(d_model)));
    recurrent_ = in.matrix("recurrent", o_.heads * gates * head_dim(), head_dim(), o_.recurrent);
    bias_ = column_bias(in, "bias", gates * d_, {bias_start, double(head_dim()), double(d_)});
    head_norm_ = centred_norm(in.inner("head_norm"), d_, o_.head_norm_eps, o_.heads);
  }

  options const& settings() const noexcept { return o_; }

  /// The cell's output, cell, normaliser and maximum [N,H,D/H], and the convolution's window [N,D,W-1].
  template <class T>
  struct state {
    slstm_state<T> cell;
    view3<T> window_ncj;
    void clear() {
      cell.clear();
      std::fill_n(window_ncj.data, window_ncj.size(), T(0));
    }
  };
  template <class T, class Device>
  state<T> carve_state(arena& a, pass<Device, T> const& run) const {
    state<T> s{slstm_state<T>::carve(a, shape(run.seq)), {}};
    if (convolves()) s.window_ncj = a.take_view<T, 3>({run.seq.count(), d_, o_.conv_width - 1});
    return s;
  }
  /// Independent of how many tokens were seen.
  index_t state_elements(index_t sequences_count, index_t) const {
    return slstm_state<float>::elements(shape(sequences::batch(sequences_count, 0))) +
           (convolves() ? sequences_count * d_ * (o_.conv_width - 1) : 0);
  }

  template <class T>
  struct saved {
    typename front_norm<Norm>::template saved<T> norm;
    view2<T> u_rd;  ///< convolved
    view2<T> y_rd;  ///< the cell's output
    kernels::slstm_saved<T> cell;
    centred_norm::saved<T> head_norm;
  };
  template <class T, class Device>
  saved<T> carve_saved(arena& a, pass<Device, T> const& run) const {
    index_t const R = run.rows();
    saved<T> s;
    s.norm = front_norm<Norm>::template saved<T>::carve(a, R);
    if (convolves()) s.u_rd = a.take_view<T, 2>({R, d_});
    s.y_rd = a.take_view<T, 2>({R, d_});
    if constexpr (is_cpu<Device>)
      s.cell = kernels::slstm_saved<T>::template carve<typename Device::isa>(a, shape(run.seq));
    s.head_norm = centred_norm::saved<T>::carve(a, R, o_.heads);
    return s;
  }

  template <class Device, class T>
  requires layer_detail::slstm_forward_on<Device, T>
  void forward(pass<Device, T> const& run, view2<same<T> const> x_rd, view2<same<T>> y_rd,
               saved<same<T>> const& keep, state<same<T>> const* before, state<same<T>>* after, arena& ws) const {
    arena_scope const scope(ws);
    auto const dev = run.device;
    auto const n = ws.take_view<T, 2>(x_rd.extent), t = ws.take_view<T, 2>(x_rd.extent);
    auto const raw = ws.take_view<T, 2>({run.rows(), gates * d_});
    norm_.forward(dev, run.parameters, x_rd, n, keep.norm);
    if (convolves())
      kernels::conv_forward(dev, run.seq, view2<T const>(n), taps_.of(run.parameters),
                            conv_bias_.data(run.parameters), true,
                            before ? view3<T const>(before->window_ncj) : view3<T const>{}, keep.u_rd,
                            after ? after->window_ncj : view3<T>{}, ws);
    for (index_t g = 0; g < gates; ++g)
      kernels::block_diagonal_forward(dev, view2<T const>(source(g, keep, n)), blocks(g, run.parameters),
                                      columns(raw, g), false, ws);
    bias_.add(dev, run.parameters, raw);
    slstm_input<T> const in{cells(raw.data, run), recurrent(run.parameters), start(before)};
    auto const final = after ? after->cell : slstm_state<T>{};
    if constexpr (is_cpu<Device>)
      kernels::slstm_forward(dev, shape(run.seq), in, heads(keep.y_rd), run.training ? &keep.cell : nullptr, final,
                             ws);
    else
      kernels::slstm_forward(dev, shape(run.seq), in, heads(keep.y_rd), final);
    head_norm_.forward(dev, run.parameters, keep.y_rd, t, keep.head_norm);
    if constexpr (Residual) kernels::detail::copy(dev, x_rd, y_rd);
    kernels::detail::copy_or_add(dev, view2<T const>(t), y_rd, Residual);
  }

  template <class Device, class T>
  requires layer_detail::slstm_backward_on<Device, T>
  void backward(pass<Device, T> const& run, view2<same<T> const> x_rd, saved<same<T>> const& keep,
                view2<same<T> const> dy_rd, view2<same<T>> dx_rd, state<same<T>> const* before,
                state<same<T>> const* d_after, state<same<T>>* d_before, same<T>* d_base, arena& ws) const {
    arena_scope const scope(ws);
    auto const dev = run.device;
    auto const n = ws.take_view<T, 2>(x_rd.extent), dn = ws.take_view<T, 2>(x_rd.extent),
               d_cell = ws.take_view<T, 2>(x_rd.extent), du = convolves() ? ws.take_view<T, 2>(x_rd.extent) : dn;
    auto const d_raw = ws.take_view<T, 2>({run.rows(), gates * d_});
    head_norm_.backward(dev, run.parameters, keep.y_rd, keep.head_norm, dy_rd, d_cell, false, d_base, ws);
    // The gates' values were saved; their input is not read again.
    slstm_input<T> const in{cells(static_cast<T*>(nullptr), run), recurrent(run.parameters), start(before)};
    kernels::slstm_backward(
        dev, shape(run.seq), in, view3<T const>(heads(keep.y_rd)), keep.cell, heads(d_cell), start(d_after),
        {cells(d_raw.data, run), recurrent(d_base), d_before ? d_before->cell : slstm_state<T>{}}, ws);
    bias_.backward(dev, view2<T const>(d_raw), d_base, ws);
    norm_.forward(dev, run.parameters, x_rd, n, keep.norm);
    gate_backward(run, 0, keep, n, d_raw, du, false, d_base, ws);
    gate_backward(run, 1, keep, n, d_raw, du, true, d_base, ws);
    if (convolves())
      kernels::conv_backward(dev, run.seq, view2<T const>(n), taps_.of(run.parameters),
                             conv_bias_.data(run.parameters), true,
                             before ? view3<T const>(before->window_ncj) : view3<T const>{}, du,
                             d_after ? view3<T const>(d_after->window_ncj) : view3<T const>{}, dn, taps_.of(d_base),
                             conv_bias_.data(d_base), d_before ? d_before->window_ncj : view3<T>{}, ws);
    gate_backward(run, 2, keep, n, d_raw, dn, true, d_base, ws);
    gate_backward(run, 3, keep, n, d_raw, dn, true, d_base, ws);
    if constexpr (Residual) kernels::detail::copy(dev, dy_rd, dx_rd);
    norm_.backward(dev, run.parameters, x_rd, keep.norm, dn, dx_rd, Residual, d_base, ws);
  }

 private:
  void check() const {
    auto const fail = [](std::string const& text) { throw option_error("seqmix: slstm_layer: " + text); };
    if (o_.heads < 1 || d_ % o_.heads != 0)
      fail("heads must divide d_model = " + std::to_string(d_) + ", got " + std::to_string(o_.heads));
    if (o_.conv_width < 0)
      fail("conv_width must be at least 0, which means none, got " + std::to_string(o_.conv_width));
  }
  /// The forget gates' start: 5 - 12 (j / (D/H - 1))^(0.3 + 1.3 l / (layers - 1)), the others 0.
  static double bias_start(initial_element const& e) {
    if (e.row / index_t(e.b) != slstm_forget_gate) return 0.0;
    index_t const dim = index_t(e.a);
    double const place = dim > 1 ? double(e.row % dim) / double(dim - 1) : 0.0;
    double const depth = e.layers > 1 ? double(e.layer) / double(e.layers - 1) : 0.0;
    return 5.0 - 12.0 * std::pow(place, 0.3 + 1.3 * depth);
  }
  bool convolves() const noexcept { return o_.conv_width > 0; }
  index_t head_dim() const noexcept { return d_ / o_.heads; }
  slstm_shape shape(sequences const& seq) const noexcept { return {seq, o_.heads, head_dim()}; }

  template <class T>
  view2<T> columns(view2<T> raw_rc, index_t g) const {
    return raw_rc.slice(1, g * d_, d_);
  }
  template <class T>
  view3<T> heads(view2<T> x_rd) const {
    return as_heads(x_rd, o_.heads, head_dim());
  }
  template <class Device, class T>
  view4<T> cells(T* raw, pass<Device, std::remove_const_t<T>> const& run) const {
    return {raw, {run.rows(), gates, o_.heads, head_dim()}};
  }
  /// Blocks [H,D/H,D/H] of gate g.
  template <class T>
  view3<T> blocks(index_t g, T* base) const {
    return {w_[std::size_t(g)].data(base), {o_.heads, head_dim(), head_dim()}};
  }
  template <class T>
  view4<T> recurrent(T* base) const {
    return {recurrent_.data(base), {o_.heads, gates, head_dim(), head_dim()}};
  }
  template <class T>
  static slstm_state<T const> start(state<T> const* s) {
    return s ? slstm_state<T const>(s->cell) : slstm_state<T const>{};
  }
  template <class T>
  view2<T> source(index_t g, saved<T> const& keep, view2<T> n_rd) const {
    return convolves() && g < slstm_cell_input ? keep.u_rd : n_rd;
  }
  template <class Device, class T>
  void gate_backward(pass<Device, T> const& run, index_t g, saved<T> const& keep, view2<T> n_rd, view2<T> d_raw,
                     view2<T> d_from, bool add, T* d_base, arena& ws) const {
    auto const d = view2<T const>(columns(d_raw, g));
    kernels::block_diagonal_backward_weight(run.device, d, source(g, keep, n_rd), blocks(g, d_base), ws);
    kernels::block_diagonal_backward_input(run.device, d, blocks(g, run.parameters), d_from, add, ws);
  }

  options o_;
  index_t d_;
  front_norm<Norm> norm_;
  centred_norm head_norm_;
  std::array<weight, gates> w_;
  column_bias bias_;
  weight taps_, conv_bias_, recurrent_;
};

}  // namespace seqmix::inline v0
