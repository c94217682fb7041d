#pragma once

#include <concepts>
#include <string_view>

#include <seqmix/tensor/formulas.hpp>
#include <seqmix/tensor/view.hpp>

namespace seqmix::inline v0 {

/// What a state is made of.
enum class state_kind {
  history,      ///< every key and value (a cache that grows)
  matrix,       ///< K x V numbers per head, whatever the length
  elementwise,  ///< a matrix with K = 1 that neither keys nor queries address: one number per head and value
                ///< channel
  stabilised    ///< a matrix and a normaliser written with weights e^write, kept relative to a running maximum
};

/// When a state is read.
enum class read_order {
  inclusive,  ///< o_t = S_t' q_t
  exclusive  ///< o_t = S_{t-1}' q_t, neither decayed by nor holding token t; an own-token term adds what is missing
};

struct state_spec {
  state_kind kind = state_kind::matrix;
  bool low_rank = false;        ///< the update erases along b (a' S); false: a and b are 0 and never formed
  bool reads_beta = false;      ///< the update takes a strength beta per head and token
  bool reads_low_rank = false;  ///< the update takes the vectors a and b of each head and token as they are
  bool shares_write = false;    ///< b = w, w alone is filled; a write scale is the value's: w (write v + S' a)'
  read_order read = read_order::inclusive;
};

/// What one token offers to one head: its key [K], the factors e^g [K] (one number repeated for a per-head gate),
/// the gate's write scale, the strength beta, and a and b [K] where the spec reads them (else nullptr).
template <class T>
struct state_token {
  T const* key;
  T const* factor;
  index_t keys;
  T write, beta;
  T const* a = nullptr;
  T const* b = nullptr;
};

/// Coefficients of the generic step  S_t = Diag(e^g) S + b (a' S) + w v',  each [K]; a acts on the undecayed S.
template <class T>
struct state_update {
  T *a, *b, *w;
};

/// Derivatives of a token, added to by a state's pullback.
template <class T>
struct state_token_gradient {
  T *key, *factor;
  T write, beta;
  T* a = nullptr;
  T* b = nullptr;
};

/// Where the running maximum of a stabilised state starts.
enum class stabiliser_start {
  none,  ///< -inf: the first token sets it
  zero
};

/// What a stabilised state is: a matrix C [K,V] and a normaliser n [K], both written with weights e^write and kept
/// relative to a running maximum m of the log-weights.
struct stabilised_spec {
  bool keyed = true;   ///< addressed by keys and queries; false: K = 1 and neither is read
  bool floor = false;  ///< the denominator is max(|n' q|, e^-m) + eps; false: n' q + eps
  double eps = 0.0;    ///< added in the stabilised scale
  stabiliser_start start = stabiliser_start::none;
};

namespace state_detail {
template <class S>
concept has_name = requires {
  { S::name } -> std::convertible_to<std::string_view>;
};
template <class S>
concept has_spec = requires {
  { S::spec } -> std::convertible_to<state_spec>;
};
template <class S, class T>
concept has_coefficients_on = requires(state_token<T> const& token, state_update<T> const& out) {
  { S::template coefficients<T>(token, out) }
  noexcept->std::same_as<void>;
};
template <class S>
concept has_coefficients = has_coefficients_on<S, double> && has_coefficients_on<S, dual<double, 1>>;
template <class S>
concept has_pullback = requires(state_token<double> const& token, state_update<double const> const& d,
                                state_token_gradient<double>& out) {
  { S::template pullback<double>(token, d, out) }
  noexcept->std::same_as<void>;
};
template <class S>
concept has_stabilised = requires {
  { S::stabilised } -> std::convertible_to<stabilised_spec>;
};
}  // namespace state_detail

/// What is remembered? A stateless type with `name` and `spec` (state_spec); a matrix state also with
///   `coefficients(token, update)`  noexcept, for any scalar: fills w, and a and b when spec.low_rank
///   `pullback(token, d_update, d_token)`  noexcept, adds to the derivatives of the token
/// and a stabilised one `stabilised` (stabilised_spec).
template <class S>
concept state = state_detail::has_name<S> && state_detail::has_spec<S> &&
    (S::spec.kind == state_kind::history ||
     (S::spec.kind == state_kind::stabilised
          ? state_detail::has_stabilised<S>
          : (state_detail::has_coefficients<S> && state_detail::has_pullback<S>)));

}  // namespace seqmix::inline v0
