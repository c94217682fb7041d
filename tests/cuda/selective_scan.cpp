#include <functional>

#include "support/device_test.hpp"
#include <seqmix/kernels/cuda_kernels.hpp>
#include <seqmix/kernels/reference/selective_scan.hpp>

// Mamba-1's scan with softplus, skip and silu(z) in one pass, against the reference; derivatives against dual
// numbers through the reference, in a few directions.

namespace {

using namespace seqmix;
using namespace seqmix::testing;

struct setting {
  std::string name;
  index_t count = 1, length = 1;
  std::vector<index_t> offsets{};
  index_t channels = 4, states = 3, groups = 1;
  bool bias = true, skip = true, z = true, state = true;
  index_t padding = 0;

  selective_scan_shape shape() const {
    return {offsets.empty() ? sequences::batch(count, length) : sequences::packed(offsets), channels, states,
            groups};
  }
};

/// Numbers of one scan, dense: what is read, in this order, or their derivatives.
struct numbers {
  enum part { u, delta, z, b, c, a_log, bias, skip, initial, parts };
  std::vector<double> of[parts];
};
std::size_t size_of(setting const& c, int part) {
  auto const s = c.shape();
  index_t const R = s.seq.rows(), D = s.channels, K = s.states, N = s.seq.count();
  index_t const sizes[] = {R * D, R * D,          c.z ? R * D : 0, R * s.groups * K,       R * s.groups * K,
                           D * K, c.bias ? D : 0, c.skip ? D : 0,  c.state ? N * D * K : 0};
  return std::size_t(sizes[part]);
}
double uniform(std::uint32_t& state) {
  state = state * 1664525U + 1013904223U;
  return double(state >> 8) / 8388608.0 - 1.0;
}
numbers random_numbers_of(setting const& c, std::uint32_t seed) {
  numbers x;
  for (int p = 0; p < numbers::parts; ++p)
    for (std::size_t i = 0; i < size_of(c, p); ++i) x.of[p].push_back(uniform(seed));
  return x;
}
bool is_parameter(int part) { return part >= numbers::a_log; }

template <class T>
selective_scan_input<T> input_of(setting const& c, std::vector<T> const (&x)[numbers::parts]) {
  auto const s = c.shape();
  index_t const R = s.seq.rows(), D = s.channels, K = s.states;
  selective_scan_input<T> in;
  auto const at = [&](int p) { return x[p].empty() ? nullptr : x[p].data(); };
  in.u_rd = {at(numbers::u), {R, D}};
  in.delta_rd = {at(numbers::delta), {R, D}};
  if (c.z) in.z_rd = {at(numbers::z), {R, D}};
  in.b_rgk = {at(numbers::b), {R, s.groups, K}};
  in.c_rgk = {at(numbers::c), {R, s.groups, K}};
  in.a_log_dk = {at(numbers::a_log), {D, K}};
  if (c.bias) in.delta_bias_d = {at(numbers::bias), {D}};
  if (c.skip) in.skip_d = {at(numbers::skip), {D}};
  if (c.state) in.initial_ndk = {at(numbers::initial), {s.seq.count(), D, K}};
  return in;
}

/// y and the final state for any scalar.
template <class T>
struct outcome {
  std::vector<T> y, final;
};
template <class T>
outcome<T> right(setting const& c, std::vector<T> const (&x)[numbers::parts]) {
  auto const s = c.shape();
  outcome<T> out;
  out.y.resize(std::size_t(s.seq.rows() * s.channels));
  out.final.resize(std::size_t(s.seq.count() * s.channels * s.states));
  kernels::selective_scan_forward(device::reference{}, s, input_of(c, x),
                                  view2<T>(out.y.data(), {s.seq.rows(), s.channels}),
                                  view3<T>(out.final.data(), {s.seq.count(), s.channels, s.states}));
  return out;
}

template <class T>
void compare(setting const& c, double unit) {
  using number = accumulator_t<T>;
  auto const s = c.shape();
  index_t const R = s.seq.rows(), D = s.channels, K = s.states, N = s.seq.count(), row = D + c.padding;
  auto const raw = random_numbers_of(c, 5);
  numbers x;
  for (int p = 0; p < numbers::parts; ++p)
    x.of[p] = is_parameter(p) ? as_double(stored<number>(raw.of[p])) : as_double(stored<T>(raw.of[p]));
  auto const want = right<double>(c, x.of);

  auto const padded = [&](std::vector<double> const& dense) {
    std::vector<double> y(std::size_t(R * row), 77.0);
    for (std::size_t i = 0; i < dense.size(); ++i) y[std::size_t(index_t(i) / D * row + index_t(i) % D)] = dense[i];
    return stored<T>(y);
  };
  device_array<T> u(padded(x.of[0])), delta(padded(x.of[1])), z(padded(x.of[2])), b(stored<T>(x.of[3])),
      c_(stored<T>(x.of[4]));
  device_array<number> a_log(stored<number>(x.of[5])), bias(stored<number>(x.of[6])), skip(stored<number>(x.of[7])),
      initial(stored<number>(x.of[8]));
  auto const cotangents = random_numbers_of(c, 9);
  auto const d_y_dense = as_double(stored<T>(cotangents.of[0]));
  std::uint32_t seed = 3;
  std::vector<double> d_final_dense(std::size_t(N * D * K));
  for (auto& v : d_final_dense) v = double(float(uniform(seed)));
  device_array<T> d_y(padded(d_y_dense)), y(padded({})), d_u(padded({})), d_delta(padded({})), d_z(padded({})),
      d_b(stored<T>(std::vector<double>(x.of[3].size(), 77.0))),
      d_c(stored<T>(std::vector<double>(x.of[4].size(), 77.0)));
  device_array<number> final(std::vector<number>(std::size_t(N * D * K), number(77))),
      d_final(stored<number>(d_final_dense)), d_initial(std::vector<number>(x.of[8].size(), number(77)));
  // Derivatives of parameters are added.
  device_array<number> d_a(std::vector<number>(x.of[5].size(), number(1))),
      d_bias(std::vector<number>(x.of[6].size(), number(1))),
      d_skip(std::vector<number>(x.of[7].size(), number(1)));
  device_array<index_t> offsets(c.offsets);
  auto const rows = [&](device_array<T> const& m) { return view2<T>(m.data(), {R, D}, {row, 1}); };

  selective_scan_input<T> in;
  in.u_rd = rows(u), in.delta_rd = rows(delta);
  if (c.z) in.z_rd = rows(z);
  in.b_rgk = view3<T>(b.data(), {R, s.groups, K}), in.c_rgk = view3<T>(c_.data(), {R, s.groups, K});
  in.a_log_dk = view2<number>(a_log.data(), {D, K});
  if (c.bias) in.delta_bias_d = view1<number>(bias.data(), {D});
  if (c.skip) in.skip_d = view1<number>(skip.data(), {D});
  if (c.state) in.initial_ndk = view3<number>(initial.data(), {N, D, K});
  selective_scan_gradient<T> d;
  d.u_rd = rows(d_u), d.delta_rd = rows(d_delta);
  if (c.z) d.z_rd = rows(d_z);
  d.b_rgk = {d_b.data(), {R, s.groups, K}}, d.c_rgk = {d_c.data(), {R, s.groups, K}};
  d.a_log_dk = {d_a.data(), {D, K}};
  if (c.bias) d.delta_bias_d = {d_bias.data(), {D}};
  if (c.skip) d.skip_d = {d_skip.data(), {D}};
  if (c.state) d.initial_ndk = {d_initial.data(), {N, D, K}};
  view3<number> const final_ndk(final.data(), {N, D, K}), d_final_ndk(d_final.data(), {N, D, K});

  using kernel = kernels::cuda_selective_scan<T>;
  auto const run = [&](arena& a, device::cuda const& dev) {
    auto const saved = kernel::carve(a, s);
    kernel::forward(dev, s, in, rows(y), &saved, final_ndk, a);
    kernel::backward(dev, s, in, saved, rows(d_y), d_final_ndk, d, a);
  };
  device_arena memory([&](arena& a) { run(a, device::cuda{.dry = true}); });
  run(memory.pieces(), device::cuda{.offsets = c.offsets.empty() ? nullptr : offsets.data()});

  auto const dense = [&](device_array<T> const& m) {
    auto const all = as_double(m.download());
    std::vector<double> result;
    bool whole = true;
    for (index_t r = 0; r < R; ++r)
      for (index_t i = 0; i < row; ++i)
        if (i < D)
          result.push_back(all[std::size_t(r * row + i)]);
        else
          whole = whole && all[std::size_t(r * row + i)] == 77.0;
    check(whole, c.name + ": numbers between rows are changed");
    return result;
  };
  check_close(c.name + ": y", dense(y), want.y, 32 * unit);
  check_close(c.name + ": final state", final.download(), want.final, 32 * std::ldexp(1.0, -23));

  auto less_one = [](std::vector<double> v) {
    for (auto& e : v) e -= 1;
    return v;
  };
  std::vector<double> const gradient[numbers::parts] = {dense(d_u),
                                                        dense(d_delta),
                                                        c.z ? dense(d_z) : std::vector<double>{},
                                                        as_double(d_b.download()),
                                                        as_double(d_c.download()),
                                                        less_one(as_double(d_a.download())),
                                                        less_one(as_double(d_bias.download())),
                                                        less_one(as_double(d_skip.download())),
                                                        as_double(d_initial.download())};
  for (std::uint32_t direction = 0; direction < 5; ++direction) {
    auto const way = random_numbers_of(c, 100 + direction);
    std::vector<dual<double, 1>> moved[numbers::parts];
    double got = 0, terms = 0;
    for (int p = 0; p < numbers::parts; ++p)
      for (std::size_t i = 0; i < x.of[p].size(); ++i) {
        moved[p].push_back(dual<double, 1>(x.of[p][i]));
        moved[p].back().slope[0] = way.of[p][i];
        got += gradient[p][i] * way.of[p][i];
        terms += std::fabs(gradient[p][i] * way.of[p][i]);
      }
    auto const out = right<dual<double, 1>>(c, moved);
    double expected = 0;
    for (std::size_t i = 0; i < out.y.size(); ++i) expected += d_y_dense[i] * out.y[i].slope[0];
    for (std::size_t i = 0; i < out.final.size(); ++i) expected += d_final_dense[i] * out.final[i].slope[0];
    check(std::fabs(got - expected) <= 16 * unit * terms,
          c.name + ": derivative in direction " + std::to_string(direction) + ": got " + std::to_string(got) +
              ", wanted " + std::to_string(expected));
  }
}

constexpr double float_unit = 1.1920929e-7, bfloat16_unit = 0.00390625;

}  // namespace

