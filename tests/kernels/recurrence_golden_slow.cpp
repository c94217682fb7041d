#include "../support/recurrence_golden.hpp"

#include <seqmix/gates/constant.hpp>
#include <seqmix/gates/none.hpp>

// The additive recurrences against the golden vectors, chunk by chunk and token by token.

namespace {

using namespace seqmix;
using namespace seqmix::testing;
using states::outer_product;
using numbers = std::vector<double>;

/// Rows of `width` numbers with one more, `last(row)`, behind each.
template <class F>
numbers with_column(numbers const& x, index_t width, F const& last) {
  numbers y;
  for (std::size_t i = 0; i < x.size(); ++i) {
    y.push_back(x[i]);
    if ((i + 1) % std::size_t(width) == 0) y.push_back(last(i / std::size_t(width)));
  }
  return y;
}
/// Rows without their last number, and those last numbers.
template <class T>
std::pair<std::vector<T>, std::vector<T>> without_column(std::vector<T> const& x, index_t width) {
  std::pair<std::vector<T>, std::vector<T>> y;
  for (std::size_t i = 0; i < x.size(); ++i)
    ((i + 1) % std::size_t(width) == 0 ? y.second : y.first).push_back(x[i]);
  return y;
}

/// Normalised linear attention: values [v, 1], then a division by what the last column has become.
template <class M, class T>
void check_normalised(recurrence_case const& c, index_t chunk) {
  DOCTEST_CAPTURE(c.file.name());
  DOCTEST_CAPTURE(chunk);
  auto s = c.shape;
  auto x = c.x;
  index_t const V = s.value_dim, wide = V + 1;
  double const eps = c.file.number("eps", 0);
  auto const joined = [&](numbers const& S, numbers const& z) {
    return with_column(S, V, [&](std::size_t row) { return z[row]; });
  };
  s.value_dim = wide;
  s.chunk = chunk;
  x.v = with_column(x.v, V, [](std::size_t) { return 1.0; });
  auto const d_o = c.numbers("cot_o");
  numbers o;
  auto const divided = [&](auto const& y) {
    std::vector<T> d_y(y.size());
    for (std::size_t row = 0; row * std::size_t(wide) < y.size(); ++row) {
      auto const at = row * std::size_t(wide), last = at + std::size_t(V);
      double const n = double(y[last]) + eps;
      double d_n = 0;
      for (std::size_t v = 0; v < std::size_t(V); ++v) {
        o.push_back(double(y[at + v]) / n);
        double const d = d_o[row * std::size_t(V) + v] / n;
        d_y[at + v] = T(d);
        d_n -= d * o.back();
      }
      d_y[last] = T(d_n);
    }
    return d_y;
  };
  auto const r = run_recurrence<M, T>(s, x, joined(c.numbers("S0"), c.numbers("z0")),
                                      joined(c.numbers("cot_S"), c.numbers("cot_z")), divided);
  check_golden(rounded<T>(o), c.stored("o"));
  auto const [S, z] = without_column(r.state, wide);
  auto const [d_S, d_z] = without_column(r.d_state, wide);
  check_golden(S, c.stored("S")), check_golden(z, c.file["z"]);
  check_golden_gradient(c, "q", r.d.q), check_golden_gradient(c, "k", r.d.k);
  check_golden_gradient(c, "v", without_column(r.d.v, wide).first);
  check_golden_gradient(c, "S0", d_S);
  if (c.file.has("grad_z0")) check_golden(d_z, c.file["grad_z0"]);
}

/// RWKV-6: an exclusive read, and what the own token adds: scale (sum of q u k) v.
template <class M, class T>
void check_with_bonus(recurrence_case const& c, index_t chunk) {
  DOCTEST_CAPTURE(c.file.name());
  DOCTEST_CAPTURE(chunk);
  auto s = c.shape;
  s.chunk = chunk;
  auto const u = c.numbers("u"), d_o = c.numbers("cot_o");
  auto const K = std::size_t(s.key_dim), V = std::size_t(s.value_dim), H = std::size_t(s.heads);
  auto r = run_recurrence<M, T>(s, c.x, c.numbers("S0"), c.numbers("cot_S"),
                                [&](auto const&) { return rounded<T>(d_o); });
  numbers d_u(u.size(), 0.0);
  for (std::size_t row = 0; row * V < r.o.size(); ++row) {
    auto const *const q = &c.x.q[row * K], *const k = &c.x.k[row * K], *const v = &c.x.v[row * V],
                      *const bonus = &u[row % H * K];
    double weight = 0, d_weight = 0;
    for (std::size_t i = 0; i < K; ++i) weight += s.scale * q[i] * bonus[i] * k[i];
    for (std::size_t i = 0; i < V; ++i) {
      r.o[row * V + i] += T(weight * v[i]);
      r.d.v[row * V + i] += T(weight * d_o[row * V + i]);
      d_weight += s.scale * d_o[row * V + i] * v[i];
    }
    for (std::size_t i = 0; i < K; ++i) {
      r.d.q[row * K + i] += T(d_weight * bonus[i] * k[i]);
      r.d.k[row * K + i] += T(d_weight * bonus[i] * q[i]);
      d_u[row % H * K + i] += d_weight * q[i] * k[i];
    }
  }
  check_golden(r.o, c.stored("o")), check_golden(r.state, c.stored("S"));
  check_golden_gradient(c, "r", r.d.q), check_golden_gradient(c, "k", r.d.k);
  check_golden_gradient(c, "v", r.d.v), check_golden_gradient(c, "w", r.d.g);
  check_golden(rounded<T>(d_u), c.file["grad_u"]);
  check_golden_gradient(c, "S0", r.d_state);
}

}  // namespace

