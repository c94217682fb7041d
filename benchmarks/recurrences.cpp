// Recurrences alone: one sequence; 8 heads of 64 channels, Mamba-2's with 128 keys that its heads share, Mamba-1's
// 1024 channels with 16 states; one thread unless the name says more.
//   recurrence_<forward|backward>/cpu/f32/<variant>/T:<tokens>[/threads:<n>]
// Counters: seconds; FLOP/s counted from shapes (support/flops.hpp) and their share of the FMA peak, measured in
// the same process; bytes per token, of everything read and written once; peak memory of the process;
// for Mamba-1 exponentials a second. Forward keeps what backward needs. Behind the runs: the bars of
// docs/performance.md.

#include <algorithm>
#include <cmath>
#include <string>

#include <benchmark/benchmark.h>

#include "support/bars.hpp"
#include "support/flops.hpp"
#include "support/timing.hpp"
#include <seqmix/kernels/cpu/recurrence.hpp>
#include <seqmix/states/delta_rule.hpp>
#include <seqmix/states/diagonal_plus_low_rank.hpp>
#include <seqmix/states/elementwise.hpp>
#include <seqmix/states/exclusive.hpp>
#include <seqmix/states/outer_product.hpp>

namespace {

using namespace seqmix;
using namespace seqmix::benchmarks;
using kernels::recurrence_form;

/// What one variant's recurrence looks like. Decays are negative and small, steps and strengths in (0, 1), keys
/// have length 1 or so: the usual range of a trained model.
struct recurrence_case {
  char const* name;
  double flops;  ///< a token, head and number of the state; exponentials not counted
  index_t heads = 8, key_heads = 8, key_dim = 64, value_dim = 64, decay_keys = 1;
  bool constant = false, rated = false, writes = false, beta = false, low_rank = false;

  index_t state() const { return heads * key_dim * value_dim; }
  recurrence_shape shape(index_t T) const {
    return {.seq = sequences::batch(1, T),
            .heads = heads,
            .query_heads = key_heads,
            .key_heads = key_heads,
            .value_heads = heads,
            .gate_heads = heads,
            .key_dim = key_dim,
            .value_dim = value_dim,
            .scale = 1.0};
  }
};

/// Every array that a case reads, or the derivatives of all of them.
struct recurrence_arrays {
  buffer<float> q, k, v, g, write, beta, a, b, rate, o;
  recurrence_case const& c;
  index_t T;

  recurrence_arrays(recurrence_case const& cell, index_t count)
      : q(normals(count * cell.key_heads * key_numbers(cell), 1, unit(cell))),
        k(normals(count * cell.key_heads * key_numbers(cell), 2, unit(cell))),
        v(normals(count * cell.heads * cell.value_dim, 3)),
        g(uniform((cell.constant ? 1 : count) * cell.heads * cell.decay_keys, 4, -0.1, -0.001)),
        write(uniform(cell.writes ? count * cell.heads : 0, 5, 0.001, 0.1)),
        beta(uniform(cell.beta ? count * cell.heads : 0, 6, 0.0, 1.0)),
        a(normals(cell.low_rank ? k.size() : 0, 7, -unit(cell))), b(normals(a.size(), 8, 0.5 * unit(cell))),
        rate(uniform(cell.rated ? cell.heads * cell.key_dim : 0, 9, 1.0, 8.0)), o(normals(v.size(), 10)), c(cell),
        T(count) {}

  double bytes() const {
    return 4.0 * double(q.size() + k.size() + v.size() + g.size() + write.size() + beta.size() + a.size() +
                        b.size() + o.size());
  }
  view3<float> keys(buffer<float>& x) const {
    return x.size() == 0 ? view3<float>{} : view3<float>(x.data(), {T, c.key_heads, c.key_dim});
  }
  view3<float> values(buffer<float>& x) const { return {x.data(), {T, c.heads, c.value_dim}}; }
  view3<float> decays() {
    index_t const row = c.constant ? 0 : c.heads * c.decay_keys;
    return {g.data(), {T, c.heads, c.decay_keys}, {row, c.decay_keys, 1}};
  }
  view2<float> numbers(buffer<float>& x) const {
    return x.size() == 0 ? view2<float>{} : view2<float>(x.data(), {T, c.heads});
  }
  view2<float> rates() {
    return rate.size() == 0 ? view2<float>{} : view2<float>(rate.data(), {c.heads, c.key_dim});
  }
  recurrence_input<float> input() {
    return {keys(q), keys(k), values(v), decays(), numbers(write), numbers(beta), {}, keys(a), keys(b), rates()};
  }
  recurrence_gradient<float> gradient() {
    return {keys(q), keys(k), values(v), decays(), numbers(write), numbers(beta), {}, keys(a), keys(b), rates()};
  }

