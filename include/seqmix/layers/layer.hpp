#pragma once

#include <seqmix/kernels/cpu/convolution.hpp>
#include <seqmix/kernels/cpu/own_token.hpp>
#include <seqmix/layers/address_room.hpp>
#include <seqmix/layers/extras.hpp>
#include <seqmix/layers/first_value_room.hpp>
#include <seqmix/layers/gate_feed.hpp>
#include <seqmix/layers/gate_room.hpp>
#include <seqmix/layers/made_keys.hpp>
#include <seqmix/layers/normaliser.hpp>
#include <seqmix/layers/output_room.hpp>
#include <seqmix/layers/removal_room.hpp>
#include <seqmix/layers/shift_room.hpp>
#include <seqmix/mixers/mixer.hpp>

namespace seqmix::inline v0 {

/// x + W_out stage(mixer(q, k, v)), with q, k, v, the output gate z and the gate's raw values projected from
/// norm(x). The way of a row, every step but the projections optional (`extras`):
///   norm -> token shift -> projections -> convolution -> projections of the convolved values -> maps of q, k, v
///   -> rotation -> gate -> mixer -> own token -> norm per head -> output gate -> W_out
/// Saved per row: the projections, the convolution's output, mapped q, k, v, what gate and mixer ask for, the
/// mixer's output and a few norms; backward computes the rest again.
template <class Mixer, extras E>
class layer {
  static_assert(mixer_type<Mixer>, "seqmix layer: the first argument must satisfy seqmix::mixer_type");
  using gate_policy = typename Mixer::gate_type;
  using state_policy = typename Mixer::state_type;
  static constexpr auto kind = state_policy::spec.kind;
  static constexpr bool stabilised = kind == state_kind::stabilised;
  static constexpr bool linear = Mixer::selector_type::how_type::spec.multiplies_decay;

  /// Whether queries and keys exist at all.
  static constexpr bool keyed = [] {
    if constexpr (stabilised)
      return state_policy::stabilised.keyed;
    else
      return kind != state_kind::elementwise;
  }();
  static constexpr bool projects_keys = keyed && E.keys == key_source::projected;
  static constexpr bool late_keys = E.keys_from == feed_source::convolved;
  static constexpr bool makes_keys = keyed && !projects_keys;
  static constexpr bool late_raw = gate_policy::spec.source == feed_source::convolved;
  static constexpr bool low_rank_raw = gate_policy::spec.from == feed::low_rank;
  static constexpr bool block_raw = gate_policy::spec.from == feed::block_diagonal;
  static constexpr bool reads_beta = state_policy::spec.reads_beta;
  static constexpr bool low_rank_z = E.output_gate && E.gate_from == feed::low_rank;
  static constexpr bool own_in_mixer = stabilised && E.own == own_token::bonus;
  static constexpr bool own_before_norm =
      (E.own == own_token::bonus || E.own == own_token::minus_one) && !own_in_mixer;
  /// Members of a gated sum, whose weights sigmoid(W x) are per head and token.
  static constexpr index_t members = [] {
    if constexpr (requires { typename Mixer::members; })
      return index_t(Mixer::count);
    else
      return index_t(0);
  }();
  static constexpr bool has_bonus = E.own == own_token::bonus || E.own == own_token::bonus_after_norm;

  using key_map_type = address_map<E, E.key_map>;
  using query_map_type = address_map<E, E.query_map>;
  static constexpr bool maps_keys =
      keyed && (key_map_type::mapped || E.keys != key_source::projected || E.removal_keys);
  static constexpr bool maps_queries = keyed && query_map_type::mapped;
  static constexpr bool maps_values = E.value_map != activation::identity || E.normalise || E.first_value;

  static_assert(!late_keys || E.conv,
                "seqmix layer: keys projected from convolved values need a convolution; set extras::conv");
  static_assert(!late_raw || E.conv,
                "seqmix layer: this gate reads the convolved values, so the layer needs a convolution; set "
                "extras::conv");
  static_assert(E.keys != key_source::one_minus_decay || gate_policy::spec.decay == axis::head_key,
                "seqmix layer: keys 1 - e^g need a gate with a decay per key channel; take gates::hgrn2");
  static_assert(!E.normalise || linear,
                "seqmix layer: softmax weights have sum 1 already; normalise is for linear weights");
  static_assert(E.own == own_token::none || own_in_mixer || (linear && keyed),
                "seqmix layer: an own-token term u (q.k) v belongs to linear weights with queries and keys");
  static_assert(
      state_policy::spec.reads_low_rank == E.removal_keys,
      "seqmix layer: a state that takes the vectors a and b of each token needs extras::removal_keys, and "
      "removal_keys needs such a state (states::diagonal_plus_low_rank)");
  static_assert(E.features == feature_map::none || linear,
                "seqmix layer: feature maps stand for a softmax; take them with linear weights");
  static_assert(E.features == feature_map::none || !E.removal_keys,
                "seqmix layer: removal_keys make the keys that are written; take no feature map with them");
  static_assert(!E.feature_weights || E.features != feature_map::none,
                "seqmix layer: feature weights stand in front of a feature map; set extras::features");
  static_assert(!E.sink || !linear,
                "seqmix layer: a sink joins the denominator of a softmax; linear weights have none");
  static_assert(!E.skip || !maps_values, "seqmix layer: the skip D v reads plain values; take no map of them");
  static_assert(keyed || (E.qk_norm == key_norm::none && !E.rope && E.keys == key_source::projected),
                "seqmix layer: this state has no queries and keys to map, rotate or replace");

 public:
  using mixer_type_ = Mixer;
  using gate_type = gate_policy;
  static constexpr extras surroundings = E;
  /// An attention's backward reads its output, which the own-token term would spoil.
  static constexpr bool keeps_mixed = E.normalise || (E.skip && kind == state_kind::history);

  using options = layer_options;

  static std::string name() { return "layer[mixer=" + Mixer::name() + extras_name(E) + "]"; }

