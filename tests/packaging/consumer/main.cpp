// What a consumer writes: every test of this folder compiles this one file in its own way. Each function uses one
// room of the library and returns true when the result is right.
#include <array>
#include <cstdio>

#include <seqmix/models/variants.hpp>
#include <seqmix/tensor/arena.hpp>
#include <seqmix/tensor/parallel_for.hpp>
#include <seqmix/tensor/philox.hpp>
#include <seqmix/tensor/sequences.hpp>
#include <seqmix/version.hpp>

namespace {

bool use_tensors() {
  seqmix::buffer<float> numbers(6);
  seqmix::view2<float> const x_rc(numbers.data(), {2, 3});
  seqmix::parallel_for(seqmix::device::cpu{2}, 2, [&](seqmix::index_t r, int) { x_rc(r, 2) = float(r + 1); });
  return numbers[2] == 1.0f && numbers[5] == 2.0f && seqmix::sequences::batch(2, 3).rows() == 6;
}

bool use_random_numbers() { return seqmix::philox4x32({0, 0, 0, 0}, {0, 0})[0] == 0x6627e8d5u; }

bool use_a_language_model() {
  using model = seqmix::language_model<seqmix::pattern<seqmix::variants::transformer_pp>>;
  model const m(
      {.vocabulary = 8, .d_model = 16, .layers = 1, .layer = {seqmix::variants::attention_options(16, 2)}});
  seqmix::buffer<float> weights(m.parameters().size());
  m.parameters().initialise(1, weights.data());
  auto memory = m.make_memory<float>(seqmix::device::cpu{}, seqmix::sequences::batch(1, 4), {.training = false});
  std::array<std::int32_t, 4> const tokens{1, 2, 3, 4}, labels{2, 3, 4, 5};
  m.forward(memory, weights.data(), tokens.data());
  auto const sum = m.loss(memory, labels.data(), 1.0);
  return sum.counted == 4 && sum.loss > 0.0;
}

}  // namespace

int main() {
  struct {
    char const* name;
    bool (*run)();
  } constexpr uses[] = {
      {"tensors", use_tensors},
      {"random numbers", use_random_numbers},
      {"language model", use_a_language_model},
  };
  int wrong = 0;
  for (auto const& use : uses) {
    bool const right = use.run();
    std::printf("%s: %s\n", use.name, right ? "right" : "WRONG");
    wrong += right ? 0 : 1;
  }
  return wrong;
}
