#pragma once

#include <array>
#include <concepts>
#include <string_view>

#include <seqmix/tensor/formulas.hpp>
#include <seqmix/tensor/view.hpp>

namespace seqmix::inline v0 {

/// On which axis one number of a gate lives.
enum class axis { head, head_key };

/// What turns the layer's input into the raw values of a gate; the library owns the projection.
enum class feed {
  nothing,
  linear,         ///< W x
  low_rank,       ///< W_up f(W_down x), the rank an option of the layer
  block_diagonal  ///< W x with one square block per group of channels (RG-LRU)
};
/// f of a low-rank feed.
enum class hidden { identity, tanh, sigmoid };
/// What that projection reads: the layer's (normed, shifted) input or the convolved values.
enum class feed_source { input, convolved };

/// The declared surrounding of a gate's formula.
struct gate_spec {
  axis raw = axis::head;                    ///< on which axis one raw value lives
  int raws = 0;                             ///< how many raw values the formula takes: 0, 1 or 2
  axis decay = axis::head;                  ///< on which axis the decay lives
  feed from = feed::nothing;                ///< what feeds the raw values
  bool bias = false;                        ///< whether that projection has a bias
  bool decays = true;                       ///< false: the log-decay is always 0 and costs nothing
  bool writes = false;                      ///< true: `gate_value::write` scales what is written
  bool log_write = false;                   ///< true: `write` is the logarithm of that scale (stabilised states)
  hidden inside = hidden::identity;         ///< of a low-rank feed
  feed_source source = feed_source::input;  ///< what the projection reads
  /// True: a decay per key channel is the product of a rate per head and key and a step per head and token,
  /// log_decay = -exp(log_rate(p) + log_step(raw, p)), so that [R,H,K] decays are never stored (Mamba-1).
  bool factored = false;
  /// No raw values: the same decay at every token (RetNet, ALiBi).
  constexpr bool constant() const noexcept { return decays && raws == 0; }
};

/// Where the value of a gate's parameter comes from.
enum class parameter_source {
  own,                ///< a tensor of its layer
  cumulative_softmax  ///< sum over m <= layer of softmax over layers of one tensor [layers, elements] of the whole
                      ///< model, less its first term: HGRN's lower bounds, 0 in layer 0
};

/// One parameter of a gate: its name, its axis (may be coarser than the decay's) and how it is trained.
struct gate_parameter {
  std::string_view name;
  axis on = axis::head;
  bool weight_decay = false;
  bool trained = true;
  bool log_rate = false;  ///< adding delta to it multiplies the decay rate by e^delta
  parameter_source source = parameter_source::own;
};

/// Which element of a parameter is initialised, and the random number it may use.
struct gate_element {
  index_t head, heads, key, keys, layer, layers;
  double uniform;  ///< in (0, 1), one per element
};

/// What a formula returns: log-decay g <= 0 and the scale of what is written, k (write v).
template <class T>
struct gate_value {
  T log_decay = T(0);
  T write = T(1);
};

namespace gate_detail {

template <class G>
inline constexpr std::size_t raws = std::size_t(G::spec.raws);
template <class G>
inline constexpr std::size_t parameters = G::parameters.size();

template <class G>
concept has_name = requires {
  { G::name } -> std::convertible_to<std::string_view>;
};
template <class G>
concept has_spec = requires {
  { G::spec } -> std::convertible_to<gate_spec>;
};
template <class G>
concept has_parameters = requires {
  { G::parameters.size() } -> std::convertible_to<std::size_t>;
  { G::parameters.data() } -> std::convertible_to<gate_parameter const*>;
};
template <class G, class T>
concept has_forward_on = requires(std::array<T, raws<G>> const& raw, std::array<T, parameters<G>> const& p) {
  { G::template forward<T>(raw, p) } -> std::same_as<gate_value<T>>;
};
/// A formula is needed for plain numbers and for the dual numbers that differentiate it.
template <class G>
concept has_forward = has_forward_on<G, double> && has_forward_on<G, dual<double, 2>>;
/// Optional: the value at the first token of a sequence where it differs (RG-LRU's multiplier is 1 there).
template <class G>
concept has_first = requires(std::array<dual<double, 2>, raws<G>> const& raw,
                             std::array<dual<double, 2>, parameters<G>> const& p) {
  { G::template first<dual<double, 2>>(raw, p) }
  noexcept->std::same_as<gate_value<dual<double, 2>>>;
};
/// Optional: start value of the projection's bias, raw value i at an element; else 0.
template <class G>
concept has_bias_initial = requires(gate_element const& e) {
  { G::bias_initial(std::size_t(0), e) } -> std::same_as<double>;
};
/// Of a factored gate: the two summands in the exponent.
template <class G>
concept has_factors = requires(std::array<double, raws<G>> const& raw, std::array<double, parameters<G>> const& p) {
  { G::template log_rate<double>(p) }
  noexcept->std::same_as<double>;
  { G::template log_step<double>(raw, p) }
  noexcept->std::same_as<double>;
};
template <class G>
concept has_noexcept_forward = noexcept(G::template forward<double>({}, {}));
template <class G>
concept has_initial = parameters<G>
== 0 || requires(gate_element const& e) {
  { G::initial(std::size_t(0), e) } -> std::same_as<double>;
};
/// Optional: derivatives by hand, faster than dual numbers.
template <class G, class T>
concept has_pullback = requires(std::array<T, raws<G>> raw, std::array<T, parameters<G>> p, T d,
                                std::array<T, raws<G>>& d_raw, std::array<T, parameters<G>>& d_p) {
  { G::template pullback<T>(raw, p, d, d, d_raw, d_p) }
  noexcept->std::same_as<void>;
};

}  // namespace gate_detail

/// How fast is it forgotten? A stateless type with
///   `name`        text, part of a variant's name
///   `spec`        gate_spec: where the formula's numbers live and what feeds them
///   `parameters`  std::array of gate_parameter (may be empty)
///   `initial(i, element)`  start value of parameter i at one element
///   `forward<T>(raw, p)`   noexcept, the formula: gate_value<T> from spec.raws raw values and the parameters
///   `pullback<T>(raw, p, d_log_decay, d_write, d_raw, d_p)`  optional, writes d_raw and d_p
///   `first<T>(raw, p)`     optional, noexcept: the value at a sequence's first token where it differs
///   `bias_initial(i, element)`  optional: start value of the bias of raw value i, else 0
///   `log_rate<T>(p)`, `log_step<T>(raw, p)`  noexcept, of a factored gate
template <class G>
concept gate = gate_detail::has_name<G> && gate_detail::has_spec<G> && gate_detail::has_parameters<G> &&
    gate_detail::has_forward<G> && gate_detail::has_noexcept_forward<G> && gate_detail::has_initial<G> &&
    (!G::spec.factored || gate_detail::has_factors<G>);

/// Prose for an author: `static_assert(seqmix::explain_gate<my_gate>());` says what to add.
template <class G>
consteval bool explain_gate() {
  static_assert(gate_detail::has_name<G>, "seqmix gate: add static constexpr std::string_view name");
  static_assert(gate_detail::has_spec<G>, "seqmix gate: add static constexpr gate_spec spec");
  static_assert(gate_detail::has_parameters<G>,
                "seqmix gate: add static constexpr std::array<gate_parameter, n> parameters (n may be 0)");
  if constexpr (gate_detail::has_spec<G> && gate_detail::has_parameters<G>) {
    static_assert(gate_detail::has_forward<G>,
                  "seqmix gate: add template <class T> static gate_value<T> forward(std::array<T, raws> const&, "
                  "std::array<T, parameters> const&) noexcept; it must take dual numbers too");
    static_assert(gate_detail::has_initial<G>,
                  "seqmix gate: add static double initial(std::size_t parameter, gate_element const&)");
    static_assert(!G::spec.factored || gate_detail::has_factors<G>,
                  "seqmix gate: a factored gate needs template <class T> static T log_rate(p) noexcept and "
                  "T log_step(raw, p) noexcept, with log_decay = -exp(log_rate + log_step)");
    if constexpr (gate_detail::has_forward<G>)
      static_assert(gate_detail::has_noexcept_forward<G>, "seqmix gate: make forward noexcept");
  }
  return gate<G>;
}

namespace gate_detail {

/// d_raw and d_p of a formula f(raw, p) on dual numbers, whose result `combine` turns into one derivative a
/// direction.
template <class G, class T, class Formula, class Combine>
void dual_pullback(std::array<T, raws<G>> const& raw, std::array<T, parameters<G>> const& p,
                   std::array<T, raws<G>>& d_raw, std::array<T, parameters<G>>& d_p, Formula const& f,
                   Combine const& combine) noexcept {
  constexpr std::size_t nr = raws<G>, np = parameters<G>;
  using number = dual<T, nr + np>;
  std::array<number, nr> raw_dual{};
  std::array<number, np> p_dual{};
  for (std::size_t i = 0; i < nr; ++i) raw_dual[i] = number(raw[i]), raw_dual[i].slope[i] = T(1);
  for (std::size_t i = 0; i < np; ++i) p_dual[i] = number(p[i]), p_dual[i].slope[nr + i] = T(1);
  auto const out = f(raw_dual, p_dual);
  for (std::size_t i = 0; i < nr; ++i) d_raw[i] = combine(out, i);
  for (std::size_t i = 0; i < np; ++i) d_p[i] = combine(out, nr + i);
}
/// derivative * slope, 0 where the slope is 0 whatever the derivative.
template <class T>
T through(T derivative, T slope) noexcept {
  return slope == T(0) ? T(0) : derivative * slope;
}

}  // namespace gate_detail

/// Derivatives of a gate's value: by its own pullback, or by running the formula on dual numbers.
template <gate G, std::floating_point T>
void gate_pullback(std::array<T, gate_detail::raws<G>> const& raw,
                   std::array<T, gate_detail::parameters<G>> const& p, T d_log_decay, T d_write,
                   std::array<T, gate_detail::raws<G>>& d_raw,
                   std::array<T, gate_detail::parameters<G>>& d_p) noexcept {
  constexpr std::size_t nr = gate_detail::raws<G>, np = gate_detail::parameters<G>;
  if constexpr (gate_detail::has_pullback<G, T>) {
    G::template pullback<T>(raw, p, d_log_decay, d_write, d_raw, d_p);
  } else if constexpr (nr + np > 0) {
    gate_detail::dual_pullback<G>(
        raw, p, d_raw, d_p,
        [](auto const& raw_dual, auto const& p_dual) {
          return G::template forward<dual<T, nr + np>>(raw_dual, p_dual);
        },
        [&](auto const& out, std::size_t i) {
          return gate_detail::through(d_log_decay, bounded_log_decay(out.log_decay).slope[i]) +
                 gate_detail::through(d_write, out.write.slope[i]);
        });
  }
}

}  // namespace seqmix::inline v0
