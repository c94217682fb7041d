#pragma once

#include <seqmix/kernels/cpu/convolution.hpp>
#include <seqmix/layers/gate_room.hpp>
#include <seqmix/layers/norm.hpp>
#include <seqmix/layers/pass.hpp>
#include <seqmix/layers/projection.hpp>
#include <seqmix/mixers/mixer.hpp>

namespace seqmix::inline v0 {

enum class output_norm { none, per_head, full_width };

/// What surrounds a mixer, as types: which code runs. Sizes and numbers are layer options.
struct extras {
  norm_kind norm = norm_kind::rms;  ///< in front of the layer
  bool residual = true;             ///< x + f(x); false: f(x) alone, for branches that are summed elsewhere
  bool rope = false;                ///< rotates queries and keys by their position
  bool conv = false;                ///< short causal convolution and SiLU over values, keys and queries together
  bool skip = false;                ///< own-token term o += D_h v
  output_norm head_norm = output_norm::none;  ///< RMS norm of the mixer's output
  bool output_gate = false;                   ///< multiplies the output by silu(z)
  bool gate_before_norm = false;              ///< Mamba-2's order
  friend constexpr bool operator==(extras const&, extras const&) = default;
};

/// Sizes and numbers of a layer; 0 stands for the usual value.
struct layer_options {
  index_t heads = 1;
  index_t query_heads = 0, key_heads = 0, value_heads = 0;  ///< 0: as many as heads
  index_t key_dim = 0, value_dim = 0;
  double scale = 0.0;  ///< 0: 1 / sqrt(key_dim)
  index_t conv_width = 4;
  index_t window = 0, chunk = 0;  ///< of the selector
  bool shared_choice = false;
  index_t recurrence_chunk = 32;  ///< tokens a recurrence computes together
  double norm_eps = 1e-5, head_norm_eps = 1e-5;
  double rope_base = 10000.0;
  initialiser in = init::normal(0.02), out = init::normal(0.02);
  double conv_init = 1.0;  ///< factor on U(+-1/sqrt(width))
};

/// x + W_out stage(mixer(q, k, v)), with q, k, v, the output gate z and the gate's raw values projected from
/// norm(x). Columns of the input projection: z | v | k | q | raw. Saved per row: the projections, the convolution's
/// output, what gate and mixer ask for, the mixer's output and a few norms.
template <class Mixer, extras E>
class layer {
  static_assert(mixer_type<Mixer>, "seqmix layer: the first argument must satisfy seqmix::mixer_type");
  static_assert(E.output_gate || !E.gate_before_norm,
                "seqmix layer: gate_before_norm orders an output gate that is not there; set extras::output_gate");

 public:
  using mixer_type_ = Mixer;
  using gate_type = typename Mixer::gate_type;
  static constexpr extras surroundings = E;
  /// An attention's backward reads its output, which the own-token term would spoil.
  static constexpr bool keeps_mixed = E.skip && Mixer::state_type::spec.kind == state_kind::history;

  using options = layer_options;

  static std::string name() {
    std::string text = "layer[mixer=" + Mixer::name();
    if (E.norm == norm_kind::layer) text += ",norm=layer";
    if (E.norm == norm_kind::none) text += ",norm=none";
    if (!E.residual) text += ",branch";
    if (E.rope) text += ",rope";
    if (E.conv) text += ",conv";
    if (E.skip) text += ",skip";
    if (E.head_norm == output_norm::per_head) text += ",head_norm";
    if (E.head_norm == output_norm::full_width) text += ",full_norm";
    if (E.output_gate) text += E.gate_before_norm ? ",gate_before_norm" : ",output_gate";
    return text + "]";
  }

