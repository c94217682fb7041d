#include "../support/law_layer.hpp"
#include <seqmix/models/variants.hpp>

// Published layers of the additive family with their own weights. A name map is data: published tensor -> ours.
// Short chunks put a boundary between the eleven tokens, long ones do not.

namespace {
using namespace seqmix;
using namespace seqmix::testing;

template <class Variant>
void check_chunks(char const* name, layer_options o, std::vector<weight_name> const& names,
                  layer_place const& place = {}) {
  for (index_t chunk : {3, 32}) {
    o.recurrence_chunk = chunk;
    check_golden<without_frame<Variant>>(name, o, names, place);
  }
}
}  // namespace

DOCTEST_TEST_CASE("a linear attention layer gives the golden results of the published one") {
  check_chunks<variants::linear_attention>("layer_linear_attn", variants::linear_attention_options(16, 2),
                                           {{"q_proj.weight", "mixer.query"},
                                            {"k_proj.weight", "mixer.key"},
                                            {"v_proj.weight", "mixer.value"},
                                            {"norm.weight", "mixer.head_norm.weight"},
                                            {"o_proj.weight", "mixer.out"}});
}

// The golden layer is that of flash-linear-attention, with the usual rotary angles; those of the authors' code are
// checked in formulas.cpp.
DOCTEST_TEST_CASE("a RetNet layer gives the golden results of the published one") {
  auto o = variants::retnet_options(16, 2);
  o.rope_interleaved = o.rope_closed = false;
  check_chunks<variants::retnet>("layer_retnet", o,
                                 {{"q_proj.weight", "mixer.query"},
                                  {"k_proj.weight", "mixer.key"},
                                  {"v_proj.weight", "mixer.value"},
                                  {"g_proj.weight", "mixer.z"},
                                  {"o_proj.weight", "mixer.out"},
                                  {"g_norm_swish_gate.weight", "mixer.head_norm.weight"}});
}

DOCTEST_TEST_CASE("a gated linear attention layer gives the golden results of the published one") {
  auto o = variants::gla_options(16, 2);
  o.gate_rank = 4;
  check_chunks<variants::gla>("layer_gla", o,
                              {{"q_proj.weight", "mixer.query"},
                               {"k_proj.weight", "mixer.key"},
                               {"v_proj.weight", "mixer.value"},
                               {"g_proj.weight", "mixer.z"},
                               {"gk_proj.0.weight", "mixer.gate.raw.down"},
                               {"gk_proj.1.weight", "mixer.gate.raw.up"},
                               {"gk_proj.1.bias", "mixer.gate.bias"},
                               {"o_proj.weight", "mixer.out"},
                               {"g_norm_swish_gate.weight", "mixer.head_norm.weight"}});
}

// The published layer is handed its lower bound; ours is the second of two with softmax over [0, logit(bound)].
DOCTEST_TEST_CASE("an HGRN2 layer gives the golden results of the published one") {
  check_chunks<variants::hgrn2>("layer_hgrn2", variants::hgrn2_options(16, 8),
                                {{"q_proj.weight", "mixer.query"},
                                 {"f_proj.weight", "mixer.gate.raw"},
                                 {"i_proj.weight", "mixer.value"},
                                 {"g_norm.weight", "mixer.head_norm.weight"},
                                 {"o_proj.weight", "mixer.out"},
                                 {nullptr, "gate.lower_bound", {.rows = 1}},
                                 {"lower_bound", "gate.lower_bound", {.our_row = 1}, logit}},
                                {.position = {1, 2}});
}

DOCTEST_TEST_CASE("a Mamba-1 layer gives the golden results of the published one") {
  auto o = variants::mamba1_options(16, 4);
  o.gate_rank = 3;
  check_chunks<variants::mamba1>("layer_mamba1", o,
                                 {{"in_proj.weight", "mixer.value"},
                                  {"in_proj.weight", "mixer.z", {.row = 32}},
                                  {"conv1d.weight", "mixer.conv.weight"},
                                  {"conv1d.bias", "mixer.conv.bias"},
                                  {"x_proj.weight", "mixer.gate.raw.down"},
                                  {"x_proj.weight", "mixer.key", {.row = 3}},
                                  {"x_proj.weight", "mixer.query", {.row = 7}},
                                  {"dt_proj.weight", "mixer.gate.raw.up"},
                                  {"dt_proj.bias", "mixer.gate.dt_bias"},
                                  {"A_log", "mixer.gate.A_log"},
                                  {"D", "mixer.skip"},
                                  {"out_proj.weight", "mixer.out"}});
}

DOCTEST_TEST_CASE("a Mamba-2 layer gives the golden results of the published one") {
  check_chunks<variants::mamba2>("layer_mamba2", variants::mamba2_options({.heads = 4, .state = 6, .head_dim = 8}),
                                 {{"in_proj.weight", "mixer.z"},
                                  {"in_proj.weight", "mixer.value", {.row = 32}},
                                  {"in_proj.weight", "mixer.key", {.row = 64}},
                                  {"in_proj.weight", "mixer.query", {.row = 70}},
                                  {"in_proj.weight", "mixer.gate.raw", {.row = 76}},
                                  {"conv1d.weight", "mixer.conv.weight"},
                                  {"conv1d.bias", "mixer.conv.bias"},
                                  {"A_log", "mixer.gate.A_log"},
                                  {"dt_bias", "mixer.gate.dt_bias"},
                                  {"D", "mixer.skip"},
                                  {"norm.weight", "mixer.head_norm.weight"},
                                  {"out_proj.weight", "mixer.out"}});
}