  layer(options const& o, index_t d_model, parameter_room room) : o_(o) {
    if (o_.query_heads == 0) o_.query_heads = o_.heads;
    if (o_.key_heads == 0) o_.key_heads = o_.heads;
    if (o_.value_heads == 0) o_.value_heads = o_.heads;
    if (!keyed) o_.key_dim = 1;
    check();
    key_width_ = kernels::feature_width(E.features, o_.key_dim, o_.feature_order);
    if (o_.scale == 0.0) o_.scale = keyed ? 1.0 / std::sqrt(double(key_width_)) : 1.0;
    auto mixer_room = room.inner("mixer");
    norm_ = norm<E.norm>(mixer_room.inner("norm"), d_model, o_.norm_eps);
    gate_ = gate_room<gate_type>(mixer_room.inner("gate"), o_.heads, key_width_, o_.decay_offset);
    bool const first = E.first_value && room.claim("first_value");
    add_shift(mixer_room, d_model);
    add_projections(mixer_room, d_model, first);
    if constexpr (E.conv) {
      double const bound = o_.start.conv / std::sqrt(double(o_.conv_width));
      taps_ = mixer_room.taps("conv.weight", conv_width(), o_.conv_width, init::uniform(-bound, bound));
      if (E.conv_bias) conv_bias_ = mixer_room.vector("conv.bias", conv_width(), init::uniform(-bound, bound));
    }
    add_second_projections(mixer_room, d_model, first);
    if constexpr (maps_keys && projects_keys)
      key_map_ = key_map_type(mixer_room, "key", o_.key_heads, key_width_, o_);
    if constexpr (maps_queries) query_map_ = query_map_type(mixer_room, "query", o_.query_heads, key_width_, o_);
    if constexpr (makes_keys)
      made_keys_ = made_keys<E.keys>(mixer_room, o_.key_heads, key_width_, o_.key_positions);
    if constexpr (E.skip) skip_ = mixer_room.vector("skip", o_.heads, init::constant(1.0));
    if constexpr (has_bonus) bonus_ = mixer_room.vector("bonus", o_.heads * key_width_, o_.start.bonus);
    if constexpr (E.sink) sink_ = mixer_room.vector("sink", o_.heads, init::constant(0.0));
    stage_ = output_room<E>(mixer_room.inner("head_norm"), o_);
    out_ = mixer_room.matrix("out", d_model, inner_width(), o_.start.out);
    if constexpr (E.bias) out_bias_ = column_bias(mixer_room, "out.bias", d_model, init::constant(0.0));
  }

  options const& settings() const noexcept { return o_; }
  index_t stream_width() const noexcept { return E.first_value ? value_width() : 0; }

  /// Everything a layer carries along time: the mixer's part, the convolution's window [N,C,W-1] and the shifted
  /// row [N,D].
  template <class T>
  struct state {
    typename Mixer::template state<T> mixer;
    view3<T> window_ncj;
    view2<T> shifted_nd;
    void clear() {
      mixer.clear();
      std::fill_n(window_ncj.data, window_ncj.size(), T(0));
      std::fill_n(shifted_nd.data, shifted_nd.size(), T(0));
    }
  };
  template <class T, class Device>
  state<T> carve_state(arena& a, pass<Device, T> const& run) const {
    state<T> s{Mixer::template state<T>::carve(a, shape(run)), {}, {}};
    if constexpr (E.conv) s.window_ncj = a.take_view<T, 3>({run.seq.count(), conv_width(), o_.conv_width - 1});
    if constexpr (E.shift != token_shift::none) s.shifted_nd = a.take_view<T, 2>({run.seq.count(), out_.rows});
    return s;
  }
  /// Numbers held for N sequences of up to `capacity` tokens.
  index_t state_elements(index_t sequences_count, index_t capacity) const {
    pass<device::cpu, float> run{{}, nullptr, sequences::batch(sequences_count, 0)};
    run.capacity = capacity;
    return Mixer::template state<float>::elements(shape(run)) +
           (E.conv ? sequences_count * conv_width() * (o_.conv_width - 1) : 0) +
           (E.shift != token_shift::none ? sequences_count * out_.rows : 0);
  }

  template <class T>
  struct saved {
    typename norm<E.norm>::template saved<T> norm;
    view2<T> p_rc;  ///< projections, also those of convolved values and the second halves of low-rank ones
    view2<T> u_rc;  ///< convolved values, keys, queries
    view3<T> q_rhk, k_rhk, v_rhv;  ///< mapped ones, where there is a map
    typename removal_room::template vectors<T> removal;
    view2<T> beta_rh;
    view3<T> mix_rhn;
    T *q_norm = nullptr, *k_norm = nullptr;
    typename gate_room<gate_type>::template values<T> gate;
    typename Mixer::template saved<T> mixer;
    view3<T> o_rhv;      ///< mixer output, own-token term included
    view3<T> mixed_rhv;  ///< without it, where backward needs both
    T* stage = nullptr;
  };
  template <class T, class Device>
  saved<T> carve_saved(arena& a, pass<Device, T> const& run) const {
    index_t const R = run.rows();
    saved<T> s;
    s.norm = norm<E.norm>::template saved<T>::carve(a, R);
    s.p_rc = a.take_view<T, 2>({R, width_});
    if constexpr (E.conv) s.u_rc = a.take_view<T, 2>({R, conv_width()});
    if constexpr (E.removal_keys) {
      s.removal = removal_room::template vectors<T>::carve(a, R, o_.heads, key_width_);
      s.k_rhk = s.removal.key_rhk;
    } else if constexpr (maps_keys) {
      s.k_rhk = a.take_view<T, 3>({R, o_.key_heads, key_width_});
    }
    if constexpr (maps_queries) s.q_rhk = a.take_view<T, 3>({R, o_.query_heads, key_width_});
    if constexpr (maps_values) s.v_rhv = a.take_view<T, 3>({R, o_.value_heads, mixed_dim()});
    if constexpr (reads_beta) s.beta_rh = a.take_view<T, 2>({R, o_.heads});
    if constexpr (members > 0) s.mix_rhn = a.take_view<T, 3>({R, o_.heads, members});
    s.k_norm = key_map_.template carve_saved<T>(a, R, o_.key_heads);
    s.q_norm = query_map_.template carve_saved<T>(a, R, o_.query_heads);
    s.gate = gate_.template carve<T>(a, R);
    if constexpr (is_cpu<Device>)
      s.mixer = Mixer::template saved<T>::template carve<typename Device::isa>(a, shape(run));
    s.o_rhv = a.take_view<T, 3>({R, o_.heads, o_.value_dim});
    s.mixed_rhv = keeps_mixed ? a.take_view<T, 3>({R, o_.heads, mixed_dim()}) : s.o_rhv;
    s.stage = stage_.template carve_saved<T>(a, R);
    return s;
  }