DEVICE_TEST("lengths around one tile, groups of channels, rows with gaps") {
  for (index_t length : {0, 1, 2, 255, 256, 259})
    compare<float>({.name = "T = " + std::to_string(length),
                    .count = 2,
                    .length = length,
                    .channels = 10,
                    .groups = 2,
                    .padding = 3},
                   float_unit);
}
DEVICE_TEST("a long sequence of one channel in pieces") {
  compare<float>({.name = "pieces", .length = 700, .channels = 1, .states = 5}, float_unit);
}
DEVICE_TEST("without bias, skip, z or initial state") {
  compare<float>({.name = "plain", .length = 20, .bias = false, .skip = false, .z = false, .state = false},
                 float_unit);
}
DEVICE_TEST("packed sequences, empty ones among them") {
  compare<float>({.name = "packed", .offsets = {0, 4, 4, 30, 31}, .channels = 6}, float_unit);
}
DEVICE_TEST("sixteen bits store, float computes") {
  compare<bfloat16>({.name = "bfloat16", .length = 40, .channels = 8, .states = 4}, bfloat16_unit);
}
DEVICE_TEST("wrong sizes are refused before anything is started") {
  selective_scan_shape const s{sequences::batch(1, 2), 5, 3, 2};
  arena ws = arena::measure();
  bool refused = false;
  try {
    kernels::cuda_selective_scan<float>::forward({.dry = true}, s, {}, {}, nullptr, {}, ws);
  } catch (shape_error const& e) {
    refused = std::string(e.what()).find("groups must divide the 5 channels, got 2") != std::string::npos;
  }
  check(refused, "groups that do not divide the channels are refused by name");
}
