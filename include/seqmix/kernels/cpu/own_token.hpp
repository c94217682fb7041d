#pragma once

#include <seqmix/kernels/cpu/rows.hpp>
#include <seqmix/kernels/reference/own_token.hpp>

namespace seqmix::inline v0::kernels {

namespace detail {

/// q.(u k) of one head, u nullptr: ones.
template <class Isa, class T>
T own_score(T const* q, T const* k, T const* u, index_t K) noexcept {
  if (!u) return dot<Isa>(q, k, K);
  return simd::map_sum<Isa, T>(
      K, [](auto const& a, auto const& b, auto const& c) { return a * (b * c); }, q, u, k);
}

template <class T>
void expect_contiguous_own_token(own_token<T> const& in, view3<T const> o_rhv) {
  for (auto const& v : {in.q_rhk, in.k_rhk, in.v_rhv, o_rhv}) expect_contiguous("own_token: q, k, v or output", v);
}

}  // namespace detail

/// o [R,H,V] += the own-token term. Work: 2 R H (K + V) flops and reads.
template <class Isa, class Threads, class T>
void own_token_forward(device::basic_cpu<Isa, Threads> dev, own_token<T> const& in, view3<same<T>> o_rhv) {
  detail::check_own_token(in, view3<T const>(o_rhv));
  detail::expect_contiguous_own_token(in, view3<T const>(o_rhv));
  index_t const H = o_rhv.extent[1], V = o_rhv.extent[2], K = in.q_rhk.extent[2];
  auto const at = [H](auto const& x, index_t r, index_t h) { return x.at(r, h * x.extent[1] / H); };
  detail::for_row_blocks(dev, o_rhv.extent[0], [&](index_t, index_t begin, index_t end) {
    for (index_t r = begin; r < end; ++r)
      for (index_t h = 0; h < H; ++h) {
        T const score =
            detail::own_score<Isa>(at(in.q_rhk, r, h), at(in.k_rhk, r, h), in.u_hk ? in.u_hk + h * K : nullptr, K);
        T const weight = T(in.scale) * score * (in.s_rh ? in.s_rh(r, h) : T(1));
        simd::map<Isa>(
            V, [=](auto const& o, auto const& v) { return o + weight * v; }, o_rhv.at(r, h), o_rhv.at(r, h),
            at(in.v_rhv, r, h));
      }
  });
}

/// Gradients of own_token's inputs; u and s are there where the inputs are.
template <class T>
struct own_token_gradient {
  view3<T> q_rhk, k_rhk, v_rhv;  ///< added to: the mixer's backward wrote its part before
  T* u_hk = nullptr;             ///< added to; nullptr: not wanted
  view2<T> s_rh = {};            ///< written; empty: not wanted
};

/// Shared heads add up in the order of the output's heads. Workspace: H K numbers for every 64 rows.
template <class Isa, class Threads, class T>
void own_token_backward(device::basic_cpu<Isa, Threads> dev, own_token<T> const& in, view3<same<T> const> d_o_rhv,
                        own_token_gradient<same<T>> const& d, arena& ws) {
  detail::check_own_token(in, d_o_rhv);
  detail::check_own_token(own_token<T>{d.q_rhk, d.k_rhk, d.v_rhv, nullptr, d.s_rh}, d_o_rhv);
  detail::expect_contiguous_own_token(in, d_o_rhv);
  expect_shape("own_token: gradient of q", d.q_rhk, in.q_rhk.extent);
  expect_shape("own_token: gradient of k", d.k_rhk, in.k_rhk.extent);
  expect_shape("own_token: gradient of v", d.v_rhv, in.v_rhv.extent);
  for (auto const& v : {d.q_rhk, d.k_rhk, d.v_rhv}) expect_contiguous("own_token: gradient of q, k or v", v);
  arena_scope const scope(ws);
  index_t const R = d_o_rhv.extent[0], H = d_o_rhv.extent[1], V = d_o_rhv.extent[2], K = in.q_rhk.extent[2];
  index_t const count = detail::blocks(R, detail::rows_per_block);
  T* const partial = ws.take<T>(count * H * K);
  if (ws.measuring()) return;
  auto const at = [H](auto const& x, index_t r, index_t h) { return x.at(r, h * x.extent[1] / H); };
  detail::for_row_blocks(dev, R, [&](index_t b, index_t begin, index_t end) {
    T* const du = partial + b * H * K;
    std::fill_n(du, H * K, T(0));
    for (index_t r = begin; r < end; ++r)
      for (index_t h = 0; h < H; ++h) {
        T const *const q = at(in.q_rhk, r, h), *const k = at(in.k_rhk, r, h), *const v = at(in.v_rhv, r, h);
        T const* const u = in.u_hk ? in.u_hk + h * K : nullptr;
        T const score = T(in.scale) * detail::own_score<Isa>(q, k, u, K), s = in.s_rh ? in.s_rh(r, h) : T(1);
        T const* const d_o = d_o_rhv.at(r, h);
        T const pull = detail::dot<Isa>(d_o, v, V);
        if (d.s_rh) d.s_rh(r, h) = score * pull;
        simd::map<Isa>(
            V, [=](auto const& old, auto const& up) { return old + score * s * up; }, at(d.v_rhv, r, h),
            at(d.v_rhv, r, h), d_o);
        T const weight = T(in.scale) * s * pull;
        T *const dq = at(d.q_rhk, r, h), *const dk = at(d.k_rhk, r, h), *const du_h = du + h * K;
        simd::for_vectors<Isa, T>(K, [&](index_t c, auto const& lanes) {
          auto query = lanes.load(q + c) * weight, key = lanes.load(k + c) * weight;
          if (d.u_hk) lanes.store(du_h + c, lanes.load(du_h + c) + query * lanes.load(k + c));
          if (u) query = query * lanes.load(u + c), key = key * lanes.load(u + c);
          lanes.store(dq + c, lanes.load(dq + c) + key);
          lanes.store(dk + c, lanes.load(dk + c) + query);
        });
      }
  });
  if (d.u_hk) detail::add_partials(partial, count, H * K, d.u_hk);
}

}  // namespace seqmix::inline v0::kernels
