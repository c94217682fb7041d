#pragma once

#include "ablation_grid/grid.hpp"
#include "support/run_architecture.hpp"

namespace ablation {

using seqmix::index_t;

/// Every cell stands in the same surroundings, Llama's block: four layers of four heads of 32 channels with rotary
/// positions, each followed by a SwiGLU. Linear weights are not normalised, so they get unit queries and keys and a
/// norm per head: with these the delta rule is stable, and linear cells differ in state and gate alone.
template <class Mixer>
inline constexpr bool linear = Mixer::selector_type::how_type::spec.multiplies_decay;
template <class Mixer>
inline constexpr seqmix::extras surroundings{
    .rope = true,
    .qk_norm = linear<Mixer> ? seqmix::key_norm::l2 : seqmix::key_norm::none,
    .head_norm = linear<Mixer> ? seqmix::output_norm::per_head : seqmix::output_norm::none};

template <class Mixer>
std::unique_ptr<study::architecture> make(study::settings const& s) {
  constexpr auto which = Mixer::selector_type::which_type::spec;
  if (which.routed && s.block / s.chunk < 4)
    throw seqmix::option_error(s.program + ": --chunk " + std::to_string(s.chunk) + " leaves " +
                               std::to_string(s.block / s.chunk) + " chunks in a sequence of " +
                               std::to_string(s.block) +
                               " tokens; with fewer than 4, the own chunk and one more are close to all of them");
  using block = seqmix::block<seqmix::layer<Mixer, surroundings<Mixer>>, seqmix::swiglu<>>;
  index_t const d_model = 128, heads = 4, dim = d_model / heads;
  seqmix::layer_options mix{.heads = heads, .key_dim = dim, .value_dim = dim};
  seqmix::selection select;
  if constexpr (which.windowed) mix.window = select.window = s.window;
  if constexpr (which.routed) mix.chunk = select.chunk = s.chunk;
  return std::make_unique<study::architecture_of<block>>(
      std::string(seqmix::cell_name<Mixer>), std::tuple(mix, seqmix::swiglu_options{.width = 344}), 4, select);
}

}  // namespace ablation