  /// y = x + f(x). `before` is the state of earlier tokens (nullptr: none), `after` takes the final one (nullptr:
  /// not wanted); both may be the same.
  template <class Device, class T>
  requires mixer_detail::has_forward_on<Mixer, Device, T>
  void forward(pass<Device, T> const& run, view2<same<T> const> x_rd, view2<same<T>> y_rd,
               saved<same<T>> const& keep, state<same<T>> const* before, state<same<T>>* after, arena& ws) const {
    arena_scope const scope(ws);
    auto const n = ws.take_view<T, 2>({run.rows(), x_rd.extent[1]});
    auto const y = ws.take_view<T, 2>({run.rows(), inner_width()});
    norm_.forward(run.device, run.parameters, x_rd, n, keep.norm);
    in_.forward(run.device, run.parameters,
                shift_.forward(run, n, before ? before->shifted_nd : view2<T>{},
                               after ? after->shifted_nd : view2<T>{}, ws),
                keep.p_rc.slice(1, 0, in_.width()), ws);
    if constexpr (E.conv)
      kernels::conv_forward(run.device, run.seq, view2<T const>(conv_in(keep.p_rc)), taps_.of(run.parameters),
                            conv_bias_.data(run.parameters), conv_activated,
                            before ? view3<T const>(before->window_ncj) : view3<T const>{}, keep.u_rc,
                            after ? after->window_ncj : view3<T>{}, ws);
    second_forward(run, keep, n, ws);
    gate_.forward(run, view2<T const>(raw(keep.p_rc)), keep.gate);
    map_forward(run, keep, ws);
    rotate(run, keys(keep), queries(keep), 1.0, ws);
    Mixer::forward(run.device, shape(run), mixer_in(run, keep), keep.mixed_rhv, before ? &before->mixer : nullptr,
                   after ? &after->mixer : nullptr, run.training ? &keep.mixer : nullptr, ws);
    if constexpr (E.normalise)
      normaliser_forward(run.device, view3<T const>(keep.mixed_rhv), o_.normaliser_eps, keep.o_rhv);
    else if constexpr (keeps_mixed)
      kernels::detail::copy(run.device, flat<T const>(keep.mixed_rhv), flat<T>(keep.o_rhv));
    if constexpr (E.skip)
      kernels::skip_forward(run.device, view3<T const>(plain_values(keep)), skip_.data(run.parameters), keep.o_rhv);
    if constexpr (own_before_norm) kernels::own_token_forward(run.device, own(run, keep), keep.o_rhv);
    stage_.forward(run.device, run.parameters, keep.o_rhv, gate_z(keep.p_rc), y, keep.stage,
                   [&](view3<T> t) { add_own(run, keep, t); });
    if constexpr (E.residual)
      kernels::detail::add_linear(run.device, x_rd, view2<T const>(y), out_.of(run.parameters), y_rd, ws);
    else
      kernels::linear_forward(run.device, view2<T const>(y), out_.of(run.parameters), y_rd, false, ws);
    out_bias_.add(run.device, run.parameters, y_rd);
  }

  /// dx is written, parameters are added to; `d_after` is the derivative of the final state (nullptr: none),
  /// `d_before` takes that of the initial one.
  template <class Device, class T>
  requires mixer_detail::has_backward_on<Mixer, Device, T>
  void backward(pass<Device, T> const& run, view2<same<T> const> x_rd, saved<same<T>> const& keep,
                view2<same<T> const> dy_rd, view2<same<T>> dx_rd, state<same<T>> const* before,
                state<same<T>> const* d_after, state<same<T>>* d_before, same<T>* d_base, arena& ws) const {
    arena_scope const scope(ws);
    index_t const R = run.rows(), D = x_rd.extent[1];
    auto const wide = ws.take_view<T, 2>({R, inner_width()});
    auto const d_wide = ws.take_view<T, 2>({R, inner_width()});
    auto const d_o = ws.take_view<T, 3>({R, o_.heads, o_.value_dim});
    auto const n = ws.take_view<T, 2>({R, D});
    auto const dn = ws.take_view<T, 2>({R, D});
    auto const d = carve_derivatives(run, ws);

    kernels::linear_backward_input(run.device, view2<T const>(dy_rd), out_.of(run.parameters), d_wide, false, ws);
    stage_.backward(
        run.device, run.parameters, keep.o_rhv, gate_z(keep.p_rc), keep.stage, d_wide, d_o, gate_z(d.p_rc), d_base,
        wide, [&](view3<T> t) { add_own(run, keep, t); },
        [&](view3<T const> dt) {
          if constexpr (E.own == own_token::bonus_after_norm)
            kernels::detail::copy(run.device, view2<T const>({dt.data, {R, inner_width()}}), flat<T>(d.mixed_rhv));
        },
        ws);
    kernels::linear_backward_weight(run.device, view2<T const>(dy_rd), wide, out_.of(d_base), ws);
    out_bias_.backward(run.device, view2<T const>(dy_rd), d_base, ws);
    mixer_backward(run, keep, d_o, before, d_after, d_before, d, d_base, ws);
    rotate(run, keys(d), queries(d), -1.0, ws);
    map_backward(run, keep, d, d_base, ws);
    gate_.backward(run, view2<T const>(raw(keep.p_rc)), keep.gate, d.gate, raw(d.p_rc), d_base, ws);

    norm_.forward(run.device, run.parameters, x_rd, n, keep.norm);
    second_backward(run, keep, n, dn, d, d_base, ws);
    if constexpr (E.conv)
      kernels::conv_backward(run.device, run.seq, view2<T const>(conv_in(keep.p_rc)), taps_.of(run.parameters),
                             conv_bias_.data(run.parameters), conv_activated,
                             before ? view3<T const>(before->window_ncj) : view3<T const>{}, d.u_rc,
                             d_after ? view3<T const>(d_after->window_ncj) : view3<T const>{}, conv_in(d.p_rc),
                             taps_.of(d_base), conv_bias_.data(d_base),
                             d_before ? d_before->window_ncj : view3<T>{}, ws);
    input_backward(run, n, before, d_after, d_before, d, dn, d_base, ws);
    if constexpr (E.residual) kernels::detail::copy(run.device, dy_rd, dx_rd);
    norm_.backward(run.device, run.parameters, x_rd, keep.norm, dn, dx_rd, E.residual, d_base, ws);
  }

