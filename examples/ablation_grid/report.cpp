#include "report.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include <nlohmann/json.hpp>

#include <seqmix/io/atomic_file.hpp>

namespace study {

namespace {

/// What the table says of a cell: losses after equal tokens in bits per byte, and the gap at equal in-domain loss.
struct row {
  result const& cell;
  double in, out;
  std::optional<gap> behind;
};

std::vector<row> rows_of(std::vector<domain> const& domains, std::vector<result> const& results) {
  auto const in_domain = training_domain(domains).name;
  auto const others = other_domains(domains);
  std::vector<row> rows;
  for (auto const& r : results) {
    auto const& bits = r.points.back().final_bits;
    rows.push_back(
        {r, bits.at(in_domain), mean_bits(bits, others), capability_gap(r, results.front(), in_domain, others)});
  }
  return rows;
}

void print_table(std::vector<row> const& rows, std::string const& in_domain, std::size_t others) {
  std::size_t width = 4;
  for (auto const& r : rows) width = std::max(width, r.cell.name.size());
  std::printf(
      "\nAfter equal tokens, bits per byte: in-domain (%s), and out of domain (OOD), the mean of %zu domains. "
      "Gap: OOD against %s at equal in-domain loss (n/a: no in-domain loss in common)\n",
      in_domain.c_str(), others, rows.front().cell.name.c_str());
  std::printf("%-*s %10s %8s %19s %9s %8s %8s\n", int(width), "cell", "parameters", "visible",
              "arbitrary_selection", "in-domain", "OOD", "gap");
  for (auto const& r : rows)
    std::printf("%-*s %10ld %8.1f %19s %9.3f %8.3f %8s\n", int(width), r.cell.name.c_str(), long(r.cell.parameters),
                r.cell.visible, r.cell.selects_arbitrarily ? "yes" : "no", r.in, r.out, text_of(r.behind).c_str());
}

void write_tables(settings const& s, std::vector<domain> const& domains, std::vector<row> const& rows) {
  csv points, cells;
  std::string lines;
  points.row({"cell", "step", "tokens", "domain", "trained_on", "bits_per_byte"});
  cells.row({"cell", "parameters", "visible", "arbitrary_selection", "in_domain", "ood", "gap"});
  for (auto const& r : rows) {
    for (auto const& p : r.cell.points)
      for (auto const& d : domains)
        points.row({r.cell.name, std::to_string(p.step), std::to_string(p.tokens), d.name,
                    d.trained_on ? "yes" : "no", number(p.bits.at(d.name))});
    cells.row({r.cell.name, std::to_string(r.cell.parameters), number(r.cell.visible),
               r.cell.selects_arbitrarily ? "yes" : "no", number(r.in), number(r.out),
               r.behind ? number(r.behind->mean) : "n/a"});
    nlohmann::json const line{{"cell", r.cell.name},
                              {"parameters", r.cell.parameters},
                              {"tokens_per_second", r.cell.tokens_per_second},
                              {"mean_visible_tokens", r.cell.visible},
                              {"arbitrary_selection", r.cell.selects_arbitrarily},
                              {"in_domain", r.in},
                              {"ood", r.out},
                              {"gap", r.behind ? nlohmann::json(r.behind->mean) : nlohmann::json(nullptr)},
                              {"bits_per_byte", r.cell.points.back().final_bits}};
    lines += line.dump() + "\n";
  }
  points.write(s.out / "points.csv");
  cells.write(s.out / "cells.csv");
  seqmix::io::write_file_atomically((s.out / "cells.jsonl").string(), lines);
}

/// What is written beside the last point of each cell: its number, and where several end at one place all their
/// numbers at the first. (Two cells may be two ways to compute one function.)
std::vector<std::string> labels_of(std::vector<row> const& rows) {
  auto const spread = [&](double row::*loss) {
    auto const [least, most] = std::minmax_element(
        rows.begin(), rows.end(), [loss](row const& a, row const& b) { return a.*loss < b.*loss; });
    return (*most).*loss - (*least).*loss;
  };
  double const across = 0.01 * spread(&row::in), along = 0.02 * spread(&row::out);
  std::vector<std::string> labels(rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    std::size_t first = 0;
    while (first < i && (labels[first].empty() || std::abs(rows[first].in - rows[i].in) > across ||
                         std::abs(rows[first].out - rows[i].out) > along))
      ++first;
    labels[first] += (first < i ? "," : "") + std::to_string(i + 1);
  }
  return labels;
}

/// One block of points a cell, and one with the last point of each.
std::string data_of(std::vector<domain> const& domains, std::vector<row> const& rows) {
  auto const in_domain = training_domain(domains).name;
  auto const others = other_domains(domains);
  std::string text;
  for (auto const& r : rows) {
    for (auto const& p : r.cell.points)
      text += number(p.bits.at(in_domain)) + " " + number(mean_bits(p.bits, others)) + "\n";
    text += "\n\n";
  }
  auto const labels = labels_of(rows);
  for (std::size_t i = 0; i < rows.size(); ++i)
    text += number(rows[i].in) + " " + number(rows[i].out) + " \"" + labels[i] + "\" " +
            (rows[i].cell.selects_arbitrarily ? "1" : "0") + "\n";
  return text;
}

/// Left the way along training, right where each cell ended, by its number, black those that select arbitrarily.
std::string script_of(std::vector<row> const& rows, std::string const& in_domain) {
  constexpr char const* colours[] = {"#000000", "#d62728", "#1f77b4", "#2ca02c", "#ff7f0e",
                                     "#9467bd", "#8c564b", "#17becf", "#7f7f7f", "#bcbd22"};
  std::string text = "set grid\nset xlabel 'in-domain (" + in_domain + ")'\nset ylabel 'mean out of domain'\n";
  for (std::string const& kind : {std::string("png"), std::string("svg")}) {
    text += kind == "png" ? "set terminal pngcairo size 1700,640 font 'sans,10'\n"
                          : "set terminal svg size 1700,640 font 'sans,10' background 'white'\n";
    text += "set output 'plot." + kind +
            "'\nset multiplot layout 1,2 title 'Out-of-domain against in-domain loss, bits per byte' font ',14'\n"
            "set title 'along training (lower left is later)'\nset key outside right top Left reverse samplen 2 "
            "width -6 font ',8'\nplot ";
    for (std::size_t i = 0; i < rows.size(); ++i)
      text += std::string(i > 0 ? ", " : "") + "'plot.dat' index " + std::to_string(i) +
              " using 1:2 with linespoints lw 1.5 ps 0.6 pt " + std::to_string(4 + i % 11) + " lc rgb '" +
              colours[i % 10] + "' title \"" + std::to_string(i + 1) + "  " + rows[i].cell.name + "\" noenhanced";
    auto const last = "'plot.dat' index " + std::to_string(rows.size());
    text += "\nset title 'after equal tokens (black: selects arbitrarily, open: does not)'\nunset key\n"
            "set offsets graph 0.15, graph 0.25, graph 0.05, graph 0.05\nplot " +
            last + " using 1:($4==1?$2:NaN) with points pt 7 lc rgb 'black', " + last +
            " using 1:($4==0?$2:NaN) with points pt 6 lc rgb '#1f77b4', " + last +
            " using 1:2:3 with labels left offset 0.6,0.3 font ',9'\nunset multiplot\nunset output\n"
            "unset offsets\n";
  }
  return text;
}

}  // namespace

std::string report_grid(settings const& s, std::vector<domain> const& domains, std::vector<result> const& results) {
  if (other_domains(domains).empty())
    throw seqmix::file_error(s.program + ": " + s.text.string() + " has no domain to generalise to");
  auto const rows = rows_of(domains, results);
  auto const in_domain = training_domain(domains).name;
  write_tables(s, domains, rows);
  print_table(rows, in_domain, other_domains(domains).size());
  return run_gnuplot(s, data_of(domains, rows), script_of(rows, in_domain));
}

}  // namespace study
