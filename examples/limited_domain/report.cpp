#include "report.hpp"

#include <algorithm>
#include <cstdio>

#include <nlohmann/json.hpp>

#include <seqmix/io/atomic_file.hpp>

namespace study {

namespace {

void print_loss_table(std::vector<domain> const& domains, std::vector<result> const& results,
                      std::string const& in_domain) {
  std::printf("\nAfter equal tokens: bits per byte (in: %s, the domain trained on)\n", in_domain.c_str());
  std::printf("%-15s %9s %9s %8s %6s %8s", "architecture", "params", "tokens/s", "visible", "arb.", "in");
  for (auto const& d : domains)
    if (!d.trained_on) std::printf(" %11s", d.name.c_str());
  std::printf("\n");
  for (auto const& r : results) {
    std::printf("%-15s %9ld %9.0f %8.1f %6s", r.name.c_str(), long(r.parameters), r.tokens_per_second, r.visible,
                r.selects_arbitrarily ? "yes" : "no");
    if (r.points.empty() || r.points.back().final_bits.empty()) {
      std::printf("   not measured yet\n");
      continue;
    }
    auto const& bits = r.points.back().final_bits;
    std::printf(" %8.3f", bits.at(in_domain));
    for (auto const& d : domains)
      if (!d.trained_on) std::printf(" %11.3f", bits.at(d.name));
    std::printf("\n");
  }
}

void print_gap_table(std::vector<domain> const& domains, std::vector<result> const& results,
                     std::string const& in_domain) {
  auto const& reference = results.front();
  std::printf("\nBase-capability gap against %s at equal in-domain loss, bits per byte (n/a: no in-domain loss in "
              "common)\n",
              reference.name.c_str());
  std::printf("%-15s %9s %7s", "architecture", "CODE", "levels");
  for (auto const& d : domains)
    if (!d.trained_on) std::printf(" %11s", d.name.c_str());
  std::printf("\n");
  for (auto const& r : results) {
    auto const code = capability_gap(r, reference, in_domain, code_domains(domains));
    std::printf("%-15s %9s %7d", r.name.c_str(), text_of(code).c_str(), code ? code->levels : 0);
    for (auto const& d : domains)
      if (!d.trained_on) std::printf(" %11s", text_of(capability_gap(r, reference, in_domain, {d.name})).c_str());
    std::printf("\n");
  }
}

}  // namespace

void write_report(settings const& s, std::vector<domain> const& domains, std::vector<result> const& results) {
  auto const in_domain = training_domain(domains).name;
  csv points, gaps;
  points.row({"architecture", "step", "tokens", "domain", "trained_on", "bits_per_byte"});
  gaps.row({"architecture", "reference", "domain", "gap_bits_per_byte", "levels"});
  std::string summary;
  for (auto const& r : results) {
    for (auto const& p : r.points)
      for (auto const& d : domains)
        points.row({r.name, std::to_string(p.step), std::to_string(p.tokens), d.name, d.trained_on ? "yes" : "no",
                    number(p.bits.at(d.name))});
    nlohmann::json line{{"architecture", r.name},
                        {"non_embedding_parameters", r.parameters},
                        {"tokens_per_second", r.tokens_per_second},
                        {"mean_visible_tokens", r.visible},
                        {"arbitrary_selection", r.selects_arbitrarily}};
    if (!r.points.empty()) line["bits_per_byte"] = r.points.back().final_bits;
    auto const record = [&](std::string const& name, std::optional<gap> const& g) {
      gaps.row(
          {r.name, results.front().name, name, g ? number(g->mean) : "n/a", std::to_string(g ? g->levels : 0)});
      line["gap"][name] = g ? nlohmann::json(g->mean) : nlohmann::json(nullptr);
    };
    record("code", capability_gap(r, results.front(), in_domain, code_domains(domains)));
    for (auto const& d : domains)
      if (!d.trained_on) record(d.name, capability_gap(r, results.front(), in_domain, {d.name}));
    summary += line.dump() + "\n";
  }
  points.write(s.out / "points.csv");
  gaps.write(s.out / "gaps.csv");
  seqmix::io::write_file_atomically((s.out / "summary.jsonl").string(), summary);
  print_gap_table(domains, results, in_domain);
  print_loss_table(domains, results, in_domain);
  if (std::count_if(domains.begin(), domains.end(), [](domain const& d) { return !d.trained_on; }) < 4)
    std::printf("\nFewer than four domains to generalise to were at hand: read the gaps with care.\n");
}

}  // namespace study