 private:
  static constexpr bool conv_activated = E.conv_map == activation::silu;
  static_assert(!E.conv || E.conv_map == activation::silu || E.conv_map == activation::identity,
                "seqmix layer: behind a convolution stands silu or identity");

  // Construction.
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
    if (E.features == feature_map::dpfp && o_.feature_order < 1)
      fail("feature_order, nu of dpfp, must be at least 1, got " + std::to_string(o_.feature_order));
    if (E.head_norm != output_norm::full_width && o_.norm_groups != 1)
      fail("norm_groups divides a norm over the full width, which this layer does not have; got " +
           std::to_string(o_.norm_groups));
    if (o_.norm_groups < 1 || inner_width() % o_.norm_groups != 0)
      fail("norm_groups must divide the width of " + std::to_string(inner_width()) + ", got " +
           std::to_string(o_.norm_groups));
    if (E.conv && o_.conv_width < 1) fail("conv_width must be at least 1, got " + std::to_string(o_.conv_width));
    using which_type = typename Mixer::selector_type::which_type;
    if (which_type::spec.windowed && o_.window < 1)
      fail("window counts the query itself and must be at least 1, got " + std::to_string(o_.window));
    if (which_type::spec.routed && o_.chunk < 1) fail("chunk must be at least 1, got " + std::to_string(o_.chunk));
    if (which_type::spec.routed && o_.top_k < 1) fail("top_k must be at least 1, got " + std::to_string(o_.top_k));
    if (o_.recurrence_chunk < 1)
      fail("recurrence_chunk must be at least 1, got " + std::to_string(o_.recurrence_chunk));
    if ((E.keys == key_source::one_minus_decay || E.removal_keys) && o_.key_heads != o_.heads)
      fail("these keys need one key head per head, got " + std::to_string(o_.key_heads) + " for " +
           std::to_string(o_.heads) + " heads");
    if ((E.keys == key_source::random_positions || E.keys == key_source::trained_positions) && o_.key_positions < 1)
      fail("keys by position need key_positions, the longest sequence, at least 1, got " +
           std::to_string(o_.key_positions));
    if (block_raw && (o_.gate_blocks < 1 || o_.heads % o_.gate_blocks != 0))
      fail("gate_blocks must divide heads = " + std::to_string(o_.heads) + ", got " +
           std::to_string(o_.gate_blocks));
  }

  initialiser or_in(initialiser const& special) const noexcept { return special ? special : o_.start.in; }
  void add_shift(parameter_room& room, index_t d_model) {
    auto const mu = [](initialiser const& i) { return i ? i : init::constant(0.5); };
    auto const& s = o_.start;
    bool const early_raw = gate_.raw_width() > 0 && !late_raw && !block_raw;  // blocks read the unshifted rows
    std::array<typename shift_room<E.shift>::entry, targets> list{
        {{"z", E.output_gate, mu(s.shift_z)},
         {"value", true, mu(s.shift_value)},
         {"key", projects_keys && !late_keys, mu(s.shift_key)},
         {"query", keyed && !late_keys, mu(s.shift_query)},
         {"raw", early_raw, mu(s.shift_raw)},
         {"rate", E.removal_keys, mu(s.shift_rate)}}};
    shift_ = shift_room<E.shift>(room.inner("shift"), d_model, list, o_.shift_rank, or_in(s.down), or_in(s.up),
                                 mu(s.shift_input));
  }
  /// Columns that are projected from the layer's input, in the order z | v | k | q | raw | beta | mix | ranks.
  void add_projections(parameter_room& room, index_t d_model, bool first) {
    auto const& s = o_.start;
    auto const add = [&](std::string_view name, index_t rows, initialiser initial, target t, bool bias) {
      return in_.add(room, name, rows, d_model, {initial, bias, shift_room<E.shift>::input(t)});
    };
    index_t const K = projected_dim();
    index_t const z_rows = !E.output_gate ? 0 : low_rank_z ? o_.output_gate_rank : inner_width();
    z_ = add(low_rank_z ? "z.down" : "z", z_rows, low_rank_z ? or_in(s.down) : or_in(s.z), to_z,
             E.bias && !low_rank_z);
    z_down_ = z_;
    v_ = add("value", value_width(), or_in(s.value), to_value, E.bias);
    k_ = add("key", projects_keys && !late_keys ? o_.key_heads * K : 0, or_in(s.key), to_key, E.bias);
    q_ = add("query", keyed && !late_keys ? o_.query_heads * K : 0, or_in(s.query), to_query, E.bias);
    if constexpr (!late_raw && !block_raw) {
      raw_ = raw_down_ = low_rank_raw ? add("gate.raw.down", o_.gate_rank, or_in(s.down), to_raw, false)
                                      : add("gate.raw", gate_.raw_width(), o_.start.in, to_raw, false);
    }
    beta_ = add("beta", reads_beta ? o_.heads : 0, o_.start.in, to_key, false);
    mix_ = add("mix", o_.heads * members, o_.start.in, to_query, false);
    rate_down_ = add("rate.down", E.removal_keys ? o_.rate_rank : 0, or_in(s.down), to_rate, false);
    first_down_ =
        add("first_value.down", E.first_value && !first ? o_.first_value_rank : 0, or_in(s.down), to_value, false);
  }
  /// Columns made from convolved values, and the second halves of low-rank projections; behind the others.
  void add_second_projections(parameter_room& room, index_t d_model, bool first) {
    auto const& s = o_.start;
    width_ = late_ = in_.width();
    index_t const source = late_raw ? value_width() : d_model, K = projected_dim();
    auto const take = [&](index_t columns) { return std::exchange(width_, width_ + columns); };
    if constexpr (late_raw && !block_raw) {
      index_t const columns = low_rank_raw ? o_.gate_rank : gate_.raw_width();
      from_values_.add(room, low_rank_raw ? "gate.raw.down" : "gate.raw", columns, source, or_in(s.down));
      raw_ = raw_down_ = take(columns);
    }
    if constexpr (late_keys && keyed) {
      from_values_.add(room, "key", projects_keys ? o_.key_heads * K : 0, value_width(), or_in(s.key));
      k_ = take(projects_keys ? o_.key_heads * K : 0);
      from_values_.add(room, "query", o_.query_heads * K, value_width(), or_in(s.query));
      q_ = take(o_.query_heads * K);
    }
    if constexpr (low_rank_raw || block_raw) {
      raw_feed_ = gate_feed<gate_type>(room, gate_.raw_width(), source, o_.gate_rank, o_.gate_blocks, or_in(s.up));
      raw_ = take(gate_.raw_width());
    }
    if constexpr (low_rank_z) {
      z_up_ = low_rank(room, "z.up", inner_width(), o_.output_gate_rank, E.gate_inside, E.gate_bias, or_in(s.up));
      z_ = take(inner_width());
    }
    if constexpr (E.removal_keys) {
      removal_ = removal_room(room, o_.heads, key_width_, o_.rate_rank, or_in(s.up));
      rate_ = take(o_.heads * key_width_);
    }
    if constexpr (E.first_value) {
      first_value_ = first_value_room(room, value_width(), o_.first_value_rank, or_in(s.up), first);
      first_value_mix_ = take(first ? 0 : value_width());
    }
  }

