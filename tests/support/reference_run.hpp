#pragma once

#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include <doctest/doctest.h>

#include "attention_case.hpp"
#include <seqmix/kernels/reference/attention.hpp>

/// Runs cases through the reference attention: outputs, choices, and gradients by dual numbers.
namespace seqmix::testing {

template <class T>
using attention_function = void (*)(device::reference, attention_shape const&, attention_input<T> const&, view3<T>,
                                    attention_record const&);

/// One selector's reference attention for the scalars that tests use.
struct reference_attention {
  attention_function<float> of_float;
  attention_function<double> of_double;
  attention_function<dual<double, 1>> of_dual;
  attention_function<dual<double, 8>> of_duals;

  template <class T>
  attention_function<T> get() const noexcept {
    if constexpr (std::is_same_v<T, float>)
      return of_float;
    else if constexpr (std::is_same_v<T, double>)
      return of_double;
    else if constexpr (std::is_same_v<T, dual<double, 1>>)
      return of_dual;
    else
      return of_duals;
  }
};

template <class Which, class How>
reference_attention reference_of() {
  using kernels::attention_forward;
  return {&attention_forward<Which, How, float>, &attention_forward<Which, How, double>,
          &attention_forward<Which, How, dual<double, 1>>, &attention_forward<Which, How, dual<double, 8>>};
}

struct make_reference {
  template <class Which, class How>
  reference_attention operator()() const {
    return reference_of<Which, How>();
  }
};

template <class T>
struct attention_output {
  buffer<T> o;                   ///< [R,H,V]
  std::vector<index_t> choice;   ///< [R,H]
  buffer<double> lse;            ///< [R,H]
  std::vector<index_t> choices;  ///< [R,H,top_k]
};

template <class T>
attention_output<T> run(reference_attention const& f, attention_shape const& s, attention_input<T> const& in) {
  index_t const rows = s.seq.rows();
  attention_output<T> out{buffer<T>(rows * s.heads * s.value_dim),
                          std::vector<index_t>(std::size_t(rows * s.heads)), buffer<double>(rows * s.heads),
                          std::vector<index_t>(std::size_t(rows * s.heads * s.select.top_k))};
  attention_record const record{view2<index_t>(out.choice.data(), {rows, s.heads}),
                                view2<double>(out.lse.data(), {rows, s.heads}),
                                view3<index_t>(out.choices.data(), {rows, s.heads, s.select.top_k})};
  f.template get<T>()(device::reference{}, s, in, view3<T>(out.o.data(), {rows, s.heads, s.value_dim}), record);
  return out;
}

template <class T = double>
attention_output<T> run(reference_attention const& f, attention_case const& c) {
  auto const a = arrays_of<T>(c);
  return run<T>(f, c.shape, a.in);
}

/// The final state of linear attention, S = sum_j e^(G_T - G_j) k_j v_j', for a case with a gate per head or none.
template <class T>
buffer<T> final_state(attention_case const& c, attention_arrays<T> const& a) {
  auto const& s = c.shape;
  buffer<T> state(s.seq.count() * s.heads * s.key_dim * s.value_dim);
  view4<T> const S_nhkv(state.data(), {s.seq.count(), s.heads, s.key_dim, s.value_dim});
  for (index_t n = 0; n < s.seq.count(); ++n)
    for (index_t h = 0; h < s.heads; ++h) {
      T G(0);  // of the tokens after j
      auto const add = [&](T const* key, T const* value) {
        for (index_t x = 0; x < s.key_dim; ++x)
          for (index_t y = 0; y < s.value_dim; ++y) S_nhkv(n, h, x, y) += exp(G) * key[x] * value[y];
      };
      for (index_t r = s.seq.end(n) - 1; r >= s.seq.begin(n); --r) {
        add(a.in.k_rhk.at(r, h), a.in.v_rhv.at(r, h));
        if (a.in.g_rhk) G += a.in.g_rhk(r, h, 0);
      }
      for (index_t j = 0; j < a.in.past(n); ++j) add(a.in.past_k_nlhk.at(n, j, h), a.in.past_v_nlhv.at(n, j, h));
    }
  return state;
}

/// L = <cot_o, o> + <cot_S, S> on duals seeded by seed(part, i) -> slopes.
template <std::size_t N, class Seed>
std::array<double, N> slopes_of_loss(reference_attention const& f, attention_case const& c, Seed const& seed) {
  using number = dual<double, N>;
  auto const a = arrays_of<number>(c, [&](std::size_t part, index_t i) {
    number x(c.input[part].value[i]);
    x.slope = seed(part, i);
    return x;
  });
  auto const out = run<number>(f, c.shape, a.in);
  std::array<double, N> slopes{};
  auto const add = [&](buffer<number> const& values, buffer<double> const& cotangent) {
    for (index_t i = 0; i < values.size(); ++i)
      for (std::size_t d = 0; d < N; ++d) slopes[d] += cotangent[i] * values[i].slope[d];
  };
  add(out.o, c.cot_o);
  if (c.cot_state.size() > 0) add(final_state(c, a), c.cot_state);
  return slopes;
}

using case_gradients = std::array<buffer<double>, attention_case::parts>;

/// dL/d(every entry of every input), eight directions a run.
inline case_gradients full_gradients(reference_attention const& f, attention_case const& c) {
  constexpr std::size_t lanes = 8;
  case_gradients result;
  for (std::size_t part = 0; part < attention_case::parts; ++part) {
    result[part] = buffer<double>(c.input[part].value.size());
    for (index_t first = 0; first < result[part].size(); first += index_t(lanes)) {
      auto const slopes = slopes_of_loss<lanes>(f, c, [&](std::size_t seeded, index_t i) {
        std::array<double, lanes> s{};
        if (seeded == part && i >= first && i < first + index_t(lanes)) s[std::size_t(i - first)] = 1;
        return s;
      });
      for (index_t i = first; i < std::min(first + index_t(lanes), result[part].size()); ++i)
        result[part][i] = slopes[std::size_t(i - first)];
    }
  }
  return result;
}

/// Every entry of a named input's gradient against the stored one.
inline void check_full_gradients(reference_attention const& f, attention_case const& c) {
  auto const found = full_gradients(f, c);
  for (std::size_t part = 0; part < attention_case::parts; ++part) {
    if (!c.input[part].gradient) continue;
    auto const r = compare(found[part].data(), *c.input[part].gradient);
    DOCTEST_CHECK_MESSAGE(r.good, r.text);
  }
}

/// The derivative of the loss along random directions over all inputs at once against the stored gradients.
inline void check_directions(reference_attention const& f, attention_case const& c, int directions) {
  random_numbers random(20240731);
  for (int d = 0; d < directions; ++d) {
    std::array<buffer<double>, attention_case::parts> direction;
    double expected = 0, absolute = 0, rounding = 0;
    for (std::size_t part = 0; part < attention_case::parts; ++part) {
      direction[part] = buffer<double>(c.input[part].value.size());
      if (!c.input[part].gradient) continue;
      for (index_t i = 0; i < direction[part].size(); ++i) {
        direction[part][i] = random.normal();
        double const term = (*c.input[part].gradient)[i] * direction[part][i];
        expected += term;
        absolute += std::abs(term);
        rounding += c.input[part].gradient->rounding_only * std::abs(direction[part][i]);
      }
    }
    double const actual = slopes_of_loss<1>(
        f, c, [&](std::size_t part, index_t i) { return std::array<double, 1>{direction[part][i]}; })[0];
    double const error = std::abs(actual - expected);
    DOCTEST_CHECK_MESSAGE(error <= 1e-10 * absolute + rounding, c.name, ", direction ", d, ": expected ", expected,
                          ", got ", actual, ", error ", error);
  }
}

/// Outputs, choices and log-sum-exps against the stored ones.
template <class T>
void check_forward(reference_attention const& f, attention_case const& c) {
  auto const out = run<T>(f, c);
  auto const o = compare(out.o.data(), *c.o);
  DOCTEST_CHECK_MESSAGE(o.good, o.text);
  if (!c.choice.empty()) DOCTEST_CHECK_MESSAGE(out.choice == c.choice, c.name, ": other choices");
  if (!c.lse) return;
  double const tolerance = golden_tolerance<T>(*c.lse);
  auto lse = compare(out.lse.data(), *c.lse);
  DOCTEST_CHECK_MESSAGE(lse.error <= tolerance, lse.text);
}

/// All of it: double and float forward, five directions, and every gradient entry where that is quick.
inline void check_case(reference_attention const& f, attention_case const& c) {
  DOCTEST_CAPTURE(c.name);
  check_forward<double>(f, c);
  check_forward<float>(f, c);
  check_directions(f, c, 5);
  index_t inputs = 0;
  for (auto const& input : c.input) inputs += input.value.size();
  if (inputs <= 1700) check_full_gradients(f, c);
}

/// The attention of one token at a time, each with the earlier ones handed in as the past.
inline attention_output<double> run_stepwise(reference_attention const& f, attention_case const& c) {
  auto const a = arrays_of<double>(c);
  auto const& s = c.shape;
  index_t const rows = c.rows();
  attention_output<double> out{buffer<double>(rows * s.heads * s.value_dim),
                               std::vector<index_t>(std::size_t(rows * s.heads)), buffer<double>(rows * s.heads),
                               std::vector<index_t>(std::size_t(rows * s.heads * s.select.top_k))};
  auto const as_past = [](view3<double const> rows_rhc, index_t begin, index_t count) {
    return view4<double const>(rows_rhc.at(begin), {1, count, rows_rhc.extent[1], rows_rhc.extent[2]},
                               {0, rows_rhc.stride[0], rows_rhc.stride[1], rows_rhc.stride[2]});
  };
  auto one = s;
  one.seq = sequences::batch(1, 1);
  for (index_t n = 0; n < s.seq.count(); ++n)
    for (index_t r = s.seq.begin(n); r < s.seq.end(n); ++r) {
      index_t const begin = s.seq.begin(n), past = r - begin;
      attention_input<double> in;
      in.q_rhk = a.in.q_rhk.slice(0, r, 1);
      in.k_rhk = a.in.k_rhk.slice(0, r, 1);
      in.v_rhv = a.in.v_rhv.slice(0, r, 1);
      in.past_k_nlhk = as_past(a.in.k_rhk, begin, past);
      in.past_v_nlhv = as_past(a.in.v_rhv, begin, past);
      in.past_length = &past;
      if (a.in.g_rhk) in.g_rhk = c.constant_gate() ? a.in.g_rhk : a.in.g_rhk.slice(0, r, 1);
      if (a.in.g_rhk && !c.constant_gate()) in.past_g_nlhk = as_past(a.in.g_rhk, begin, past);
      in.sink_h = a.in.sink_h;
      attention_record const record{
          view2<index_t>(out.choice.data() + r * s.heads, {1, s.heads}),
          view2<double>(out.lse.data() + r * s.heads, {1, s.heads}),
          view3<index_t>(out.choices.data() + r * s.heads * s.select.top_k, {1, s.heads, s.select.top_k})};
      view3<double> const o(out.o.data() + r * s.heads * s.value_dim, {1, s.heads, s.value_dim});
      f.of_double(device::reference{}, one, in, o, record);
    }
  return out;
}

/// Decode = forward, to the bit.
inline void check_stepwise(reference_attention const& f, attention_case const& c) {
  auto const all = run(f, c);
  auto const steps = run_stepwise(f, c);
  bool same = all.choice == steps.choice && all.choices == steps.choices;
  for (index_t i = 0; i < all.o.size(); ++i) same = same && all.o[i] == steps.o[i];
  DOCTEST_CHECK_MESSAGE(same, c.name, ": token by token differs from the whole sequence");
}

/// NaN in the last row's key and value must leave all earlier rows alone, and reach the last one.
inline void check_causality(reference_attention const& f, attention_case& c) {
  auto const& s = c.shape;
  auto const before = run(f, c);
  index_t const last = c.rows() - 1;
  for (auto which : {attention_case::k, attention_case::v}) {
    index_t const width = which == attention_case::k ? s.key_heads * s.key_dim : s.value_heads * s.value_dim;
    for (index_t i = last * width; i < (last + 1) * width; ++i)
      c.input[which].value[i] = std::numeric_limits<double>::quiet_NaN();
  }
  auto const after = run(f, c);
  bool same = true, reached = true;
  for (index_t i = 0; i < before.o.size(); ++i) {
    bool const of_last = i >= last * s.heads * s.value_dim;
    same = same && (of_last || before.o[i] == after.o[i]);
    reached = reached && (!of_last || std::isnan(after.o[i]));
  }
  DOCTEST_CHECK_MESSAGE(same, c.name, ": a later token changed an earlier row");
  DOCTEST_CHECK_MESSAGE(reached, c.name, ": the last row hides a NaN");
}

/// Everything about a case that identities compare.
struct outcome {
  attention_output<double> out;
  case_gradients gradient;
};

inline outcome outcome_of(reference_attention const& f, attention_case const& c) {
  return {run(f, c), full_gradients(f, c)};
}

inline double greatest_difference(buffer<double> const& a, buffer<double> const& b) {
  DOCTEST_REQUIRE(a.size() == b.size());
  double most = 0;
  for (index_t i = 0; i < a.size(); ++i) {
    double const d = std::abs(a[i] - b[i]);
    if (!(d <= most)) most = d;
    if (d != d) return d;
  }
  return most;
}

/// The greatest difference of any gradient.
inline double gradient_difference(outcome const& a, outcome const& b) {
  double most = 0;
  for (std::size_t part = 0; part < attention_case::parts; ++part)
    most = std::max(most, greatest_difference(a.gradient[part], b.gradient[part]));
  return most;
}

inline double output_difference(outcome const& a, outcome const& b) {
  return greatest_difference(a.out.o, b.out.o);
}

inline index_t different_choices(outcome const& a, outcome const& b) {
  index_t count = 0;
  for (std::size_t i = 0; i < a.out.choice.size(); ++i) count += a.out.choice[i] != b.out.choice[i];
  return count;
}

}  // namespace seqmix::testing
