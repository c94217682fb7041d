#pragma once

#include <optional>

#include "study.hpp"

namespace study {

/// OOD loss of an architecture minus that of the reference at the same held-out in-domain loss, in bits per byte.
struct gap {
  double mean = 0.0;
  int levels = 0;  ///< points that lie in the reference's range
};

/// Linear interpolation of the reference between neighbouring points; the mean over the points of `a` whose
/// in-domain loss the reference reached too. Nothing is extrapolated: no such point, no value.
std::optional<gap> capability_gap(result const& a, result const& reference, std::string const& in_domain,
                                  std::string const& ood_domain);

/// The same on the mean over the code domains.
std::optional<gap> code_gap(result const& a, result const& reference, std::vector<domain> const& domains);

/// Prints the tables and writes points.csv, gaps.csv and summary.jsonl into the folder of the study.
void write_report(settings const&, std::vector<domain> const& domains, std::vector<result> const& results);

/// Writes plot.png and plot.svg by gnuplot; returns a sentence that says what went wrong, or nothing.
std::string write_plot(settings const&, std::vector<domain> const& domains, std::vector<result> const& results);

}  // namespace study
