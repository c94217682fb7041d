#include "../support/models.hpp"
#include <seqmix/models/variants.hpp>

namespace {

using namespace seqmix;
using namespace seqmix::testing;

/// Published start values leave some projections at zero, whose gradients would then hide mistakes behind them.
template <class Options>
Options awake(Options o) {
  auto& s = std::get<0>(o).start;
  s.in = s.out = s.down = s.up = s.key = init::fan_in();
  auto& mix = std::get<1>(o);
  mix.in = mix.out = mix.receptance = init::fan_in(0.5);
  std::get<0>(o).shift_rank = std::get<0>(o).rate_rank = 3;
  std::get<0>(o).gate_rank = std::get<0>(o).output_gate_rank = 5;
  std::get<0>(o).first_value_rank = 4;
  std::get<0>(o).recurrence_chunk = 4;
  return o;
}
template <class Layer>
void check(typename Layer::options const& o) {
  check_model_gradients<Layer>(o);
  check_model_difference<Layer>(o);
  check_model_laws<Layer, double>(o);
}

}  // namespace

DOCTEST_TEST_CASE("a model of RWKV-4 blocks has the gradients of both oracles, and the laws hold") {
  check<variants::rwkv4>(awake(variants::rwkv4_options(16)));
}

DOCTEST_TEST_CASE("a model of RWKV-5 blocks has the gradients of both oracles, and the laws hold") {
  check<variants::rwkv5>(awake(variants::rwkv5_options(16, 8)));
}

DOCTEST_TEST_CASE("a model of RWKV-6 blocks has the gradients of both oracles, and the laws hold") {
  check<variants::rwkv6>(awake(variants::rwkv6_options(16, 8)));
}

DOCTEST_TEST_CASE("a model of RWKV-7 blocks has the gradients of both oracles, and the laws hold") {
  check<variants::rwkv7>(awake(variants::rwkv7_options(16, 8)));
}
