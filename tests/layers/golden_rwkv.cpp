#include "../support/law_layer.hpp"
#include <seqmix/models/variants.hpp>

// Published RWKV layers with their own weights, from a shift state of zero. A name map is data: published tensor ->
// ours. RWKV-4 and -5 weigh the token itself in their shift, ours and the later ones the token before.

namespace {
using namespace seqmix;
using namespace seqmix::testing;

constexpr weight_name::place transposed{.transposed = true};

template <class Block>
void check_chunks(char const* name, layer_options o, std::vector<weight_name> const& names,
                  layer_place const& place = {}) {
  for (index_t chunk : {3, 32}) {
    o.recurrence_chunk = chunk;
    check_golden<without_frame<Block>>(name, o, names, place);
  }
}
}  // namespace

DOCTEST_TEST_CASE("RWKV-4's time mix gives the golden results of the published one") {
  check_chunks<variants::rwkv4>("layer_rwkv4_tmix", std::get<0>(variants::rwkv4_options(16)),
                                {{"time_decay", "mixer.gate.time_decay"},
                                 {"time_first", "mixer.bonus"},
                                 {"time_mix_k", "mixer.shift.raw", {}, one_minus},
                                 {"time_mix_v", "mixer.shift.value", {}, one_minus},
                                 {"time_mix_r", "mixer.shift.z", {}, one_minus},
                                 {"key.weight", "mixer.gate.raw"},
                                 {"value.weight", "mixer.value"},
                                 {"receptance.weight", "mixer.z"},
                                 {"output.weight", "mixer.out"}});
}

DOCTEST_TEST_CASE("RWKV-5's time mix gives the golden results of the published one") {
  check_chunks<variants::rwkv5>("layer_rwkv5_tmix", std::get<0>(variants::rwkv5_options(16, 8)),
                                {{"time_mix_k", "mixer.shift.key", {}, one_minus},
                                 {"time_mix_v", "mixer.shift.value", {}, one_minus},
                                 {"time_mix_r", "mixer.shift.query", {}, one_minus},
                                 {"time_mix_g", "mixer.shift.z", {}, one_minus},
                                 {"time_decay", "mixer.gate.time_decay"},
                                 {"time_faaaa", "mixer.bonus"},
                                 {"receptance.weight", "mixer.query"},
                                 {"key.weight", "mixer.key"},
                                 {"value.weight", "mixer.value"},
                                 {"gate.weight", "mixer.z"},
                                 {"output.weight", "mixer.out"},
                                 {"ln_x.weight", "mixer.head_norm.weight"},
                                 {"ln_x.bias", "mixer.head_norm.bias"}});
}

// The five low-rank mixtures stand in the order w, k, v, r, g there, in the order g, v, k, r, w here.
DOCTEST_TEST_CASE("RWKV-6's time mix gives the golden results of the published one") {
  std::vector<weight_name> names{{"time_maa_x", "mixer.shift.input"},
                                 {"time_maa_w", "mixer.shift.raw"},
                                 {"time_maa_k", "mixer.shift.key"},
                                 {"time_maa_v", "mixer.shift.value"},
                                 {"time_maa_r", "mixer.shift.query"},
                                 {"time_maa_g", "mixer.shift.z"},
                                 {"time_decay", "mixer.gate.time_decay"},
                                 {"time_decay_w1", "mixer.gate.raw.down", transposed},
                                 {"time_decay_w2", "mixer.gate.raw.up", transposed},
                                 {"time_faaaa", "mixer.bonus"},
                                 {"receptance.weight", "mixer.query"},
                                 {"key.weight", "mixer.key"},
                                 {"value.weight", "mixer.value"},
                                 {"gate.weight", "mixer.z"},
                                 {"output.weight", "mixer.out"},
                                 {"ln_x.weight", "mixer.head_norm.weight"},
                                 {"ln_x.bias", "mixer.head_norm.bias"}};
  struct mixture {
    char const* up;
    index_t theirs, ours;
  };
  for (auto const& m : {mixture{"mixer.shift.raw.up", 0, 4}, mixture{"mixer.shift.key.up", 1, 2},
                        mixture{"mixer.shift.value.up", 2, 1}, mixture{"mixer.shift.query.up", 3, 3},
                        mixture{"mixer.shift.z.up", 4, 0}}) {
    names.push_back({"time_maa_w1",
                     "mixer.shift.down",
                     {.row = 32 * m.theirs, .rows = 32, .our_row = 32 * m.ours, .transposed = true}});
    names.push_back({"time_maa_w2", m.up, {.transposed = true, .matrix = m.theirs}});
  }
  check_chunks<variants::rwkv6>("layer_rwkv6_tmix", std::get<0>(variants::rwkv6_options(16, 8)), names);
}

DOCTEST_TEST_CASE("RWKV-7's time mix gives the golden results of the published one") {
  auto o = std::get<0>(variants::rwkv7_options(16, 8));
  o.gate_rank = o.rate_rank = o.first_value_rank = o.output_gate_rank = 4;
  std::vector<weight_name> names{{"x_r", "mixer.shift.query"},
                                 {"x_w", "mixer.shift.raw"},
                                 {"x_k", "mixer.shift.key"},
                                 {"x_v", "mixer.shift.value"},
                                 {"x_a", "mixer.shift.rate"},
                                 {"x_g", "mixer.shift.z"},
                                 {"w0", "mixer.gate.w0"},
                                 {"w1", "mixer.gate.raw.down", transposed},
                                 {"w2", "mixer.gate.raw.up", transposed},
                                 {"a0", "mixer.rate.bias"},
                                 {"a1", "mixer.rate.down", transposed},
                                 {"a2", "mixer.rate.up", transposed},
                                 {"g1", "mixer.z.down", transposed},
                                 {"g2", "mixer.z.up", transposed},
                                 {"k_k", "mixer.removal"},
                                 {"k_a", "mixer.removal_mix"},
                                 {"r_k", "mixer.bonus"},
                                 {"receptance.weight", "mixer.query"},
                                 {"key.weight", "mixer.key"},
                                 {"value.weight", "mixer.value"},
                                 {"output.weight", "mixer.out"},
                                 {"ln_x.weight", "mixer.head_norm.weight"},
                                 {"ln_x.bias", "mixer.head_norm.bias"}};
  // In the first layer v0, v1 and v2 have no effect, and their stored gradients are 0.
  check_chunks<variants::rwkv7>("layer_rwkv7_tmix_l0", o, names, {.position = {0, 2}});
  names.insert(names.end(), {{"v0", "mixer.first_value.bias"},
                             {"v1", "mixer.first_value.down", transposed},
                             {"v2", "mixer.first_value.up", transposed}});
  check_chunks<variants::rwkv7>("layer_rwkv7_tmix_l1", o, names, {.position = {1, 2}});
}

DOCTEST_TEST_CASE("RWKV-7's channel mix gives the golden results of the published one") {
  auto o = std::get<1>(variants::rwkv7_options(16, 8));
  o.width = 24;
  check_golden<without_frame<channel_mix<false>>>(
      "layer_rwkv7_cmix", o,
      {{"x_k", "channel.shift.key"}, {"key.weight", "channel.key"}, {"value.weight", "channel.value"}},
      {.adds_input = true});
}