  // Sizes.
  index_t inner_width() const noexcept { return o_.heads * o_.value_dim; }
  index_t value_width() const noexcept { return o_.value_heads * o_.value_dim; }
  /// Channels of a query or key in front of their map.
  index_t projected_dim() const noexcept {
    return E.feature_weights ? o_.key_dim : kernels::feature_input(E.features, o_.key_dim);
  }
  /// Channels of a value as the mixer sees it: a column of ones sums the weights.
  index_t mixed_dim() const noexcept { return o_.value_dim + (E.normalise ? 1 : 0); }
  index_t conv_width() const noexcept {
    index_t const K = projected_dim();
    return value_width() + (late_keys || !keyed ? 0 : ((projects_keys ? o_.key_heads : 0) + o_.query_heads) * K);
  }

  template <class Device, class T>
  mixer_shape shape(pass<Device, T> const& run) const {
    selection select{};
    select.window = o_.window;
    select.chunk = o_.chunk;
    select.top_k = o_.top_k;
    select.shared_choice = o_.shared_choice;
    select.router_bias = o_.router_bias;
    return {.seq = run.seq,
            .heads = o_.heads,
            .query_heads = o_.query_heads,
            .key_heads = o_.key_heads,
            .value_heads = o_.value_heads,
            .gate_heads = o_.heads,
            .key_dim = key_width_,
            .value_dim = mixed_dim(),
            .scale = o_.scale,
            .chunk = o_.recurrence_chunk,
            .capacity = run.capacity,
            .select = select,
            .knobs = run.knobs};
  }

