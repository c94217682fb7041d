#include "../support/law_layer.hpp"
#include <seqmix/models/variants.hpp>

// Published layers of the delta family with their own weights. A name map is data: published tensor -> ours. Short
// chunks put boundaries between the eleven tokens, long ones do not.

namespace {
using namespace seqmix;
using namespace seqmix::testing;

template <class Variant>
void check_chunks(char const* name, layer_options o, std::vector<weight_name> const& names) {
  for (index_t chunk : {3, 32}) {
    o.recurrence_chunk = chunk;
    check_golden<without_frame<Variant>>(name, o, names);
  }
}
}  // namespace

// Our convolution runs over values, keys and queries together, in this order.

DOCTEST_TEST_CASE("a DeltaNet layer gives the golden results of the published one") {
  check_chunks<variants::deltanet>("layer_deltanet", variants::deltanet_options(16, 2),
                                   {{"q_proj.weight", "mixer.query"},
                                    {"k_proj.weight", "mixer.key"},
                                    {"v_proj.weight", "mixer.value"},
                                    {"b_proj.weight", "mixer.beta"},
                                    {"v_conv1d.weight", "mixer.conv.weight", {.rows = 16}},
                                    {"k_conv1d.weight", "mixer.conv.weight", {.rows = 16, .our_row = 16}},
                                    {"q_conv1d.weight", "mixer.conv.weight", {.rows = 16, .our_row = 32}},
                                    {"o_norm.weight", "mixer.head_norm.weight"},
                                    {"o_proj.weight", "mixer.out"}});
}

DOCTEST_TEST_CASE("a Gated DeltaNet layer gives the golden results of the published one") {
  check_chunks<variants::gated_deltanet>("layer_gated_deltanet", variants::gated_deltanet_options(2, 4),
                                         {{"A_log", "mixer.gate.A_log"},
                                          {"dt_bias", "mixer.gate.dt_bias"},
                                          {"q_proj.weight", "mixer.query"},
                                          {"k_proj.weight", "mixer.key"},
                                          {"v_proj.weight", "mixer.value"},
                                          {"a_proj.weight", "mixer.gate.raw"},
                                          {"b_proj.weight", "mixer.beta"},
                                          {"v_conv1d.weight", "mixer.conv.weight", {.rows = 16}},
                                          {"k_conv1d.weight", "mixer.conv.weight", {.rows = 8, .our_row = 16}},
                                          {"q_conv1d.weight", "mixer.conv.weight", {.rows = 8, .our_row = 24}},
                                          {"g_proj.weight", "mixer.z"},
                                          {"o_norm.weight", "mixer.head_norm.weight"},
                                          {"o_proj.weight", "mixer.out"}});
}

DOCTEST_TEST_CASE("Gated DeltaNet with shared keys gives the golden results of its other publication") {
  auto o = variants::gated_deltanet_options(4, 4);
  o.query_heads = o.key_heads = 2;
  o.value_dim = 6;
  o.head_norm_eps = 1e-6;
  std::vector<weight_name> names{{"A_log", "mixer.gate.A_log"},
                                 {"dt_bias", "mixer.gate.dt_bias"},
                                 {"conv1d.weight", "mixer.conv.weight", {.row = 16, .rows = 24}},
                                 {"conv1d.weight", "mixer.conv.weight", {.row = 8, .rows = 8, .our_row = 24}},
                                 {"conv1d.weight", "mixer.conv.weight", {.rows = 8, .our_row = 32}},
                                 {"norm.weight", "mixer.head_norm.weight"},
                                 {"out_proj.weight", "mixer.out"}};
  add_interleaved(names, "in_proj_qkvz.weight", 2,
                  {{"mixer.query", 4}, {"mixer.key", 4}, {"mixer.value", 12}, {"mixer.z", 12}});
  add_interleaved(names, "in_proj_ba.weight", 2, {{"mixer.beta", 2}, {"mixer.gate.raw", 2}});
  check_chunks<variants::gated_deltanet>("layer_gated_deltanet_hf", o, names);
}

DOCTEST_TEST_CASE("a Kimi Delta Attention layer gives the golden results of the published one") {
  check_chunks<variants::kda>("layer_kda", variants::kda_options(2, 4),
                              {{"A_log", "mixer.gate.A_log"},
                               {"dt_bias", "mixer.gate.dt_bias"},
                               {"q_proj.weight", "mixer.query"},
                               {"k_proj.weight", "mixer.key"},
                               {"v_proj.weight", "mixer.value"},
                               {"v_conv1d.weight", "mixer.conv.weight", {.rows = 8}},
                               {"k_conv1d.weight", "mixer.conv.weight", {.rows = 8, .our_row = 8}},
                               {"q_conv1d.weight", "mixer.conv.weight", {.rows = 8, .our_row = 16}},
                               {"f_proj.0.weight", "mixer.gate.raw.down"},
                               {"f_proj.1.weight", "mixer.gate.raw.up"},
                               {"b_proj.weight", "mixer.beta"},
                               {"g_proj.0.weight", "mixer.z.down"},
                               {"g_proj.1.weight", "mixer.z.up"},
                               {"g_proj.1.bias", "mixer.z.up.bias"},
                               {"o_norm.weight", "mixer.head_norm.weight"},
                               {"o_proj.weight", "mixer.out"}});
}
