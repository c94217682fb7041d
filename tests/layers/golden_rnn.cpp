#include "../support/law_layer.hpp"
#include <seqmix/models/variants.hpp>

// Published gated recurrent layers with their own weights. A name map is data: published tensor -> ours.

namespace {
using namespace seqmix;
using namespace seqmix::testing;
}  // namespace

// The published layer is handed its lower bound; ours is the second of two with softmax over [0, logit(bound)].
DOCTEST_TEST_CASE("an HGRN layer gives the golden results of the published one") {
  check_golden<without_frame<variants::hgrn>>("layer_hgrn", variants::hgrn_options(16),
                                              {{"i_proj.weight", "mixer.value"},
                                               {"f_proj.weight", "mixer.gate.raw"},
                                               {"g_proj.weight", "mixer.z"},
                                               {"g_norm.weight", "mixer.head_norm.weight"},
                                               {"o_proj.weight", "mixer.out"},
                                               {nullptr, "gate.lower_bound", {.rows = 1}},
                                               {"lower_bound", "gate.lower_bound", {.our_row = 1}, logit}},
                                              {.position = {1, 2}});
}

// The second of the two rows of the published batch holds two documents, the first of six tokens.
DOCTEST_TEST_CASE("Griffin's recurrent block gives the golden results of the published one") {
  std::vector<weight_name> names{{"linear_y.weight", "mixer.z"},
                                 {"linear_y.bias", "mixer.z.bias"},
                                 {"linear_x.weight", "mixer.value"},
                                 {"linear_x.bias", "mixer.value.bias"},
                                 {"linear_out.weight", "mixer.out"},
                                 {"linear_out.bias", "mixer.out.bias"},
                                 {"conv_1d.w", "mixer.conv.weight", {.transposed = true}},
                                 {"conv_1d.b", "mixer.conv.bias"},
                                 {"rg_lru.a_param", "mixer.gate.Lambda"},
                                 {"rg_lru.a_gate.b", "mixer.gate.bias", {.rows = 12}},
                                 {"rg_lru.input_gate.b", "mixer.gate.bias", {.rows = 12, .our_row = 12}}};
  for (index_t block : {0, 1}) {
    weight_name::place at{.rows = 6, .our_row = 6 * block, .transposed = true, .matrix = block};
    names.push_back({"rg_lru.a_gate.w", "mixer.gate.raw", at});
    at.our_row += 12;
    names.push_back({"rg_lru.input_gate.w", "mixer.gate.raw", at});
  }
  check_golden<without_frame<variants::rg_lru>>("layer_griffin_recurrent", variants::rg_lru_options(12, 2), names,
                                                {.offsets = {0, 11, 17, 22}});
}