  layer(options const& o, index_t d_model, parameter_room room) : o_(o) {
    if (o_.query_heads == 0) o_.query_heads = o_.heads;
    if (o_.key_heads == 0) o_.key_heads = o_.heads;
    if (o_.value_heads == 0) o_.value_heads = o_.heads;
    if (o_.scale == 0.0) o_.scale = 1.0 / std::sqrt(double(o_.key_dim));
    check();
    auto mixer_room = room.inner("mixer");
    norm_ = norm<E.norm>(mixer_room.inner("norm"), d_model, o_.norm_eps);
    value_width_ = o_.value_heads * o_.value_dim;
    gate_ = gate_room<gate_type>(mixer_room.inner("gate"), o_.heads, o_.key_dim);
    z_ = in_.add(mixer_room, "z", E.output_gate ? inner_width() : 0, d_model, o_.in);
    v_ = in_.add(mixer_room, "value", value_width_, d_model, o_.in);
    k_ = in_.add(mixer_room, "key", o_.key_heads * o_.key_dim, d_model, o_.in);
    q_ = in_.add(mixer_room, "query", o_.query_heads * o_.key_dim, d_model, o_.in);
    raw_ = in_.add(mixer_room, "gate.raw", gate_.raw_width(), d_model, o_.in);
    if constexpr (E.conv) {
      double const bound = o_.conv_init / std::sqrt(double(o_.conv_width));
      taps_ = mixer_room.taps("conv.weight", conv_width(), o_.conv_width, init::uniform(-bound, bound));
      conv_bias_ = mixer_room.vector("conv.bias", conv_width(), init::uniform(-bound, bound));
    }
    if constexpr (E.skip) skip_ = mixer_room.vector("skip", o_.heads, init::constant(1.0));
    if constexpr (E.head_norm != output_norm::none)
      head_gain_ =
          mixer_room.vector("head_norm.weight", E.head_norm == output_norm::per_head ? o_.value_dim : inner_width(),
                            init::constant(1.0));
    out_ = mixer_room.matrix("out", d_model, inner_width(), o_.out);
  }

  options const& settings() const noexcept { return o_; }

  /// Everything a layer carries along time: the mixer's part and the convolution's window [N,C,W-1].
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
    state<T> s{Mixer::template state<T>::carve(a, shape(run)), {}};
    if constexpr (E.conv) s.window_ncj = a.take_view<T, 3>({run.seq.count(), conv_width(), o_.conv_width - 1});
    return s;
  }
  /// Numbers held for N sequences of up to `capacity` tokens.
  index_t state_elements(index_t sequences_count, index_t capacity) const {
    pass<device::cpu, float> run{{}, nullptr, sequences::batch(sequences_count, 0)};
    run.capacity = capacity;
    return Mixer::template state<float>::elements(shape(run)) +
           (E.conv ? sequences_count * conv_width() * (o_.conv_width - 1) : 0);
  }

  template <class T>
  struct saved {
    typename norm<E.norm>::template saved<T> norm;
    view2<T> p_rc;  ///< projections
    view2<T> u_rc;  ///< convolved values, keys, queries
    typename gate_room<gate_type>::template values<T> gate;
    typename Mixer::template saved<T> mixer;
    view3<T> o_rhv;      ///< mixer output, own-token term included
    view3<T> mixed_rhv;  ///< without it, where backward needs both
    T* rstd = nullptr;
  };
  template <class T, class Device>
  saved<T> carve_saved(arena& a, pass<Device, T> const& run) const {
    index_t const R = run.rows();
    saved<T> s;
    s.norm = norm<E.norm>::template saved<T>::carve(a, R);
    s.p_rc = a.take_view<T, 2>({R, in_.width()});
    if constexpr (E.conv) s.u_rc = a.take_view<T, 2>({R, conv_width()});
    s.gate = gate_.template carve<T>(a, R);
    if constexpr (is_cpu<Device>)
      s.mixer = Mixer::template saved<T>::template carve<typename Device::isa>(a, shape(run));
    s.o_rhv = a.take_view<T, 3>({R, o_.heads, o_.value_dim});
    s.mixed_rhv = keeps_mixed ? a.take_view<T, 3>({R, o_.heads, o_.value_dim}) : s.o_rhv;
    s.rstd = a.take<T>(R * norm_groups());
    return s;
  }

