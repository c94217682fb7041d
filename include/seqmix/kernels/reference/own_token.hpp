#pragma once

#include <string>

#include <seqmix/tensor/arena.hpp>
#include <seqmix/tensor/device.hpp>
#include <seqmix/tensor/formulas.hpp>

namespace seqmix::inline v0::kernels {

/// What a token adds to its own output behind a mixer: o_h += scale s_h (q.(u_h k)) v. q, k, v may have fewer heads
/// than o, head h reads h Hx / H. RWKV-5/6: u the bonus of an exclusive read; RWKV-7: u = r_k, behind the norm;
/// Mamba-3: s the part of the write that belongs to the next token, scale -1; scale -1 alone makes an inclusive
/// read skip its own token.
template <class T>
struct own_token {
  view3<T const> q_rhk, k_rhk, v_rhv;
  T const* u_hk = nullptr;   ///< [H,K], H heads of the output; nullptr: ones
  view2<T const> s_rh = {};  ///< [R,H] per token; empty: ones
  double scale = 1.0;
};

namespace detail {

/// Throws unless the own-token term's views fit the output [R,H,V].
template <class T>
void check_own_token(own_token<T> const& in, view3<same<T> const> o_rhv) {
  index_t const R = o_rhv.extent[0], H = o_rhv.extent[1];
  expect_shape("own_token: q", in.q_rhk, {R, -1, -1});
  expect_shape("own_token: k", in.k_rhk, {R, -1, in.q_rhk.extent[2]});
  expect_shape("own_token: v", in.v_rhv, {R, -1, o_rhv.extent[2]});
  if (in.s_rh) expect_shape("own_token: s", in.s_rh, {R, H});
  for (auto const& v : {in.q_rhk, in.k_rhk, in.v_rhv})
    if (v.extent[1] < 1 || H % v.extent[1] != 0)
      throw shape_error("seqmix: own_token: heads of q, k and v must divide the " + std::to_string(H) +
                        " of the output, got " + std::to_string(v.extent[1]));
}

}  // namespace detail

template <class T>
void own_token_forward(device::reference, own_token<T> const& in, view3<same<T>> o_rhv) {
  detail::check_own_token(in, view3<T const>(o_rhv));
  index_t const H = o_rhv.extent[1], K = in.q_rhk.extent[2];
  auto const head = [&](auto const& x, index_t h) { return h * x.extent[1] / H; };
  for (index_t r = 0; r < o_rhv.extent[0]; ++r)
    for (index_t h = 0; h < H; ++h) {
      T score(0);
      for (index_t k = 0; k < K; ++k) {
        T const key = in.k_rhk(r, head(in.k_rhk, h), k);
        score += in.q_rhk(r, head(in.q_rhk, h), k) * (in.u_hk ? in.u_hk[h * K + k] * key : key);
      }
      score = score * T(in.scale);
      if (in.s_rh) score = score * in.s_rh(r, h);
      for (index_t v = 0; v < o_rhv.extent[2]; ++v) o_rhv(r, h, v) += score * in.v_rhv(r, head(in.v_rhv, h), v);
    }
}

}  // namespace seqmix::inline v0::kernels
