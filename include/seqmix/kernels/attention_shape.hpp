#pragma once

#include <string>

#include <seqmix/concepts/selector.hpp>
#include <seqmix/tensor/sequences.hpp>
#include <seqmix/tensor/storage.hpp>

namespace seqmix::inline v0 {

/// Sizes and numbers of one attention over packed or batched rows. Query head h reads key head h / (heads /
/// key_heads), and so on for values and gates.
struct attention_shape {
  sequences seq{};
  index_t heads = 1, key_heads = 1, value_heads = 1, gate_heads = 1;
  index_t key_dim = 1, value_dim = 1;
  double scale = 1.0;  ///< multiplies q.k
  selection select{};
  selector_knobs knobs{};
};

/// What one attention reads. Log-decays g <= 0 are [R,Hg,1] per token, or [1,Hg,1] with row stride 0 when constant;
/// an empty view means no gate. Where a gate multiplies they may be [R,Hg,K], one per key channel, or with `rate`
/// [Hg,K] >= 0 the bounded g rate_k; `past_g` is laid out as g. `past_*` are the tokens before row 0 of each
/// sequence, empty when there are none. With `queries_alone` rows bring no keys: they stand at position[n],
/// position[n] + 1, ..., and all keys are `past_*`.
template <class T>
struct attention_input {
  using number = accumulator_t<T>;
  view3<T const> q_rhk{}, k_rhk{}, v_rhv{};
  view3<number const> g_rhk{};
  view4<T const> past_k_nlhk{}, past_v_nlhv{};  ///< capacity on axis L; the oldest token first
  view4<number const> past_g_nlhk{};
  index_t const* past_length = nullptr;  ///< [N] tokens held, nullptr: none
  view1<number const> sink_h{};          ///< e^sink joins the denominator of every row [H]; empty: nothing does
  bool queries_alone = false;
  index_t const* position = nullptr;  ///< [N]
  view2<number const> rate_hk{};      ///< of log-decays that are products; empty: they are none

