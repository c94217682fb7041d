/// An ablation grid: every mixer that states, gates and selectors make together, in the same surroundings, trained
/// on the same tokens of one domain and measured on that domain and on others.

#include <algorithm>
#include <fnmatch.h>

#include "ablation_grid/cells.hpp"
#include "ablation_grid/report.hpp"

namespace {

/// A pattern with * or ? must fit a whole name, other text a part of it.
bool fits(std::string const& pattern, std::string const& name) {
  if (pattern.find_first_of("*?[") == std::string::npos) return name.find(pattern) != std::string::npos;
  return fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
}

/// The cells that fit one of the patterns, in the order of the grid.
std::vector<std::string> choose(study::program const& p, std::vector<std::string> const& patterns) {
  if (patterns.empty()) return study::choose_by_name(p, patterns);
  for (auto const& pattern : patterns)
    if (std::none_of(p.entries.begin(), p.entries.end(),
                     [&](study::entry const& e) { return fits(pattern, std::string(e.name)); }))
      throw seqmix::option_error(std::string(p.name) + ": --cells: no cell that is compiled in fits '" + pattern +
                                 "'; --list prints them");
  std::vector<std::string> chosen;
  for (auto const& e : p.entries) {
    std::string const name(e.name);
    if (std::any_of(patterns.begin(), patterns.end(), [&](auto const& pattern) { return fits(pattern, name); }))
      chosen.push_back(name);
  }
  return chosen;
}

}  // namespace

int main(int argc, char** argv) {
  return study::run_program(
      {.name = "ablation_grid",
       .description =
           "Trains a grid of states, gates and selectors on one domain of text and measures every cell on "
           "it and on others.",
       .option = "--cells",
       .choosing =
           "cells to train, by parts of their names or patterns with *; the first is the reference (default: "
           "all)",
       .entries = study::cells(),
       .window = 8,
       .choose = choose,
       .report = study::report_grid,
       .written = "points.csv, cells.csv, cells.jsonl, one log a cell"},
      argc, argv);
}
