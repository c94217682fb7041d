#include <array>

#include "routed_attention.hpp"

// Routed attention in float16.

namespace {

using namespace seqmix;
using namespace seqmix::testing;
using namespace seqmix::selectors;

template <class Which>
void compare(std::string const& what, routed_case& c, std::uint64_t seed) {
  draw<float16>(c, seed);
  check_results(what, run_on_device<Which, float16>(c), run_on_cpu<Which>(c), half_bits<float16>.output,
                half_bits<float16>.gradient, half_bits<float16>.decay);
}

}  // namespace

DEVICE_TEST("routed attention in float16 agrees with the CPU on the same stored numbers, at any width") {
  routed_sizes size;
  size.heads = 2;
  size.key_heads = size.value_heads = size.gate_heads = 1;
  size.chunk = 20;
  size.top_k = 2;
  std::uint64_t seed = 1;
  for (auto const& [key_dim, value_dim] :
       std::vector<std::array<index_t, 2>>{{8, 6}, {64, 64}, {96, 128}, {130, 24}}) {
    size.key_dim = key_dim;
    size.value_dim = value_dim;
    auto c = make_case(size, {50, 0, 3});
    c.gap = key_dim == 64 ? 8 : 3;
    c.sink = true;
    compare<own_plus_top_k<>>("K " + std::to_string(key_dim) + ", V " + std::to_string(value_dim), c, seed++);
  }
  auto d = make_case({}, {50});
  d.gate = routed_case::gate::tokens;
  d.shape.select.router_bias = true;
  compare<exactly_one<>>("exactly_one", d, 33);
}
