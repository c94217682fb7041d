#pragma once

#include <cstring>

#include "reference_run.hpp"
#include <seqmix/kernels/cpu/routed_attention.hpp>

/// Runs cases through the fast attention of the selectors that choose chunks, forward and backward, in memory
/// filled with NaN, and compares with golden vectors and the reference.
namespace seqmix::testing {

template <class T>
struct routed_result {
  buffer<T> o;
  std::vector<index_t> choice;
  buffer<double> lse;
  std::vector<index_t> choices;                           ///< [R,H,top_k]
  std::array<buffer<T>, attention_case::parts> gradient;  ///< of q, k, v, g and the sink
  std::array<buffer<T>, 3> past;                          ///< of the past's keys, values and gates
};

/// Room for what forward keeps and for the workspace, measured by a dry run of both directions.
template <class Which, class T>
buffer<std::byte> planned_memory(device::cpu dev, attention_shape const& s, attention_input<T> const& in) {
  dev.dry = true;
  auto plan = arena::measure();
  auto const saved = kernels::routed_saved<Which, T>::carve(plan, s);
  view3<T> const o(nullptr, {s.seq.rows(), s.heads, s.value_dim});
  kernels::routed_attention_forward<Which>(dev, s, in, o, &saved, {}, plan);
  kernels::routed_attention_backward<Which>(dev, s, in, o, saved, o, {}, plan);
  return buffer<std::byte>(plan.peak());
}

/// Forward and, given a cotangent of o, backward.
template <class Which, class T>
routed_result<T> run_routed(attention_shape const& s, attention_input<T> const& in, buffer<T> const& cot_o,
                            int threads) {
  device::cpu dev;
  dev.threads = threads;
  index_t const rows = s.seq.rows();
  auto block = planned_memory<Which, T>(dev, s, in);
  std::memset(block.data(), 0xff, std::size_t(block.size()));  // NaN wherever it is read before it is written
  arena memory(block);
  auto const saved = kernels::routed_saved<Which, T>::carve(memory, s);

  routed_result<T> out;
  out.o = buffer<T>(rows * s.heads * s.value_dim);
  out.choice.resize(std::size_t(rows * s.heads));
  out.lse = buffer<double>(rows * s.heads);
  view3<T> const o(out.o.data(), {rows, s.heads, s.value_dim});
  out.choices.resize(std::size_t(rows * s.heads * s.select.top_k));
  attention_record const record{view2<index_t>(out.choice.data(), {rows, s.heads}),
                                view2<double>(out.lse.data(), {rows, s.heads}),
                                view3<index_t>(out.choices.data(), {rows, s.heads, s.select.top_k})};
  kernels::routed_attention_forward<Which>(dev, s, in, o, &saved, record, memory);

  attention_gradient<T> d;
  auto const make3 = [](buffer<T>& b, view3<T const> const& like) {
    b = buffer<T>(like.size());
    b.fill(T(77));  // written, not added
    view3<T> v(b.data(), like.extent);
    if (like.stride[0] == 0) v.stride[0] = 0;
    return v;
  };
  auto const make4 = [](buffer<T>& b, view4<T const> const& like) {
    b = buffer<T>(like.size());
    return view4<T>(b.data(), like.extent);
  };
  d.q_rhk = make3(out.gradient[attention_case::q], in.q_rhk);
  d.k_rhk = make3(out.gradient[attention_case::k], in.k_rhk);
  d.v_rhv = make3(out.gradient[attention_case::v], in.v_rhv);
  if (in.g_rhk) d.g_rhk = make3(out.gradient[attention_case::g], in.g_rhk);
  if (in.past_k_nlhk) d.past_k_nlhk = make4(out.past[0], in.past_k_nlhk);
  if (in.past_v_nlhv) d.past_v_nlhv = make4(out.past[1], in.past_v_nlhv);
  if (in.past_g_nlhk) d.past_g_nlhk = make4(out.past[2], in.past_g_nlhk);
  if (in.sink_h) {
    out.gradient[attention_case::sink] = buffer<T>(s.heads);
    out.gradient[attention_case::sink].fill(T(77));
    d.sink_h = view1<T>(out.gradient[attention_case::sink].data(), {s.heads});
  }
  view3<T const> const d_o(cot_o.data(), {rows, s.heads, s.value_dim});
  kernels::routed_attention_backward<Which>(dev, s, in, o, saved, d_o, d, memory);
  return out;
}

template <class T>
using routed_function = routed_result<T> (*)(attention_shape const&, attention_input<T> const&, buffer<T> const&,
                                             int);

struct routed_functions {
  routed_function<double> of_double;
  routed_function<float> of_float;
  reference_attention reference;
};
template <class Which, class How = selectors::softmax>
routed_functions routed_functions_of() {
  return {&run_routed<Which, double>, &run_routed<Which, float>, reference_of<Which, How>()};
}

template <class T>
routed_result<T> run_case(routed_function<T> f, attention_case const& c, int threads = 1) {
  auto const a = arrays_of<T>(c);
  buffer<T> cot(c.cot_o.size());
  for (index_t i = 0; i < cot.size(); ++i) cot[i] = T(c.cot_o[i]);
  auto result = f(c.shape, a.in, cot, threads);
  if (c.gate == attention_case::gate_source::slopes)
    for (auto& x : result.gradient[attention_case::g]) x = -x;
  return result;
}

template <class T>
void check_golden(routed_function<T> f, attention_case const& c) {
  auto const out = run_case<T>(f, c);
  auto const o = compare(out.o.data(), *c.o);
  DOCTEST_CHECK_MESSAGE(o.good, o.text);
  if (!c.choice.empty()) DOCTEST_CHECK_MESSAGE(out.choice == c.choice, c.name, ": other choices");
  if (c.lse) {
    auto const lse = compare(out.lse.data(), *c.lse);
    DOCTEST_CHECK_MESSAGE(lse.error <= golden_tolerance<T>(*c.lse), lse.text);
  }
  for (std::size_t which = 0; which < attention_case::parts; ++which)
    if (c.input[which].gradient) {
      auto const d = compare(out.gradient[which].data(), *c.input[which].gradient);
      DOCTEST_CHECK_MESSAGE(d.good, d.text);
    }
}

/// A random case whose sizes and options go round with `i`.
inline attention_case ragged_case(index_t length, index_t i) {
  constexpr std::array<index_t, 7> chunks{1, 3, 5, 8, 16, 64, 1000};
  constexpr std::array<index_t, 3> windows{1, 3, 9};
  auto c = random_attention_case(std::uint64_t(1000 + i),
                                 {.length = length, .heads = 4, .key_heads = 2, .key_dim = 5, .value_dim = 3});
  c.shape.select.chunk = chunks[std::size_t(i) % chunks.size()];
  c.shape.select.window = windows[std::size_t(i) % windows.size()];
  c.shape.select.shared_choice = i % 5 == 1;
  c.shape.knobs.temperature = i % 2 ? 0.7 : 1.0;
  if (i % 4 == 3) c.offsets = {0, length / 3, length / 3, length - length / 4, length};
  if (i % 3 == 1) add_token_gate(c, i % 2 ? 4 : 1, std::uint64_t(i));
  if (i % 3 == 2) add_constant_gate(c, i % 2 ? 2 : 4);
  return c;
}

inline void check_against_reference(routed_functions const& f, attention_case& c, int directions) {
  if (!c.offsets.empty()) c.shape.seq = sequences::packed(c.offsets);
  auto const expected = run<double>(f.reference, c);
  auto const found = run_case<double>(f.of_double, c);
  DOCTEST_CHECK(greatest_difference(found.o, expected.o) <= 1e-12);
  DOCTEST_CHECK(greatest_difference(found.lse, expected.lse) <= 1e-12);
  DOCTEST_CHECK(found.choice == expected.choice);
  DOCTEST_CHECK(found.choices == expected.choices);
  random_numbers random(7);
  for (int d = 0; d < directions; ++d) {
    std::array<buffer<double>, attention_case::parts> direction;
    double actual = 0, absolute = 0;
    for (std::size_t which = 0; which < attention_case::parts; ++which) {
      direction[which] = random.normals(c.input[which].value.size());
      for (index_t i = 0; i < direction[which].size(); ++i) {
        double const term = direction[which][i] * found.gradient[which][i];
        actual += term;
        absolute += std::abs(term);
      }
    }
    double const slope = slopes_of_loss<1>(f.reference, c, [&](std::size_t which, index_t i) {
      return std::array<double, 1>{direction[which][i]};
    })[0];
    DOCTEST_CHECK_MESSAGE(std::abs(slope - actual) <= 1e-10 * (absolute + 1e-3), "direction ", d, ": expected ",
                          slope, ", got ", actual);
  }
}

/// A call on the last tokens, the first `held` ones being its past, gives what one call on all of them gives.
inline void check_past(routed_functions const& functions, attention_case& c, index_t held) {
  using part = attention_case::part;
  c.offsets.clear();
  auto const& s = c.shape;
  index_t const width = s.heads * s.value_dim;
  for (index_t x = 0; x < held * width; ++x) c.cot_o[x] = 0;
  auto const f = functions.of_double;
  auto const all = run_case<double>(f, c);

  auto const a = arrays_of<double>(c);
  index_t const rest = c.length - held;
  auto shape = s;
  shape.seq = sequences::batch(1, rest);
  auto const as_past = [&](view3<double const> v) {
    return view4<double const>(v.data, {1, held, v.extent[1], v.extent[2]},
                               {0, v.stride[0], v.stride[1], v.stride[2]});
  };
  attention_input<double> in;
  in.q_rhk = a.in.q_rhk.slice(0, held, rest);
  in.k_rhk = a.in.k_rhk.slice(0, held, rest);
  in.v_rhv = a.in.v_rhv.slice(0, held, rest);
  in.past_k_nlhk = as_past(a.in.k_rhk);
  in.past_v_nlhv = as_past(a.in.v_rhv);
  if (a.in.g_rhk) in.g_rhk = c.constant_gate() ? a.in.g_rhk : a.in.g_rhk.slice(0, held, rest);
  if (a.in.g_rhk && !c.constant_gate()) in.past_g_nlhk = as_past(a.in.g_rhk);
  in.past_length = &held;
  buffer<double> cot(rest * width);
  for (index_t x = 0; x < cot.size(); ++x) cot[x] = c.cot_o[held * width + x];
  auto const after = f(shape, in, cot, 1);

  auto const agrees = [](buffer<double> const& whole, buffer<double> const& first, buffer<double> const& second) {
    DOCTEST_REQUIRE(whole.size() == first.size() + second.size());
    double worst = 0;
    for (index_t x = 0; x < whole.size(); ++x)
      worst = std::max(worst, std::abs(whole[x] - (x < first.size() ? first[x] : second[x - first.size()])));
    DOCTEST_CHECK(worst <= 1e-12);
  };
  buffer<double> none, o_of_past(held * width);
  for (index_t x = 0; x < o_of_past.size(); ++x) o_of_past[x] = all.o[x];
  agrees(all.o, o_of_past, after.o);
  for (std::size_t x = 0; x < after.choice.size(); ++x)
    DOCTEST_CHECK(after.choice[x] == all.choice[std::size_t(held * s.heads) + x]);
  agrees(all.gradient[part::k], after.past[0], after.gradient[part::k]);
  agrees(all.gradient[part::v], after.past[1], after.gradient[part::v]);
  if (a.in.g_rhk) agrees(all.gradient[part::g], c.constant_gate() ? none : after.past[2], after.gradient[part::g]);
}

template <class T>
bool same_bits(buffer<T> const& a, buffer<T> const& b) {
  return a.size() == b.size() &&
         (a.size() == 0 || std::memcmp(a.data(), b.data(), std::size_t(a.size()) * sizeof(T)) == 0);
}

}  // namespace seqmix::testing
