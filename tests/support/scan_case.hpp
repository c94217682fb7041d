#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include <doctest/doctest.h>

#include "random_numbers.hpp"
#include <seqmix/kernels/cpu/recurrence.hpp>
#include <seqmix/kernels/reference/recurrence.hpp>
#include <seqmix/states/elementwise.hpp>
#include <seqmix/states/outer_product.hpp>

/// The recurrence over channels on plain arrays.
namespace seqmix::testing {

/// Everything one scan reads (empty: not given), or the derivatives by it.
template <class T>
struct scan_numbers {
  std::vector<T> q, k, v, g, write, rate, initial;

  static constexpr std::size_t parts = 7;
  std::vector<T>& part(std::size_t i) {
    std::vector<T>* const all[] = {&q, &k, &v, &g, &write, &rate, &initial};
    return *all[i];
  }
  std::vector<T> const& part(std::size_t i) const {
    std::vector<T> const* const all[] = {&q, &k, &v, &g, &write, &rate, &initial};
    return *all[i];
  }
  template <class U, class F>
  scan_numbers<U> map(F const& f) const {
    scan_numbers<U> r;
    for (std::size_t i = 0; i < parts; ++i)
      for (T const& x : part(i)) r.part(i).push_back(f(x));
    return r;
  }
  template <class U>
  scan_numbers<U> as() const {
    return map<U>([](T const& x) { return U(x); });
  }
};

/// A shape and how its gate is laid out.
struct scan_form {
  recurrence_shape s;
  bool addressed = true;  ///< has queries and keys
  bool gated = true, rated = false, per_key = false, constant = false, writes = true, starts = true;

  index_t decay_keys() const { return per_key ? s.key_dim : 1; }
  index_t states() const { return s.seq.count() * s.heads * s.key_dim * s.value_dim; }
  index_t outputs() const { return s.seq.rows() * s.heads * s.value_dim; }

  template <class T>
  recurrence_input<T> input(scan_numbers<T> const& x) const {
    index_t const R = s.seq.rows();
    recurrence_input<T> in;
    if (addressed) {
      in.q_rhk = {x.q.data(), {R, s.query_heads, s.key_dim}};
      in.k_rhk = {x.k.data(), {R, s.key_heads, s.key_dim}};
    }
    in.v_rhv = {x.v.data(), {R, s.value_heads, s.value_dim}};
    if (gated) in.g_rhk = decays<T const>(x.g.data());
    if (writes) in.write_rh = {x.write.data(), {R, s.gate_heads}};
    if (rated) in.rate_hk = {x.rate.data(), {s.gate_heads, s.key_dim}};
    if (starts) in.initial_nhkv = {x.initial.data(), {s.seq.count(), s.heads, s.key_dim, s.value_dim}};
    return in;
  }
  template <class T>
  recurrence_gradient<T> gradient(scan_numbers<T>& d) const {
    index_t const R = s.seq.rows();
    recurrence_gradient<T> out;
    if (addressed) {
      out.q_rhk = {d.q.data(), {R, s.query_heads, s.key_dim}};
      out.k_rhk = {d.k.data(), {R, s.key_heads, s.key_dim}};
    }
    out.v_rhv = {d.v.data(), {R, s.value_heads, s.value_dim}};
    if (gated) out.g_rhk = decays<T>(d.g.data());
    if (writes) out.write_rh = {d.write.data(), {R, s.gate_heads}};
    if (rated) out.rate_hk = {d.rate.data(), {s.gate_heads, s.key_dim}};
    if (starts) out.initial_nhkv = {d.initial.data(), {s.seq.count(), s.heads, s.key_dim, s.value_dim}};
    return out;
  }
  scan_numbers<double> random(std::uint64_t seed) const {
    random_numbers draw(seed);
    auto const normals = [&](index_t n) {
      std::vector<double> x(std::size_t(n), 0.0);
      for (auto& e : x) e = draw.normal();
      return x;
    };
    index_t const R = s.seq.rows();
    scan_numbers<double> x;
    if (addressed) x.q = normals(R * s.query_heads * s.key_dim), x.k = normals(R * s.key_heads * s.key_dim);
    x.v = normals(R * s.value_heads * s.value_dim);
    if (gated) x.g = normals((constant ? 1 : R) * s.gate_heads * decay_keys());
    if (writes) x.write = normals(R * s.gate_heads);
    if (rated) x.rate = normals(s.gate_heads * s.key_dim);
    if (starts) x.initial = normals(states());
    for (auto& g : x.g) g = -0.3 * std::abs(g);
    for (auto& rate : x.rate) rate = 2 * std::abs(rate);
    return x;
  }

