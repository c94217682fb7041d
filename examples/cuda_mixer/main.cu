// A mixer on device pointers inside a CUDA program: a sequence forward and backward, then tokens one by one.
//   nvcc -std=c++20 -O3 -arch=native -I include examples/cuda_mixer/main.cu -o cuda_mixer && ./cuda_mixer
#include <cstdio>

#include <seqmix/kernels/cuda/history.cuh>
#include <seqmix/kernels/cuda/top1_attention.cuh>
#include <seqmix/mixers/cuda_instance.hpp>

using mixer = seqmix::attention<seqmix::selectors::top1_element<>>;  // any mixer_on<M, seqmix::device::cuda>
using number = seqmix::bfloat16;
static_assert(seqmix::explain_on_cuda<mixer, number>());

/// Zeroed device memory, dense.
template <class T = number>
T* zeros(seqmix::index_t count) {
  void* memory = nullptr;
  seqmix::kernels::cuda::check(cudaMalloc(&memory, std::size_t(count) * sizeof(T)), "cudaMalloc");
  seqmix::kernels::cuda::check(cudaMemset(memory, 0, std::size_t(count) * sizeof(T)), "cudaMemset");
  return static_cast<T*>(memory);
}

int main() {
  seqmix::index_t const T = 256, H = 8, D = 64;
  seqmix::mixer_shape s{.seq = seqmix::sequences::batch(1, T), .heads = H, .query_heads = H, .key_heads = H,
                        .value_heads = H, .gate_heads = H, .key_dim = D, .value_dim = D, .scale = 0.125, .capacity = T};
  auto const tensor = [&] { return seqmix::view3<number>(zeros(T * H * D), {T, H, D}); };
  seqmix::mixer_input<number> in{.q_rhk = tensor(), .k_rhk = tensor(), .v_rhv = tensor()};
  seqmix::mixer_gradient<number> const d{.q_rhk = tensor(), .k_rhk = tensor(), .v_rhv = tensor()};
  auto const o = tensor(), d_o = tensor();

  // The same code plans its memory in a dry run and then runs: no allocation, nothing waits on the way.
  auto const sequence = [&](seqmix::device::cuda const& dev, seqmix::arena& memory) {
    auto const saved = mixer::saved<number>::carve<seqmix::device::cuda::isa>(memory, s);
    mixer::forward(dev, s, in, o, nullptr, nullptr, &saved, memory);
    mixer::backward(dev, s, in, o, saved, d_o, nullptr, nullptr, d, nullptr, memory);
    memory.rewind(0);
  };
  // Decoding carries a state; each call is a sequence of one token that continues it.
  auto one = s;
  one.seq = seqmix::sequences::batch(1, 1);
  auto const decode = [&](seqmix::device::cuda const& dev, seqmix::index_t t, mixer::state<number>& state,
                          seqmix::arena& memory) {
    seqmix::mixer_input<number> const x{in.q_rhk.slice(0, t, 1), in.k_rhk.slice(0, t, 1), in.v_rhv.slice(0, t, 1)};
    mixer::forward(dev, one, x, o.slice(0, t, 1), &state, &state, nullptr, memory);
  };
  auto plan = seqmix::arena::measure(), cache = seqmix::arena::measure();
  auto planned = mixer::state<number>::carve(cache, one);
  sequence({.dry = true}, plan);
  decode({.dry = true}, 0, planned, plan);
  seqmix::arena memory(zeros<std::byte>(plan.peak()), std::size_t(plan.peak()));
  seqmix::arena room(zeros<std::byte>(cache.peak()), std::size_t(cache.peak()));
  seqmix::device::cuda const dev;  // a stream of yours: {.stream = stream}
  sequence(dev, memory);
  auto state = mixer::state<number>::carve(room, one);
  for (seqmix::index_t t = 0; t < 16; ++t) decode(dev, t, state, memory);
  seqmix::kernels::cuda::check(cudaDeviceSynchronize(), "the mixer");
  std::printf("%s: %td tokens forward and backward, 16 decoded, %td bytes of workspace\n", mixer::name().c_str(), T,
              plan.peak());
}
