#include "../support/golden.hpp"
#include "../support/law_rows.hpp"
#include "../support/laws.hpp"
#include <seqmix/gates/mamba2.hpp>
#include <seqmix/mixers/recurrence.hpp>

// Mamba-2 without its projections: gate, recurrence, own-token skip and silu(z), against the published fused
// operation.

namespace {

using namespace seqmix;
using namespace seqmix::testing;
using gate = gates::mamba2;
using M = recurrence<states::outer_product, gate>;

template <class T>
void check_combined() {
  golden_case const c("ops/ssd_combined");
  auto const numbers = [&](char const* name) {
    std::vector<T> x;
    for (double e : c[name].data) x.push_back(T(e));
    return x;
  };
  auto const check = [](std::vector<T> const& found, golden_tensor const& t) {
    auto const r = compare(found.data(), t);
    DOCTEST_CHECK_MESSAGE(r.good, r.text);
  };
  auto const& shape_of_x = c["x"];
  index_t const R = shape_of_x.extent(0) * shape_of_x.extent(1), H = shape_of_x.extent(2), V = shape_of_x.extent(3);
  mixer_shape s;
  s.seq = sequences::batch(shape_of_x.extent(0), shape_of_x.extent(1));
  s.heads = s.value_heads = s.gate_heads = H;
  s.query_heads = s.key_heads = c["B"].extent(2);
  s.key_dim = c["B"].extent(3);
  s.value_dim = V;
  s.chunk = 8;
  auto const dt = numbers("dt"), A = numbers("A"), D = numbers("D"), dt_bias = numbers("dt_bias"), z = numbers("z");
  mixer_numbers<T> x{numbers("C"), numbers("B"), numbers("x"), {}, {}, {}};
  auto const parameters = [&](std::size_t i) {
    std::size_t const h = i % std::size_t(H);
    return std::array<T, 2>{std::log(-A[h]), dt_bias[h]};
  };
  for (std::size_t i = 0; i < dt.size(); ++i) {
    auto const value = gate::forward<T>({dt[i]}, parameters(i));
    x.g.push_back(bounded_log_decay(value.log_decay));
    x.write.push_back(value.write);
  }
  std::array<index_t, 3> const rhv{R, H, V};
  std::array<index_t, 2> const rc{R, H * V};
  kernels::output_stage const stage{0, 0, true, true, 0.0};
  mixer_machine<M, T> machine(s);
  auto o = machine.forward(x);
  kernels::skip_forward(device::cpu{2}, view3<T const>(x.v.data(), rhv), D.data(), view3<T>(o.data(), rhv));
  std::vector<T> y(o.size()), rstd(o.size());
  kernels::output_stage_forward(device::cpu{2}, stage, view2<T const>(o.data(), rc), view2<T const>(z.data(), rc),
                                nullptr, view2<T>(y.data(), rc), rstd.data());
  check(y, c["o"]);

  auto const dy = numbers("cot_o");
  std::vector<T> d_o(o.size()), dz(o.size()), dD(std::size_t(H), T(0));
  with_planned_memory(2, [&](device::cpu dev, arena& ws) {
    kernels::output_stage_backward(dev, stage, view2<T const>(o.data(), rc), view2<T const>(z.data(), rc), nullptr,
                                   rstd.data(), view2<T const>(dy.data(), rc), view2<T>(d_o.data(), rc),
                                   view2<T>(dz.data(), rc), nullptr, ws);
  });
  auto d = machine.backward(x, d_o);
  with_planned_memory(2, [&](device::cpu dev, arena& ws) {
    kernels::skip_backward(dev, view3<T const>(x.v.data(), rhv), D.data(), view3<T const>(d_o.data(), rhv),
                           view3<T>(d.v.data(), rhv), dD.data(), ws);
  });
  std::vector<T> d_dt(dt.size()), dA(std::size_t(H), T(0)), d_bias(dA);
  for (std::size_t i = 0; i < dt.size(); ++i) {
    std::array<T, 1> d_raw{};
    std::array<T, 2> d_p{};
    gate_pullback<gate, T>({dt[i]}, parameters(i), d.g[i], d.write[i], d_raw, d_p);
    std::size_t const h = i % std::size_t(H);
    d_dt[i] = d_raw[0];
    dA[h] += d_p[gate::a_log] / A[h];  // A = -e^A_log
    d_bias[h] += d_p[gate::dt_bias];
  }
  check(d.q, c["grad_C"]), check(d.k, c["grad_B"]), check(d.v, c["grad_x"]), check(dz, c["grad_z"]);
  check(d_dt, c["grad_dt"]), check(dA, c["grad_A"]), check(dD, c["grad_D"]), check(d_bias, c["grad_dt_bias"]);
}

}  // namespace

DOCTEST_TEST_CASE_TEMPLATE("Mamba-2's parts give the golden results of the fused operation", T, double, float) {
  check_combined<T>();
}