 private:
  template <class T>
  view3<T> decays(T* data) const {
    index_t const width = s.gate_heads * decay_keys();
    return {data, {s.seq.rows(), s.gate_heads, decay_keys()}, {constant ? 0 : width, decay_keys(), 1}};
  }
};

template <class T>
struct scan_outcome {
  std::vector<T> o, final;
  scan_numbers<T> d;
};

/// What a scan plans, in bytes: for backward, and while it runs.
struct scan_memory {
  index_t saved, scratch;
};

/// Forward and backward on the CPU in memory that holds NaN; `d_final` empty: zero.
template <class T>
scan_outcome<T> run_scan_passes(scan_form const& form, scan_numbers<T> const& x, T const* d_o,
                                std::vector<T> const& d_final, bool backward, int threads, scan_memory* memory) {
  using kernels::recurrence_form;
  auto const& s = form.s;
  auto const nan = std::numeric_limits<T>::quiet_NaN();
  std::array<index_t, 3> const rows{s.seq.rows(), s.heads, s.value_dim};
  std::array<index_t, 4> const state{s.seq.count(), s.heads, s.key_dim, s.value_dim};
  scan_outcome<T> r{std::vector<T>(std::size_t(form.outputs()), nan),
                    std::vector<T>(std::size_t(form.states()), nan),
                    x.template map<T>([&](T const&) { return nan; })};
  auto const pass = [&]<class State>(State, device::cpu dev, arena& kept, arena& ws) {
    auto const saved = kernels::detail::channel_saved<device::cpu::isa, T>(kept, s);
    auto const in = form.input(x);
    kernels::recurrence_forward<recurrence_form::channels, State>(
        dev, s, in, view3<T>(r.o.data(), rows), backward ? &saved : nullptr, view4<T>(r.final.data(), state), ws);
    if (backward)
      kernels::recurrence_backward<recurrence_form::channels, State>(
          dev, s, in, saved, view3<T const>(d_o, rows),
          view4<T const>(d_final.empty() ? nullptr : d_final.data(), state), form.gradient(r.d), ws);
  };
  auto const run = [&](device::cpu dev, arena& kept, arena& ws) {
    form.addressed ? pass(states::outer_product{}, dev, kept, ws) : pass(states::elementwise{}, dev, kept, ws);
  };
  auto kept = arena::measure(), plan = arena::measure();
  run({threads, true}, kept, plan);
  if (memory) *memory = {kept.peak(), plan.peak()};
  buffer<std::byte> kept_block(kept.peak()), block(plan.peak());
  kept_block.fill(std::byte(0xff)), block.fill(std::byte(0xff));
  arena kept_pieces(kept_block), ws(block);
  run({threads}, kept_pieces, ws);
  return r;
}

template <class T>
scan_outcome<T> run_scan(scan_form const& form, scan_numbers<T> const& x) {
  return run_scan_passes<T>(form, x, nullptr, {}, false, 2, nullptr);
}
template <class T>
scan_outcome<T> run_scan(scan_form const& form, scan_numbers<T> const& x, std::vector<T> const& d_o,
                         std::vector<T> const& d_final = {}, int threads = 2, scan_memory* memory = nullptr) {
  return run_scan_passes(form, x, d_o.data(), d_final, true, threads, memory);
}

/// The same token by token for any scalar.
template <class T>
scan_outcome<T> reference_scan(scan_form const& form, scan_numbers<T> const& x) {
  auto const& s = form.s;
  scan_outcome<T> r{std::vector<T>(std::size_t(form.outputs())), std::vector<T>(std::size_t(form.states())), {}};
  auto const in = form.input(x);
  view3<T> const o(r.o.data(), {s.seq.rows(), s.heads, s.value_dim});
  view4<T> const final(r.final.data(), {s.seq.count(), s.heads, s.key_dim, s.value_dim});
  kernels::recurrence_forward<states::outer_product>(device::reference{}, s, in, o, final);
  return r;
}

/// The greatest difference over the greatest entry of b.
template <class T, class U>
double scan_difference(std::vector<T> const& a, std::vector<U> const& b) {
  DOCTEST_REQUIRE(a.size() == b.size());
  double most = 0, size = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    double const difference = std::abs(double(a[i]) - double(b[i]));
    if (difference != difference) return difference;
    most = std::max(most, difference), size = std::max(size, std::abs(double(b[i])));
  }
  return size > 0 ? most / size : most;
}
template <class T, class U>
double scan_difference(scan_numbers<T> const& a, scan_numbers<U> const& b) {
  double most = 0;
  for (std::size_t i = 0; i < scan_numbers<T>::parts; ++i) {
    double const difference = scan_difference(a.part(i), b.part(i));
    if (difference != difference) return difference;
    most = std::max(most, difference);
  }
  return most;
}
template <class T>
bool scan_same_bits(std::vector<T> const& a, std::vector<T> const& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

}  // namespace seqmix::testing