  // Slices of the projections p or, behind the convolution, of u; of activations and of derivatives alike.
  template <class T>
  view2<T> conv_in(view2<T> p_rc) const {
    return p_rc.slice(1, v_, conv_width());
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
  view3<T> part(view2<T> p_rc, view2<T> u_rc, index_t column, index_t heads, index_t dim, bool convolved) const {
    auto const from = convolved ? u_rc.slice(1, column - v_, heads * dim) : p_rc.slice(1, column, heads * dim);
    return as_heads(from, heads, dim);
  }
  template <class X>
  auto plain_values(X const& x) const {
    return part(x.p_rc, x.u_rc, v_, o_.value_heads, o_.value_dim, E.conv);
  }
  template <class X>
  auto plain_keys(X const& x) const {
    return part(x.p_rc, x.u_rc, k_, o_.key_heads, projected_dim(), E.conv && !late_keys);
  }
  template <class X>
  auto plain_queries(X const& x) const {
    return part(x.p_rc, x.u_rc, q_, o_.query_heads, projected_dim(), E.conv && !late_keys);
  }
  template <class X>
  auto values(X const& x) const {
    return maps_values ? x.v_rhv : plain_values(x);
  }
  template <class X>
  auto keys(X const& x) const {
    if constexpr (!keyed)
      return decltype(x.k_rhk){};
    else
      return maps_keys ? x.k_rhk : plain_keys(x);
  }
  template <class X>
  auto queries(X const& x) const {
    if constexpr (!keyed)
      return decltype(x.q_rhk){};
    else
      return maps_queries ? x.q_rhk : plain_queries(x);
  }
  template <class T>
  view2<T> flat(view3<std::remove_const_t<T>> o_rhv) const {
    return {o_rhv.data, {o_rhv.extent[0], inner_width()}};
  }
  template <class T>
  static view2<T> joined(view3<T> x_rhc) {
    return {x_rhc.data, {x_rhc.extent[0], x_rhc.extent[1] * x_rhc.extent[2]}, {x_rhc.stride[0], 1}};
  }

  template <class Device, class T>
  mixer_input<T> mixer_in(pass<Device, T> const& run, saved<T> const& keep) const {
    mixer_input<T> in{.q_rhk = queries(keep),
                      .k_rhk = keys(keep),
                      .v_rhv = values(keep),
                      .g_rhk = keep.gate.g_rhk,
                      .write_rh = keep.gate.write_rh,
                      .beta_rh = keep.beta_rh,
                      .a_rhk = keep.removal.a_rhk,
                      .b_rhk = keep.removal.b_rhk,
                      .rate_hk = keep.gate.rate_hk};
    if constexpr (own_in_mixer) in.bonus_hk = {bonus_.data(run.parameters), {o_.heads, key_width_}};
    if constexpr (members > 0) in.mix_rhn = keep.mix_rhn;
    if constexpr (E.sink) in.sink_h = {sink_.data(run.parameters), {o_.heads}};
    return in;
  }
  template <class Device, class T>
  kernels::own_token<T> own(pass<Device, T> const& run, saved<T> const& keep) const {
    return {.q_rhk = queries(keep),
            .k_rhk = keys(keep),
            .v_rhv = plain_or_mixed_values(keep),
            .u_hk = has_bonus ? bonus_.data(run.parameters) : nullptr,
            .s_rh = gate_type::spec.writes ? view2<T const>(keep.gate.write_rh) : view2<T const>{},
            .scale = E.own == own_token::minus_one ? -o_.scale : o_.scale};
  }
  /// Values without the column of ones.
  template <class X>
  auto plain_or_mixed_values(X const& x) const {
    auto v = values(x);
    v.extent[2] = o_.value_dim;
    return v;
  }
  template <class Device, class T>
  void add_own(pass<Device, T> const& run, saved<T> const& keep, view3<T> t_rhv) const {
    if constexpr (E.own == own_token::bonus_after_norm)
      kernels::own_token_forward(run.device, own(run, keep), t_rhv);
  }

  // Forward, behind the first projections.
  template <class Device, class T>
  void second_forward(pass<Device, T> const& run, saved<T> const& keep, view2<T> n_rd, arena& ws) const {
    auto const columns = [&](index_t at, index_t count) { return keep.p_rc.slice(1, at, count); };
    if (from_values_.width() > 0)
      from_values_.forward(run.device, run.parameters, joined(plain_values(keep)),
                           columns(late_, from_values_.width()), ws);
    if constexpr (low_rank_raw || block_raw)
      raw_feed_.forward(run.device, run.parameters, raw_source(n_rd, keep), raw(keep.p_rc), ws);
    if constexpr (low_rank_z)
      z_up_.forward(run.device, run.parameters, columns(z_down_, o_.output_gate_rank), gate_z(keep.p_rc), ws);
  }
  /// What the gate's feed reads: low-rank columns, or the rows that its blocks take.
  template <class T>
  view2<T const> raw_source(view2<T> n_rd, saved<T> const& keep) const {
    if constexpr (low_rank_raw) return keep.p_rc.slice(1, raw_down_, o_.gate_rank);
    return late_raw ? view2<T const>(joined(plain_values(keep))) : view2<T const>(n_rd);
  }
  template <class Device, class T>
  void map_forward(pass<Device, T> const& run, saved<T> const& keep, arena& ws) const {
    auto const dev = run.device;
    if constexpr (members > 0)
      kernels::activate(dev, activation::sigmoid, view2<T const>(keep.p_rc.slice(1, mix_, o_.heads * members)),
                        joined(keep.mix_rhn));
    if constexpr (reads_beta) {
      auto const raw_beta = keep.p_rc.slice(1, beta_, o_.heads);
      kernels::detail::for_row_blocks(dev, run.rows(), [&](index_t, index_t begin, index_t end) {
        for (index_t r = begin; r < end; ++r)
          for (index_t h = 0; h < o_.heads; ++h) keep.beta_rh(r, h) = T(o_.beta_scale) * sigmoid(raw_beta(r, h));
      });
    }
    if constexpr (E.removal_keys)
      removal_.forward(dev, run.parameters, plain_keys(keep), keep.p_rc.slice(1, rate_down_, o_.rate_rank),
                       keep.p_rc.slice(1, rate_, o_.heads * key_width_), keep.removal, ws);
    else if constexpr (maps_keys && projects_keys)
      key_map_.forward(dev, run.parameters, plain_keys(keep), keep.k_rhk, keep.k_norm, ws);
    if constexpr (makes_keys) made_keys_.forward(run, view3<T const>(keep.gate.g_rhk), keep.k_rhk);
    if constexpr (maps_queries)
      query_map_.forward(dev, run.parameters, plain_queries(keep), keep.q_rhk, keep.q_norm, ws);
    if constexpr (maps_values) map_values(run, keep, ws);
  }
  template <class Device, class T>
  void map_values(pass<Device, T> const& run, saved<T> const& keep, arena& ws) const {
    auto const mapped = joined(keep.v_rhv);
    if constexpr (E.first_value)
      first_value_.forward(run, joined(plain_values(keep)), keep.p_rc.slice(1, first_down_, first_rank()),
                           keep.p_rc.slice(1, first_value_mix_, first_rank() > 0 ? value_width() : 0), mapped, ws);
    else if constexpr (E.normalise)
      append_ones(run.device, E.value_map, view3<T const>(plain_values(keep)), keep.v_rhv);
    else
      kernels::activate(run.device, E.value_map, view2<T const>(joined(plain_values(keep))), mapped);
  }
  index_t first_rank() const noexcept {
    return first_value_mix_ < width_ && E.first_value ? o_.first_value_rank : 0;
  }
  template <class Device, class T>
  void rotate(pass<Device, T> const& run, view3<T> k_rhk, view3<T> q_rhk, double direction, arena& ws) const {
    if constexpr (E.rope) {
      kernels::rope_options const angles{.base = o_.rope_base,
                                         .channels = o_.rope_channels,
                                         .interleaved = o_.rope_interleaved,
                                         .closed = o_.rope_closed};
      if constexpr (!maps_keys && !maps_queries) {
        // Queries stand behind the keys, so that one call turns both.
        auto both = k_rhk;
        both.extent[1] = o_.key_heads + o_.query_heads;
        kernels::rope(run.device, run.seq, run.position, angles, direction, both, ws);
      } else {
        kernels::rope(run.device, run.seq, run.position, angles, direction, k_rhk, ws);
        kernels::rope(run.device, run.seq, run.position, angles, direction, q_rhk, ws);
      }
    }
  }

  // Backward.
  template <class T>
  struct derivatives {
    view2<T> p_rc, u_rc;
    view3<T> q_rhk, k_rhk, v_rhv, mixed_rhv;
    typename removal_room::template vectors<T> removal;
    view2<T> beta_rh;
    view3<T> mix_rhn;
    typename gate_room<gate_type>::template values<T> gate;
  };
  template <class Device, class T>
  derivatives<T> carve_derivatives(pass<Device, T> const& run, arena& ws) const {
    index_t const R = run.rows();
    derivatives<T> d;
    d.p_rc = ws.take_view<T, 2>({R, width_});
    if constexpr (E.conv) d.u_rc = ws.take_view<T, 2>({R, conv_width()});
    if constexpr (E.removal_keys) {
      d.removal = removal_room::template vectors<T>::carve(ws, R, o_.heads, key_width_);
      d.k_rhk = d.removal.key_rhk;
    } else if constexpr (maps_keys) {
      d.k_rhk = ws.take_view<T, 3>({R, o_.key_heads, key_width_});
    }
    if constexpr (maps_queries) d.q_rhk = ws.take_view<T, 3>({R, o_.query_heads, key_width_});
    if constexpr (maps_values) d.v_rhv = ws.take_view<T, 3>({R, o_.value_heads, mixed_dim()});
    if constexpr (E.normalise || E.own == own_token::bonus_after_norm)
      d.mixed_rhv = ws.take_view<T, 3>({R, o_.heads, mixed_dim()});
    if constexpr (reads_beta) d.beta_rh = ws.take_view<T, 2>({R, o_.heads});
    if constexpr (members > 0) d.mix_rhn = ws.take_view<T, 3>({R, o_.heads, members});
    d.gate = gate_.template carve<T>(ws, R);
    return d;
  }

  template <class Device, class T>
  void mixer_backward(pass<Device, T> const& run, saved<T> const& keep, view3<T> d_o, state<T> const* before,
                      state<T> const* d_after, state<T>* d_before, derivatives<T> const& d, T* d_base,
                      arena& ws) const {
    auto d_mixed = d_o;
    if constexpr (E.normalise) {
      normaliser_backward(run.device, view3<T const>(keep.mixed_rhv), o_.normaliser_eps, view3<T const>(d_o),
                          d.mixed_rhv);
      d_mixed = d.mixed_rhv;
    }
    mixer_gradient<T> out{.q_rhk = queries(d),
                          .k_rhk = keys(d),
                          .v_rhv = values(d),
                          .g_rhk = d.gate.g_rhk,
                          .write_rh = d.gate.write_rh,
                          .beta_rh = d.beta_rh,
                          .a_rhk = d.removal.a_rhk,
                          .b_rhk = d.removal.b_rhk,
                          .rate_hk = d.gate.rate_hk};
    if constexpr (members > 0) out.mix_rhn = d.mix_rhn;
    if constexpr (own_in_mixer) out.bonus_hk = ws.take_view<T, 2>({o_.heads, key_width_});
    if constexpr (E.sink) out.sink_h = ws.take_view<T, 1>({o_.heads});
    Mixer::backward(run.device, shape(run), mixer_in(run, keep), view3<T const>(keep.mixed_rhv), keep.mixer,
                    view3<T const>(d_mixed), before ? &before->mixer : nullptr, d_after ? &d_after->mixer : nullptr,
                    out, d_before ? &d_before->mixer : nullptr, ws);
    auto const accumulate = [&](T const* from, weight const& to, index_t count) {
      for (index_t i = 0; !run.device.dry && i < count; ++i) to.data(d_base)[i] += from[i];
    };
    if constexpr (own_in_mixer) accumulate(out.bonus_hk.data, bonus_, o_.heads * key_width_);
    if constexpr (E.sink) accumulate(out.sink_h.data, sink_, o_.heads);
    if constexpr (E.skip) skip_backward(run, keep, d_o, d, d_base, ws);
    if constexpr (own_before_norm) own_backward(run, keep, view3<T const>(d_o), d, d_base, ws);
    if constexpr (E.own == own_token::bonus_after_norm) {
      auto d_added = view3<T const>(d.mixed_rhv);
      own_backward(run, keep, d_added, d, d_base, ws);
    }
  }
  /// The skip reads the values as they are in front of their map.
  template <class Device, class T>
  void skip_backward(pass<Device, T> const& run, saved<T> const& keep, view3<T> d_o, derivatives<T> const& d,
                     T* d_base, arena& ws) const {
    kernels::skip_backward(run.device, view3<T const>(plain_values(keep)), skip_.data(run.parameters), d_o,
                           values(d), skip_.data(d_base), ws);
  }
  template <class Device, class T>
  void own_backward(pass<Device, T> const& run, saved<T> const& keep, view3<T const> d_o, derivatives<T> const& d,
                    T* d_base, arena& ws) const {
    arena_scope const scope(ws);
    constexpr bool writes = gate_type::spec.writes;
    auto const d_write = writes ? ws.take_view<T, 2>({run.rows(), o_.heads}) : view2<T>{};
    kernels::own_token_backward(run.device, own(run, keep), d_o,
                                {.q_rhk = queries(d),
                                 .k_rhk = keys(d),
                                 .v_rhv = plain_or_mixed_values(d),
                                 .u_hk = has_bonus ? bonus_.data(d_base) : nullptr,
                                 .s_rh = d_write},
                                ws);
    if constexpr (writes) kernels::detail::copy_or_add(run.device, view2<T const>(d_write), d.gate.write_rh, true);
  }

  template <class Device, class T>
  void map_backward(pass<Device, T> const& run, saved<T> const& keep, derivatives<T> const& d, T* d_base,
                    arena& ws) const {
    auto const dev = run.device;
    if constexpr (members > 0)
      kernels::activate_backward(dev, activation::sigmoid,
                                 view2<T const>(keep.p_rc.slice(1, mix_, o_.heads * members)), joined(d.mix_rhn),
                                 d.p_rc.slice(1, mix_, o_.heads * members), false);
    if constexpr (reads_beta) {
      auto const d_raw = d.p_rc.slice(1, beta_, o_.heads);
      kernels::detail::for_row_blocks(dev, run.rows(), [&](index_t, index_t begin, index_t end) {
        for (index_t r = begin; r < end; ++r)
          for (index_t h = 0; h < o_.heads; ++h) {
            T const s = keep.beta_rh(r, h) / T(o_.beta_scale);
            d_raw(r, h) = T(o_.beta_scale) * d.beta_rh(r, h) * s * (T(1) - s);
          }
      });
    }
    if constexpr (E.removal_keys)
      removal_.backward(dev, run.parameters, plain_keys(keep), keep.p_rc.slice(1, rate_down_, o_.rate_rank),
                        keep.p_rc.slice(1, rate_, o_.heads * key_width_), d.removal, plain_keys(d),
                        d.p_rc.slice(1, rate_down_, o_.rate_rank), d_base, ws);
    else if constexpr (maps_keys && projects_keys)
      key_map_.backward(dev, run.parameters, plain_keys(keep), keep.k_norm, d.k_rhk, plain_keys(d), d_base, ws);
    if constexpr (makes_keys)
      made_keys_.backward(run, view3<T const>(keep.gate.g_rhk), d.k_rhk, d.gate.g_rhk, d_base);
    if constexpr (maps_queries)
      query_map_.backward(dev, run.parameters, plain_queries(keep), keep.q_norm, d.q_rhk, plain_queries(d), d_base,
                          ws);
    if constexpr (maps_values) {
      if constexpr (E.first_value)
        first_value_.backward(run, joined(plain_values(keep)), keep.p_rc.slice(1, first_down_, first_rank()),
                              keep.p_rc.slice(1, first_value_mix_, first_rank() > 0 ? value_width() : 0),
                              joined(d.v_rhv), joined(plain_values(d)), d.p_rc.slice(1, first_down_, first_rank()),
                              d_base, ws);
      else if constexpr (E.normalise)
        drop_ones(dev, E.value_map, view3<T const>(plain_values(keep)), view3<T const>(d.v_rhv), plain_values(d));
      else
        kernels::activate_backward(dev, E.value_map, view2<T const>(joined(plain_values(keep))), joined(d.v_rhv),
                                   joined(plain_values(d)), false);
    }
  }
  /// Through the projections of convolved values and the second halves of low-rank ones; dn is written where a
  /// block-diagonal feed reads the input.
  template <class Device, class T>
  void second_backward(pass<Device, T> const& run, saved<T> const& keep, view2<T> n_rd, view2<T> dn_rd,
                       derivatives<T> const& d, T* d_base, arena& ws) const {
    arena_scope const scope(ws);
    auto const columns = [&](auto p_rc, index_t at, index_t count) { return p_rc.slice(1, at, count); };
    if constexpr (low_rank_z)
      z_up_.backward(run.device, run.parameters, columns(keep.p_rc, z_down_, o_.output_gate_rank), gate_z(d.p_rc),
                     columns(d.p_rc, z_down_, o_.output_gate_rank), d_base, ws);
    if constexpr (low_rank_raw)
      raw_feed_.backward(run.device, run.parameters, raw_source(n_rd, keep), raw(d.p_rc),
                         columns(d.p_rc, raw_down_, o_.gate_rank), false, d_base, ws);
    if constexpr (block_raw)
      raw_feed_.backward(run.device, run.parameters, raw_source(n_rd, keep), raw(d.p_rc),
                         late_raw ? joined(plain_values(d)) : dn_rd, late_raw, d_base, ws);
    if (from_values_.width() > 0) {
      auto const d_values = ws.take_view<T, 2>({run.rows(), value_width()});
      from_values_.backward(run.device, run.parameters, joined(plain_values(keep)),
                            columns(d.p_rc, late_, from_values_.width()), d_values, d_base, ws);
      kernels::detail::copy_or_add(run.device, view2<T const>(d_values), joined(plain_values(d)), true);
    }
  }
  template <class Device, class T>
  void input_backward(pass<Device, T> const& run, view2<T> n_rd, state<T> const* before, state<T> const* d_after,
                      state<T>* d_before, derivatives<T> const& d, view2<T> dn_rd, T* d_base, arena& ws) const {
    arena_scope const scope(ws);
    auto const carried = before ? before->shifted_nd : view2<T>{};
    constexpr bool kept = block_raw && !late_raw;  // dn holds what the block-diagonal feed gave back
    auto const dn = kept ? ws.take_view<T, 2>(dn_rd.extent) : dn_rd;
    auto d_inputs = shift_.template carve_inputs<T>(run.rows(), n_rd.extent[1], ws);
    if constexpr (E.shift == token_shift::none) d_inputs.fill(dn);
    in_.backward(run.device, run.parameters, shift_.forward(run, n_rd, carried, view2<T>{}, ws),
                 d.p_rc.slice(1, 0, in_.width()), d_inputs, d_base, ws);
    shift_.backward(run, n_rd, carried, d_inputs, d_after ? d_after->shifted_nd : view2<T>{}, dn,
                    d_before ? d_before->shifted_nd : view2<T>{}, d_base, ws);
    if constexpr (kept) kernels::detail::copy_or_add(run.device, view2<T const>(dn), dn_rd, true);
  }

  options o_;
  norm<E.norm> norm_;
  shift_room<E.shift> shift_;
  projection in_, from_values_;
  gate_room<gate_type> gate_;
  gate_feed<gate_type> raw_feed_;
  low_rank z_up_;
  made_keys<E.keys> made_keys_;
  removal_room removal_;
  first_value_room first_value_;
  key_map_type key_map_;
  query_map_type query_map_;
  output_room<E> stage_;
  index_t width_ = 0, key_width_ = 1, late_ = 0;
  index_t z_ = 0, v_ = 0, k_ = 0, q_ = 0, raw_ = 0, beta_ = 0, mix_ = 0, rate_ = 0, first_value_mix_ = 0;
  index_t z_down_ = 0, raw_down_ = 0, rate_down_ = 0, first_down_ = 0;
  weight taps_, conv_bias_, skip_, bonus_, sink_, out_;
  column_bias out_bias_;
};

}  // namespace seqmix::inline v0
