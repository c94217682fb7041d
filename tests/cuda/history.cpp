#include <algorithm>
#include <limits>
#include <memory>

#include "support/device_test.hpp"
#include <seqmix/kernels/cuda_kernels.hpp>

namespace {

using namespace seqmix;
using namespace seqmix::testing;

/// One cache and one call, with a number for every (sequence, token, head, channel) that no other has.
struct cache_case {
  std::string name;
  std::vector<index_t> offsets, past;
  index_t capacity = 0;
  bool windowed = false, in_place = true, gated = true;
  index_t key_heads = 2, value_heads = 1, gate_heads = 3, key_dim = 5, value_dim = 40;

  index_t sequences_count() const { return index_t(offsets.size()) - 1; }
  index_t rows(index_t n) const { return offsets[std::size_t(n) + 1] - offsets[std::size_t(n)]; }
  index_t held(index_t n) const { return past.empty() ? 0 : past[std::size_t(n)]; }
  bool overflows(index_t n) const { return !windowed && held(n) + rows(n) > capacity; }
  index_t tokens(index_t n) const { return held(n) + (overflows(n) ? 0 : rows(n)); }
  index_t kept(index_t n) const { return std::min(tokens(n), capacity); }
  /// The token in a slot of the new cache.
  index_t token(index_t n, index_t slot) const { return tokens(n) - kept(n) + slot; }
};

/// Of one token's channel; small enough to be exact in sixteen bits.
double number_of(index_t n, index_t token, index_t head, index_t channel) {
  return double((n * 131 + token * 37 + head * 17 + channel * 7) % 255 - 127);
}

/// Keys, values or log-decays: rows of the call and a cache, on the host.
template <class T>
struct part {
  index_t heads, channels;
  std::vector<T> now, past;

  part(cache_case const& c, index_t h, index_t ch) : heads(h), channels(ch) {
    for (index_t n = 0; n < c.sequences_count(); ++n)
      for (index_t i = 0; i < c.rows(n); ++i) each([&](index_t y, index_t x) { add(now, n, c.held(n) + i, y, x); });
    for (index_t n = 0; n < c.sequences_count(); ++n)
      for (index_t l = 0; l < c.capacity; ++l) each([&](index_t y, index_t x) { add(past, n, l, y, x); });
  }
  template <class F>
  void each(F const& f) const {
    for (index_t h = 0; h < heads; ++h)
      for (index_t x = 0; x < channels; ++x) f(h, x);
  }
  static void add(std::vector<T>& to, index_t n, index_t token, index_t h, index_t x) {
    to.push_back(T(float(number_of(n, token, h, x))));
  }
};

constexpr double left_alone = 111;

template <class T>
struct device_part {
  part<T> host;
  device_array<T> now, past, after;
  cache_case const& c;

  device_part(cache_case const& setting, index_t heads, index_t channels)
      : host(setting, heads, channels), now(host.now), past(host.past),
        after(std::vector<T>(host.past.size(), T(float(left_alone)))), c(setting) {}
  view3<T> rows() const { return {now.data(), {c.offsets.back(), host.heads, host.channels}}; }
  view4<T> cache(device_array<T> const& memory) const {
    return {memory.data(), {c.sequences_count(), c.capacity, host.heads, host.channels}};
  }
  device_array<T> const& result() const { return c.in_place ? past : after; }

