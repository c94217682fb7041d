#pragma once

#include "support/report_parts.hpp"

namespace study {

/// Prints the table of cells, writes points.csv, cells.csv and cells.jsonl, and plots; returns a sentence that says
/// what went wrong with the plot, or nothing.
std::string report_grid(settings const&, std::vector<domain> const& domains, std::vector<result> const& results);

}  // namespace study
