#include <vector>

#include <doctest/doctest.h>

#include "../support/random_numbers.hpp"
#include <seqmix/kernels/reference/recurrence.hpp>
#include <seqmix/kernels/reference/selective_scan.hpp>
#include <seqmix/states/outer_product.hpp>

// The reference of Mamba-1's fused scan is the reference recurrence with what surrounds it.

using namespace seqmix;
using namespace seqmix::testing;

DOCTEST_TEST_CASE("the fused scan is softplus, the recurrence, the skip and silu(z) one after the other") {
  constexpr index_t D = 6, K = 3, G = 2;
  std::vector<index_t> const offsets{0, 4, 4, 9};
  auto const seq = sequences::packed(offsets);
  index_t const R = seq.rows(), N = seq.count();
  random_numbers random(3);
  auto u = random.normals(R * D), delta = random.normals(R * D), z = random.normals(R * D),
       B = random.normals(R * G * K), C = random.normals(R * G * K), a_log = random.normals(D * K),
       bias = random.normals(D), skip = random.normals(D), initial = random.normals(N * D * K);
  delta[0] = 400.0;  // a step whose decay meets the bound
  buffer<double> y(R * D), final(N * D * K), o(R * D), state(N * D * K), g(R * D), write(R * D), rate(D * K);
  selective_scan_input<double> in;
  in.u_rd = view2<double>(u.data(), {R, D});
  in.delta_rd = view2<double>(delta.data(), {R, D});
  in.z_rd = view2<double>(z.data(), {R, D});
  in.b_rgk = view3<double>(B.data(), {R, G, K});
  in.c_rgk = view3<double>(C.data(), {R, G, K});
  in.a_log_dk = view2<double>(a_log.data(), {D, K});
  in.delta_bias_d = view1<double>(bias.data(), {D});
  in.skip_d = view1<double>(skip.data(), {D});
  in.initial_ndk = view3<double>(initial.data(), {N, D, K});
  kernels::selective_scan_forward(device::reference{}, {seq, D, K, G}, in, view2<double>(y.data(), {R, D}),
                                  view3<double>(final.data(), {N, D, K}));

  for (index_t i = 0; i < R * D; ++i) write[i] = softplus(delta[i] + bias[i % D]), g[i] = -write[i];
  for (index_t i = 0; i < D * K; ++i) rate[i] = std::exp(a_log[i]);
  recurrence_shape const s{seq, D, G, G, D, D, K, 1};
  recurrence_input<double> x;
  x.q_rhk = in.c_rgk, x.k_rhk = in.b_rgk;
  x.v_rhv = view3<double>(u.data(), {R, D, 1});
  x.g_rhk = view3<double>(g.data(), {R, D, 1});
  x.write_rh = view2<double>(write.data(), {R, D});
  x.rate_hk = view2<double>(rate.data(), {D, K});
  x.initial_nhkv = view4<double>(initial.data(), {N, D, K, 1});
  kernels::recurrence_forward<states::outer_product>(device::reference{}, s, x, view3<double>(o.data(), {R, D, 1}),
                                                     view4<double>(state.data(), {N, D, K, 1}));
  for (index_t i = 0; i < R * D; ++i)
    DOCTEST_CHECK(y[i] == doctest::Approx((o[i] + skip[i % D] * u[i]) * silu(z[i])).epsilon(1e-13));
  for (index_t i = 0; i < N * D * K; ++i) DOCTEST_CHECK(final[i] == doctest::Approx(state[i]).epsilon(1e-13));
}
