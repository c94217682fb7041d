// The CUDA kernels alone, batch of 8: 16 heads of 64 channels, Mamba-1 with 2048 channels of 16 states, Mamba-2
// with 32 heads of 64 channels and 128 states.
//   <kernel>_<forward|backward>/cuda/<bf16|f32>/<what>/T:<tokens>
//   <kernel>_step/cuda/<bf16|f32>/<what>/T:<tokens of the past>      one token, as in generation
//   kernels [--smoke]      --smoke: tiny shapes, every one once
// A floor is what copying a shape's tensors, its products or its exponentials take at the ceilings that are
// measured first.

#include <cstring>

#include "cases.hpp"

namespace {

using namespace seqmix;
using namespace seqmix::benchmarks;
using selectors::all;

template <class T>
using softmax_kernel = kernels::cuda_attention<all, T>;
template <class T>
using top1_kernel = kernels::cuda_top1<all, selectors::top1<>, T>;
template <class T>
using chunk_kernel = kernels::cuda_routed_attention<selectors::top1_chunk<>::which_type, T>;
template <class T>
using additive_kernel = kernels::cuda_recurrence<states::outer_product, false, T>;
template <class T>
using per_channel_kernel = kernels::cuda_recurrence<states::outer_product, true, T>;
template <class T>
using delta_kernel = kernels::cuda_recurrence<states::delta_rule, false, T>;

/// Lengths and widths; tiny ones show only that everything works.
struct plan {
  bool smoke;
  index_t sequences_, heads, dim, chunk;
  index_t scan_channels, scan_states;
  index_t ssd_heads, ssd_keys;
  std::vector<index_t> attention_lengths, scan_lengths, recurrence_lengths;

