#pragma once

#include "support/study.hpp"

/// The architectures of the demo; each function is compiled in a file of its own name.
namespace study {

std::unique_ptr<architecture> make_transformer_pp(settings const&);
std::unique_ptr<architecture> make_mamba2(settings const&);
std::unique_ptr<architecture> make_retnet(settings const&);
std::unique_ptr<architecture> make_top1_element(settings const&);
std::unique_ptr<architecture> make_top1_chunk(settings const&);

}  // namespace study
