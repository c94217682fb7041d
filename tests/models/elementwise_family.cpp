#include "../support/models.hpp"
#include <seqmix/models/variants.hpp>

namespace {

using namespace seqmix;
using namespace seqmix::testing;

template <class Layer>
void check(typename Layer::options o) {
  o.recurrence_chunk = 4;
  check_model_gradients<Layer>(o);
  check_model_difference<Layer>(o);
  check_model_laws<Layer, double>(o);
}

}  // namespace

DOCTEST_TEST_CASE("a model of HGRN layers has the gradients of both oracles, and the laws hold") {
  check<variants::hgrn>(variants::hgrn_options(16));
}

DOCTEST_TEST_CASE("a model of Mamba-1 layers has the gradients of both oracles, and the laws hold") {
  auto const o = variants::mamba1_options(16, 3);
  check<variants::mamba1>(o);
  check_model_laws<variants::mamba1, float>(o);
}

DOCTEST_TEST_CASE("a model of minGRU layers has the gradients of both oracles, and the laws hold") {
  check<variants::min_gru>(variants::min_gru_options(16));
}

DOCTEST_TEST_CASE("a model of minLSTM layers has the gradients of both oracles, and the laws hold") {
  check<variants::min_lstm>(variants::min_gru_options(16, 1.5));
}

DOCTEST_TEST_CASE("a model of Griffin's recurrent blocks has the gradients of both oracles, and the laws hold") {
  // With larger gates the root's bounded slope acts, which no difference sees.
  auto o = variants::rg_lru_options(12, 3);
  o.start.up = init::normal_fan_in(0.01);
  check<variants::rg_lru>(o);
}
