#include "architectures.hpp"
#include "support/run_architecture.hpp"
#include <seqmix/models/variants.hpp>

namespace study {

/// Its own gate and no MLP, so more layers: 7 of 4 heads with 48 x 64 states.
std::unique_ptr<architecture> make_mamba2(settings const&) {
  return std::make_unique<architecture_of<seqmix::variants::mamba2>>(
      "mamba2", seqmix::variants::mamba2_options({.heads = 4, .state = 48, .head_dim = 64}), 7,
      seqmix::selection{});
}

}  // namespace study