  /// y = x + f(x). `before` is the state of earlier tokens (nullptr: none), `after` takes the final one (nullptr:
  /// not wanted); both may be the same.
  template <class Device, class T>
  void forward(pass<Device, T> const& run, view2<same<T> const> x_rd, view2<same<T>> y_rd,
               saved<same<T>> const& keep, state<same<T>> const* before, state<same<T>>* after, arena& ws) const {
    arena_scope const scope(ws);
    auto const n = ws.take_view<T, 2>({run.rows(), x_rd.extent[1]});
    auto const y = ws.take_view<T, 2>({run.rows(), inner_width()});
    norm_.forward(run.device, run.parameters, x_rd, n, keep.norm);
    in_.forward(run.device, run.parameters, n, keep.p_rc, ws);
    if constexpr (E.conv)
      kernels::conv_forward(run.device, run.seq, view2<T const>(conv_in(keep.p_rc)), taps_.of(run.parameters),
                            conv_bias_.data(run.parameters), true,
                            before ? view3<T const>(before->window_ncj) : view3<T const>{}, keep.u_rc,
                            after ? after->window_ncj : view3<T>{}, ws);
    rotate(run, keep.p_rc, keep.u_rc, 1.0, ws);
    gate_.forward(run.device, run.parameters, view2<T const>(raw(keep.p_rc)), keep.gate);
    Mixer::forward(run.device, shape(run), mixer_in<T>(keep), keep.mixed_rhv, before ? &before->mixer : nullptr,
                   after ? &after->mixer : nullptr, run.training ? &keep.mixer : nullptr, ws);
    if constexpr (E.skip) {
      if constexpr (keeps_mixed)
        kernels::detail::copy(run.device, flat<T const>(keep.mixed_rhv), flat<T>(keep.o_rhv));
      kernels::skip_forward(run.device, view3<T const>(values(keep.p_rc, keep.u_rc)), skip_.data(run.parameters),
                            keep.o_rhv);
    }
    kernels::output_stage_forward(run.device, stage(), flat<T const>(keep.o_rhv), gate_z(keep.p_rc),
                                  head_gain_.data(run.parameters), y, keep.rstd);
    if constexpr (E.residual)
      kernels::detail::add_linear(run.device, x_rd, view2<T const>(y), out_.of(run.parameters), y_rd, ws);
    else
      kernels::linear_forward(run.device, view2<T const>(y), out_.of(run.parameters), y_rd, false, ws);
  }