 private:
  static index_t key_numbers(recurrence_case const& c) { return c.key_dim > 1 ? c.key_dim : 0; }
  static double unit(recurrence_case const& c) { return 1.0 / std::sqrt(double(c.key_dim)); }
};

template <recurrence_form Form, class State>
auto carve_saved(arena& a, recurrence_shape const& s) {
  using isa = device::cpu::isa;
  if constexpr (Form == recurrence_form::channels)
    return kernels::detail::channel_saved<isa, float>(a, s);
  else
    return kernels::recurrence_saved<float>::carve<isa>(a, s, State::spec);
}

template <recurrence_form Form, class State>
void run(benchmark::State& state, recurrence_case const& c, index_t T, bool backward, int threads) {
  reset_peak_memory();
  recurrence_arrays x(c, T), d(c, backward ? T : 1);
  auto const s = c.shape(T);
  auto keep_memory = arena::growing(), ws = arena::growing();
  auto const keep = carve_saved<Form, State>(keep_memory, s);
  buffer<float> o(x.v.size());
  auto const forward = [&](device::cpu dev, arena& room) {
    kernels::recurrence_forward<Form, State>(dev, s, x.input(), x.values(o), &keep, {}, room);
  };
  double seconds = 0.0;
  if (backward) {
    forward(device::cpu{threads}, ws);
    seconds = time_kernel(
        state,
        [&](device::cpu dev, arena& room) {
          kernels::recurrence_backward<Form, State>(dev, s, x.input(), keep, view3<float const>(x.values(x.o)), {},
                                                    d.gradient(), room);
        },
        threads);
  } else {
    seconds = time_kernel(state, forward, threads);
  }
  double const runs = double(state.iterations()), flops = c.flops * double(T) * double(c.state());
  report_flops(state, runs * (backward ? backward_flops(flops) : flops), seconds, threads);
  state.counters["bytes per token"] = (x.bytes() + (backward ? d.bytes() : 0.0)) / double(T);
  state.counters["peak memory"] = peak_memory();
  if (c.rated && !backward) state.counters["exp/s"] = runs * double(T) * double(c.state()) / seconds;
}

template <recurrence_form Form, class State>
void add(recurrence_case const& c) {
  auto const one = [&](index_t T, bool backward, int threads) {
    benchmark::RegisterBenchmark(
        benchmark_name(backward ? "recurrence_backward" : "recurrence_forward", c.name, T, threads).c_str(),
        [=](benchmark::State& state) { run<Form, State>(state, c, T, backward, threads); })
        ->Unit(benchmark::kMillisecond);
  };
  for (index_t T : {512, 2048, 16384}) one(T, false, 1);
  one(2048, true, 1);
  if (machine_has_threads(2)) one(512, false, 2);
}

void add_all() {
  using namespace states;
  using enum recurrence_form;
  add<chunkwise, outer_product>({.name = "retnet", .flops = 5, .constant = true});
  add<chunkwise, outer_product>({.name = "mamba2", .flops = 5, .key_heads = 1, .key_dim = 128, .writes = true});
  add<chunkwise_per_channel, outer_product>({.name = "gla", .flops = 5, .decay_keys = 64});
  add<chunkwise_per_channel, exclusive<outer_product>>({.name = "rwkv6", .flops = 5, .decay_keys = 64});
  add<chunkwise_per_channel, diagonal_plus_low_rank>(
      {.name = "rwkv7", .flops = 9, .decay_keys = 64, .low_rank = true});
  add<chunkwise, delta_rule>({.name = "gated_deltanet", .flops = 7, .beta = true});
  add<chunkwise_per_channel, delta_rule>({.name = "kda", .flops = 7, .decay_keys = 64, .beta = true});
  add<channels, outer_product>({.name = "mamba1",
                                .flops = 6,
                                .heads = 1024,
                                .key_heads = 1,
                                .key_dim = 16,
                                .value_dim = 1,
                                .rated = true,
                                .writes = true});
  add<channels, elementwise>(
      {.name = "min_gru", .flops = 2, .heads = 1024, .key_heads = 1024, .key_dim = 1, .value_dim = 1});
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  add_all();
  collecting_reporter reporter;
  benchmark::RunSpecifiedBenchmarks(&reporter);
  print_recurrence_bars(reporter);
  return 0;
}
