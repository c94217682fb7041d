// The kernels alone: one sequence, 8 heads of 64 channels, or 512 channels; one thread unless the name says more.
//   <kernel>_<forward|backward>/cpu/f32/<what>/T:<tokens>[/threads:<n>]
// Counters: seconds; FLOP/s counted from shapes (support/flops.hpp) and their share of the FMA peak, measured in
// the same process. Behind the runs: the bars of docs/performance.md.

#include <string>
#include <thread>
#include <vector>

#include <benchmark/benchmark.h>

#include "support/bars.hpp"
#include "support/flops.hpp"
#include "support/timing.hpp"
#include <seqmix/kernels/cpu/attention.hpp>
#include <seqmix/kernels/cpu/convolution.hpp>
#include <seqmix/kernels/cpu/linear.hpp>
#include <seqmix/kernels/cpu/routed_attention.hpp>
#include <seqmix/selectors/select.hpp>

namespace {

using namespace seqmix;
using namespace seqmix::benchmarks;

constexpr index_t heads = 8, dim = 64, channels = heads * dim, taps = 4, chunk = 128;

/// Times body(device, workspace).
template <class Body>
void time(benchmark::State& state, double flops, Body const& body, int threads = 1) {
  double const seconds = time_kernel(state, body, threads);
  report_flops(state, flops * double(state.iterations()), seconds, threads);
}

/// Queries, keys, values, an output and the derivatives of all, [T,H,d] each.
struct tokens {
  index_t T;
  buffer<float> q, k, v, o, d_q, d_k, d_v, d_o;
  explicit tokens(index_t count)
      : T(count), q(normals(count * channels, 1)), k(normals(count * channels, 2)), v(normals(count * channels, 3)),
        o(count * channels), d_q(count * channels), d_k(count * channels), d_v(count * channels),
        d_o(normals(count * channels, 4)) {}
  view3<float> view(buffer<float>& x) const { return {x.data(), {T, heads, dim}}; }
  attention_input<float> attention() { return {view(q), view(k), view(v)}; }
  attention_gradient<float> attention_gradients() { return {view(d_q), view(d_k), view(d_v)}; }
};

attention_shape shape_of(index_t T) {
  attention_shape s;
  s.seq = sequences::batch(1, T);
  s.heads = s.key_heads = s.value_heads = s.gate_heads = heads;
  s.key_dim = s.value_dim = dim;
  s.scale = 0.125;
  s.select.chunk = chunk;
  return s;
}

/// Runs one direction of an element selector's attention; without a backward to come a hard choice skips its
/// surrogate.
template <class Selector>
void attention(benchmark::State& state, index_t T, bool backward, bool training, double flops, int threads = 1) {
  using which = typename Selector::which_type;
  using how = typename Selector::how_type;
  tokens x(T);
  auto const s = shape_of(T);
  auto keep_memory = arena::growing();
  auto const keep = kernels::attention_saved<how, float>::carve(keep_memory, s);
  auto const forward = [&](device::cpu dev, arena& ws) {
    kernels::attention_forward<which, how>(dev, s, x.attention(), x.view(x.o),
                                           training || backward ? &keep : nullptr, {}, ws);
  };
  if (!backward) return time(state, flops, forward, threads);
  auto ws = arena::growing();
  forward(device::cpu{1}, ws);
  time(state, flops, [&](device::cpu dev, arena& room) {
    kernels::attention_backward<which, how>(dev, s, x.attention(), view3<float const>(x.view(x.o)), keep,
                                            view3<float const>(x.view(x.d_o)), x.attention_gradients(), room);
  });
}

template <class Which>
void routed(benchmark::State& state, index_t T, bool backward, double flops, int threads = 1) {
  tokens x(T);
  auto const s = shape_of(T);
  auto keep_memory = arena::growing();
  auto const keep = kernels::routed_saved<Which, float>::carve(keep_memory, s);
  auto const forward = [&](device::cpu dev, arena& ws) {
    kernels::routed_attention_forward<Which>(dev, s, x.attention(), x.view(x.o), &keep, {}, ws);
  };
  if (!backward) return time(state, flops, forward, threads);
  auto ws = arena::growing();
  forward(device::cpu{1}, ws);
  time(state, flops, [&](device::cpu dev, arena& room) {
    kernels::routed_attention_backward<Which>(dev, s, x.attention(), view3<float const>(x.view(x.o)), keep,
                                              view3<float const>(x.view(x.d_o)), x.attention_gradients(), room);
  });
}

void convolution(benchmark::State& state, index_t T, bool backward, double flops) {
  tokens x(T);
  auto w = normals(channels * taps, 6), d_w = buffer<float>(channels * taps), b = normals(channels, 7),
       d_b = buffer<float>(channels);
  auto const seq = sequences::batch(1, T);
  auto const rows = [&](buffer<float>& r) { return view2<float>(r.data(), {T, channels}); };
  view2<float> const taps_cj(w.data(), {channels, taps}), d_taps(d_w.data(), {channels, taps});
  time(state, flops, [&](device::cpu dev, arena& ws) {
    if (backward)
      kernels::conv_backward(dev, seq, view2<float const>(rows(x.q)), taps_cj, b.data(), true, {}, rows(x.d_o), {},
                             rows(x.d_q), d_taps, d_b.data(), {}, ws);
    else
      kernels::conv_forward(dev, seq, view2<float const>(rows(x.q)), taps_cj, b.data(), true, {}, rows(x.o), {},
                            ws);
  });
}

void linear(benchmark::State& state, index_t T, bool backward, double flops) {
  tokens x(T);
  auto w = normals(channels * channels, 8), d_w = buffer<float>(channels * channels);
  auto const rows = [&](buffer<float>& r) { return view2<float>(r.data(), {T, channels}); };
  view2<float> const w_oi(w.data(), {channels, channels}), dw_oi(d_w.data(), {channels, channels});
  time(state, flops, [&](device::cpu dev, arena& ws) {
    if (!backward) return kernels::linear_forward(dev, view2<float const>(rows(x.q)), w_oi, rows(x.o), false, ws);
    kernels::linear_backward_input(dev, view2<float const>(rows(x.d_o)), w_oi, rows(x.d_q), false, ws);
    kernels::linear_backward_weight(dev, view2<float const>(rows(x.d_o)), rows(x.q), dw_oi, ws);
  });
}

/// Both directions at some lengths; run(state, T, backward, flops) with forward(T) operations forward.
template <class Forward, class Run>
void add(std::string const& kernel, std::string const& what, Forward const& forward, Run const& run,
         std::vector<index_t> const& lengths = {256, 2048}) {
  for (index_t T : lengths)
    for (bool backward : {false, true})
      benchmark::RegisterBenchmark(
          (kernel + (backward ? "_backward" : "_forward") + "/cpu/f32/" + what + "/T:" + std::to_string(T)).c_str(),
          [=](benchmark::State& state) {
            double const flops = forward(T);
            run(state, T, backward, backward ? backward_flops(flops) : flops);
          })
          ->Unit(benchmark::kMillisecond);
}

/// Forward at T = 2048 by two threads, where the machine has them.
template <class Run>
void add_two_threads(std::string const& what, double flops, Run const& run) {
  if (std::thread::hardware_concurrency() < 2) return;
  benchmark::RegisterBenchmark(("attention_forward/cpu/f32/" + what + "/T:2048/threads:2").c_str(),
                               [=](benchmark::State& state) { run(state, flops); })
      ->Unit(benchmark::kMillisecond);
}

void add_attention() {
  using namespace selectors;
  using softmax_type = seqmix::select<all, softmax>;
  using chunk_type = typename top1_chunk<>::which_type;
  auto const soft = [](index_t T) { return attention_flops(causal_pairs(T), heads, dim, dim); };
  auto const hard = [](index_t T) { return hard_attention_flops(causal_pairs(T), heads, dim); };
  auto const chunks = [](index_t T) { return attention_flops(chunk_pairs(T, chunk), heads, dim, dim); };
  add("attention", "softmax", soft,
      [](benchmark::State& s, index_t T, bool backward, double flops) {
        attention<softmax_type>(s, T, backward, true, flops);
      },
      {256, 2048, 8192});
  add("attention", "top1_element", soft, [](benchmark::State& s, index_t T, bool backward, double flops) {
    attention<top1_element<>>(s, T, backward, true, flops);
  });
  for (index_t T : {256, 2048})
    benchmark::RegisterBenchmark(
        ("attention_inference/cpu/f32/top1_element/T:" + std::to_string(T)).c_str(),
        [=](benchmark::State& s) { attention<top1_element<>>(s, T, false, false, hard(T)); })
        ->Unit(benchmark::kMillisecond);
  add("attention", "top1_chunk", chunks,
      [](benchmark::State& s, index_t T, bool backward, double flops) {
        routed<chunk_type>(s, T, backward, flops);
      },
      {256, 2048, 8192});
  add_two_threads("softmax", soft(2048), [](benchmark::State& s, double flops) {
    attention<softmax_type>(s, 2048, false, true, flops, 2);
  });
  add_two_threads("top1_element", soft(2048), [](benchmark::State& s, double flops) {
    attention<top1_element<>>(s, 2048, false, true, flops, 2);
  });
  add_two_threads("top1_chunk", chunks(2048),
                  [](benchmark::State& s, double flops) { routed<chunk_type>(s, 2048, false, flops, 2); });
}

void add_all() {
  add_attention();
  add(
      "convolution", "silu", [](index_t T) { return convolution_flops(T, channels, taps); }, convolution);
  add(
      "linear", "512x512", [](index_t T) { return linear_flops(T, channels, channels); }, linear);
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  add_all();
  collecting_reporter reporter;
  benchmark::RunSpecifiedBenchmarks(&reporter);
  print_attention_bars(reporter);
  return 0;
}
