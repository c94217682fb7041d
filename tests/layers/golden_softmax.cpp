#include "../support/law_layer.hpp"
#include <seqmix/models/variants.hpp>

// Published softmax layers with their own weights. A name map is data: published tensor -> ours.

namespace {
using namespace seqmix;
using namespace seqmix::testing;
}  // namespace

DOCTEST_TEST_CASE("a Transformer++ block gives the golden results of Llama's decoder layer") {
  auto o = variants::attention_options(16, 4, 2);
  std::get<1>(o).width = 24;
  check_golden<variants::transformer_pp>("layer_llama", o,
                                         {{"self_attn.q_proj.weight", "mixer.query"},
                                          {"self_attn.k_proj.weight", "mixer.key"},
                                          {"self_attn.v_proj.weight", "mixer.value"},
                                          {"self_attn.o_proj.weight", "mixer.out"},
                                          {"input_layernorm.weight", "mixer.norm.weight"},
                                          {"mlp.gate_proj.weight", "mlp.gate"},
                                          {"mlp.up_proj.weight", "mlp.up"},
                                          {"mlp.down_proj.weight", "mlp.down"},
                                          {"post_attention_layernorm.weight", "mlp.norm.weight"}});
}

DOCTEST_TEST_CASE("a Forgetting Transformer layer gives the golden results of the published one") {
  check_golden<without_frame<variants::fox>>("layer_fox", std::get<0>(variants::fox_options(16, 2)),
                                             {{"q_proj.weight", "mixer.query"},
                                              {"k_proj.weight", "mixer.key"},
                                              {"v_proj.weight", "mixer.value"},
                                              {"f_proj.weight", "mixer.gate.raw"},
                                              {"f_proj.bias", "mixer.gate.bias"},
                                              {"g_proj.weight", "mixer.z"},
                                              {"o_proj.weight", "mixer.out"},
                                              {"q_norm.weight", "mixer.query_norm.weight"},
                                              {"k_norm.weight", "mixer.key_norm.weight"}});
}

DOCTEST_TEST_CASE("a GPT-NeoX block gives the golden results of the published one") {
  auto o = variants::gpt_neox_options(16, 2, 0.5);
  std::get<1>(o).width = 24;
  std::vector<weight_name> names{{"attention.dense.weight", "mixer.out"},
                                 {"attention.dense.bias", "mixer.out.bias"},
                                 {"input_layernorm.weight", "mixer.norm.weight"},
                                 {"input_layernorm.bias", "mixer.norm.bias"},
                                 {"post_attention_layernorm.weight", "mlp.norm.weight"},
                                 {"post_attention_layernorm.bias", "mlp.norm.bias"},
                                 {"mlp.dense_h_to_4h.weight", "mlp.up"},
                                 {"mlp.dense_h_to_4h.bias", "mlp.up.bias"},
                                 {"mlp.dense_4h_to_h.weight", "mlp.down"},
                                 {"mlp.dense_4h_to_h.bias", "mlp.down.bias"}};
  add_interleaved(names, "attention.query_key_value.weight", 2,
                  {{"mixer.query", 8}, {"mixer.key", 8}, {"mixer.value", 8}});
  add_interleaved(names, "attention.query_key_value.bias", 2,
                  {{"mixer.query.bias", 8}, {"mixer.key.bias", 8}, {"mixer.value.bias", 8}});
  check_golden<variants::gpt_neox>("layer_gpt_neox", o, names);
}
