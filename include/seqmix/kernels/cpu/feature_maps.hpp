#pragma once

#include <seqmix/kernels/cpu/activations.hpp>
#include <seqmix/kernels/reference/feature_maps.hpp>

namespace seqmix::inline v0::kernels {

namespace detail {

/// One head of one token in every feature map. Products of shifted runs are vectors; only where a run wraps around
/// does it end early.
template <class Isa, class T>
struct feature_row {
  index_t K, nu;

  /// `room` takes 2K numbers.
  void forward(feature_map m, T const* u, T* y, T* room) const noexcept {
    switch (m) {
    case feature_map::none:
      return each<activation::identity>(u, y);
    case feature_map::relu:
      return each<activation::relu>(u, y);
    case feature_map::elu_plus_one:
      return each<activation::elu_plus_one>(u, y);
    case feature_map::hedgehog:
      return hedgehog(u, y);
    case feature_map::dpfp:
      return dpfp(u, y, room);
    case feature_map::taylor:
      return taylor(u, y);
    case feature_map::hadamard:
      return product(u, u + K, y);
    }
  }
  /// `room` takes 4K numbers.
  void backward(feature_map m, T const* u, T const* y, T const* dy, T* du, T* room) const noexcept {
    switch (m) {
    case feature_map::none:
      return each_backward<activation::identity>(u, dy, du);
    case feature_map::relu:
      return each_backward<activation::relu>(u, dy, du);
    case feature_map::elu_plus_one:
      return each_backward<activation::elu_plus_one>(u, dy, du);
    case feature_map::hedgehog:
      return hedgehog_backward(y, dy, du);
    case feature_map::dpfp:
      return dpfp_backward(u, dy, du, room, room + 2 * K);
    case feature_map::taylor:
      return taylor_backward(u, dy, du);
    case feature_map::hadamard:
      product(u + K, dy, du);
      return product(u, dy, du + K);
    }
  }

 private:
  template <activation F>
  void each(T const* u, T* y) const noexcept {
    simd::map<Isa>(
        K, [](auto const& x) { return activation_at<F, Isa, T>(x).value; }, y, u);
  }
  template <activation F>
  void each_backward(T const* u, T const* dy, T* du) const noexcept {
    simd::map<Isa>(
        K, [](auto const& x, auto const& d) { return d * activation_at<F, Isa, T>(x).slope; }, du, u, dy);
  }
  void product(T const* a, T const* b, T* y) const noexcept {
    simd::map<Isa>(
        K, [](auto const& x, auto const& z) { return x * z; }, y, a, b);
  }

  /// dpfp: target(run of n from i, from i - j) over the runs in which neither index wraps around 2K.
  template <class F>
  void for_runs(F const& f) const noexcept {
    index_t const wide = 2 * K;
    for (index_t j = 1; j <= nu; ++j) {
      index_t const shift = j % wide;
      f((j - 1) * wide, index_t(0), wide - shift, shift);
      f((j - 1) * wide + shift, shift, index_t(0), wide - shift);
    }
  }
  /// [relu u, -relu u]
  void signed_halves(T const* u, T* x) const noexcept {
    for (index_t i = 0; i < K; ++i) {
      x[i] = u[i] <= T(0) ? T(0) : u[i];
      x[K + i] = -x[i];
    }
  }

  void hedgehog(T const* u, T* y) const noexcept {
    T most(0);
    for (index_t i = 0; i < K; ++i) {
      T const size = u[i] < T(0) ? -u[i] : u[i];
      most = size > most ? size : most;
    }
    simd::vec<Isa, T> total{};
    simd::for_vectors<Isa, T>(K, [&](index_t i, auto const& lanes) {
      auto const x = lanes.load(u + i);
      lanes.store(y + i, simd::exp<Isa, T>(T(2) * (x - most)));
      lanes.store(y + K + i, simd::exp<Isa, T>(T(2) * (-x - most)));
    });
    simd::for_vectors<Isa, T>(2 * K, [&](index_t i, auto const& lanes) { total += lanes.load(y + i); });
    T const unit = T(1) / simd::sum<Isa, T>(total);
    simd::map<Isa>(
        2 * K, [=](auto const& e) { return e * unit; }, y, y);
  }
  void hedgehog_backward(T const* y, T const* dy, T* du) const noexcept {
    T const mean = dot<Isa>(y, dy, 2 * K);
    simd::for_vectors<Isa, T>(K, [&](index_t i, auto const& lanes) {
      auto const up = lanes.load(y + i) * (lanes.load(dy + i) - mean);
      auto const down = lanes.load(y + K + i) * (lanes.load(dy + K + i) - mean);
      lanes.store(du + i, T(2) * (up - down));
    });
  }

  void dpfp(T const* u, T* y, T* x) const noexcept {
    signed_halves(u, x);
    for_runs([&](index_t to, index_t a, index_t b, index_t n) {
      simd::map<Isa>(
          n, [](auto const& p, auto const& q) { return p * q; }, y + to, x + a, x + b);
    });
  }
  void dpfp_backward(T const* u, T const* dy, T* du, T* x, T* dx) const noexcept {
    signed_halves(u, x);
    std::fill_n(dx, 2 * K, T(0));
    auto const multiply_add = [](auto const& sum, auto const& p, auto const& q) { return sum + p * q; };
    for_runs([&](index_t from, index_t a, index_t b, index_t n) {
      simd::map<Isa>(n, multiply_add, dx + a, dx + a, dy + from, x + b);
      simd::map<Isa>(n, multiply_add, dx + b, dx + b, dy + from, x + a);
    });
    for (index_t i = 0; i < K; ++i) du[i] = u[i] <= T(0) ? T(0) : dx[i] - dx[K + i];
  }

