#pragma once

#include <string_view>

#include "study.hpp"

namespace study {

/// What is compiled into a program, under its name.
struct entry {
  std::string_view name;
  std::unique_ptr<architecture> (*make)(settings const&);
};

/// What makes a program out of a study: its names, its architectures and its report.
struct program {
  char const* name;         ///< of the program, also of its folders under results/
  char const* description;  ///< one sentence for --help
  char const* option;       ///< the option that chooses architectures, "--arch"
  char const* choosing;     ///< what it says of itself
  std::vector<entry> entries;
  index_t window;  ///< what --window starts from; 0: no architecture has one
  /// The chosen entries of what was given to that option; throws option_error for what fits nothing.
  std::vector<std::string> (*choose)(program const&, std::vector<std::string> const&);
  /// Prints tables, writes files into the folder of the study; returns a sentence about what failed, or nothing.
  std::string (*report)(settings const&, std::vector<domain> const&, std::vector<result> const&);
  char const* written;  ///< what the report wrote, for the last line
};

/// Reads the command line, plans, trains, measures and reports; what main returns. An interrupt ends it after the
/// step it is in, so that --resume goes on from there.
int run_program(program const&, int argc, char** argv);

/// `choose` for whole names; nothing stands for all of them.
std::vector<std::string> choose_by_name(program const&, std::vector<std::string> const&);

}  // namespace study
