#pragma once

#include <seqmix/gates/alibi.hpp>
#include <seqmix/gates/constant.hpp>
#include <seqmix/gates/gdn.hpp>
#include <seqmix/gates/gla.hpp>
#include <seqmix/gates/hgrn.hpp>
#include <seqmix/gates/hgrn2.hpp>
#include <seqmix/gates/kda.hpp>
#include <seqmix/gates/kda_bounded.hpp>
#include <seqmix/gates/log_sigmoid.hpp>
#include <seqmix/gates/mamba1.hpp>
#include <seqmix/gates/mamba2.hpp>
#include <seqmix/gates/min_gru.hpp>
#include <seqmix/gates/min_lstm.hpp>
#include <seqmix/gates/retention.hpp>
#include <seqmix/gates/rg_lru.hpp>
#include <seqmix/gates/rwkv4.hpp>
#include <seqmix/gates/rwkv5.hpp>
#include <seqmix/gates/rwkv6.hpp>
#include <seqmix/gates/rwkv7.hpp>
#include <seqmix/layers/channel_mix.hpp>
#include <seqmix/layers/gated_mlp.hpp>
#include <seqmix/layers/mamba3_layer.hpp>
#include <seqmix/layers/mlp.hpp>
#include <seqmix/layers/mlstm_layer.hpp>
#include <seqmix/layers/parallel_block.hpp>
#include <seqmix/layers/s4d_layer.hpp>
#include <seqmix/layers/slstm_layer.hpp>
#include <seqmix/mixers/native_sparse.hpp>
#include <seqmix/models/language_model.hpp>

