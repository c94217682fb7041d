#include "architectures.hpp"
#include "support/run_architecture.hpp"
#include <seqmix/models/variants.hpp>

namespace study {

std::unique_ptr<architecture> make_transformer_pp(settings const&) {
  using namespace seqmix::variants;
  return std::make_unique<architecture_of<transformer_pp>>("transformer_pp", attention_options(128, 4), 4,
                                                           seqmix::selection{});
}

}  // namespace study
