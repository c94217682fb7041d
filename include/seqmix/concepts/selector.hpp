#pragma once

#include <array>
#include <concepts>
#include <string_view>

#include <seqmix/tensor/device.hpp>
#include <seqmix/tensor/formulas.hpp>
#include <seqmix/tensor/view.hpp>

namespace seqmix::inline v0 {

/// Keys [begin, end) of one sequence.
struct key_range {
  index_t begin = 0;
  index_t end = 0;
  constexpr index_t size() const noexcept { return end > begin ? end - begin : 0; }
};

/// The keys one query sees: a few disjoint ranges in ascending order.
struct key_ranges {
  static constexpr int most = 3;
  std::array<key_range, most> range{};
  int count = 0;

  constexpr void add(key_range r) noexcept {
    if (r.size() > 0) range[std::size_t(count++)] = r;
  }
  constexpr index_t size() const noexcept {
    index_t n = 0;
    for (int i = 0; i < count; ++i) n += range[std::size_t(i)].size();
    return n;
  }
  constexpr bool contains(index_t key) const noexcept {
    for (int i = 0; i < count; ++i)
      if (key >= range[std::size_t(i)].begin && key < range[std::size_t(i)].end) return true;
    return false;
  }
};

/// The numbers a selector needs; fixed for a layer.
struct selection {
  index_t window = 0;          ///< keys a query sees counting itself, for the windowed selectors
  index_t chunk = 0;           ///< keys per chunk, counted from the start of the sequence, for the routed selectors
  bool shared_choice = false;  ///< one choice for all query heads that share a key head
  index_t top_k = 1;           ///< chunks a query chooses, its own never counted, for the selectors of several
  bool router_bias = false;    ///< mean-key scores add the mean of the gate's biases of the chunk's visible keys
};

/// The numbers of a selector that may change during a run.
struct selector_knobs {
  double temperature = 1.0;          ///< divides the scores before the bias is added
  double forward_temperature = 0.0;  ///< of a hard choice where it differs from its surrogate's; 0: the same
  double hard_fraction = 1.0;        ///< m of (1 - m) soft + m hard output, for the hard selectors

