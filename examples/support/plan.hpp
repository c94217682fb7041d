#pragma once

#include "study.hpp"

namespace study {

/// What was decided before training began; a resumed run reads it instead of deciding again.
struct plan {
  index_t steps = 0;
  std::vector<index_t> measured_after;
};

using architectures = std::vector<std::unique_ptr<architecture>>;

/// A folder of its own under results/ for every new study; --resume goes on with the newest.
std::filesystem::path study_folder(settings const&);

/// Reads plan.json of the study's folder. Throws where there is none, or where it was made for other settings.
plan stored_plan(settings const&);

/// Times a trial of each architecture unless the steps are given, and writes plan.json.
plan new_plan(settings const&, std::vector<domain> const&, architectures const&);

}  // namespace study
