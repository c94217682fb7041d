#pragma once

#include "support/report_parts.hpp"

namespace study {

/// Prints the tables and writes points.csv, gaps.csv and summary.jsonl into the folder of the study.
void write_report(settings const&, std::vector<domain> const& domains, std::vector<result> const& results);

/// Writes plot.png and plot.svg by gnuplot; returns a sentence that says what went wrong, or nothing.
std::string write_plot(settings const&, std::vector<domain> const& domains, std::vector<result> const& results);

}  // namespace study
