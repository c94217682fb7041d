#pragma once

#include <seqmix/kernels/cpu/activations.hpp>
#include <seqmix/kernels/reference/rotation.hpp>

namespace seqmix::inline v0::kernels {

namespace detail {

/// sin and cos of angles up to some hundred turns to two units in the last place of 1: the nearest quarter turn is
/// taken off in three words, the rest by Taylor series.
template <class Isa, class T>
SEQMIX_INLINE void sine_and_cosine(simd::vec<Isa, T> const& angle, simd::vec<Isa, T>& sine,
                                   simd::vec<Isa, T>& cosine) noexcept {
  using V = simd::vec<Isa, T>;
  using I = simd::ivec<Isa, T>;
  constexpr bool single = sizeof(T) == 4;
  constexpr T magic = single ? T(12582912.0) : T(6755399441055744.0);  // adding it rounds to whole numbers
  constexpr T high = single ? T(1.5703125) : T(1.5707963267341256);
  constexpr T middle = single ? T(0.000483751296997) : T(6.077100506303966e-11);
  constexpr T low = single ? T(7.54978995489e-8) : T(2.0222662487959507e-21);
  V const shifted = angle * T(0.63661977236758134) + magic, quarters = shifted - magic;
  V const r = ((angle - quarters * high) - quarters * middle) - quarters * low, square = r * r;
  V odd_sum{}, even_sum{};  // r^(2n+1) and r^(2n), down from the highest
  for (int n = single ? 5 : 8; n >= 0; --n) {
    odd_sum = T(1) - odd_sum * square * T(1.0 / double((2 * n + 2) * (2 * n + 3)));
    even_sum = T(1) - even_sum * square * T(1.0 / double((2 * n + 1) * (2 * n + 2)));
  }
  odd_sum = odd_sum * r;
  I const quarter = std::bit_cast<I>(shifted);
  auto const swapped = (quarter & 1) != 0;
  V const s = swapped ? even_sum : odd_sum, c = swapped ? odd_sum : even_sum;
  sine = (quarter & 2) != 0 ? -s : s;
  cosine = ((quarter + 1) & 2) != 0 ? -c : c;
}

/// The angle in [0, 2 pi] that points the same way.
template <class Isa, class T>
SEQMIX_INLINE simd::vec<Isa, T> within_a_turn(simd::vec<Isa, T> const& angle) noexcept {
  constexpr T magic = sizeof(T) == 4 ? T(12582912.0) : T(6755399441055744.0);
  auto const shifted = angle * T(1 / whole_turn) + magic;
  auto const rest = angle - (shifted - magic) * T(whole_turn);
  return rest < T(0) ? rest + T(whole_turn) : rest;
}

/// Lanes 0, 2, 4, ... of a and b one after the other; `Odd`: 1, 3, 5, ...
template <bool Odd, class V, std::size_t... I>
SEQMIX_INLINE V every_second(V const& a, V const& b, std::index_sequence<I...>) noexcept {
  return simd::shuffle<int(2 * I + (Odd ? 1 : 0))...>(a, b);
}

/// One head of one token: S pairs that turn by `theta`, then numbers that do not.
template <class Isa, class T>
struct rotated_row {
  using V = simd::vec<Isa, T>;
  static constexpr index_t lanes = Isa::template lanes<T>;
  static constexpr auto all = std::make_index_sequence<std::size_t(lanes)>{};
  index_t S, K;
  T const* theta;

  /// f(first number, lanes, cos of each number's pair, -+ sin of it) over the numbers that turn; after(first pair,
  /// lanes of pairs) when a vector of pairs is done.
  template <class F, class After>
  SEQMIX_INLINE void for_turning(F const& f, After const& after) const noexcept {
    simd::for_vectors<Isa, T>(S, [&](index_t pair, auto const& part) {
      V sine, cosine;
      sine_and_cosine<Isa, T>(part.load(theta + pair), sine, cosine);
      index_t const numbers = 2 * (std::min)(lanes, S - pair);
      auto const half = [&](index_t from, V const& c, V const& s) {
        simd::for_vectors<Isa, T>((std::min)(lanes, numbers - from),
                                  [&](index_t, auto const& some) { f(2 * pair + from, from > 0, some, c, s); });
      };
      half(0, simd::interleave<false>(cosine, cosine, all), simd::interleave<false>(-sine, sine, all));
      if (numbers > lanes)
        half(lanes, simd::interleave<true>(cosine, cosine, all), simd::interleave<true>(-sine, sine, all));
      after(pair, part);
    });
  }
  /// f(first number, lanes) over the numbers that stay.
  template <class F>
  SEQMIX_INLINE void for_still(F const& f) const noexcept {
    simd::for_vectors<Isa, T>(K - 2 * S, [&](index_t k, auto const& some) { f(2 * S + k, some); });
  }

