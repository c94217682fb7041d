#include <algorithm>
#include <array>

#include "routed_attention.hpp"

// Routed attention in bfloat16, and what does not depend on the kind of numbers: choices, their order, steps.

namespace {

using namespace seqmix;
using namespace seqmix::testing;
using namespace seqmix::selectors;
using enum chunk_score;
using enum chunk_gradient;

using own = own_plus_top1<>;
using own_mass_through = own_plus_top1<exact_mass, chunk_straight_through>;
using own_k = own_plus_top_k<>;
using own_k_gated = own_plus_top_k<mean_key, gated>;
using one_prefix_score = exactly_one<mean_key_prefix, chunk_straight_through, chunk_probability::score>;
using one_max = exactly_one<exact_max>;

template <class Which>
void compare(std::string const& what, routed_case& c, std::uint64_t seed) {
  draw<bfloat16>(c, seed);
  check_results(what, run_on_device<Which, bfloat16>(c), run_on_cpu<Which>(c), half_bits<bfloat16>.output,
                half_bits<bfloat16>.gradient, half_bits<bfloat16>.decay);
}

// ---- choices

template <class Which>
std::vector<index_t> choices_of(routed_case const& c) {
  return run_on_device<Which, bfloat16>(c, false).choices;
}
template <class Which>
void check_ties(std::string const& what, index_t chunk, bool shared) {
  routed_sizes size;
  size.chunk = chunk;
  size.heads = 2;
  size.key_heads = size.value_heads = 1;
  size.top_k = Which::spec.several ? 3 : 1;
  auto c = make_case(size, {130});
  c.shape.select.shared_choice = shared;
  draw<bfloat16>(c, 9);
  for (std::size_t i = 0; i < c.k.size(); ++i) c.k[i] = c.k[i % 5];
  auto const choices = choices_of<Which>(c);
  index_t wrong = 0;
  for (index_t r = 0; r < c.rows(); ++r) {
    index_t const candidates = r / chunk + (Which::spec.own_competes ? 1 : 0);
    for (index_t x = 0; x < size.heads * size.top_k; ++x) {
      index_t const i = x % size.top_k;
      wrong += choices[std::size_t(r * size.heads * size.top_k + x)] != (i < candidates ? i : -1);
    }
  }
  check(wrong == 0, what + ", chunk " + std::to_string(chunk) + ": " + std::to_string(wrong) +
                        " choices are not the lowest chunks");
}

/// Sequences of T tokens, and the same one token at a time with the others as past.
template <class Which>
void check_steps(std::string const& what) {
  constexpr index_t T = 26, N = 2;
  routed_sizes size;
  size.heads = 2;
  size.key_heads = size.value_heads = 1;
  size.gate_heads = 2;
  size.top_k = Which::spec.several ? 2 : 1;
  auto c = make_case(size, {T, T});
  c.gate = routed_case::gate::tokens;
  draw<bfloat16>(c, 21);
  // Half of the keys of the second sequence are equal, so that some scores tie.
  for (index_t t = 0; t < T / 2; ++t)
    for (index_t x = 0; x < size.key_dim; ++x)
      c.k[std::size_t((T + t) * size.key_dim + x)] = c.k[std::size_t(T * size.key_dim + x)];
  auto const whole = run_on_device<Which, bfloat16>(c, false);
  std::vector<double> o(whole.o.size());
  std::vector<index_t> choices(whole.choices.size());
  for (index_t t = 0; t < T; ++t) {
    auto one = make_case(size, {1, 1});
    one.shape.seq = sequences::batch(N, 1);
    one.gate = c.gate;
    one.capacity = T;
    one.past = {t, t};
    // The numbers of token t of both sequences; the tokens before it, then room.
    auto const pick = [&](std::vector<double> const& from, std::vector<double>& now, std::vector<double>& past) {
      auto const width = from.size() / std::size_t(N * T);
      for (std::size_t n = 0; n < N; ++n) {
        auto const at = from.begin() + std::ptrdiff_t(n * std::size_t(T) * width);
        now.insert(now.end(), at + t * std::ptrdiff_t(width), at + (t + 1) * std::ptrdiff_t(width));
        past.insert(past.end(), at, at + t * std::ptrdiff_t(width));
        past.resize((n + 1) * std::size_t(T) * width, std::numeric_limits<double>::quiet_NaN());
      }
    };
    std::vector<double> unused;
    pick(c.q, one.q, unused);
    unused.clear();
    pick(c.d_o, one.d_o, unused);
    pick(c.k, one.k, one.past_k);
    pick(c.v, one.v, one.past_v);
    pick(c.g, one.g, one.past_g);
    auto const step = run_on_device<Which, bfloat16>(one, false);
    auto const put = [&](auto const& from, auto& to) {
      std::size_t const width = from.size() / N;
      for (std::size_t n = 0; n < N; ++n)
        std::copy_n(from.begin() + std::ptrdiff_t(n * width), width,
                    to.begin() + std::ptrdiff_t((n * std::size_t(T) + std::size_t(t)) * width));
    };
    put(step.o, o);
    put(step.choices, choices);
  }
  check(choices == whole.choices, what + ": other choices token by token");
  check_numbers(what + ": o token by token", o, whole.o, half_bits<bfloat16>.output);
}

}  // namespace