  /// dx is written, parameters are added to; `d_after` is the derivative of the final state (nullptr: none),
  /// `d_before` takes that of the initial one.
  template <class Device, class T>
  void backward(pass<Device, T> const& run, view2<same<T> const> x_rd, saved<same<T>> const& keep,
                view2<same<T> const> dy_rd, view2<same<T>> dx_rd, state<same<T>> const* before,
                state<same<T>> const* d_after, state<same<T>>* d_before, same<T>* d_base, arena& ws) const {
    arena_scope const scope(ws);
    index_t const R = run.rows();
    auto const wide = ws.take_view<T, 2>({R, inner_width()});
    auto const d_wide = ws.take_view<T, 2>({R, inner_width()});
    auto const d_o = ws.take_view<T, 3>({R, o_.heads, o_.value_dim});
    auto const dp = ws.take_view<T, 2>({R, in_.width()});
    auto const du = E.conv ? ws.take_view<T, 2>({R, conv_width()}) : view2<T>{};
    auto const n = ws.take_view<T, 2>({R, x_rd.extent[1]});
    auto const dn = ws.take_view<T, 2>({R, x_rd.extent[1]});
    auto const d_gate = gate_.template carve<T>(ws, R);

    kernels::linear_backward_input(run.device, view2<T const>(dy_rd), out_.of(run.parameters), d_wide, false, ws);
    kernels::output_stage_backward(run.device, stage(), flat<T const>(keep.o_rhv), gate_z(keep.p_rc),
                                   head_gain_.data(run.parameters), keep.rstd, d_wide, flat<T>(d_o), gate_z(dp),
                                   head_gain_.data(d_base), ws, wide);
    kernels::linear_backward_weight(run.device, view2<T const>(dy_rd), wide, out_.of(d_base), ws);
    auto const d_values = values(dp, du);
    Mixer::backward(run.device, shape(run), mixer_in<T>(keep), view3<T const>(keep.mixed_rhv), keep.mixer,
                    view3<T const>(d_o), before ? &before->mixer : nullptr, d_after ? &d_after->mixer : nullptr,
                    mixer_gradient<T>{queries(dp, du), keys(dp, du), d_values, d_gate.g_rhk, d_gate.write_rh, {}},
                    d_before ? &d_before->mixer : nullptr, ws);
    if constexpr (E.skip)
      kernels::skip_backward(run.device, view3<T const>(values(keep.p_rc, keep.u_rc)), skip_.data(run.parameters),
                             d_o, d_values, skip_.data(d_base), ws);
    gate_.backward(run.device, run.parameters, view2<T const>(raw(keep.p_rc)), d_gate, raw(dp), d_base, ws);
    rotate(run, dp, du, -1.0, ws);
    if constexpr (E.conv)
      kernels::conv_backward(
          run.device, run.seq, view2<T const>(conv_in(keep.p_rc)), taps_.of(run.parameters),
          conv_bias_.data(run.parameters), true, before ? view3<T const>(before->window_ncj) : view3<T const>{}, du,
          d_after ? view3<T const>(d_after->window_ncj) : view3<T const>{}, conv_in(dp), taps_.of(d_base),
          conv_bias_.data(d_base), d_before ? d_before->window_ncj : view3<T>{}, ws);
    norm_.forward(run.device, run.parameters, x_rd, n, keep.norm);
    in_.backward(run.device, run.parameters, n, dp, dn, d_base, ws);
    if constexpr (E.residual) kernels::detail::copy(run.device, dy_rd, dx_rd);
    norm_.backward(run.device, run.parameters, x_rd, keep.norm, dn, dx_rd, E.residual, d_base, ws);
  }

 private:
  void check() const {
    auto const fail = [](std::string const& text) { throw option_error("seqmix: layer: " + text); };
    if (o_.heads < 1 || o_.key_dim < 1 || o_.value_dim < 1)
      fail("heads, key_dim and value_dim must be at least 1, got " + std::to_string(o_.heads) + ", " +
           std::to_string(o_.key_dim) + " and " + std::to_string(o_.value_dim));
    for (auto const& [what, count] :
         {std::pair("query_heads", o_.query_heads), std::pair("key_heads", o_.key_heads),
          std::pair("value_heads", o_.value_heads)})
      if (count < 1 || o_.heads % count != 0)
        fail(std::string(what) + " must divide heads = " + std::to_string(o_.heads) + ", got " +
             std::to_string(count));
    if (E.rope && o_.key_dim % 2 != 0) fail("rope needs an even key_dim, got " + std::to_string(o_.key_dim));
    if (E.conv && o_.conv_width < 1) fail("conv_width must be at least 1, got " + std::to_string(o_.conv_width));
    using which_type = typename Mixer::selector_type::which_type;
    if (which_type::spec.windowed && o_.window < 1)
      fail("window counts the query itself and must be at least 1, got " + std::to_string(o_.window));
    if (which_type::spec.routed && o_.chunk < 1) fail("chunk must be at least 1, got " + std::to_string(o_.chunk));
    if (o_.recurrence_chunk < 1)
      fail("recurrence_chunk must be at least 1, got " + std::to_string(o_.recurrence_chunk));
  }
  index_t inner_width() const noexcept { return o_.heads * o_.value_dim; }
  index_t conv_width() const noexcept { return value_width_ + (o_.key_heads + o_.query_heads) * o_.key_dim; }
  index_t norm_groups() const noexcept { return E.head_norm == output_norm::per_head ? o_.heads : 1; }

