#pragma once

#include <string>
#include <utility>

#include "golden.hpp"
#include "law_recurrence.hpp"

/// Golden cases of the linear and delta families as problems of a recurrence.
namespace seqmix::testing {

/// The names of a case's tensors.
struct recurrence_names {
  char const *q = "q", *k = "k", *v = "v", *g = "g", *beta = "beta", *a = "alpha", *b = "beta", *initial = "S0",
             *final = "S";
  bool low_rank = false;  ///< a and b instead of beta
};

struct recurrence_case {
  golden_case file;
  recurrence_names names;
  mixer_shape shape{};
  mixer_numbers<double> x{};

  /// Tokens first, states K x V.
  golden_tensor stored(std::string const& name) const {
    auto const& t = file[name];
    bool const state = name.ends_with(names.final) || name.ends_with(names.initial);
    if (state) return file.op() == "ssd" ? with_axes_swapped(t, t.shape.size() - 2, t.shape.size() - 1) : t.clone();
    auto const layout = file.text("layout");
    bool const head_first =
        layout.find("HEAD FIRST") != std::string::npos || layout.find("[B,H,T") != std::string::npos;
    return head_first && t.shape.size() > 2 ? token_first(t) : t.clone();
  }
  std::vector<double> numbers(std::string const& name) const {
    if (!file.has(name)) return {};
    auto const t = stored(name);
    return {t.data.begin(), t.data.end()};
  }
};

/// Heads are those of the values, or, in rows [B,T,H*N], the case's head_size says how many there are.
inline recurrence_case load_recurrence(std::string const& name, recurrence_names names = {}) {
  recurrence_case c{golden_case("ops/" + name), names};
  c.x.q = c.numbers(names.q), c.x.k = c.numbers(names.k), c.x.v = c.numbers(names.v), c.x.g = c.numbers(names.g);
  if (names.low_rank)
    c.x.a = c.numbers(names.a), c.x.b = c.numbers(names.b);
  else
    c.x.beta = c.numbers(names.beta);
  auto const q = c.stored(names.q), v = c.stored(names.v);
  auto const head_size = index_t(c.file.number("head_size", 0));
  auto& s = c.shape;
  s.seq = sequences::batch(q.extent(0), q.extent(1));
  s.heads = s.value_heads = s.gate_heads = head_size > 0 ? v.extent(2) / head_size : v.extent(2);
  s.query_heads = s.key_heads = head_size > 0 ? s.heads : q.extent(2);
  s.key_dim = head_size > 0 ? head_size : q.extent(3);
  s.value_dim = head_size > 0 ? head_size : v.extent(3);
  s.scale = c.file.number("scale", 1.0);
  return c;
}

/// Outputs, final state and derivatives of one problem; `d_o_of(o)` is the derivative of the outputs.
template <class M, class T, class F>
mixer_outcome<T> run_recurrence(mixer_shape const& s, mixer_numbers<double> const& numbers,
                                std::vector<double> const& initial, std::vector<double> const& d_final,
                                F const& d_o_of) {
  auto const x = numbers.as<T>();
  auto const fill = [](mixer_memory<M, T>& to, std::vector<double> const& from) {
    std::size_t i = 0;
    if (!from.empty()) to.each([&](T& e) { e = T(from[i++]); });
  };
  mixer_memory<M, T> before(s), after(s), d_after(s), d_before(s);
  fill(before, initial);
  fill(d_after, d_final);
  mixer_machine<M, T> machine(s);
  mixer_outcome<T> r;
  r.o = machine.forward(x, &before, &after);
  if constexpr (sizeof(T) == 8) {
    mixer_memory<M, T> reference_after(s);
    DOCTEST_CHECK(relative_difference(reference_mixer<M, T>(s, x, &before, &reference_after), r.o) <= 1e-12);
    DOCTEST_CHECK(relative_difference(reference_after.numbers(), after.numbers()) <= 1e-12);
  }
  r.d = machine.backward(x, d_o_of(r.o), &before, &d_after, &d_before);
  r.state = after.numbers();
  r.d_state = d_before.numbers();
  return r;
}

template <class T>
void check_golden(std::vector<T> const& actual, golden_tensor const& expected) {
  DOCTEST_REQUIRE(index_t(actual.size()) == expected.size());
  auto const r = compare(actual.data(), expected);
  DOCTEST_CHECK_MESSAGE(r.good, r.text);
}
/// The derivative by a named tensor, where the case stores it.
template <class T>
void check_golden_gradient(recurrence_case const& c, std::string const& name, std::vector<T> const& found) {
  if (c.file.has("grad_" + name)) check_golden(found, c.stored("grad_" + name));
}
template <class T>
std::vector<T> rounded(std::vector<double> const& x) {
  return {x.begin(), x.end()};
}

/// All of a case's tensors, with d.g turned by `gate_pullback(d_g, i)` into the derivative of what is stored.
template <class M, class T, class F>
void check_recurrence_case(recurrence_case const& c, index_t chunk, F const& gate_pullback) {
  DOCTEST_CAPTURE(c.file.name());
  DOCTEST_CAPTURE(chunk);
  auto s = c.shape;
  s.chunk = chunk;
  auto r = run_recurrence<M, T>(s, c.x, c.numbers(c.names.initial), c.numbers("cot_" + std::string(c.names.final)),
                                [&](auto const&) { return rounded<T>(c.numbers("cot_o")); });
  check_golden(r.o, c.stored("o"));
  if (c.file.has(c.names.final)) check_golden(r.state, c.stored(c.names.final));
  for (std::size_t i = 0; i < r.d.g.size(); ++i) r.d.g[i] = T(gate_pullback(double(r.d.g[i]), i));
  check_golden_gradient(c, c.names.q, r.d.q), check_golden_gradient(c, c.names.k, r.d.k);
  check_golden_gradient(c, c.names.v, r.d.v), check_golden_gradient(c, c.names.g, r.d.g);
  if (c.names.low_rank)
    check_golden_gradient(c, c.names.a, r.d.a), check_golden_gradient(c, c.names.b, r.d.b);
  else
    check_golden_gradient(c, c.names.beta, r.d.beta);
  check_golden_gradient(c, c.names.initial, r.d_state);
}

/// f<M, T>(chunk) for a state and a gate, token by token and chunk by chunk, in double and float.
template <class State, class Gate, class F>
void in_every_form(F const& f) {
  using kernels::recurrence_form;
  using sequential = recurrence_in_form<recurrence_form::sequential, State, Gate>;
  using chunkwise = recurrence_in_form<recurrence_form::chunkwise, State, Gate>;
  f.template operator()<sequential, double>(16);
  f.template operator()<sequential, float>(16);
  for (index_t chunk : {1, 5, 32}) {
    f.template operator()<chunkwise, double>(chunk);
    f.template operator()<chunkwise, float>(chunk);
  }
}
template <class State, class Gate>
void check_forms(recurrence_case const& c) {
  in_every_form<State, Gate>([&]<class M, class T>(index_t chunk) {
    check_recurrence_case<M, T>(c, chunk, [](double d, std::size_t) { return d; });
  });
}

}  // namespace seqmix::testing
