#include "../support/recurrence_golden.hpp"
#include <seqmix/gates/none.hpp>

// The recurrences that erase against the golden vectors, chunk by chunk and token by token.

namespace {

using namespace seqmix;
using namespace seqmix::testing;
using states::delta_rule;
using numbers = std::vector<double>;

/// x / sqrt(sum of squares + eps) for rows of `width`.
numbers normalised(numbers const& x, index_t width, double eps) {
  auto y = x;
  for (std::size_t at = 0; at < x.size(); at += std::size_t(width)) {
    double sum = eps;
    for (std::size_t i = at; i < at + std::size_t(width); ++i) sum += x[i] * x[i];
    for (std::size_t i = at; i < at + std::size_t(width); ++i) y[i] = x[i] / std::sqrt(sum);
  }
  return y;
}
template <class T>
std::vector<T> normalised_backward(numbers const& x, std::vector<T> const& d_y, index_t width, double eps) {
  auto d = d_y;
  for (std::size_t at = 0; at < x.size(); at += std::size_t(width)) {
    double sum = eps, along = 0;
    for (std::size_t i = at; i < at + std::size_t(width); ++i) sum += x[i] * x[i], along += x[i] * double(d_y[i]);
    for (std::size_t i = at; i < at + std::size_t(width); ++i)
      d[i] = T((double(d_y[i]) - x[i] * along / sum) / std::sqrt(sum));
  }
  return d;
}

template <class M, class T>
void check_normalised_keys(recurrence_case const& c, index_t chunk) {
  DOCTEST_CAPTURE(chunk);
  auto s = c.shape;
  auto x = c.x;
  double const eps = c.file.number("l2_eps", 0);
  s.chunk = chunk;
  x.q = normalised(x.q, s.key_dim, eps), x.k = normalised(x.k, s.key_dim, eps);
  auto const r = run_recurrence<M, T>(s, x, {}, c.numbers("cot_S"),
                                      [&](auto const&) { return rounded<T>(c.numbers("cot_o")); });
  check_golden(r.o, c.stored("o")), check_golden(r.state, c.stored("S"));
  check_golden_gradient(c, "q", normalised_backward(c.x.q, r.d.q, s.key_dim, eps));
  check_golden_gradient(c, "k", normalised_backward(c.x.k, r.d.k, s.key_dim, eps));
  check_golden_gradient(c, "v", r.d.v), check_golden_gradient(c, "g", r.d.g);
  check_golden_gradient(c, "beta", r.d.beta);
}

}  // namespace

DOCTEST_TEST_CASE("recurrences give the golden outputs, states and gradients of the delta rule") {
  for (auto const* name : {"delta_rule", "delta_rule_init", "delta_rule_t1"})
    check_forms<delta_rule, gates::none>(load_recurrence(name));
}

DOCTEST_TEST_CASE("recurrences give the golden outputs, states and gradients of the gated delta rule") {
  for (auto const* name : {"gated_delta_rule", "gated_delta_rule_init", "gated_delta_rule_t1"})
    check_forms<delta_rule, decay_per_head>(load_recurrence(name));
  in_every_form<delta_rule, decay_per_head>([c = load_recurrence("gated_delta_rule_hf_chunk_l2")]<class M, class T>(
                                                index_t chunk) { check_normalised_keys<M, T>(c, chunk); });
}

DOCTEST_TEST_CASE("recurrences give the golden outputs, states and gradients of Kimi Delta Attention") {
  for (auto const* name : {"kda", "kda_init", "kda_t1"})
    check_forms<delta_rule, decay_per_channel>(load_recurrence(name));
}

DOCTEST_TEST_CASE(
    "recurrences give the golden outputs, states and gradients of diagonal plus low rank and RWKV-7") {
  using state = states::diagonal_plus_low_rank;
  for (auto const* name : {"dplr", "dplr_init", "dplr_t1"})
    check_forms<state, decay_per_channel>(load_recurrence(name, {.low_rank = true}));
  for (auto const* name : {"rwkv7", "rwkv7_t1"}) {
    auto c = load_recurrence(name, {.q = "r", .g = "w", .a = "a", .b = "b", .low_rank = true});
    for (auto& w : c.x.g) w = -std::exp(w);  // the stored w is a log of a rate
    in_every_form<state, decay_per_channel>([&]<class M, class T>(index_t chunk) {
      check_recurrence_case<M, T>(c, chunk, [&](double d, std::size_t i) { return d * c.x.g[i]; });
    });
  }
}