  void forward(T const* x, T const* bias, T* y) const noexcept {
    auto const input = [&](index_t k, auto const& some) {
      return bias ? some.load(x + k) + some.load(bias + k) : some.load(x + k);
    };
    for_turning(
        [&](index_t k, bool, auto const& some, V const& c, V const& s) {
          V const v = input(k, some);
          some.store(y + k, v * c + exchange_pairs<Isa, T>(v) * s);
        },
        [](index_t, auto const&) {});
    for_still([&](index_t k, auto const& some) { some.store(y + k, input(k, some)); });
  }

  /// dx is written, or += for later heads of a group; dbias +=; dtheta is written or +=, nullptr: not wanted.
  void backward(T const* y, T const* dy, T* dx, bool add_x, T* dbias, T* dtheta, bool add_theta) const noexcept {
    auto const pass_on = [&](index_t k, auto const& some, V const& d) {
      some.store(dx + k, add_x ? some.load(dx + k) + d : d);
      if (dbias) some.store(dbias + k, some.load(dbias + k) + d);
    };
    V moved[2]{};  // (y_a dy_b, y_b dy_a) of both halves
    for_turning(
        [&](index_t k, bool second, auto const& some, V const& c, V const& s) {
          V const d = some.load(dy + k), other = exchange_pairs<Isa, T>(d);
          moved[second ? 1 : 0] = some.load(y + k) * other;
          pass_on(k, some, d * c - other * s);
        },
        [&](index_t pair, auto const& part) {
          if (!dtheta) return;
          V const d = every_second<false>(moved[0], moved[1], all) - every_second<true>(moved[0], moved[1], all);
          part.store(dtheta + pair, add_theta ? part.load(dtheta + pair) + d : d);
        });
    for_still([&](index_t k, auto const& some) { pass_on(k, some, some.load(dy + k)); });
  }
};

/// to [R,G,S] = pi tanh(raw)
template <class Isa, class Threads, class T>
void rotation_speeds(device::basic_cpu<Isa, Threads> dev, view3<T const> raw_rgs, view3<T> to_rgs) {
  for_row_blocks(dev, raw_rgs.extent[0], [&](index_t, index_t begin, index_t end) {
    for (index_t r = begin; r < end; ++r)
      for (index_t g = 0; g < raw_rgs.extent[1]; ++g)
        simd::map<Isa>(
            raw_rgs.extent[2], [](auto const& x) { return T(pi) * vector_tanh<Isa, T>(x); }, to_rgs.at(r, g),
            raw_rgs.at(r, g));
  });
}

}  // namespace detail

/// The angles of every head and token; one sequence and head after the other along time, R H S steps. Workspace:
/// R G S numbers.
template <class Isa, class Threads, class T>
void rotation_angles_forward(device::basic_cpu<Isa, Threads> dev, sequences const& seq, view3<T const> raw_rgs,
                             view2<same<T> const> delta_rh, view3<same<T> const> carried_nhs,
                             view3<same<T>> theta_rhs, view3<same<T>> carried_out_nhs, arena& ws) {
  detail::check_angles<T>(seq, raw_rgs, delta_rh, theta_rhs, carried_nhs, carried_out_nhs);
  for (auto const& v : {raw_rgs, carried_nhs, view3<T const>(theta_rhs), view3<T const>(carried_out_nhs)})
    expect_contiguous("rotation_angles: raw or angles", v);
  arena_scope const scope(ws);
  index_t const H = theta_rhs.extent[1], S = theta_rhs.extent[2], G = raw_rgs.extent[1];
  auto const speed_rgs = ws.take_view<T, 3>(raw_rgs.extent);
  if (ws.measuring()) return;
  detail::rotation_speeds(dev, raw_rgs, speed_rgs);
  parallel_for(dev, seq.count() * H, [&](index_t unit, int) {
    index_t const n = unit / H, h = unit % H, g = h * G / H;
    for (index_t r = seq.begin(n); r < seq.end(n); ++r) {
      T const* const before = r > seq.begin(n) ? theta_rhs.at(r - 1, h)
                              : carried_nhs    ? carried_nhs.at(n, h)
                                               : nullptr;
      T const delta = delta_rh(r, h);
      simd::for_vectors<Isa, T>(S, [&](index_t s, auto const& lanes) {
        auto const speed = lanes.load(speed_rgs.at(r, g) + s);
        auto const angle = before ? lanes.load(before + s) + speed * delta : speed * delta;
        lanes.store(theta_rhs.at(r, h) + s, detail::within_a_turn<Isa, T>(angle));
      });
    }
    if (!carried_out_nhs) return;
    T const* const last = seq.length(n) > 0 ? theta_rhs.at(seq.end(n) - 1, h)
                          : carried_nhs     ? carried_nhs.at(n, h)
                                            : nullptr;
    for (index_t s = 0; s < S; ++s) carried_out_nhs(n, h, s) = last ? last[s] : T(0);
  });
}

/// draw, ddelta and d_carried are written (empty: not wanted). `dtheta` is what the rotations gave and becomes the
/// derivative of the sums: it is overwritten. Workspace: R G S numbers.
template <class Isa, class Threads, class T>
void rotation_angles_backward(device::basic_cpu<Isa, Threads> dev, sequences const& seq, view3<T const> raw_rgs,
                              view2<same<T> const> delta_rh, view3<same<T> const> d_carried_out_nhs,
                              view3<same<T>> dtheta_rhs, view3<same<T>> draw_rgs, view2<same<T>> ddelta_rh,
                              view3<same<T>> d_carried_nhs, arena& ws) {
  detail::check_angles<T>(seq, raw_rgs, delta_rh, dtheta_rhs, d_carried_out_nhs, d_carried_nhs);
  if (draw_rgs) expect_shape("rotation_angles: gradient of raw", draw_rgs, raw_rgs.extent);
  if (ddelta_rh) expect_shape("rotation_angles: gradient of delta", ddelta_rh, delta_rh.extent);
  for (auto const& v : {raw_rgs, d_carried_out_nhs, view3<T const>(dtheta_rhs), view3<T const>(draw_rgs),
                        view3<T const>(d_carried_nhs)})
    expect_contiguous("rotation_angles: raw, angles or their gradients", v);
  arena_scope const scope(ws);
  index_t const H = dtheta_rhs.extent[1], S = dtheta_rhs.extent[2], G = raw_rgs.extent[1];
  auto const speed_rgs = ws.take_view<T, 3>(raw_rgs.extent);
  if (ws.measuring()) return;
  detail::rotation_speeds(dev, raw_rgs, speed_rgs);
  parallel_for(dev, seq.count() * H, [&](index_t unit, int) {
    index_t const n = unit / H, h = unit % H, g = h * G / H;
    T const* after = d_carried_out_nhs ? d_carried_out_nhs.at(n, h) : nullptr;
    for (index_t r = seq.end(n); r-- > seq.begin(n);) {
      T* const d = dtheta_rhs.at(r, h);
      if (after)
        simd::map<Isa>(
            S, [](auto const& a, auto const& b) { return a + b; }, d, d, after);
      after = d;
      if (ddelta_rh) ddelta_rh(r, h) = detail::dot<Isa>(d, speed_rgs.at(r, g), S);
    }
    for (index_t s = 0; d_carried_nhs && s < S; ++s) d_carried_nhs(n, h, s) = after ? after[s] : T(0);
  });
  if (!draw_rgs) return;
  detail::for_row_blocks(dev, seq.rows(), [&](index_t, index_t begin, index_t end) {
    for (index_t r = begin; r < end; ++r)
      for (index_t g = 0; g < G; ++g)
        simd::for_vectors<Isa, T>(S, [&](index_t s, auto const& lanes) {
          simd::vec<Isa, T> total{};
          for (index_t h = g * H / G; h < (g + 1) * H / G; ++h)
            total += lanes.load(dtheta_rhs.at(r, h) + s) * delta_rh(r, h);
          auto const tangent = lanes.load(speed_rgs.at(r, g) + s) * T(1 / detail::pi);
          lanes.store(draw_rgs.at(r, g) + s, total * T(detail::pi) * (T(1) - tangent * tangent));
        });
  });
}

/// y = x + bias with the first S pairs turned by theta.
template <class Isa, class Threads, class T>
void rotate_forward(device::basic_cpu<Isa, Threads> dev, view3<T const> x_rhk, same<T> const* bias_hk,
                    view3<same<T> const> theta_rhs, view3<same<T>> y_rhk) {
  detail::check_rotate<T>(x_rhk, theta_rhs, y_rhk);
  for (auto const& v : {x_rhk, theta_rhs, view3<T const>(y_rhk)}) expect_contiguous("rotate: x, theta or y", v);
  index_t const H = y_rhk.extent[1], K = y_rhk.extent[2], S = theta_rhs.extent[2];
  detail::for_row_blocks(dev, y_rhk.extent[0], [&](index_t, index_t begin, index_t end) {
    for (index_t r = begin; r < end; ++r)
      for (index_t h = 0; h < H; ++h)
        detail::rotated_row<Isa, T>{S, K, theta_rhs.at(r, h)}.forward(
            x_rhk.at(r, h * x_rhk.extent[1] / H), bias_hk ? bias_hk + h * K : nullptr, y_rhk.at(r, h));
  });
}

/// From the forward's result y. dx is written, summed over the heads that share it in their order, and may be dy
/// where Hx = H; dbias += (nullptr: none); dtheta is written, or += when `add_theta` (empty: not wanted).
/// Workspace: H K numbers for every 64 rows.
template <class Isa, class Threads, class T>
void rotate_backward(device::basic_cpu<Isa, Threads> dev, view3<T const> y_rhk, view3<same<T> const> theta_rhs,
                     view3<same<T> const> dy_rhk, view3<same<T>> dx_rhk, same<T>* dbias_hk,
                     view3<same<T>> dtheta_rhs, bool add_theta, arena& ws) {
  detail::check_rotate<T>(dx_rhk, theta_rhs, y_rhk);
  expect_shape("rotate: dy", dy_rhk, y_rhk.extent);
  if (dtheta_rhs) expect_shape("rotate: dtheta", dtheta_rhs, theta_rhs.extent);
  for (auto const& v : {y_rhk, theta_rhs, dy_rhk, view3<T const>(dx_rhk), view3<T const>(dtheta_rhs)})
    expect_contiguous("rotate: y, theta or gradients", v);
  arena_scope const scope(ws);
  index_t const R = y_rhk.extent[0], H = y_rhk.extent[1], K = y_rhk.extent[2], S = theta_rhs.extent[2];
  index_t const count = detail::blocks(R, detail::rows_per_block), shared = H / dx_rhk.extent[1];
  T* const partial = ws.take<T>(count * H * K);
  if (ws.measuring()) return;
  detail::for_row_blocks(dev, R, [&](index_t b, index_t begin, index_t end) {
    T* const dbias = partial + b * H * K;
    if (dbias_hk) std::fill_n(dbias, H * K, T(0));
    for (index_t r = begin; r < end; ++r)
      for (index_t h = 0; h < H; ++h)
        detail::rotated_row<Isa, T>{S, K, theta_rhs.at(r, h)}.backward(
            y_rhk.at(r, h), dy_rhk.at(r, h), dx_rhk.at(r, h / shared), h % shared != 0,
            dbias_hk ? dbias + h * K : nullptr, dtheta_rhs ? dtheta_rhs.at(r, h) : nullptr, add_theta);
  });
  if (dbias_hk) detail::add_partials(partial, count, H * K, dbias_hk);
}

}  // namespace seqmix::inline v0::kernels