  constexpr double forward() const noexcept { return forward_temperature > 0 ? forward_temperature : temperature; }
};

/// How a routed selector scores a chunk.
enum class chunk_score { mean_key, mean_key_prefix, exact_mass, exact_max };
/// What a routed selector passes back to its scores.
enum class chunk_gradient { index_constant, chunk_straight_through, gated };
/// Which softmax over the chunks chunk_straight_through takes for its surrogate.
enum class chunk_probability { mass, score };

/// Which earlier chunks are chosen whatever their scores; they count as chosen.
enum class forced_chunks { none, first_and_previous };

/// What a `which` promises about itself.
struct which_spec {
  bool full_sequence = true;  ///< every earlier key can receive weight, at any distance
  bool routed = false;        ///< chooses a chunk per query from chunk scores
  bool windowed = false;      ///< reads selection::window
  bool own_chunk = false;     ///< always sees its own chunk
  bool own_competes = false;  ///< its own partial chunk is a candidate of the choice
  chunk_score score = chunk_score::mean_key;
  chunk_gradient gradient = chunk_gradient::index_constant;
  chunk_probability probability = chunk_probability::mass;
  bool several = false;  ///< chooses selection::top_k chunks, all candidates where there are fewer; else one
  forced_chunks forced = forced_chunks::none;
  /// Heads that share a key head choose together, by softmaxes over all complete chunks (the query's own among them
  /// when the query ends it), which are the weights of attention to `compressed` keys.
  bool by_compression = false;
  bool compressed = false;  ///< its keys and values are the means of complete chunks, counted in chunks
};

/// What a `how` promises about itself.
struct how_spec {
  bool multiplies_decay = false;  ///< a gate multiplies the score instead of biasing it (linear weights)
  bool non_uniform = true;        ///< can put nearly all weight on one key whatever the others are
  bool hard = false;              ///< keeps one key and remembers which
  bool soft_output = false;       ///< its backward needs the softmax output beside the hard one
  bool takes_sink = false;        ///< a weight without a value may join its denominator
};

/// The output of one query: soft * (what was accumulated) + hard * (the value of key `chosen`).
template <class T>
struct how_output {
  T soft = T(0);
  T hard = T(0);
  index_t chosen = -1;
  T normaliser = T(0);  ///< what turns the accumulated values into the soft output that backward reads
};

/// What a row's upstream gradient g offers to every key of the row.
template <class T>
struct row_gradient {
  T soft = T(0);    ///< g . (the normalised accumulated output)
  T chosen = T(0);  ///< g . (the chosen value), for the hard selectors
};

namespace selector_detail {
template <class S>
concept has_name = requires {
  { S::name } -> std::convertible_to<std::string_view>;
};
template <class W>
concept has_which_spec = requires {
  { W::spec } -> std::convertible_to<which_spec>;
};
template <class W>
concept has_blocks = requires(index_t query, index_t choice, selection const& s) {
  { W::blocks(query, choice, s) }
  noexcept->std::same_as<key_ranges>;
};
template <class H>
concept has_how_spec = requires {
  { H::spec } -> std::convertible_to<how_spec>;
};
/// The definition, on a whole row, for any scalar.
template <class H, class T>
concept has_weights_on = requires(T const* in, index_t n, selector_knobs const& k, T* out) {
  { H::template weights<T>(in, in, n, k, out, out) }
  noexcept->std::same_as<void>;
};
template <class H>
concept has_weights = has_weights_on<H, double> && has_weights_on<H, dual<double, 1>>;
/// The same in one pass over tiles of keys: what the fast kernels run.
template <class H>
concept has_absorb = requires(typename H::template row<double>& row, double* score, double const* forward,
                              index_t n) {
  { H::template absorb<portable_isa>(row, score, forward, n, n, true) }
  noexcept->std::same_as<double>;
};
template <class H>
concept has_soft = requires(selector_knobs const& k) {
  { H::soft(k, true) }
  noexcept->std::same_as<bool>;
};
template <class H>
concept has_finish = requires(typename H::template row<double> const& row,
                              typename H::template saved<double>& saved, selector_knobs const& k) {
  { H::finish(row, k, saved) }
  noexcept->std::same_as<how_output<double>>;
};
template <class H>
concept has_pullback = requires(typename H::template saved<double> const& saved, row_gradient<double> const& g,
                                double* score, double const* gv, double* d_score, index_t n,
                                selector_knobs const& k) {
  { H::template pullback<portable_isa>(saved, g, score, gv, d_score, n, n, k) }
  noexcept->std::same_as<void>;
};
/// Of those whose spec takes a sink.
template <class H>
concept has_sink = requires(typename H::template saved<double> const& saved, row_gradient<double> const& g,
                            double sink) {
  { H::template start<double>(sink) }
  noexcept->std::same_as<typename H::template row<double>>;
  { H::template sink_pullback<double>(saved, g, sink) }
  noexcept->std::same_as<double>;
};
}  // namespace selector_detail

/// Which of the keys are visible? A stateless type with
///   `name`, `spec`  which_spec: its promises
///   `blocks(query, choice, selection)`  noexcept, the visible ranges of a query counted from the sequence's start;
///                   a query that chose several chunks sees the union over its choices
/// Chunk scores of routed selectors belong to the library; they are named in `spec`.
template <class W>
concept which =
    selector_detail::has_name<W> && selector_detail::has_which_spec<W> && selector_detail::has_blocks<W>;

/// How do scores become weights? A stateless type with
///   `name`, `spec`  how_spec
///   `weights(raw, bias, n, knobs, on_values, on_stopped)`  the definition on one row, for any scalar: the oracle
///   `row<T>`        what is carried from tile to tile of one query; `row<T>{}` is the start
///   `absorb<Isa>(row, score, forward, n, first_key, soft)`  turns n scores (a multiple of the vector length; -inf
///   where
///                   invisible) into weights in place, returns the factor for what was accumulated before;
///                   `forward` are the scores at the forward temperature where they differ, else nullptr
///   `absorb_rows<Isa>(row, score, forward, n, rows, first_key, soft, factor)`  optional: the same for rows whose
///                   scores lie n apart, for speed
///   `finish(row, knobs, saved)`  the output's factors, and what backward needs
///   `pullback<Isa>(saved, row_gradient, score, gv, d_score, n, first_key, knobs)`  from g.v per key to d_score;
///   scores
///                   become the weights on dv in place
///   `soft(knobs, training)`  whether values have to be accumulated at all
///   `start(sink)`, `sink_pullback(saved, row_gradient, sink)`  where spec.takes_sink: a row that begins with the
///                   weight e^sink on nothing, and the sink's derivative by that row
template <class H>
concept how = selector_detail::has_name<H> && selector_detail::has_how_spec<H> && selector_detail::has_weights<H> &&
    selector_detail::has_soft<H> && selector_detail::has_absorb<H> && selector_detail::has_finish<H> &&
    selector_detail::has_pullback<H> &&(!H::spec.takes_sink || selector_detail::has_sink<H>);

/// Which of it is read, with what weights?
template <class Which, class How>
struct select {
  static_assert(which<Which>, "seqmix selector: the first half must satisfy seqmix::which (name, spec, blocks)");
  static_assert(
      how<How>,
      "seqmix selector: the second half must satisfy seqmix::how (name, spec, weights, absorb, finish, pullback)");
  static_assert(!(Which::spec.routed && (How::spec.hard || How::spec.multiplies_decay)),
                "seqmix pairing: a chosen chunk is read by softmax; take softmax, or top1 over all keys");
  using which_type = Which;
  using how_type = How;
};

namespace selector_detail {
template <class S>
inline constexpr bool is_select = false;
template <class W, class H>
inline constexpr bool is_select<select<W, H>> = true;
}  // namespace selector_detail

/// Both halves together, `select<which, how>`.
template <class S>
concept selector = selector_detail::is_select<S>;

}  // namespace seqmix::inline v0
