#include "architectures.hpp"
#include "support/run_architecture.hpp"
#include <seqmix/models/variants.hpp>

namespace study {

std::unique_ptr<architecture> make_top1_element(settings const&) {
  using namespace seqmix::variants;
  return std::make_unique<architecture_of<top1_element>>("top1_element", attention_options(128, 4), 4,
                                                         seqmix::selection{});
}

}  // namespace study
