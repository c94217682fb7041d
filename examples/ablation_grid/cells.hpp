#pragma once

#include <vector>

#include "support/program.hpp"

namespace study {

/// The cells that were compiled in, in the order of the grid.
std::vector<entry> cells();

}  // namespace study
