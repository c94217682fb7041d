#pragma once

#include <concepts>
#include <string_view>

#include <seqmix/tensor/formulas.hpp>
#include <seqmix/tensor/view.hpp>

namespace seqmix::inline v0 {

/// What a state is made of.
enum class state_kind {
  history,  ///< every key and value (a cache that grows)
  matrix    ///< K x V numbers per head, whatever the length
};

struct state_spec {
  state_kind kind = state_kind::matrix;
  bool low_rank = false;    ///< the update erases along b (a' S); false: a and b are 0 and never formed
  bool reads_beta = false;  ///< the update takes a strength beta per head and token
};

/// What one token offers to one head: its key [K], the factors e^g [K] (one number repeated for a per-head gate),
/// the gate's write scale and the strength beta.
template <class T>
struct state_token {
  T const* key;
  T const* factor;
  index_t keys;
  T write, beta;
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
}  // namespace state_detail

/// What is remembered? A stateless type with `name` and `spec` (state_spec); a matrix state also with
///   `coefficients(token, update)`  noexcept, for any scalar: fills w, and a and b when spec.low_rank
///   `pullback(token, d_update, d_token)`  noexcept, adds to the derivatives of the token
template <class S>
concept state = state_detail::has_name<S> && state_detail::has_spec<S> &&
    (S::spec.kind == state_kind::history || (state_detail::has_coefficients<S> && state_detail::has_pullback<S>));

}  // namespace seqmix::inline v0
