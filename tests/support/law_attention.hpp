#pragma once

#include <limits>

#include <doctest/doctest.h>

#include "attention_case.hpp"
#include <seqmix/kernels/cpu/attention_compressed.hpp>

/// Runs cases through the fast attention over element selectors and means of chunks, forward and backward, in
/// memory filled with NaN.
namespace seqmix::testing {

template <class T>
struct cpu_attention_result {
  std::vector<T> o;
  std::vector<index_t> choice;
  std::vector<double> lse;
  std::array<std::vector<T>, attention_case::parts> gradient;  ///< in the order of the case's stored inputs
};

template <class Which, class How, class T>
cpu_attention_result<T> run_cpu_attention(attention_case const& c, int threads = 2, bool training = true) {
  using enum attention_case::part;
  using saved = kernels::attention_saved<How, T>;
  constexpr T nan = std::numeric_limits<T>::quiet_NaN();
  auto const& s = c.shape;
  index_t const R = c.rows(), N = s.seq.count();
  auto const a = arrays_of<T>(c);
  auto const size = [](index_t n) { return static_cast<std::size_t>(n); };
  cpu_attention_result<T> r;
  r.o.assign(size(R * s.heads * s.value_dim), nan);
  r.choice.assign(size(R * s.heads), -7);
  r.lse.assign(size(R * s.heads), double(nan));
  view3<T> const o(r.o.data(), {R, s.heads, s.value_dim});
  attention_record const record{view2<index_t>(r.choice.data(), {R, s.heads}),
                                view2<double>(r.lse.data(), {R, s.heads})};

  auto const poisoned = [](index_t bytes) {
    buffer<std::byte> block(bytes);
    block.fill(std::byte(0xff));
    return block;
  };
  auto plan = arena::measure();
  saved::carve(plan, s);
  auto saved_block = poisoned(plan.used());
  arena pieces(saved_block);
  auto const keep = saved::carve(pieces, s);
  auto const planned = [&](auto const& f) {
    auto measure = arena::measure();
    f(device::cpu{threads, true}, measure);
    auto block = poisoned(measure.peak());
    arena ws(block);
    f(device::cpu{threads}, ws);
  };
  planned([&](device::cpu dev, arena& ws) {
    if constexpr (Which::spec.compressed)
      kernels::compressed_attention_forward<Which, How>(dev, s, a.in, o, training ? &keep : nullptr, record, ws);
    else
      kernels::attention_forward<Which, How>(dev, s, a.in, o, training ? &keep : nullptr, record, ws);
  });
  if (!training) return r;

  std::vector<T> d_o(c.cot_o.begin(), c.cot_o.end());
  std::vector<T> dq(size(a.q.size()), nan), dk(size(a.k.size()), nan), dv(size(a.v.size()), nan),
      dg(size(a.g.size()), nan), past_k(size(a.past_k.size()), nan), past_v(size(a.past_v.size()), nan),
      past_g(size(a.past_g.size()), nan), d_sink(size(a.sink.size()), nan);
  attention_gradient<T> d;
  d.q_rhk = {dq.data(), a.in.q_rhk.extent};
  d.k_rhk = {dk.data(), a.in.k_rhk.extent};
  d.v_rhv = {dv.data(), a.in.v_rhv.extent};
  if (a.in.g_rhk) d.g_rhk = {dg.data(), a.in.g_rhk.extent, a.in.g_rhk.stride};
  if (a.in.past_length) {
    d.past_k_nlhk = {past_k.data(), a.in.past_k_nlhk.extent};
    d.past_v_nlhv = {past_v.data(), a.in.past_v_nlhv.extent};
    d.past_g_nlhk = {past_g.data(), a.in.past_g_nlhk.extent};
  }
  if (a.in.sink_h) d.sink_h = {d_sink.data(), a.in.sink_h.extent};
  planned([&](device::cpu dev, arena& ws) {
    view3<T const> const o_seen(o), d_o_seen(d_o.data(), {R, s.heads, s.value_dim});
    if constexpr (Which::spec.compressed)
      kernels::compressed_attention_backward<Which, How>(dev, s, a.in, o_seen, keep, d_o_seen, d, ws);
    else
      kernels::attention_backward<Which, How>(dev, s, a.in, o_seen, keep, d_o_seen, d, ws);
  });
  r.gradient[q] = dq;
  r.gradient[v] = dv;
  r.gradient[k].assign(size(c.input[k].value.size()), T(0));
  for (index_t row = 0, i = 0; row < R; ++row)
    for (index_t h = 0; h < s.key_heads; ++h)
      for (index_t x = 0; x < s.key_dim; ++x) r.gradient[k][size(c.key_index(row, h, x))] += dk[size(i++)];
  r.gradient[g] = dg;
  r.gradient[sink] = d_sink;
  if (c.gate == attention_case::gate_source::slopes)
    for (auto& x : r.gradient[g]) x = -x;
  if (a.in.past_length) {
    r.gradient[s0].assign(size(c.input[s0].value.size()), T(0));
    for (index_t n = 0; n < N; ++n)
      for (index_t j = 0; j < s.key_dim; ++j)
        for (index_t h = 0; h < s.value_heads; ++h)
          for (index_t x = 0; x < s.value_dim; ++x)
            r.gradient[s0][size(((n * s.value_heads + h) * s.key_dim + j) * s.value_dim + x)] =
                d.past_v_nlhv(n, j, h, x);
  }
  return r;
}

/// The list of tests/golden/README.md, "What needs more", for the fast kernels: the slopes' derivative is a sum
/// over all pairs whose terms are some twenty times the result.
template <class T>
double golden_allowance(golden_tensor const& t) {
  return std::is_same_v<T, float> && t.case_name == "top1_element_weighted_sel_alibi_temp" &&
                 t.name == "grad_slopes"
             ? 2
             : 1;
}

/// Outputs, choices, log-sum-exps and gradients against the stored ones.
template <class T>
void check_against_golden(attention_case const& c, cpu_attention_result<T> const& r) {
  auto const o = compare(r.o.data(), *c.o);
  DOCTEST_CHECK_MESSAGE(o.good, o.text);
  if (!c.choice.empty()) DOCTEST_CHECK_MESSAGE(r.choice == c.choice, c.name, ": other choices");
  bool const surrogate = c.selector.surrogate != selectors::top1_gradient::none ||
                         c.shape.knobs.hard_fraction < 1 || c.selector.output == selectors::top1_output::weighted;
  if (c.lse && surrogate) {  // without a softmax anywhere there is no log-sum-exp
    double worst = 0;
    for (index_t i = 0; i < c.lse->size(); ++i)
      worst = std::max(worst, std::abs(r.lse[std::size_t(i)] - (*c.lse)[i]));
    DOCTEST_CHECK_MESSAGE(worst <= golden_tolerance<T>(*c.lse), c.name, ": log-sum-exp off by ", worst);
  }
  for (std::size_t part = 0; part < attention_case::parts; ++part) {
    if (!c.input[part].gradient) continue;
    DOCTEST_REQUIRE(index_t(r.gradient[part].size()) == c.input[part].gradient->size());
    auto const g = compare(r.gradient[part].data(), *c.input[part].gradient);
    DOCTEST_CHECK_MESSAGE(g.error <= golden_allowance<T>(*c.input[part].gradient) * g.tolerance, g.text);
  }
}

}  // namespace seqmix::testing
