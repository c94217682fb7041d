#include "architectures.hpp"
#include "support/run_architecture.hpp"
#include <seqmix/models/variants.hpp>

namespace study {

/// Its own gate and no MLP, so more layers: 6 of 4 heads with 32 x 64 states.
std::unique_ptr<architecture> make_retnet(settings const&) {
  return std::make_unique<architecture_of<seqmix::variants::retnet>>(
      "retnet", seqmix::variants::retnet_options(128, 4), 6, seqmix::selection{});
}

}  // namespace study