/// The named architectures, one alias each: what the policies are. Sizes and numbers come with `*_options`, which
/// hold the published defaults.
namespace seqmix::inline v0::variants {

// ---- softmax family

/// Llama's block: pre-norm attention with rotary positions, then SwiGLU (Touvron et al., arXiv 2302.13971).
template <class Selector>
using attention_block = block<layer<attention<Selector>, extras{.rope = true}>, swiglu<>>;

using transformer_pp = attention_block<selectors::softmax>;
using sliding_window = attention_block<selectors::window>;
using top1_element = attention_block<selectors::top1_element<>>;
using top1_chunk = attention_block<selectors::top1_chunk<>>;
/// Mixture of block attention (Lu et al., arXiv 2502.13189), equations 5-8: top_k does not count the own block.
using moba = attention_block<selectors::own_plus_top_k<>>;
/// Native sparse attention (Yuan et al., arXiv 2502.11089), equations 5-12: compressed, selected and recent tokens,
/// a gated sum of three attentions.
using nsa = block<layer<native_sparse<>, extras{.rope = true}>, swiglu<>>;
/// ALiBi's fixed slopes instead of rotary positions (Press et al., arXiv 2108.12409).
using alibi = block<layer<attention<selectors::softmax, gates::alibi>, extras{}>, swiglu<>>;
/// Forgetting Transformer (Lin et al., arXiv 2503.02130), equation 3: a forget gate as score bias, no positions,
/// norm of queries and keys, sigmoid output gate.
using fox = block<layer<attention<selectors::softmax, gates::log_sigmoid>,
                        extras{.qk_norm = key_norm::rms, .output_gate = true, .gate_map = activation::sigmoid}>,
                  swiglu<>>;
/// GPT-NeoX (Black et al., arXiv 2204.06745): LayerNorm, biases, rotary positions on a part of each head, erf-GELU,
/// and attention beside the MLP.
using gpt_neox = parallel_block<
    layer<attention<>, extras{.norm = norm_kind::layer, .residual = false, .bias = true, .rope = true}>,
    mlp<activation::gelu, norm_kind::layer, true, false>>;

// ---- additive linear family

/// Linear attention (Katharopoulos et al., arXiv 2006.16236), equation 4: elu + 1 features, divided by the sum of
/// the weights; then a norm per head, as in the code of flash-linear-attention.
using linear_attention =
    layer<recurrence<states::outer_product, gates::none>, extras{.query_map = activation::elu_plus_one,
                                                                 .key_map = activation::elu_plus_one,
                                                                 .normalise = true,
                                                                 .head_norm = output_norm::per_head}>;
/// The same without the norm, as the paper has it.
using normalised_linear_attention =
    layer<recurrence<states::outer_product, gates::none>,
          extras{.query_map = activation::elu_plus_one, .key_map = activation::elu_plus_one, .normalise = true}>;
/// Sun et al. (arXiv 2307.08621), equation 8: fixed decays, rotary positions, norm per head, then a SiLU gate.
using retnet = layer<recurrence<states::outer_product, gates::retention>,
                     extras{.rope = true, .head_norm = output_norm::per_head, .output_gate = true}>;
/// Gated linear attention (Yang et al., arXiv 2312.06635), section 4.4.
using gla = layer<recurrence<states::outer_product, gates::gla>,
                  extras{.head_norm = output_norm::per_head, .output_gate = true}>;
/// HGRN (Qin et al., arXiv 2311.04823): one gated channel each, lower bounds that grow from layer to layer.
using hgrn =
    layer<recurrence<states::elementwise, gates::hgrn>,
          extras{.value_map = activation::silu, .head_norm = output_norm::full_width, .output_gate = true}>;
/// HGRN2 (Qin et al., arXiv 2404.07904), equation 9: keys 1 - e^g.
using hgrn2 = layer<recurrence<states::outer_product, gates::hgrn2>, extras{.query_map = activation::silu,
                                                                            .keys = key_source::one_minus_decay,
                                                                            .head_norm = output_norm::full_width}>;
/// Gu, Dao (arXiv 2312.00752), algorithm 2 and figure 3: step, B and C from the convolved values.
using mamba1 = layer<recurrence<states::outer_product, gates::mamba1>,
                     extras{.conv = true, .keys_from = feed_source::convolved, .skip = true, .output_gate = true}>;
/// Dao, Gu (arXiv 2405.21060), figure 6: convolution and SiLU over x, B, C, the skip D, gate before norm; no MLP.
using mamba2 = layer<recurrence<states::outer_product, gates::mamba2>, extras{.conv = true,
                                                                              .skip = true,
                                                                              .head_norm = output_norm::full_width,
                                                                              .output_gate = true,
                                                                              .gate_before_norm = true}>;

/// Mamba-3 (arXiv 2603.15569), one input and one output: trapezoidal writes, rotated B and C; then an MLP.
using mamba3 = block<mamba3_layer<>, swiglu<>>;

/// S4D (Gu et al., arXiv 2206.11893): complex diagonal systems that no token changes, then GELU and a GLU.
using s4d = s4d_layer<>;

// ---- delta family

/// DeltaNet (Yang et al., arXiv 2406.06484), section 3.3: convolutions without bias, unit keys and queries.
using deltanet =
    layer<recurrence<states::delta_rule, gates::none>,
          extras{.conv = true, .conv_bias = false, .qk_norm = key_norm::l2, .head_norm = output_norm::per_head}>;
/// Gated DeltaNet (Yang et al., arXiv 2412.06464), equation 10 and figure 1.
using gated_deltanet = layer<recurrence<states::delta_rule, gates::gdn>, extras{.conv = true,
                                                                                .conv_bias = false,
                                                                                .qk_norm = key_norm::l2,
                                                                                .head_norm = output_norm::per_head,
                                                                                .output_gate = true}>;
/// Kimi Delta Attention (Kimi team, arXiv 2510.26692), equation 1: a decay per key channel, a low-rank sigmoid
/// gate.
template <gate Gate>
using kda_with = layer<recurrence<states::delta_rule, Gate>, extras{.conv = true,
                                                                    .conv_bias = false,
                                                                    .qk_norm = key_norm::l2,
                                                                    .head_norm = output_norm::per_head,
                                                                    .output_gate = true,
                                                                    .gate_map = activation::sigmoid,
                                                                    .gate_from = feed::low_rank,
                                                                    .gate_bias = true}>;
using kda = kda_with<gates::kda>;
using kda_bounded = kda_with<gates::kda_bounded>;

// ---- gated recurrent networks

/// minGRU (Feng et al., arXiv 2410.01201), appendix B: positive candidates, no biases.
using min_gru = layer<recurrence<states::elementwise, gates::min_gru>, extras{.value_map = activation::min_gru}>;
/// minLSTM, the same with normalised forget and input gates.
using min_lstm = layer<recurrence<states::elementwise, gates::min_lstm>, extras{.value_map = activation::min_gru}>;
/// Griffin's recurrent block (De et al., arXiv 2402.19427), section 2.3, with the RG-LRU of section 2.4.
using rg_lru = layer<recurrence<states::elementwise, gates::rg_lru>, extras{.bias = true,
                                                                            .conv = true,
                                                                            .conv_map = activation::identity,
                                                                            .output_gate = true,
                                                                            .gate_map = activation::gelu_tanh}>;

/// xLSTM's two blocks (Beck et al., arXiv 2405.04517), sections 2.2 to 2.4.
using mlstm = mlstm_layer<>;
using slstm = block<slstm_layer<>, gated_mlp<>>;

// ---- RWKV: a time mix and a channel mix make a block

/// RWKV-4 (Peng et al., arXiv 2305.13048), equations 11-17.
using rwkv4_time_mix = layer<recurrence<states::wkv, gates::rwkv4>, extras{.norm = norm_kind::layer,
                                                                           .shift = token_shift::fixed,
                                                                           .own = own_token::bonus,
                                                                           .output_gate = true,
                                                                           .gate_map = activation::sigmoid}>;
using rwkv4 = block<rwkv4_time_mix, channel_mix<>>;
/// RWKV-5 (Eagle) and RWKV-6 (Finch), Peng et al. (arXiv 2404.05892), sections 3.1 and 3.2.
template <gate Gate, token_shift Shift>
using eagle_time_mix =
    layer<recurrence<states::exclusive<states::outer_product>, Gate>, extras{.norm = norm_kind::layer,
                                                                             .shift = Shift,
                                                                             .own = own_token::bonus,
                                                                             .head_norm = output_norm::group,
                                                                             .output_gate = true}>;
using rwkv5_time_mix = eagle_time_mix<gates::rwkv5, token_shift::fixed>;
using rwkv6_time_mix = eagle_time_mix<gates::rwkv6, token_shift::dynamic>;
using rwkv5 = block<rwkv5_time_mix, channel_mix<>>;
using rwkv6 = block<rwkv6_time_mix, channel_mix<>>;
/// RWKV-7 (Peng et al., arXiv 2503.14456), section 4.
using rwkv7_time_mix =
    layer<recurrence<states::diagonal_plus_low_rank, gates::rwkv7>, extras{.norm = norm_kind::layer,
                                                                           .shift = token_shift::fixed,
                                                                           .removal_keys = true,
                                                                           .first_value = true,
                                                                           .own = own_token::bonus_after_norm,
                                                                           .head_norm = output_norm::group,
                                                                           .output_gate = true,
                                                                           .gate_map = activation::identity,
                                                                           .gate_from = feed::low_rank,
                                                                           .gate_inside = hidden::sigmoid}>;
using rwkv7 = block<rwkv7_time_mix, channel_mix<false>>;

// ---- hybrids: layers of different kinds in one pattern

/// One attention layer in four, the others Gated DeltaNet.
using hybrid = pattern<gated_deltanet, gated_deltanet, gated_deltanet, transformer_pp>;
/// Griffin (De et al., arXiv 2402.19427): two recurrent blocks, then local attention, each with its MLP.
using griffin = pattern<block<rg_lru, swiglu<>>, block<rg_lru, swiglu<>>, sliding_window>;

// ---- sizes and numbers

/// Sizes of an attention block: `key_heads` groups the queries; the MLP has 8/3 d_model channels, rounded up to 8.
inline std::tuple<layer_options, swiglu_options>
attention_options(index_t d_model, index_t heads, index_t key_heads = 0, index_t window = 0, index_t chunk = 0) {
  index_t const dim = d_model / heads;
  layer_options mix{
      .heads = heads, .key_heads = key_heads, .value_heads = key_heads, .key_dim = dim, .value_dim = dim};
  mix.window = window;
  mix.chunk = chunk;
  mix.norm_eps = 1e-6;
  return {mix, {.width = (8 * d_model / 3 + 7) / 8 * 8}};
}
/// The same for MoBA: `blocks` are the earlier blocks a query chooses.
inline std::tuple<layer_options, swiglu_options> moba_options(index_t d_model, index_t heads, index_t block,
                                                              index_t blocks) {
  auto o = attention_options(d_model, heads, 0, 0, block);
  std::get<0>(o).top_k = blocks;
  return o;
}
/// NSA: `blocks` are the chosen ones beside the own; queries share keys in groups (16 and more are published).
struct nsa_sizes {
  index_t heads = 16, key_heads = 1, block = 64, blocks = 15, window = 512;
};
inline std::tuple<layer_options, swiglu_options> nsa_options(index_t d_model, nsa_sizes s) {
  auto o = attention_options(d_model, s.heads, s.key_heads, s.window, s.block);
  std::get<0>(o).top_k = s.blocks;
  return o;
}
/// FoX: its norms have eps 1e-5.
inline std::tuple<layer_options, swiglu_options> fox_options(index_t d_model, index_t heads) {
  auto o = attention_options(d_model, heads);
  std::get<0>(o).qk_norm_eps = 1e-5;
  return o;
}
/// GPT-NeoX: rotary positions on a quarter of each head unless told otherwise, an MLP of four times the width.
inline std::tuple<layer_options, mlp_options> gpt_neox_options(index_t d_model, index_t heads,
                                                               double rotated = 0.25) {
  index_t const dim = d_model / heads;
  layer_options mix{.heads = heads, .key_dim = dim, .value_dim = dim};
  mix.rope_channels = index_t(rotated * double(dim)) / 2 * 2;
  return {mix, {.width = 4 * d_model}};
}

namespace detail {
/// Keys of `keys` and values of `values` times d_model over all heads.
inline layer_options expanded(index_t d_model, index_t heads, double keys, double values) {
  return {.heads = heads,
          .key_dim = index_t(keys * double(d_model)) / heads,
          .value_dim = index_t(values * double(d_model)) / heads};
}
}  // namespace detail

inline layer_options linear_attention_options(index_t d_model, index_t heads) {
  return detail::expanded(d_model, heads, 1.0, 1.0);
}
/// Sizes of a RetNet layer: keys of d_model, values of twice that; angles, and xavier start values with their
/// gains, as in its authors' code. (Weights of flash-linear-attention have the usual rotary angles:
/// rope_interleaved and rope_closed are false there.)
inline layer_options retnet_options(index_t d_model, index_t heads) {
  auto o = detail::expanded(d_model, heads, 1.0, 2.0);
  o.rope_interleaved = o.rope_closed = true;
  o.start.in = init::xavier(std::exp2(-2.5));
  o.start.out = init::xavier(0.5);
  return o;
}
/// GLA: half the width for keys, a gate of rank 16; its authors' xavier start values.
inline layer_options gla_options(index_t d_model, index_t heads) {
  auto o = detail::expanded(d_model, heads, 0.5, 1.0);
  o.start.in = o.start.out = init::xavier(std::exp2(-2.5));
  return o;
}
/// HGRN: one head a channel.
inline layer_options hgrn_options(index_t d_model) { return {.heads = d_model, .key_dim = 1, .value_dim = 1}; }
/// HGRN2: keys of `expand` channels a head; its authors' default is 128.
inline layer_options hgrn2_options(index_t d_model, index_t expand = 128) {
  return {.heads = d_model / expand, .key_dim = expand, .value_dim = expand};
}
/// Mamba-1: twice the width, 16 states a channel, a step of rank d_model / 16.
inline layer_options mamba1_options(index_t d_model, index_t states = 16, index_t expand = 2) {
  layer_options o{
      .heads = expand * d_model, .query_heads = 1, .key_heads = 1, .key_dim = states, .value_dim = 1, .scale = 1.0};
  o.gate_rank = (d_model + 15) / 16;
  o.start.in = init::fan_in();
  o.start.out = init::fan_in_per_layer();
  o.start.up = init::fan_in();  // U(+-1/sqrt(rank))
  return o;
}
/// Sizes of a Mamba-2 layer: the heads of a group share B and C, and its channels are normed together;
/// framework-style start values.
struct mamba2_sizes {
  index_t heads = 1, state = 128, head_dim = 64, groups = 1;
};
inline layer_options mamba2_options(mamba2_sizes s) {
  layer_options o{.heads = s.heads,
                  .query_heads = s.groups,
                  .key_heads = s.groups,
                  .key_dim = s.state,
                  .value_dim = s.head_dim,
                  .scale = 1.0};
  o.norm_groups = s.groups;
  o.start.in = init::fan_in();
  o.start.out = init::fan_in_per_layer();
  return o;
}
/// Mamba-3: keys of 128, heads of 64.
inline std::tuple<mamba3_layer_options, swiglu_options> mamba3_options(index_t d_model, index_t key_dim = 128,
                                                                       index_t head_dim = 64) {
  mamba3_layer_options mix{.key_dim = key_dim, .value_dim = head_dim};
  return {mix, {.width = (8 * d_model / 3 + 7) / 8 * 8, .norm_eps = mix.norm_eps}};
}
inline mlstm_layer_options mlstm_options(index_t heads = 4) { return {.heads = heads}; }
inline std::tuple<slstm_layer_options, gated_mlp_options> slstm_options(index_t heads = 4) {
  return {{.heads = heads}, {}};
}
inline s4d_layer_options s4d_options(index_t states = 64) { return {.states = states}; }
inline layer_options deltanet_options(index_t d_model, index_t heads) {
  return detail::expanded(d_model, heads, 1.0, 1.0);
}
/// Gated DeltaNet: heads of `head_dim` keys and twice as many values.
inline layer_options gated_deltanet_options(index_t heads, index_t head_dim, index_t expand_values = 2) {
  return {.heads = heads, .key_dim = head_dim, .value_dim = expand_values * head_dim};
}
/// KDA: gate and output gate of the rank of a head's values.
inline layer_options kda_options(index_t heads, index_t head_dim) {
  layer_options o{.heads = heads, .key_dim = head_dim, .value_dim = head_dim};
  o.gate_rank = o.output_gate_rank = head_dim;
  return o;
}
/// minGRU and minLSTM: `expand` times the width.
inline layer_options min_gru_options(index_t d_model, double expand = 1.0) {
  layer_options o{.heads = index_t(expand * double(d_model)), .key_dim = 1, .value_dim = 1};
  o.start.in = o.start.out = init::fan_in();
  return o;
}
/// Griffin's recurrent block: `width` channels, gates in `blocks` square blocks.
inline layer_options rg_lru_options(index_t width, index_t blocks) {
  layer_options o{.heads = width, .key_dim = 1, .value_dim = 1};
  o.gate_blocks = blocks;
  o.start.in = o.start.out = init::normal_fan_in();
  o.start.up = init::normal_fan_in();
  return o;
}

namespace detail {

/// RWKV's start values of shifts and bonuses: n / C, with the layer's place from the top (eta) and bottom (rho).
struct rwkv_place {
  double n, eta, rho;
  explicit rwkv_place(initial_element const& e)
      : n(double(e.row) / double(e.rows)), eta(1.0 - double(e.layer) / double(e.layers)),
        rho(e.layers > 1 ? double(e.layer) / double(e.layers - 1) : 0.0) {}
};
/// Ours weigh the row before: 1 - (n/C)^(a eta) - b rho.
inline initialiser rwkv_shift(double power, double more = 0.0) {
  return {[](initial_element const& e) {
            rwkv_place const p(e);
            return 1.0 - std::pow(p.n, e.a * p.eta) - e.b * p.rho;
          },
          power, more};
}
inline double zigzag(initial_element const& e) { return double((e.row + 1) % 3) - 1.0; }
inline layer_options rwkv_options(index_t d_model, index_t head_dim) {
  return {.heads = d_model / head_dim, .key_dim = head_dim, .value_dim = head_dim, .scale = 1.0};
}
inline channel_mix_options rwkv_channel_options(index_t d_model, double expand) {
  channel_mix_options o{.width = index_t(expand * double(d_model))};
  o.in = init::constant(0.0);
  o.shift_key = rwkv_shift(1.0);
  o.shift_receptance = rwkv_shift(1.0);
  return o;
}
/// A rank of RWKV-7: max(32, round(c sqrt(C) / 32) 32).
inline index_t rwkv7_rank(index_t d_model, double c) {
  return (std::max)(index_t(32), index_t(std::lround(c * std::sqrt(double(d_model)) / 32.0)) * 32);
}

/// RWKV-7's second low-rank factors, orthogonal; its code has them transposed, [rank, C], with a gain that grows
/// where the rank is the greater side.
inline initialiser rwkv7_up(double gain) {
  return {.a = gain, .matrix = [](initial_matrix const& m) {
            double const widened = m.a * std::sqrt((std::max)(1.0, double(m.columns) / double(m.rows)));
            seqmix::detail::make_orthogonal(m.to, m.rows, m.columns, widened);
          }};
}

}  // namespace detail

/// RWKV-4: every channel a head. Start values of its training code; its zero-scaled matrices start at zero there,
/// here with a small uniform rule so that no projection is dead.
inline std::tuple<layer_options, channel_mix_options> rwkv4_options(index_t d_model) {
  layer_options o{.heads = d_model, .key_dim = 1, .value_dim = 1};
  o.start.shift_key = detail::rwkv_shift(1.0);
  o.start.shift_raw = detail::rwkv_shift(1.0);
  o.start.shift_value = detail::rwkv_shift(1.0, 0.3);
  o.start.shift_z = detail::rwkv_shift(0.5);
  o.start.in = o.start.out = init::fan_in(0.1);
  o.start.bonus = {[](initial_element const& e) { return std::log(0.3) + 0.5 * detail::zigzag(e); }};
  auto mix = detail::rwkv_channel_options(d_model, 4.0);
  mix.in = mix.out = mix.receptance = init::fan_in(0.1);
  return {o, mix};
}
/// RWKV-5: heads of `head_dim`; the group norm's eps 64e-5 is that of its code, 1e-5 behind a division by 8.
inline std::tuple<layer_options, channel_mix_options> rwkv5_options(index_t d_model, index_t head_dim = 64) {
  auto o = detail::rwkv_options(d_model, head_dim);
  o.head_norm_eps = 64e-5;
  o.start.shift_key = o.start.shift_raw = detail::rwkv_shift(1.0);
  o.start.shift_value = detail::rwkv_shift(1.0, 0.3);
  o.start.shift_query = o.start.shift_z = detail::rwkv_shift(0.5);
  o.start.bonus = {[](initial_element const& e) {
    double const place = double(e.row) / double(e.rows > 1 ? e.rows - 1 : 1);
    return detail::rwkv_place(e).rho * (1.0 - place) + 0.1 * detail::zigzag(e);
  }};
  o.start.in = o.start.out = init::fan_in(0.5);
  auto mix = detail::rwkv_channel_options(d_model, 3.5);
  mix.in = mix.out = mix.receptance = init::fan_in(0.5);
  return {o, mix};
}
/// RWKV-6: dynamic shifts of rank 32, decays of rank 64.
inline std::tuple<layer_options, channel_mix_options> rwkv6_options(index_t d_model, index_t head_dim = 64) {
  auto [o, mix] = rwkv5_options(d_model, head_dim);
  o.shift_rank = 32;
  o.gate_rank = 64;
  o.start.shift_input = detail::rwkv_shift(1.0);
  o.start.down = init::constant(0.0);
  o.start.up = init::uniform(-0.01, 0.01);
  return {o, mix};
}
/// RWKV-7: start values of its training code.
inline std::tuple<layer_options, channel_mix_options> rwkv7_options(index_t d_model, index_t head_dim = 64) {
  auto o = detail::rwkv_options(d_model, head_dim);
  auto& s = o.start;
  o.head_norm_eps = 64e-5;
  o.gate_rank = o.rate_rank = detail::rwkv7_rank(d_model, 2.5);
  o.first_value_rank = detail::rwkv7_rank(d_model, 1.7);
  o.output_gate_rank = detail::rwkv7_rank(d_model, 5.0);
  auto const mu = [](double power) {
    return initialiser{[](initial_element const& e) {
                         detail::rwkv_place const p(e);
                         return 1.0 - std::pow(p.n, e.a * p.eta);
                       },
                       power};
  };
  s.shift_query = s.shift_z = mu(0.2);
  s.shift_raw = s.shift_rate = mu(0.9);
  s.shift_key = s.shift_value = mu(0.7);
  s.in = init::fan_in(0.5);
  s.key = init::fan_in(0.05);
  s.out = init::constant(0.0);
  s.down = init::constant(0.0);
  s.up = detail::rwkv7_up(0.1);
  s.bonus = init::constant(-0.04);
  s.head_gain = {
      [](initial_element const& e) { return std::pow((1.0 + double(e.layer)) / double(e.layers), 0.7); }};
  auto mix = detail::rwkv_channel_options(d_model, 4.0);
  mix.in = init::fan_in(0.5);
  mix.shift_key = {[](initial_element const& e) {
    detail::rwkv_place const p(e);
    return 1.0 - std::pow(p.n, std::pow(p.eta, 4.0));
  }};
  return {o, mix};
}

}  // namespace seqmix::inline v0::variants
