#include "report.hpp"

namespace study {

namespace {

/// One block of points per architecture: in-domain loss, then each other domain, then the mean of the code domains.
std::string data_of(std::vector<domain> const& domains, std::vector<result> const& results) {
  std::string text;
  auto const in_domain = training_domain(domains).name;
  for (auto const& r : results) {
    for (auto const& p : r.points) {
      text += std::to_string(p.bits.at(in_domain));
      double code = 0.0;
      int codes = 0;
      for (auto const& d : domains) {
        if (d.trained_on) continue;
        text += " " + std::to_string(p.bits.at(d.name));
        if (d.code) code += p.bits.at(d.name), ++codes;
      }
      text += " " + (codes > 0 ? std::to_string(code / codes) : "NaN") + "\n";
    }
    text += "\n\n";
  }
  return text;
}

std::string script(std::vector<domain> const& domains, std::vector<result> const& results) {
  std::vector<std::string> panels;
  bool code = false;
  for (auto const& d : domains)
    if (!d.trained_on) panels.push_back(d.name), code = code || d.code;
  if (code) panels.push_back("mean of the code domains");
  int const columns = panels.size() > 4 ? 4 : int(panels.size());
  int const rows = (int(panels.size()) + columns - 1) / columns;
  std::string const layout =
      "set multiplot layout " + std::to_string(rows) + "," + std::to_string(columns) +
      " title 'Out-of-domain against in-domain loss along training (bits per byte; lower left is later)' "
      "font ',14'\n";
  std::string text =
      "set grid\nset key bottom right font ',8'\nset xlabel 'in-domain (" + training_domain(domains).name +
      ")' offset 0,0.5\nset style line 1 lc rgb '#000000'\nset style line 2 lc rgb '#d62728'\n"
      "set style line 3 lc rgb '#1f77b4'\nset style line 4 lc rgb '#2ca02c'\nset style line 5 lc rgb '#ff7f0e'\n";
  for (std::string const& kind : {std::string("png"), std::string("svg")}) {
    std::string const size = std::to_string(420 * columns) + "," + std::to_string(380 * rows);
    text += kind == "png" ? "set terminal pngcairo size " + size + " font 'sans,10'\n"
                          : "set terminal svg size " + size + " font 'sans,10' background 'white'\n";
    text += "set output 'plot." + kind + "'\n" + layout;
    for (std::size_t panel = 0; panel < panels.size(); ++panel) {
      text += "set title \"" + panels[panel] + "\" noenhanced\nset ylabel 'out of domain' offset 1,0\nplot ";
      for (std::size_t a = 0; a < results.size(); ++a)
        text += std::string(a > 0 ? ", " : "") + "'plot.dat' index " + std::to_string(a) +
                " using 1:" + std::to_string(panel + 2) + " with linespoints ls " + std::to_string(a % 5 + 1) +
                " lw 1.5 pt " + std::to_string(5 + 2 * (a % 5)) + " ps 0.7 title \"" + results[a].name +
                "\" noenhanced";
      text += "\n";
    }
    text += "unset multiplot\nunset output\n";
  }
  return text;
}

}  // namespace

std::string write_plot(settings const& s, std::vector<domain> const& domains, std::vector<result> const& results) {
  for (auto const& r : results)
    if (r.points.empty()) return "no plot: " + r.name + " has not been measured yet";
  return run_gnuplot(s, data_of(domains, results), script(domains, results));
}

}  // namespace study