  index_t past(index_t n) const noexcept { return past_length ? past_length[n] : 0; }
};

/// Where the derivatives go; layouts as in attention_input. Written, not added. Those of q, k and v are always
/// wanted, the others may be empty.
template <class T>
struct attention_gradient {
  using number = accumulator_t<T>;
  view3<T> q_rhk{}, k_rhk{}, v_rhv{};
  view3<number> g_rhk{};
  view4<T> past_k_nlhk{}, past_v_nlhv{};
  view4<number> past_g_nlhk{};
  view1<number> sink_h{};
  view2<number> rate_hk{};
};

/// What a test or a probe may look at; every view may be empty.
struct attention_record {
  view2<index_t> choice_rh{};    ///< the selected key or best chunk, counted inside its sequence; -1: none
  view2<double> lse_rh{};        ///< log-sum-exp over the visible keys (and the sink) at the (backward) temperature
  view3<index_t> choices_rhk{};  ///< all chosen chunks [R,H,top_k], the best first, -1 behind them
};

/// Whether a chunk is scored by the mean of its keys.
constexpr bool scores_by_mean(chunk_score score) noexcept {
  return score == chunk_score::mean_key || score == chunk_score::mean_key_prefix;
}
/// Chunks a query of this selector chooses at most.
constexpr index_t choices_per_query(which_spec const& which, selection const& select) noexcept {
  return which.several ? select.top_k : 1;
}
/// Whether the query heads of a key head choose together.
constexpr bool choose_together(which_spec const& which, selection const& select) noexcept {
  return select.shared_choice || which.by_compression;
}

namespace detail {
inline void expect_dividing_heads(char const* what, index_t count, index_t heads) {
  if (count >= 1 && heads >= 1 && heads % count == 0) return;
  throw shape_error(std::string("seqmix: attention: ") + what + " must divide the " + std::to_string(heads) +
                    " query heads, got " + std::to_string(count));
}
inline void expect_at_least_one(char const* what, index_t count) {
  if (count >= 1) return;
  throw value_error(std::string("seqmix: attention: ") + what + " must be at least 1, got " +
                    std::to_string(count));
}
}  // namespace detail

/// Checks the sizes and numbers that a selector of this kind reads; every attention kernel calls it first.
/// Throws shape_error for head counts that do not divide the query heads, value_error for a window or chunk below
/// 1, a temperature that is not above 0, a hard fraction outside [0, 1], and a shared choice, a top_k or a router
/// bias of a selector that has no use for it.
inline void validate(attention_shape const& s, which_spec const& which) {
  detail::expect_dividing_heads("key_heads", s.key_heads, s.heads);
  detail::expect_dividing_heads("value_heads", s.value_heads, s.heads);
  detail::expect_dividing_heads("gate_heads", s.gate_heads, s.heads);
  if (which.windowed) detail::expect_at_least_one("window (keys a query sees, itself among them)", s.select.window);
  if (which.routed || which.own_chunk || which.compressed)
    detail::expect_at_least_one("chunk (keys per chunk)", s.select.chunk);
  if (!(s.knobs.temperature > 0.0))
    throw value_error("seqmix: attention: temperature must be above 0, got " + std::to_string(s.knobs.temperature));
  if (!(s.knobs.forward_temperature >= 0.0))
    throw value_error(
        "seqmix: attention: forward_temperature must be above 0, or 0 for the same as temperature, got " +
        std::to_string(s.knobs.forward_temperature));
  if (!(s.knobs.hard_fraction >= 0.0 && s.knobs.hard_fraction <= 1.0))
    throw value_error("seqmix: attention: hard_fraction must lie in [0, 1], got " +
                      std::to_string(s.knobs.hard_fraction));
  if (s.select.shared_choice && !which.routed)
    throw value_error(
        "seqmix: attention: shared_choice is for selectors that choose chunks; this one chooses none");
  if (which.several) detail::expect_at_least_one("top_k (chunks chosen beside the own one)", s.select.top_k);
  if (!which.several && s.select.top_k != 1)
    throw value_error("seqmix: attention: top_k other than 1 is for own_plus_top_k, window_plus_top_k and "
                      "top_k_by_compression; this selector chooses at most one chunk, got " +
                      std::to_string(s.select.top_k));
  if (s.select.router_bias && !(which.routed && scores_by_mean(which.score) && !which.by_compression))
    throw value_error(
        "seqmix: attention: router_bias is for chunk scores by mean keys; exact scores hold the bias already, and "
        "other selectors score no chunks");
}

/// Checks a sink: one number per query head, of weights that are normalised by a sum of exponentials.
template <class T>
void validate_sink(attention_shape const& s, how_spec const& how, view1<T const> const& sink_h) {
  if (!sink_h) return;
  if (!how.takes_sink)
    throw value_error(
        "seqmix: attention: a sink joins the denominator of a softmax, and these weights have none; take "
        "selectors::softmax, or no sink");
  expect_shape("attention sink", sink_h, {s.heads});
}

/// Checks the views that a backward always writes: shapes and contiguous last axes; not those of keys and values
/// where rows bring none.
template <class T>
void validate_gradient(attention_shape const& s, attention_gradient<T> const& d, bool queries_alone = false) {
  index_t const R = s.seq.rows();
  expect_shape("attention query derivative d_q", d.q_rhk, {R, s.heads, s.key_dim});
  expect_contiguous("attention query derivative d_q", d.q_rhk);
  if (d.sink_h) expect_shape("attention sink derivative d_sink", d.sink_h, {s.heads});
  if (queries_alone) return;
  expect_shape("attention key derivative d_k", d.k_rhk, {R, s.key_heads, s.key_dim});
  expect_shape("attention value derivative d_v", d.v_rhv, {R, s.value_heads, s.value_dim});
  expect_contiguous("attention key derivative d_k", d.k_rhk);
  expect_contiguous("attention value derivative d_v", d.v_rhv);
}

/// Checks that every view of an input fits the shape and is contiguous in its last axis; names the one that is not.
/// `per_channel`: the kernel takes a decay per key channel, else one per head.
template <class T>
void validate_input(attention_shape const& s, attention_input<T> const& in, bool per_channel = false) {
  index_t const R = s.seq.rows();
  expect_shape("attention query q", in.q_rhk, {R, s.heads, s.key_dim});
  expect_contiguous("attention query q", in.q_rhk);
  if (!in.queries_alone) {
    expect_shape("attention key k", in.k_rhk, {R, s.key_heads, s.key_dim});
    expect_shape("attention value v", in.v_rhv, {R, s.value_heads, s.value_dim});
    expect_contiguous("attention key k", in.k_rhk);
    expect_contiguous("attention value v", in.v_rhv);
  }
  bool const rated = in.rate_hk.extent[1] > 0;
  index_t const decays = per_channel && !rated ? s.key_dim : 1;
  if (in.g_rhk || per_channel) expect_shape("attention log-decay g", in.g_rhk, {-1, s.gate_heads, decays});
  if (rated && !per_channel)
    throw value_error("seqmix: attention: decay rates are for a gate per key channel under linear weights");
  if (rated) expect_shape("attention decay rate", in.rate_hk, {s.gate_heads, s.key_dim});
  if (in.past_length) {
    expect_shape("attention past keys", in.past_k_nlhk, {s.seq.count(), -1, s.key_heads, s.key_dim});
    expect_shape("attention past values", in.past_v_nlhv, {s.seq.count(), -1, s.value_heads, s.value_dim});
    if (in.past_g_nlhk)
      expect_shape("attention past log-decays", in.past_g_nlhk, {s.seq.count(), -1, s.gate_heads, decays});
  }
}

}  // namespace seqmix::inline v0