  template <class Device, class T>
  mixer_shape shape(pass<Device, T> const& run) const {
    return {.seq = run.seq,
            .heads = o_.heads,
            .query_heads = o_.query_heads,
            .key_heads = o_.key_heads,
            .value_heads = o_.value_heads,
            .gate_heads = o_.heads,
            .key_dim = o_.key_dim,
            .value_dim = o_.value_dim,
            .scale = o_.scale,
            .chunk = o_.recurrence_chunk,
            .capacity = run.capacity,
            .select = {.window = o_.window, .chunk = o_.chunk, .shared_choice = o_.shared_choice},
            .knobs = run.knobs};
  }
  kernels::output_stage stage() const noexcept {
    index_t const width = E.head_norm == output_norm::none       ? 0
                          : E.head_norm == output_norm::per_head ? o_.value_dim
                                                                 : inner_width();
    return {width, width, E.output_gate, E.gate_before_norm, o_.head_norm_eps};
  }

  // Slices of the projections p or, behind the convolution, of u.
  template <class T>
  view2<T> conv_in(view2<T> p_rc) const {
    return p_rc.slice(1, v_, conv_width());
  }
  template <class T>
  view3<T> part(view2<T> p_rc, view2<T> u_rc, index_t column, index_t heads, index_t dim) const {
    auto const from = E.conv ? u_rc.slice(1, column - v_, heads * dim) : p_rc.slice(1, column, heads * dim);
    return as_heads(from, heads, dim);
  }
  template <class T>
  view3<T> values(view2<T> p, view2<T> u) const {
    return part(p, u, v_, o_.value_heads, o_.value_dim);
  }
  template <class T>
  view3<T> keys(view2<T> p, view2<T> u) const {
    return part(p, u, k_, o_.key_heads, o_.key_dim);
  }
  template <class T>
  view3<T> queries(view2<T> p, view2<T> u) const {
    return part(p, u, q_, o_.query_heads, o_.key_dim);
  }
  template <class T>
  view2<T> raw(view2<T> p_rc) const {
    return p_rc.slice(1, raw_, gate_.raw_width());
  }
  template <class T>
  view2<T> gate_z(view2<T> p_rc) const {
    return p_rc.slice(1, z_, E.output_gate ? inner_width() : 0);
  }
  template <class T>
  view2<T> flat(view3<std::remove_const_t<T>> o_rhv) const {
    return {o_rhv.data, {o_rhv.extent[0], inner_width()}};
  }
  template <class T>
  mixer_input<T> mixer_in(saved<T> const& keep) const {
    return {queries(keep.p_rc, keep.u_rc),
            keys(keep.p_rc, keep.u_rc),
            values(keep.p_rc, keep.u_rc),
            keep.gate.g_rhk,
            keep.gate.write_rh,
            {}};
  }
  template <class Device, class T>
  void rotate(pass<Device, T> const& run, view2<same<T>> p_rc, view2<same<T>> u_rc, double direction,
              arena& ws) const {
    // Queries stand behind the keys, so that one call turns both.
    if constexpr (E.rope)
      kernels::rope(run.device, run.seq, run.position, o_.rope_base, direction,
                    part(p_rc, u_rc, k_, o_.key_heads + o_.query_heads, o_.key_dim), ws);
  }

  options o_;
  norm<E.norm> norm_;
  projection in_;
  gate_room<gate_type> gate_;
  index_t value_width_ = 0, z_ = 0, v_ = 0, k_ = 0, q_ = 0, raw_ = 0;
  weight taps_, conv_bias_, skip_, head_gain_, out_;
};

}  // namespace seqmix::inline v0