  void taylor(T const* u, T* y) const noexcept {
    double const root = std::sqrt(double(K));
    T const once = T(1.0 / std::sqrt(root)), square = T(1.0 / (std::sqrt(2.0) * root)), pair = T(1.0 / root);
    *y++ = T(1);
    simd::for_vectors<Isa, T>(K, [&](index_t i, auto const& lanes) {
      auto const x = lanes.load(u + i);
      lanes.store(y + i, x * once);
      lanes.store(y + K + i, x * x * square);
    });
    y += 2 * K;
    for (index_t i = 0; i + 1 < K; ++i) {
      T const a = u[i] * pair;
      simd::map<Isa>(
          K - i - 1, [=](auto const& x) { return a * x; }, y, u + i + 1);
      y += K - i - 1;
    }
  }
  void taylor_backward(T const* u, T const* dy, T* du) const noexcept {
    double const root = std::sqrt(double(K));
    T const once = T(1.0 / std::sqrt(root)), twice = T(std::sqrt(2.0) / root), pair = T(1.0 / root);
    ++dy;
    simd::for_vectors<Isa, T>(K, [&](index_t i, auto const& lanes) {
      auto const x = lanes.load(u + i);
      lanes.store(du + i, lanes.load(dy + i) * once + lanes.load(dy + K + i) * x * twice);
    });
    dy += 2 * K;
    for (index_t i = 0; i + 1 < K; ++i) {
      T const a = u[i] * pair;
      du[i] += dot<Isa>(dy, u + i + 1, K - i - 1) * pair;
      simd::map<Isa>(
          K - i - 1, [=](auto const& sum, auto const& d) { return sum + a * d; }, du + i + 1, du + i + 1, dy);
      dy += K - i - 1;
    }
  }
};

/// f(row, head, room of this thread) over blocks of rows; `room` numbers a thread.
template <class T, class Device, class F>
void for_row_heads(Device dev, index_t rows, index_t heads, index_t room, arena& ws, F const& f) {
  arena_scope const scope(ws);
  T* const scratch = ws.take<T>(thread_count(dev) * room);
  if (ws.measuring()) return;
  parallel_for(dev, blocks(rows, rows_per_block), [&](index_t b, int thread) {
    index_t const end = (std::min)(rows, (b + 1) * rows_per_block);
    for (index_t r = b * rows_per_block; r < end; ++r)
      for (index_t h = 0; h < heads; ++h) f(r, h, scratch + thread * room);
  });
}

}  // namespace detail

/// y [R,H,F] = the features of u [R,H,I]; y must not be u. Workspace: 2K numbers a thread.
template <class Isa, class Threads, class T>
void feature_map_forward(device::basic_cpu<Isa, Threads> dev, feature_map m, index_t nu, view3<T const> u_rhi,
                         view3<same<T>> y_rhf, arena& ws) {
  index_t const K = detail::feature_key_dim(m, nu, u_rhi, view3<T const>(y_rhf));
  expect_contiguous("feature_map: u", u_rhi);
  expect_contiguous("feature_map: features", y_rhf);
  detail::feature_row<Isa, T> const row{K, nu};
  detail::for_row_heads<T>(dev, u_rhi.extent[0], u_rhi.extent[1], 2 * K, ws, [&](index_t r, index_t h, T* room) {
    row.forward(m, u_rhi.at(r, h), y_rhf.at(r, h), room);
  });
}

/// du is written; y is the forward's result (hedgehog reads it). Workspace: 4K numbers a thread.
template <class Isa, class Threads, class T>
void feature_map_backward(device::basic_cpu<Isa, Threads> dev, feature_map m, index_t nu, view3<T const> u_rhi,
                          view3<same<T> const> y_rhf, view3<same<T> const> dy_rhf, view3<same<T>> du_rhi,
                          arena& ws) {
  index_t const K = detail::feature_key_dim(m, nu, u_rhi, y_rhf);
  expect_shape("feature_map: gradient of the features", dy_rhf, y_rhf.extent);
  expect_shape("feature_map: gradient of u", du_rhi, u_rhi.extent);
  expect_contiguous("feature_map: u", u_rhi);
  expect_contiguous("feature_map: features", y_rhf);
  expect_contiguous("feature_map: gradient of the features", dy_rhf);
  expect_contiguous("feature_map: gradient of u", du_rhi);
  detail::feature_row<Isa, T> const row{K, nu};
  detail::for_row_heads<T>(dev, u_rhi.extent[0], u_rhi.extent[1], 4 * K, ws, [&](index_t r, index_t h, T* room) {
    row.backward(m, u_rhi.at(r, h), y_rhf.at(r, h), dy_rhf.at(r, h), du_rhi.at(r, h), room);
  });
}

}  // namespace seqmix::inline v0::kernels
