/// The limited-domain study at demo size: five byte-level architectures trained on one domain, measured on that
/// domain and on others. Base capability is the out-of-domain loss at equal in-domain loss.

#include "architectures.hpp"
#include "report.hpp"
#include "support/program.hpp"

namespace {

std::string report(study::settings const& s, std::vector<study::domain> const& domains,
                   std::vector<study::result> const& results) {
  study::write_report(s, domains, results);
  return study::write_plot(s, domains, results);
}

}  // namespace

int main(int argc, char** argv) {
  return study::run_program(
      {.name = "limited_domain",
       .description =
           "Trains byte-level architectures on one domain of text and measures them on it and on others.",
       .option = "--arch",
       .choosing = "architectures to compare; the first is the reference (default: all)",
       .entries = {{"transformer_pp", study::make_transformer_pp},
                   {"mamba2", study::make_mamba2},
                   {"retnet", study::make_retnet},
                   {"top1_element", study::make_top1_element},
                   {"top1_chunk", study::make_top1_chunk}},
       .window = 0,
       .choose = study::choose_by_name,
       .report = report,
       .written = "points.csv, gaps.csv, summary.jsonl, one log an architecture"},
      argc, argv);
}