DEVICE_TEST("routed attention in bfloat16 agrees with the CPU on the same stored numbers, at any width") {
  routed_sizes size;
  size.heads = 2;
  size.key_heads = size.value_heads = size.gate_heads = 1;
  size.chunk = 20;
  std::uint64_t seed = 1;
  for (auto const& [key_dim, value_dim] :
       std::vector<std::array<index_t, 2>>{{8, 6}, {64, 64}, {96, 128}, {130, 24}}) {
    size.key_dim = key_dim;
    size.value_dim = value_dim;
    auto c = make_case(size, {50, 0, 3});
    // Rows that begin 16 bytes apart in multiples of 16, and rows that do not.
    c.gap = key_dim == 64 ? 8 : 3;
    c.sink = true;
    c.gate = key_dim == 96 ? routed_case::gate::tokens : routed_case::gate::none;
    compare<own>("K " + std::to_string(key_dim) + ", V " + std::to_string(value_dim), c, seed++);
  }
}

DEVICE_TEST("routers that learn do so in bfloat16") {
  auto c = make_case({.top_k = 2}, {60, 5});
  c.gate = routed_case::gate::tokens;
  c.shape.select.router_bias = true;
  compare<own_k_gated>("gated", c, 31);
  auto d = make_case({}, {40});
  d.capacity = 9;
  d.past = {9};
  compare<own_mass_through>("straight through", d, 32);
  auto e = make_case({}, {70});
  compare<one_prefix_score>("straight through by score", e, 33);
}

DEVICE_TEST("windows of routed attention reach over chunks and tiles, longer ones than the sequence too") {
  for (index_t window : {1, 70, 1000}) {
    auto c = make_case({.heads = 2, .chunk = 24, .window = window}, {150});
    compare<window_plus_top1<>>("window " + std::to_string(window), c, 41);
  }
}

DEVICE_TEST("a row that sees one key alone gets exact zeros in sixteen bits") {
  auto c = make_case({}, {1});
  draw<bfloat16>(c, 3);
  auto const r = run_on_device<own, bfloat16>(c);
  auto const is_zero = [](double x) { return x == 0.0; };
  check(std::all_of(r.d_q.begin(), r.d_q.end(), is_zero), "d_q is 0");
  check(std::all_of(r.d_k.begin(), r.d_k.end(), is_zero), "d_k is 0");
}

DEVICE_TEST("routed attention agrees with the CPU over many chunks, parts of the order and tables of scores") {
  // The counting sort takes 1024 rows at a time, the router 64 chunks.
  routed_sizes size;
  size.heads = size.key_heads = size.value_heads = size.gate_heads = 1;
  size.chunk = 16;
  size.top_k = 2;
  auto c = make_case(size, {2100});
  compare<own_k>("2100 rows", c, 7);
  // 50 query tiles by 100 chunks are more than one table holds; the long sequence lies in two.
  std::vector<index_t> lengths(45, 3);
  lengths[37] = 200;
  size.top_k = 1;
  size.chunk = 2;
  auto d = make_case(size, lengths);
  d.gate = routed_case::gate::tokens;
  compare<own_mass_through>("two tables of masses", d, 8);
  size.top_k = 2;
  auto e = make_case(size, lengths);
  e.gate = routed_case::gate::tokens;
  e.shape.select.router_bias = true;
  compare<own_k_gated>("two tables of mean keys", e, 8);
}

DEVICE_TEST("equal keys tie wherever they stand, and the lowest chunks win") {
  for (index_t chunk : {1, 16, 37}) {
    check_ties<own>("own_plus_top1", chunk, chunk == 37);
    check_ties<own_k>("own_plus_top_k", chunk, chunk == 16);
    check_ties<one_max>("exactly_one, max", chunk, false);
  }
  check_ties<own_mass_through>("own_plus_top1, mass", 21, false);
}

DEVICE_TEST("routed attention token by token chooses and reads what the whole sequence does") {
  check_steps<own>("own_plus_top1");
  check_steps<own_k>("own_plus_top_k");
  check_steps<one_prefix_score>("exactly_one");
  check_steps<own_mass_through>("own_plus_top1, mass");
}
