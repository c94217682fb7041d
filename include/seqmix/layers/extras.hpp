#pragma once

#include <seqmix/concepts/gate.hpp>
#include <seqmix/kernels/cpu/activations.hpp>
#include <seqmix/kernels/cpu/feature_maps.hpp>
#include <seqmix/layers/norm.hpp>
#include <seqmix/layers/parameters.hpp>

namespace seqmix::inline v0 {

using kernels::activation;
using kernels::feature_map;

/// How the output of a mixer is normalised: by RMS over each head or the whole width, or mean and variance over
/// each head with one gain and shift a channel (RWKV's group norm).
enum class output_norm { none, per_head, full_width, group };
/// Token shift: every projection reads its own mixture of this token and the one before it.
enum class token_shift {
  none,
  fixed,   ///< x + (before - x) mu, mu per channel and projection (RWKV-4, -5, -7)
  dynamic  ///< mu + a low-rank function of x, per token (RWKV-6)
};
/// What a query is compared with.
enum class key_source {
  projected,
  one_minus_decay,   ///< 1 - e^g, of gates with a decay per key channel (HGRN2)
  random_positions,  ///< one fixed random vector per position and head: an ablation of content
  random_head,       ///< one fixed random vector per head
  trained_positions  ///< one trained vector per position and head
};
/// The norm of queries and keys, over each head.
enum class key_norm {
  none,
  l1,   ///< x / (sum |x| + eps)
  l2,   ///< x / sqrt(sum x^2 + eps)
  rms,  ///< x / sqrt(mean x^2 + eps), one trained gain a head and channel
};
/// What an output takes from its own token beside what the state gives: scale u (q.k) v.
enum class own_token {
  none,
  bonus,             ///< u trained per head and key channel (RWKV-5, -6)
  bonus_after_norm,  ///< the same behind the head norm (RWKV-7)
  minus_one          ///< u = -1: an inclusive read without its own token
};

/// What surrounds a mixer, as types: which code runs. Sizes and numbers are layer options.
struct extras {
  norm_kind norm = norm_kind::rms;        ///< in front of the layer
  bool residual = true;                   ///< x + f(x); false: f(x) alone, for branches that are summed elsewhere
  token_shift shift = token_shift::none;  ///< of what the projections read
  bool bias = false;                      ///< biases on all projections of the input and on the last one
  bool rope = false;                      ///< rotates queries and keys by their position
  bool conv = false;                      ///< short causal convolution over values, keys and queries together
  bool conv_bias = true;
  activation conv_map = activation::silu;      ///< behind the convolution: silu or identity
  feed_source keys_from = feed_source::input;  ///< convolved: keys and queries are projected from convolved values
  activation query_map = activation::identity, key_map = activation::identity, value_map = activation::identity;
  feature_map features = feature_map::none;  ///< of queries and keys
  /// Features of W x + b with a matrix and a bias of its own for every head, for queries and for keys (Hedgehog).
  bool feature_weights = false;
  key_source keys = key_source::projected;
  key_norm qk_norm = key_norm::none;
  bool removal_keys = false;  ///< RWKV-7's vectors a and b for states that take them
  bool first_value = false;   ///< RWKV-7's mixture with the first layer's values
  bool normalise = false;     ///< divides by the sum of the weights (linear weights only)
  bool skip = false;          ///< own-token term o += D_h v
  own_token own = own_token::none;
  output_norm head_norm = output_norm::none;
  bool output_gate = false;  ///< multiplies the output by gate_map(z)
  activation gate_map = activation::silu;
  feed gate_from = feed::linear;          ///< what makes z: linear or low_rank
  hidden gate_inside = hidden::identity;  ///< of a low-rank z
  bool gate_bias = false;                 ///< of a low-rank z
  bool gate_before_norm = false;          ///< Mamba-2's order
  bool sink = false;                      ///< a trained logit per head in the softmax's denominator
  friend constexpr bool operator==(extras const&, extras const&) = default;
};

/// What a variant's name says of its surroundings: whatever differs from the defaults.
constexpr auto extras_words(extras const& e) {
  struct word {
    bool said;
    char const* text;
  };
  return std::array{word{e.norm == norm_kind::layer, ",norm=layer"},
                    word{e.norm == norm_kind::none, ",norm=none"},
                    word{!e.residual, ",branch"},
                    word{e.shift == token_shift::fixed, ",shift"},
                    word{e.shift == token_shift::dynamic, ",dynamic_shift"},
                    word{e.bias, ",bias"},
                    word{e.conv, ",conv"},
                    word{e.conv && !e.conv_bias, ",conv_bias=no"},
                    word{e.conv && e.conv_map == activation::identity, ",conv_map=identity"},
                    word{e.keys_from == feed_source::convolved, ",keys_from=convolved"},
                    word{e.keys == key_source::one_minus_decay, ",keys=one_minus_decay"},
                    word{e.keys == key_source::random_positions, ",keys=random_positions"},
                    word{e.keys == key_source::random_head, ",keys=random_head"},
                    word{e.keys == key_source::trained_positions, ",keys=trained_positions"},
                    word{e.qk_norm == key_norm::l1, ",qk_norm=l1"},
                    word{e.qk_norm == key_norm::l2, ",qk_norm=l2"},
                    word{e.qk_norm == key_norm::rms, ",qk_norm=rms"},
                    word{e.removal_keys, ",removal_keys"},
                    word{e.first_value, ",first_value"},
                    word{e.rope, ",rope"},
                    word{e.normalise, ",normalise"},
                    word{e.skip, ",skip"},
                    word{e.own == own_token::bonus, ",bonus"},
                    word{e.own == own_token::bonus_after_norm, ",bonus_after_norm"},
                    word{e.own == own_token::minus_one, ",own=minus_one"},
                    word{e.head_norm == output_norm::per_head, ",head_norm"},
                    word{e.head_norm == output_norm::full_width, ",full_norm"},
                    word{e.head_norm == output_norm::group, ",group_norm"},
                    word{e.output_gate && e.gate_before_norm, ",gate_before_norm"},
                    word{e.output_gate && !e.gate_before_norm, ",output_gate"},
                    word{e.output_gate && e.gate_from == feed::low_rank, ",gate_from=low_rank"},
                    word{e.output_gate && e.gate_inside == hidden::tanh, ",gate_inside=tanh"},
                    word{e.output_gate && e.gate_inside == hidden::sigmoid, ",gate_inside=sigmoid"},
                    word{e.output_gate && e.gate_bias, ",gate_bias"},
                    word{e.sink, ",sink"}};
}
constexpr char const* map_name(activation f) {
  constexpr char const* names[] = {"identity", "silu",      "relu",         "sigmoid",      "tanh",
                                   "gelu",     "gelu_tanh", "elu_plus_one", "squared_relu", "min_gru"};
  return names[int(f)];
}
constexpr char const* map_name(feature_map f) {
  constexpr char const* names[] = {"none", "elu_plus_one", "relu", "hedgehog", "dpfp", "taylor", "hadamard"};
  return names[int(f)];
}
inline std::string extras_name(extras const& e) {
  std::string text;
  for (auto const& w : extras_words(e))
    if (w.said) text += w.text;
  auto const map = [&](char const* what, activation f) {
    if (f != activation::identity) text += std::string(",") + what + "=" + map_name(f);
  };
  map("query_map", e.query_map), map("key_map", e.key_map), map("value_map", e.value_map);
  if (e.output_gate && e.gate_map != activation::silu) map("gate_map", e.gate_map);
  if (e.features != feature_map::none) text += std::string(",features=") + map_name(e.features);
  if (e.feature_weights) text += ",feature_weights";
  return text;
}

/// Start values of a layer beside those of its gate.
struct layer_start {
  initialiser in = init::normal(0.02), out = init::normal(0.02);
  initialiser value{}, key{}, query{}, z{};  ///< of one projection where it differs from `in`
  double conv = 1.0;                         ///< factor on U(+-1/sqrt(width))
  initialiser down{}, up{};                  ///< of low-rank factors; none: as `in`
  initialiser features{};                    ///< of feature weights; none: the published rule of the feature map
  initialiser bonus = init::constant(0.0);
  initialiser shift_z{}, shift_value{}, shift_key{}, shift_query{}, shift_raw{}, shift_rate{};  ///< mu; none: 1/2
  initialiser shift_input{};  ///< mu of what a dynamic shift's mixtures read
  initialiser head_gain = init::constant(1.0);
};

/// Sizes and numbers of a layer; 0 stands for the usual value.
struct layer_options {
  index_t heads = 1;
  index_t query_heads = 0, key_heads = 0, value_heads = 0;  ///< 0: as many as heads
  index_t key_dim = 0, value_dim = 0;
  double scale = 0.0;  ///< 0: 1 / sqrt(key_dim)
  index_t conv_width = 4;
  index_t window = 0, chunk = 0, top_k = 1;  ///< of the selector
  bool shared_choice = false, router_bias = false;
  index_t recurrence_chunk = 32;  ///< tokens a recurrence computes together
  double norm_eps = 1e-5, head_norm_eps = 1e-5;
  index_t norm_groups = 1;  ///< of a norm over the full width: so many groups of channels, each normed on its own
  double qk_norm_eps = 1e-6;
  double normaliser_eps = 1e-10;
  double rope_base = 10000.0;
  index_t rope_channels = 0;      ///< leading channels that are rotated; 0: all
  bool rope_interleaved = false;  ///< turns channels (2i, 2i+1) together rather than (i, i + channels/2)
  bool rope_closed = false;       ///< speeds from 1 to 1/base, both included, rather than short of 1/base
  index_t feature_order = 4;      ///< nu of dpfp
  double beta_scale = 1.0;        ///< 2: negative eigenvalues in the delta rule
  double decay_offset = 0.0;      ///< added to the start values of logarithms of decay rates
  index_t gate_rank = 16, output_gate_rank = 16, shift_rank = 32, rate_rank = 16, first_value_rank = 16;
  index_t gate_blocks = 1;    ///< of a block-diagonal feed
  index_t key_positions = 0;  ///< rows of a table of keys: the longest sequence
  layer_start start{};
};

/// add(name, value) for every option but the start values: what a checkpoint compares. Every options type of a
/// layer has one.
template <class Add>
void each_option(layer_options const& o, Add const& add) {
  add("heads", o.heads);
  add("query_heads", o.query_heads);
  add("key_heads", o.key_heads);
  add("value_heads", o.value_heads);
  add("key_dim", o.key_dim);
  add("value_dim", o.value_dim);
  add("scale", o.scale);
  add("conv_width", o.conv_width);
  add("window", o.window);
  add("chunk", o.chunk);
  add("top_k", o.top_k);
  add("shared_choice", o.shared_choice);
  add("router_bias", o.router_bias);
  add("recurrence_chunk", o.recurrence_chunk);
  add("norm_eps", o.norm_eps);
  add("head_norm_eps", o.head_norm_eps);
  add("norm_groups", o.norm_groups);
  add("qk_norm_eps", o.qk_norm_eps);
  add("normaliser_eps", o.normaliser_eps);
  add("rope_base", o.rope_base);
  add("rope_channels", o.rope_channels);
  add("rope_interleaved", o.rope_interleaved);
  add("rope_closed", o.rope_closed);
  add("feature_order", o.feature_order);
  add("beta_scale", o.beta_scale);
  add("gate_rank", o.gate_rank);
  add("output_gate_rank", o.output_gate_rank);
  add("shift_rank", o.shift_rank);
  add("rate_rank", o.rate_rank);
  add("first_value_rank", o.first_value_rank);
  add("gate_blocks", o.gate_blocks);
  add("key_positions", o.key_positions);
}

}  // namespace seqmix::inline v0
