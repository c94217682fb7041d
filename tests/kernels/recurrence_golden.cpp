#include "../support/golden.hpp"
#include "../support/law_delta_rule.hpp"
#include "../support/law_recurrence.hpp"
#include <seqmix/gates/constant.hpp>
#include <seqmix/gates/none.hpp>

// The recurrences against the golden vectors, chunk by chunk and token by token.

namespace {

using namespace seqmix;
using namespace seqmix::testing;
using kernels::recurrence_form;
using states::outer_product;

/// The names of a case's tensors for q, k, v, g, beta, initial and final state.
struct tensor_names {
  char const *q = "q", *k = "k", *v = "v", *g = "g", *beta = "beta", *initial = "S0", *final = "S";
};

struct recurrence_case {
  golden_case file;
  tensor_names names;
  mixer_shape shape;
  mixer_numbers<double> x;

  /// Tokens first, states K x V.
  golden_tensor stored(std::string const& name) const {
    auto const& t = file[name];
    bool const state = name.ends_with(names.final) || name.ends_with(names.initial);
    if (state) return file.op() == "ssd" ? with_axes_swapped(t, t.shape.size() - 2, t.shape.size() - 1) : t.clone();
    return head_first() && t.shape.size() > 2 ? token_first(t) : t.clone();
  }
  std::vector<double> numbers(std::string const& name) const {
    if (!file.has(name)) return {};
    auto const t = stored(name);
    return {t.data.begin(), t.data.end()};
  }
  bool head_first() const {
    auto const layout = file.text("layout");
    return layout.find("HEAD FIRST") != std::string::npos || layout.find("[B,H,T") != std::string::npos;
  }
};

recurrence_case load(std::string const& name) {
  recurrence_case c{golden_case("ops/" + name), {}, {}, {}};
  if (c.file.op() == "ssd") c.names.q = "C", c.names.k = "B", c.names.v = "X", c.names.g = "A";
  c.x = {c.numbers(c.names.q),   c.numbers(c.names.k), c.numbers(c.names.v), c.numbers(c.names.g), {},
         c.numbers(c.names.beta)};
  auto const q = c.stored(c.names.q);
  c.shape.seq = sequences::batch(q.extent(0), q.extent(1));
  c.shape.heads = c.shape.query_heads = c.shape.key_heads = c.shape.value_heads = c.shape.gate_heads = q.extent(2);
  c.shape.key_dim = q.extent(3);
  c.shape.value_dim = c.stored(c.names.v).extent(3);
  c.shape.scale = c.file.number("scale", 1.0);
  if (c.file.op() == "retention")
    for (index_t h = 0; h < c.shape.heads; ++h) c.x.g.push_back(std::log1p(-std::exp2(-5.0 - double(h))));
  return c;
}

void check(std::vector<double> const& actual, golden_tensor const& expected) {
  auto const r = compare(actual.data(), expected);
  DOCTEST_CHECK_MESSAGE(r.good, r.text);
}
void check(std::vector<float> const& actual, golden_tensor const& expected) {
  auto const r = compare(actual.data(), expected);
  DOCTEST_CHECK_MESSAGE(r.good, r.text);
}

template <class M, class T>
void check_case(recurrence_case const& c, index_t chunk) {
  DOCTEST_CAPTURE(c.file.name());
  DOCTEST_CAPTURE(chunk);
  auto s = c.shape;
  s.chunk = chunk;
  auto const x = c.x.as<T>();
  auto const fill = [](mixer_memory<M, T>& to, std::vector<double> const& from) {
    std::size_t i = 0;
    if (!from.empty()) to.each([&](T& e) { e = T(from[i++]); });
  };
  mixer_memory<M, T> before(s), after(s), d_after(s), d_before(s);
  fill(before, c.numbers(c.names.initial));
  fill(d_after, c.numbers("cot_" + std::string(c.names.final)));
  mixer_machine<M, T> machine(s);
  check(machine.forward(x, &before, &after), c.stored("o"));
  if (c.file.has(c.names.final)) check(after.numbers(), c.stored(c.names.final));
  auto const cotangent = c.numbers("cot_o");
  auto const d =
      machine.backward(x, std::vector<T>(cotangent.begin(), cotangent.end()), &before, &d_after, &d_before);
  auto const check_gradient = [&](char const* name, std::vector<T> const& found) {
    auto const gradient = std::string("grad_") + name;
    if (c.file.has(gradient)) check(found, c.stored(gradient));
  };
  check_gradient(c.names.q, d.q), check_gradient(c.names.k, d.k), check_gradient(c.names.v, d.v);
  check_gradient(c.names.g, d.g), check_gradient(c.names.beta, d.beta);
  check_gradient(c.names.initial, d_before.numbers());
}

template <class State, class Gate>
void check_forms(char const* name) {
  auto const c = load(name);
  check_case<recurrence_in_form<recurrence_form::sequential, State, Gate>, double>(c, 16);
  check_case<recurrence_in_form<recurrence_form::sequential, State, Gate>, float>(c, 16);
  if constexpr (!State::spec.low_rank)
    for (index_t chunk : {1, 5, 32}) {
      check_case<recurrence_in_form<recurrence_form::chunkwise, State, Gate>, double>(c, chunk);
      check_case<recurrence_in_form<recurrence_form::chunkwise, State, Gate>, float>(c, chunk);
    }
}
using token_gate = given_decays<axis::head, false>;

}  // namespace

DOCTEST_TEST_CASE("recurrences give the golden outputs, states and gradients of linear attention") {
  for (auto const* name : {"linear_attn", "linear_attn_init", "linear_attn_t1"})
    check_forms<outer_product, gates::none>(name);
}

DOCTEST_TEST_CASE("recurrences give the golden outputs, states and gradients of retention") {
  for (auto const* name : {"retention", "retention_t1"}) check_forms<outer_product, gates::constant>(name);
}

DOCTEST_TEST_CASE(
    "recurrences give the golden outputs, states and gradients of simple gated linear attention and SSD") {
  for (auto const* name : {"simple_gla", "simple_gla_init", "simple_gla_t1", "ssd", "ssd_init", "ssd_t1"})
    check_forms<outer_product, token_gate>(name);
}

DOCTEST_TEST_CASE("a delta rule written by a user gives the golden outputs, states and gradients") {
  for (auto const* name : {"delta_rule", "delta_rule_init", "delta_rule_t1"})
    check_forms<delta_rule, gates::none>(name);
  for (auto const* name : {"gated_delta_rule", "gated_delta_rule_init", "gated_delta_rule_t1"})
    check_forms<delta_rule, token_gate>(name);
}
