#include "architectures.hpp"
#include "support/run_architecture.hpp"
#include <seqmix/models/variants.hpp>

namespace study {

std::unique_ptr<architecture> make_top1_chunk(settings const& s) {
  using namespace seqmix::variants;
  // With fewer than four chunks a sequence, the own chunk and one more are close to all of it.
  if (s.block / s.chunk < 4)
    throw seqmix::option_error(
        "limited_domain: --chunk " + std::to_string(s.chunk) + " leaves " + std::to_string(s.block / s.chunk) +
        " chunks in a sequence of " + std::to_string(s.block) +
        " tokens; with fewer than 4, top1_chunk is close to full attention and the table would compare a "
        "thing with itself");
  return std::make_unique<architecture_of<top1_chunk>>("top1_chunk", attention_options(128, 4, 0, 0, s.chunk), 4,
                                                       seqmix::selection{.chunk = s.chunk});
}

}  // namespace study
