#include "../support/spaced.hpp"
#include <seqmix/kernels/cpu/own_token.hpp>

// The own-token term: against the reference and its dual numbers, with shared heads.

namespace {

using namespace seqmix;
using namespace seqmix::testing;
using kernels::own_token;
using number = dual<double, 1>;

struct sizes {
  index_t R, H, query_heads, key_heads, value_heads, K, V;
  bool bonus, token_scale;
  std::array<index_t, 3> q() const { return {R, query_heads, K}; }
  std::array<index_t, 3> k() const { return {R, key_heads, K}; }
  std::array<index_t, 3> v() const { return {R, value_heads, V}; }
  std::array<index_t, 3> o() const { return {R, H, V}; }
};
constexpr double scale = -0.7;

/// q, k, v, u, s
arrays<double> random_inputs(sizes const& z) {
  return {rounded(normals(z.R * z.query_heads * z.K, 1)), rounded(normals(z.R * z.key_heads * z.K, 2)),
          rounded(normals(z.R * z.value_heads * z.V, 3)), rounded(normals(z.bonus ? z.H * z.K : 0, 4)),
          rounded(normals(z.token_scale ? z.R * z.H : 0, 5))};
}
template <class S>
std::vector<S> reference(sizes const& z, arrays<S> const& x) {
  std::vector<S> o(std::size_t(z.R * z.H * z.V), S(0.25));
  own_token<S> const in{view3<S const>(x[0].data(), z.q()),
                        view3<S const>(x[1].data(), z.k()),
                        view3<S const>(x[2].data(), z.v()),
                        z.bonus ? x[3].data() : nullptr,
                        z.token_scale ? view2<S const>(x[4].data(), {z.R, z.H}) : view2<S const>{},
                        scale};
  kernels::own_token_forward(device::reference{}, in, view3<S>(o.data(), z.o()));
  return o;
}
/// o | dq, dk, dv, du, ds, each beside what was there before
template <class T>
std::pair<std::vector<double>, arrays<double>> fast(int threads, sizes const& z, arrays<double> const& x,
                                                    std::vector<double> const& d_o) {
  auto const filled = [](std::vector<double> const& like) { return std::vector<double>(like.size(), 0.5); };
  spaced<T, 3> q(z.q(), x[0]), k(z.k(), x[1]), v(z.v(), x[2]), up(z.o(), d_o), dq(z.q(), filled(x[0])),
      dk(z.k(), filled(x[1])), dv(z.v(), filled(x[2])), o(z.o(), std::vector<double>(d_o.size(), 0.25));
  std::array<index_t, 2> const tokens{z.R, z.H};
  spaced<T, 2> s(tokens, x[4]), ds(tokens);
  std::vector<T> const u(x[3].begin(), x[3].end());
  std::vector<T> du(x[3].size(), T(0.5));
  own_token<T> const in{q(), k(), v(), z.bonus ? u.data() : nullptr, z.token_scale ? s() : view2<T const>{}, scale};
  kernels::own_token_forward(device::cpu{threads}, in, o.view_of());
  with_planned_memory(threads, [&](device::cpu dev, arena& ws) {
    kernels::own_token_backward(dev, in, up(),
                                {dq.view_of(), dk.view_of(), dv.view_of(), z.bonus ? du.data() : nullptr,
                                 z.token_scale ? ds.view_of() : view2<T>{}},
                                ws);
  });
  for (auto const* a : {&o, &dq, &dk, &dv}) DOCTEST_CHECK(a->intact());
  DOCTEST_CHECK(ds.intact());
  arrays<double> d{dq.values(),
                   dk.values(),
                   dv.values(),
                   {du.begin(), du.end()},
                   z.token_scale ? ds.values() : std::vector<double>{}};
  for (std::size_t i = 0; i < 4; ++i)
    for (auto& e : d[i]) e -= 0.5;
  return {o.values(), d};
}

}  // namespace

DOCTEST_TEST_CASE("the own-token term and its gradients agree with the reference, for any number of threads") {
  for (sizes const& z : {sizes{0, 2, 1, 1, 2, 3, 4, true, true},
                         {1, 1, 1, 1, 1, 1, 1, false, false},
                         {63, 4, 1, 2, 4, 5, 19, true, false},
                         {65, 6, 3, 2, 1, 17, 3, false, true},
                         {65, 2, 2, 2, 2, 8, 8, true, true}}) {
    DOCTEST_CAPTURE(z.R);
    DOCTEST_CAPTURE(z.H);
    auto const x = random_inputs(z);
    auto const d_o = rounded(normals(z.R * z.H * z.V, 6));
    auto const found = fast<double>(1, z, x, d_o);
    auto const single = fast<float>(1, z, x, d_o);
    check_close({found.first}, {reference(z, x)}, row_tolerance<double>);
    check_close({single.first}, {found.first}, row_tolerance<float>);
    check_close(single.second, found.second, 10 * row_tolerance<float>);
    DOCTEST_CHECK(fast<double>(3, z, x, d_o) == found);
    DOCTEST_CHECK(fast<float>(2, z, x, d_o) == single);
    if (z.R == 0) continue;
    check_pullback(
        x, [&](arrays<number> const& in) { return reference(z, in); },
        [&](std::vector<double> const& d) { return fast<double>(2, z, x, d).second; });
  }
}

DOCTEST_TEST_CASE("the own-token term by hand: weight minus one takes a token out of an inclusive read") {
  std::vector<double> const q{1, 2}, k{3, -1}, v{5}, u{2, 4};
  view3<double const> const queries(q.data(), {1, 1, 2}), keys(k.data(), {1, 1, 2}), values(v.data(), {1, 1, 1});
  std::vector<double> o{1 * 5};  // the read of a state that holds this token alone
  view3<double> const out(o.data(), {1, 1, 1});
  kernels::own_token_forward(device::cpu{}, own_token<double>{queries, keys, values, nullptr, {}, -1.0}, out);
  DOCTEST_CHECK(o[0] == 0);
  kernels::own_token_forward(device::cpu{}, own_token<double>{queries, keys, values, u.data()}, out);
  DOCTEST_CHECK(o[0] == (1 * 2 * 3 - 2 * 4 * 1) * 5);
}

DOCTEST_TEST_CASE("heads that do not divide the output's are named") {
  std::vector<double> x(12), o(12);
  view3<double const> const two(x.data(), {1, 2, 2}), values(x.data(), {1, 3, 2});
  DOCTEST_CHECK_THROWS_WITH_AS(kernels::own_token_forward(device::cpu{}, own_token<double>{two, two, values},
                                                          view3<double>(o.data(), {1, 3, 2})),
                               "seqmix: own_token: heads of q, k and v must divide the 3 of the output, got 2",
                               shape_error);
}