DOCTEST_TEST_CASE("recurrences give the golden outputs, states and gradients of linear attention") {
  for (auto const* name : {"linear_attn", "linear_attn_init", "linear_attn_t1"})
    check_forms<outer_product, gates::none>(load_recurrence(name));
  for (auto const* name : {"linear_attn_norm", "linear_attn_norm_init", "linear_attn_norm_t1"})
    in_every_form<outer_product, gates::none>(
        [c = load_recurrence(name)]<class M, class T>(index_t chunk) { check_normalised<M, T>(c, chunk); });
}

DOCTEST_TEST_CASE("recurrences give the golden outputs, states and gradients of retention") {
  for (auto const* name : {"retention", "retention_t1"}) {
    auto c = load_recurrence(name);
    for (index_t h = 0; h < c.shape.heads; ++h) c.x.g.push_back(std::log1p(-std::exp2(-5.0 - double(h))));
    check_forms<outer_product, gates::constant>(c);
  }
}

DOCTEST_TEST_CASE(
    "recurrences give the golden outputs, states and gradients of simple gated linear attention and SSD") {
  for (auto const* name : {"simple_gla", "simple_gla_init", "simple_gla_t1"})
    check_forms<outer_product, decay_per_head>(load_recurrence(name));
  for (auto const* name : {"ssd", "ssd_init", "ssd_t1"})
    check_forms<outer_product, decay_per_head>(load_recurrence(name, {.q = "C", .k = "B", .v = "X", .g = "A"}));
}

DOCTEST_TEST_CASE("recurrences give the golden outputs, states and gradients of gated linear attention") {
  for (auto const* name : {"gla", "gla_init", "gla_t1"})
    check_forms<outer_product, decay_per_channel>(load_recurrence(name));
}

DOCTEST_TEST_CASE("recurrences read exclusively give the golden outputs, states and gradients of RWKV-6") {
  for (auto const* name : {"rwkv6", "rwkv6_init", "rwkv6_t1"})
    in_every_form<states::exclusive<outer_product>, decay_per_channel>(
        [c = load_recurrence(name, {.q = "r", .g = "w"})]<class M, class T>(index_t chunk) {
          check_with_bonus<M, T>(c, chunk);
        });
}
