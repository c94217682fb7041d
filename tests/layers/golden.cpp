#include "../support/law_layer.hpp"
#include <seqmix/models/variants.hpp>

// Published layers with their own weights. A name map is data: published tensor and first row -> our tensor.

namespace {

using namespace seqmix;
using namespace seqmix::testing;

/// The mixing part alone, as the published layers are: no norm in front, no residual around.
constexpr extras alone(extras e) {
  e.norm = norm_kind::none;
  e.residual = false;
  return e;
}
using lone_mamba2 = layer<variants::mamba2::mixer_type_, alone(variants::mamba2::surroundings)>;
using lone_retnet = layer<variants::retnet::mixer_type_, alone(variants::retnet::surroundings)>;

template <class Layer>
void check(char const* name, typename Layer::options const& o, std::vector<weight_name> const& names) {
  golden_case const c(std::string("ops/") + name);
  check_golden_layer<Layer, double>(c, o, names);
  check_golden_layer<Layer, float>(c, o, names);
}

}  // namespace

DOCTEST_TEST_CASE("a Transformer++ block gives the golden results of Llama's decoder layer") {
  auto o = variants::attention_options(16, 4, 2);
  std::get<1>(o).width = 24;
  check<variants::transformer_pp>("layer_llama", o,
                                  {{"self_attn.q_proj.weight", 0, "mixer.query"},
                                   {"self_attn.k_proj.weight", 0, "mixer.key"},
                                   {"self_attn.v_proj.weight", 0, "mixer.value"},
                                   {"self_attn.o_proj.weight", 0, "mixer.out"},
                                   {"input_layernorm.weight", 0, "mixer.norm.weight"},
                                   {"mlp.gate_proj.weight", 0, "mlp.gate"},
                                   {"mlp.up_proj.weight", 0, "mlp.up"},
                                   {"mlp.down_proj.weight", 0, "mlp.down"},
                                   {"post_attention_layernorm.weight", 0, "mlp.norm.weight"}});
}

DOCTEST_TEST_CASE("a Mamba-2 layer gives the golden results of the published one") {
  for (index_t chunk : {3, 32})
    check<lone_mamba2>("layer_mamba2",
                       {.heads = 4,
                        .query_heads = 1,
                        .key_heads = 1,
                        .key_dim = 6,
                        .value_dim = 8,
                        .scale = 1.0,
                        .recurrence_chunk = chunk},
                       {{"in_proj.weight", 0, "mixer.z", 32},
                        {"in_proj.weight", 32, "mixer.value", 32},
                        {"in_proj.weight", 64, "mixer.key", 6},
                        {"in_proj.weight", 70, "mixer.query", 6},
                        {"in_proj.weight", 76, "mixer.gate.raw", 4},
                        {"conv1d.weight", 0, "mixer.conv.weight"},
                        {"conv1d.bias", 0, "mixer.conv.bias"},
                        {"A_log", 0, "mixer.gate.A_log"},
                        {"dt_bias", 0, "mixer.gate.dt_bias"},
                        {"D", 0, "mixer.skip"},
                        {"norm.weight", 0, "mixer.head_norm.weight"},
                        {"out_proj.weight", 0, "mixer.out"}});
}

DOCTEST_TEST_CASE("a RetNet layer gives the golden results of the published one") {
  for (index_t chunk : {4, 32})
    check<lone_retnet>("layer_retnet", {.heads = 2, .key_dim = 8, .value_dim = 16, .recurrence_chunk = chunk},
                       {{"q_proj.weight", 0, "mixer.query"},
                        {"k_proj.weight", 0, "mixer.key"},
                        {"v_proj.weight", 0, "mixer.value"},
                        {"g_proj.weight", 0, "mixer.z"},
                        {"o_proj.weight", 0, "mixer.out"},
                        {"g_norm_swish_gate.weight", 0, "mixer.head_norm.weight"}});
}
