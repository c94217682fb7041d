#include "report_parts.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include <seqmix/io/atomic_file.hpp>

namespace study {

namespace {

/// y of the reference at x, between the two of its points that x lies between.
std::optional<double> interpolate(std::vector<std::pair<double, double>> const& curve, double x) {
  for (std::size_t i = 1; i < curve.size(); ++i) {
    auto const [x0, y0] = curve[i - 1];
    auto const [x1, y1] = curve[i];
    if (x < x0 || x > x1) continue;
    return x1 == x0 ? y0 : y0 + (y1 - y0) * (x - x0) / (x1 - x0);
  }
  return std::nullopt;
}

}  // namespace

double mean_bits(std::map<std::string, double> const& bits, std::vector<std::string> const& names) {
  double sum = 0.0;
  for (auto const& name : names) sum += bits.at(name);
  return sum / double(names.size());
}

std::optional<gap> capability_gap(result const& a, result const& reference, std::string const& in_domain,
                                  std::vector<std::string> const& ood_domains) {
  if (ood_domains.empty()) return std::nullopt;
  std::vector<std::pair<double, double>> curve;
  for (auto const& p : reference.points) curve.emplace_back(p.bits.at(in_domain), mean_bits(p.bits, ood_domains));
  std::sort(curve.begin(), curve.end());
  gap sum;
  for (auto const& p : a.points)
    if (auto const y = interpolate(curve, p.bits.at(in_domain))) {
      sum.mean += mean_bits(p.bits, ood_domains) - *y;
      ++sum.levels;
    }
  if (sum.levels == 0) return std::nullopt;
  sum.mean /= sum.levels;
  return sum;
}

std::vector<std::string> other_domains(std::vector<domain> const& domains) {
  std::vector<std::string> names;
  for (auto const& d : domains)
    if (!d.trained_on) names.push_back(d.name);
  return names;
}

std::vector<std::string> code_domains(std::vector<domain> const& domains) {
  std::vector<std::string> names;
  for (auto const& d : domains)
    if (d.code && !d.trained_on) names.push_back(d.name);
  return names;
}

std::string text_of(std::optional<gap> const& g) {
  if (!g) return "n/a";
  char text[32];
  std::snprintf(text, sizeof text, "%+.3f", g->mean);
  return text;
}

void csv::row(std::vector<std::string> const& cells) {
  for (std::size_t i = 0; i < cells.size(); ++i) text += (i > 0 ? "," : "") + cells[i];
  text += '\n';
}

void csv::write(std::filesystem::path const& path) const { seqmix::io::write_file_atomically(path.string(), text); }

std::string number(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.5f", x);
  return text;
}

std::string run_gnuplot(settings const& s, std::string const& data, std::string const& script) {
  auto const folder = s.out.string();
  seqmix::io::write_file_atomically((s.out / "plot.dat").string(), data);
  seqmix::io::write_file_atomically((s.out / "plot.gp").string(), script);
  if (folder.find('\'') != std::string::npos) return "no plot: the folder's name has a quote in it: " + folder;
  std::string const command = "cd '" + folder + "' && gnuplot plot.gp > plot.log 2>&1";
  if (std::system(command.c_str()) != 0) return "no plot: gnuplot failed; it says why in " + folder + "/plot.log";
  return "";
}

}  // namespace study
