#pragma once

#include <seqmix/gates/alibi.hpp>
#include <seqmix/gates/constant.hpp>
#include <seqmix/gates/mamba2.hpp>
#include <seqmix/gates/retention.hpp>
#include <seqmix/models/language_model.hpp>

/// The named architectures, one alias each: what the policies are. Sizes and numbers come with `*_options`.
namespace seqmix::inline v0::variants {

/// Llama's block: pre-norm attention with rotary positions, then SwiGLU (Touvron et al., arXiv 2302.13971).
template <class Selector>
using attention_block = block<layer<attention<Selector>, extras{.rope = true}>, swiglu<>>;

using transformer_pp = attention_block<selectors::softmax>;
using sliding_window = attention_block<selectors::window>;
using top1_element = attention_block<selectors::top1_element<>>;
using top1_chunk = attention_block<selectors::top1_chunk<>>;
/// ALiBi's fixed slopes instead of rotary positions (Press et al., arXiv 2108.12409).
using alibi = block<layer<attention<selectors::softmax, gates::alibi>, extras{}>, swiglu<>>;

/// Dao, Gu (arXiv 2405.21060), figure 6: convolution and SiLU over x, B, C, the skip D, gate before norm; no MLP.
using mamba2 = layer<recurrence<states::outer_product, gates::mamba2>, extras{.conv = true,
                                                                              .skip = true,
                                                                              .head_norm = output_norm::full_width,
                                                                              .output_gate = true,
                                                                              .gate_before_norm = true}>;

/// Sun et al. (arXiv 2307.08621), equation 8: fixed decays, rotary positions, norm per head, then a SiLU gate.
using retnet = layer<recurrence<states::outer_product, gates::retention>,
                     extras{.rope = true, .head_norm = output_norm::per_head, .output_gate = true}>;

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

/// Sizes of a Mamba-2 layer: B and C are shared by all heads (one group); framework-style start values.
struct mamba2_sizes {
  index_t heads = 1, state = 128, head_dim = 64;
};
inline layer_options mamba2_options(mamba2_sizes s) {
  layer_options o{.heads = s.heads,
                  .query_heads = 1,
                  .key_heads = 1,
                  .key_dim = s.state,
                  .value_dim = s.head_dim,
                  .scale = 1.0};
  o.in = init::fan_in();
  o.out = init::fan_in_per_layer();
  return o;
}

/// Sizes of a RetNet layer: keys of d_model, values of twice that; xavier start values with the gains of its
/// authors' code.
inline layer_options retnet_options(index_t d_model, index_t heads) {
  layer_options o{.heads = heads, .key_dim = d_model / heads, .value_dim = 2 * d_model / heads};
  o.in = init::xavier(std::exp2(-2.5));
  o.out = init::xavier(0.5);
  return o;
}

}  // namespace seqmix::inline v0::variants
