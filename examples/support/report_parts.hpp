#pragma once

#include <optional>

#include "study.hpp"

namespace study {

/// OOD loss of an architecture minus that of the reference at the same held-out in-domain loss, in bits per byte.
struct gap {
  double mean = 0.0;
  int levels = 0;  ///< points that lie in the reference's range
};

/// Mean bits per byte of a point over some domains; all of them must have been measured.
double mean_bits(std::map<std::string, double> const& bits, std::vector<std::string> const& names);

/// The gap of the mean over the named domains. Linear interpolation of the reference between neighbouring points;
/// the mean over the points of `a` whose in-domain loss the reference reached too. Nothing is extrapolated: no such
/// point or no domain, no value.
std::optional<gap> capability_gap(result const& a, result const& reference, std::string const& in_domain,
                                  std::vector<std::string> const& ood_domains);

/// Names of the domains that are not trained on; of those with code among them.
std::vector<std::string> other_domains(std::vector<domain> const&);
std::vector<std::string> code_domains(std::vector<domain> const&);

/// "+0.012", or n/a.
std::string text_of(std::optional<gap> const&);

/// Rows of a table for other programs.
struct csv {
  std::string text;
  void row(std::vector<std::string> const& cells);
  void write(std::filesystem::path const&) const;
};
/// With five digits behind the point.
std::string number(double);

/// Writes plot.dat and plot.gp into the folder of the study and runs gnuplot there; `script` calls the data
/// plot.dat. Returns a sentence that says what went wrong, or nothing.
std::string run_gnuplot(settings const&, std::string const& data, std::string const& script);

}  // namespace study