  static plan of(bool smoke) {
    if (smoke) return {true, 1, 2, 32, 16, 8, 4, 2, 32, {40}, {40}, {40}};
    return {false,
            8,
            16,
            64,
            128,
            2048,
            16,
            32,
            128,
            {2048, 8192, 16384},
            {2048, 8192, 16384, 65536},
            {2048, 8192, 16384}};
  }
  /// Floats at the shortest length only.
  template <class T>
  std::vector<index_t> lengths(std::vector<index_t> const& every) const {
    return sizeof(T) == 2 ? every : std::vector<index_t>{every.front()};
  }
};

std::string tokens(std::string const& what, index_t T) { return what + "/T:" + std::to_string(T); }

template <class Kernel, sees Sees, class T>
void add_attention(measurements& all_of, plan const& p, char const* what) {
  for (index_t length : p.lengths<T>(p.attention_lengths)) {
    attention_sizes sizes{{p.sequences_, length}, p.heads, p.dim, p.chunk};
    all_of.add<attention_case<Kernel, Sees, T>>("attention", tokens(what, length), {false, true}, sizes);
    if (Sees == sees::one_key) {
      sizes.training = false;
      all_of.add<attention_step_case<Kernel, Sees, T>>("attention_inference", tokens(what, length), {false}, sizes);
    }
    if (sizeof(T) == 4) continue;
    sizes = {{p.sequences_, 1}, p.heads, p.dim, p.chunk, length, false};
    all_of.add<attention_step_case<Kernel, Sees, T>>("attention_step", tokens(what, length), {false}, sizes);
  }
}

template <class Kernel, class T>
void add_recurrence(measurements& all_of, plan const& p, char const* what, recurrence_sizes sizes) {
  for (index_t length : p.lengths<T>(p.recurrence_lengths)) {
    sizes.in = {p.sequences_, length};
    all_of.add<recurrence_case<Kernel, T>>("recurrence", tokens(what, length), {false, true}, sizes);
  }
  if (sizeof(T) == 4) return;
  sizes.in = {p.sequences_, 1};
  sizes.with_state = true;
  all_of.add<recurrence_step_case<Kernel, T>>("recurrence_step", what, {false}, sizes);
}

template <class T>
void add_scan(measurements& all_of, plan const& p) {
  for (index_t length : p.lengths<T>(p.scan_lengths))
    all_of.add<scan_case<T>>("selective_scan", tokens("mamba1", length), {false, true},
                             scan_sizes{{p.sequences_, length}, p.scan_channels, p.scan_states});
  if (sizeof(T) == 4) return;
  all_of.add<scan_step_case<T>>("selective_scan_step", "mamba1", {false},
                                scan_sizes{{p.sequences_, 1}, p.scan_channels, p.scan_states, true});
}

template <class T>
void add_all(measurements& all_of, plan const& p) {
  add_scan<T>(all_of, p);
  add_attention<softmax_kernel<T>, sees::all_keys, T>(all_of, p, "softmax");
  add_attention<top1_kernel<T>, sees::one_key, T>(all_of, p, "top1_element");
  add_attention<chunk_kernel<T>, sees::own_and_one_chunk, T>(all_of, p, "top1_chunk");
  add_recurrence<additive_kernel<T>, T>(
      all_of, p, "mamba2",
      {.heads = p.ssd_heads, .key_heads = 1, .key_dim = p.ssd_keys, .value_dim = p.dim, .write = true});
  add_recurrence<per_channel_kernel<T>, T>(
      all_of, p, "gla",
      {.heads = p.heads, .key_heads = p.heads, .key_dim = p.dim, .value_dim = p.dim, .per_channel = true});
  add_recurrence<delta_kernel<T>, T>(
      all_of, p, "gated_delta",
      {.heads = p.heads, .key_heads = p.heads, .key_dim = p.dim, .value_dim = p.dim, .beta = true});
}

/// How many times faster than softmax attention of the same shape and run.
void print_ratios(measurements const& all_of, plan const& p) {
  std::printf("\n| times faster than softmax attention, bf16 ");
  for (index_t length : p.attention_lengths) std::printf("| T:%td ", length);
  std::printf("|\n|---|");
  for (std::size_t i = 0; i < p.attention_lengths.size(); ++i) std::printf("---|");
  std::printf("\n");
  for (std::string const& direction : {std::string("forward"), std::string("backward")})
    for (auto const& what :
         {"attention_" + direction + "/cuda/bf16/top1_element", "attention_" + direction + "/cuda/bf16/top1_chunk",
          "recurrence_" + direction + "/cuda/bf16/gla", "recurrence_" + direction + "/cuda/bf16/gated_delta"}) {
      std::printf("| %-41s ", what.c_str());
      for (index_t length : p.attention_lengths)
        std::printf("| %.2f ", all_of.ratio(tokens("attention_" + direction + "/cuda/bf16/softmax", length),
                                            tokens(what, length)));
      std::printf("|\n");
    }
}

int run(bool smoke) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("not run: no CUDA device\n");
    return 77;
  }
  cudaDeviceProp device{};
  expect(cudaGetDeviceProperties(&device, 0), "cudaGetDeviceProperties");
  auto const most = measure_ceilings(smoke);
  std::printf("%s, %d multiprocessors; measured: copy %.0f GB/s, bfloat16 products ", device.name,
              device.multiProcessorCount, most.bytes * 1e-9);
  if (most.matrix > 0)
    std::printf("%.0f TFLOP/s", most.matrix * 1e-12);
  else
    std::printf("not measured (no cuBLASLt)");
  std::printf(", float multiply-adds %.1f TFLOP/s, %.2f T exp/s\n\n", most.multiply_add * 1e-12,
              most.exponentials * 1e-12);

  auto const sizes = plan::of(smoke);
  measurements all_of(most, smoke);
  add_all<bfloat16>(all_of, sizes);
  add_all<float>(all_of, sizes);
  print_ratios(all_of, sizes);
  for (auto const& [name, count] : all_of.broken())
    std::printf("FAILED: %s: %llu results are infinite or NaN\n", name.c_str(), count);
  return all_of.broken().empty() ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  bool const smoke = argc == 2 && std::strcmp(argv[1], "--smoke") == 0;
  if (argc > 1 && !smoke) {
    std::fprintf(stderr, "kernels: expected nothing or --smoke\n");
    return 2;
  }
  try {
    return run(smoke);
  } catch (std::exception const& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