  void check_cache(std::string const& what) const {
    auto const got = as_double(result().download());
    bool good = true;
    std::size_t i = 0;
    for (index_t n = 0; n < c.sequences_count(); ++n)
      for (index_t slot = 0; slot < c.capacity; ++slot)
        host.each([&](index_t h, index_t x) {
          double const want = slot < c.kept(n) ? number_of(n, c.token(n, slot), h, x) : left_alone;
          double const value = got[i++];
          good = good && (value == want || (slot >= c.kept(n) && c.in_place));
        });
    check(good, c.name + ": " + what);
  }
};

template <class T>
void check_history(cache_case const& c) {
  attention_shape s;
  s.seq = sequences::packed(c.offsets);
  s.heads = 6;
  s.key_heads = c.key_heads;
  s.value_heads = c.value_heads;
  s.gate_heads = c.gate_heads;
  s.key_dim = c.key_dim;
  s.value_dim = c.value_dim;
  device_part<T> const k(c, c.key_heads, c.key_dim), v(c, c.value_heads, c.value_dim);
  device_part<float> const g(c, c.gate_heads, 1);
  device_array<index_t> const offsets(c.offsets), past(c.past);
  device_array<index_t> const other_length(std::vector<index_t>(c.offsets.size() - 1, -5));
  device_array<T> const o(std::vector<T>(std::size_t(c.offsets.back() * 6 * c.value_dim), T(1.0F)));
  attention_input<T> in;
  in.k_rhk = k.rows();
  in.v_rhv = v.rows();
  if (c.gated) in.g_rhk = g.rows();
  if (!c.past.empty()) {
    in.past_k_nlhk = k.cache(k.past);
    in.past_v_nlhv = v.cache(v.past);
    if (c.gated) in.past_g_nlhk = g.cache(g.past);
    in.past_length = past.data();
  }
  device::cuda dev;
  dev.offsets = offsets.data();
  auto const& length = c.in_place ? past : other_length;
  auto const remember = [&](device::cuda const& d) {
    kernels::cuda_history<T>::remember(d, s, in, c.windowed, k.cache(k.result()), v.cache(v.result()),
                                       c.gated ? g.cache(g.result()) : view4<float>{}, length.data(),
                                       o.template as<3>({c.offsets.back(), 6, c.value_dim}));
  };
  auto dry = dev;
  dry.dry = true;
  remember(dry);
  remember(dev);
  k.check_cache("keys");
  v.check_cache("values");
  if (c.gated) g.check_cache("log-decays");
  auto const lengths = length.download();
  auto const output = as_double(o.download());
  for (index_t n = 0; n < c.sequences_count(); ++n) {
    check(lengths[std::size_t(n)] == c.kept(n), c.name + ": length of sequence " + std::to_string(n));
    bool good = true;
    for (index_t i = c.offsets[std::size_t(n)] * 6 * c.value_dim;
         i < c.offsets[std::size_t(n) + 1] * 6 * c.value_dim; ++i) {
      double const x = output[std::size_t(i)];
      good = good && (c.overflows(n) ? x != x : x == 1);
    }
    check(good, c.name + ": only outputs of a sequence that does not fit are NaN");
  }
}

/// Derivatives of the cache 1, 2, ... are added to what is there: 1000 for rows, 2000 for past tokens.
template <class T>
void check_gradient_of(cache_case const& c, std::string const& what, index_t heads, index_t channels,
                       std::vector<double> const& now, std::vector<double> const& past, bool past_wanted) {
  std::vector<double> want_now(now.size(), 1000), want_past(past.size(), 2000);
  for (index_t n = 0; n < c.sequences_count(); ++n)
    for (index_t slot = 0; slot < c.kept(n); ++slot)
      for (index_t i = 0; i < heads * channels; ++i) {
        index_t const token = c.token(n, slot);
        double const d = number_of(n, slot, i / channels, i % channels);
        if (token >= c.held(n))
          want_now[std::size_t((c.offsets[std::size_t(n)] + token - c.held(n)) * heads * channels + i)] += d;
        else if (past_wanted)
          want_past[std::size_t((n * c.capacity + token) * heads * channels + i)] += d;
      }
  // Sums of more than eight bits are rounded once.
  double const rounding = sizeof(T) == 2 ? 1.0 / 256 : 0;
  check_close(c.name + ": " + what, now, want_now, rounding);
  check_close(c.name + ": past " + what, past, want_past, rounding);
}

template <class T>
void check_gradient(cache_case const& c, bool past_wanted = true) {
  attention_shape s;
  s.seq = sequences::packed(c.offsets);
  s.heads = 6;
  s.key_heads = c.key_heads;
  s.value_heads = c.value_heads;
  s.gate_heads = c.gate_heads;
  s.key_dim = c.key_dim;
  s.value_dim = c.value_dim;
  // The parts' caches hold the derivatives: their slots are counted like tokens.
  device_part<T> const k(c, c.key_heads, c.key_dim), v(c, c.value_heads, c.value_dim);
  device_part<float> const g(c, c.gate_heads, 1);
  auto const filled = [](auto const& like, double value) {
    using U = std::remove_pointer_t<decltype(like.data())>;
    return device_array<U>(std::vector<U>(like.size(), U(float(value))));
  };
  auto const d_k = filled(k.now, 1000), d_v = filled(v.now, 1000);
  auto const d_past_k = filled(k.past, 2000), d_past_v = filled(v.past, 2000);
  auto const d_g = filled(g.now, 1000), d_past_g = filled(g.past, 2000);
  device_array<index_t> const offsets(c.offsets), past(c.past);
  attention_input<T> in;
  in.past_length = c.past.empty() ? nullptr : past.data();
  in.g_rhk = g.rows();
  attention_gradient<T> d;
  d.k_rhk = d_k.template as<3>({c.offsets.back(), c.key_heads, c.key_dim});
  d.v_rhv = d_v.template as<3>({c.offsets.back(), c.value_heads, c.value_dim});
  d.g_rhk = d_g.template as<3>({c.offsets.back(), c.gate_heads, 1});
  if (past_wanted) {
    d.past_k_nlhk = k.cache(d_past_k);
    d.past_v_nlhv = v.cache(d_past_v);
    d.past_g_nlhk = g.cache(d_past_g);
  }
  device::cuda dev;
  dev.offsets = offsets.data();
  kernels::cuda_history<T>::add_remembered(dev, s, in, c.windowed, k.cache(k.past), v.cache(v.past),
                                           g.cache(g.past), d);
  check_gradient_of<T>(c, "d_k", c.key_heads, c.key_dim, as_double(d_k.download()), as_double(d_past_k.download()),
                       past_wanted);
  check_gradient_of<T>(c, "d_v", c.value_heads, c.value_dim, as_double(d_v.download()),
                       as_double(d_past_v.download()), past_wanted);
  check_gradient_of<float>(c, "d_g", c.gate_heads, 1, as_double(d_g.download()), as_double(d_past_g.download()),
                           past_wanted);
}

template <class T>
void both(cache_case const& c) {
  check_history<T>(c);
  check_gradient<T>(c);
}

DEVICE_TEST("tokens are appended, in place and to a new cache") {
  cache_case c{"append", {0, 3, 3, 20}, {4, 2, 0}};
  c.capacity = 20;
  both<float>(c);
  both<bfloat16>(c);
  c.in_place = false;
  c.gated = false;
  c.name = "append to a new cache";
  check_history<float>(c);
}

DEVICE_TEST("without a past") {
  cache_case c{"no past", {0, 5, 5, 21}, {}};
  c.capacity = 16;
  c.in_place = false;
  both<float>(c);
  c.windowed = true;
  c.capacity = 7;
  c.name = "no past, window";
  both<float>(c);
}

DEVICE_TEST("a full window is moved in place by any distance") {
  // 300 slots are moved in several pieces; one row moves them by one.
  for (index_t rows : {1, 40, 299, 300, 310}) {
    cache_case c{"window, " + std::to_string(rows) + " rows", {0, rows, rows + 1}, {300, 180}};
    c.capacity = 300;
    c.windowed = true;
    c.key_dim = 3;
    c.value_dim = 7;
    check_history<float>(c);
  }
  cache_case c{"window", {0, 3, 3, 20, 21}, {12, 5, 12, 9}};
  c.capacity = 12;
  c.windowed = true;
  both<bfloat16>(c);
  check_gradient<float>(c, false);
  c.in_place = false;
  c.name = "window to a new cache";
  check_history<float>(c);
  c.capacity = 0;
  c.past = {0, 0, 0, 0};
  c.name = "window of one";
  both<float>(c);
}

DEVICE_TEST("a sequence that does not fit keeps its cache and shows NaN") {
  cache_case c{"overflow", {0, 3, 7, 8}, {5, 5, 8}};
  c.capacity = 8;
  both<float>(c);
  c.in_place = false;
  check_history<bfloat16>(c);
}

DEVICE_TEST("many calls of one row") {
  // The window's cache after T rows, one at a time, is that of the last ones.
  index_t const capacity = 6, steps = 15;
  cache_case c{"steps", {0, steps, 2 * steps}, {}};
  c.capacity = capacity;
  part<float> const host(c, 1, 4);
  device_array<float> const rows(host.now), k(std::size_t(2 * capacity * 4)), v(std::size_t(2 * capacity * 4));
  device_array<index_t> const length(std::vector<index_t>{0, 0});
  attention_shape s;
  s.seq = sequences::batch(2, 1);
  s.key_dim = s.value_dim = 4;
  attention_input<float> in;
  in.past_k_nlhk = k.as<4>({2, capacity, 1, 4});
  in.past_v_nlhv = v.as<4>({2, capacity, 1, 4});
  in.past_length = length.data();
  for (index_t t = 0; t < steps; ++t) {
    in.k_rhk = in.v_rhv = view3<float const>(rows.data() + t * 4, {2, 1, 4}, {steps * 4, 4, 1});
    kernels::cuda_history<float>::remember(device::cuda{}, s, in, true, k.as<4>({2, capacity, 1, 4}),
                                           v.as<4>({2, capacity, 1, 4}), {}, length.data(), {});
  }
  std::vector<float> want;
  for (index_t n = 0; n < 2; ++n)
    for (index_t t = steps - capacity; t < steps; ++t)
      for (index_t x = 0; x < 4; ++x) want.push_back(float(number_of(n, t, 0, x)));
  check(k.download() == want, "keys");
  check(v.download() == want, "values");
  check(length.download() == std::vector<index_t>{capacity, capacity}, "lengths");
}

DEVICE_TEST("errors name what is wrong") {
  attention_shape s;
  s.seq = sequences::batch(2, 1);
  auto const error_of = [&](view4<float> k, view4<float> v, view4<float> g, bool alone) {
    attention_input<float> in;
    in.queries_alone = alone;
    try {
      kernels::cuda_history<float>::remember(device::cuda{}, s, in, false, k, v, g, nullptr, {});
    } catch (error const& e) {
      return std::string(e.what());
    }
    return std::string("none");
  };
  float number = 0;
  view4<float> const good(&number, {2, 3, 1, 1}), bad(&number, {2, 4, 1, 1}), many(&number, {2, 3, 2, 1});
  check(error_of(many, good, {}, false).find("history state, keys") != std::string::npos, "keys");
  check(error_of(good, bad, {}, false).find("history state, values") != std::string::npos, "values");
  check(error_of(good, good, many, false).find("history state, log-decays") != std::string::npos, "log-decays");
  check(error_of(good, good, {}, true).find("keys of their own") != std::string::npos, "queries alone");
}

}  // namespace
