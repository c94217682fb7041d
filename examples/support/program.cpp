#include "program.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <thread>

#include <CLI/CLI.hpp>

#include "plan.hpp"

namespace study {

namespace {

std::atomic<bool> stop_requested{false};
extern "C" void request_stop(int) { stop_requested = true; }

void print_architectures(architectures const& all) {
  auto const reference = double(all.front()->parameters());
  std::size_t width = 15;
  for (auto const& a : all) width = std::max(width, a->name().size());
  for (auto const& a : all) {
    double const off = 100.0 * (double(a->parameters()) / reference - 1.0);
    std::printf("%-*s %8ld parameters outside the embedding (%+.2f %%)\n", int(width), a->name().c_str(),
                long(a->parameters()), off);
    if (std::abs(off) > 3.0)
      std::printf("  more than 3 %% from %s: the comparison is not fair\n", all.front()->name().c_str());
    std::string names;
    for (auto const& name : a->without_weight_decay())
      if (name.find("layers.") != 0 || name.find("layers.0.") == 0) names += (names.empty() ? "" : ", ") + name;
    std::printf("  no weight decay (layer 0 stands for all): %s\n", names.c_str());
  }
}

architectures make(program const& p, settings const& s) {
  architectures all;
  for (auto const& name : s.architectures) {
    auto const at =
        std::find_if(p.entries.begin(), p.entries.end(), [&](entry const& e) { return e.name == name; });
    all.push_back(at->make(s));
  }
  return all;
}

int study_of(program const& p, settings s) {
  auto const begin = std::chrono::steady_clock::now();
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  s.architectures = p.choose(p, s.architectures);
  if (s.text.empty()) throw seqmix::option_error(s.program + ": --text: name the folder that prepare_text wrote");
  auto const domains = load_domains(s);
  auto const all = make(p, s);
  if (s.out.empty()) s.out = study_folder(s);
  if (!s.resume && std::filesystem::exists(s.out / "plan.json"))
    throw seqmix::option_error(s.program + ": " + s.out.string() +
                               " holds a study already; --resume continues it, --out names another folder");
  std::filesystem::create_directories(s.out);
  print_architectures(all);
  auto const decided = s.resume ? stored_plan(s) : new_plan(s, domains, all);
  std::printf("Every architecture reads the same %.2f million tokens of %s in the same order; results go to %s\n\n",
              double(decided.steps * s.batch * s.block) / 1e6, training_domain(domains).name.c_str(),
              s.out.c_str());

  std::vector<result> results;
  for (auto const& a : all) {
    results.emplace_back();
    if (!a->run(s, domains, decided.steps, decided.measured_after, stop_requested, results.back())) {
      std::printf("\nStopped. --resume --out %s goes on from here.\n", s.out.c_str());
      return 130;
    }
  }
  auto const trouble = p.report(s, domains, results);
  if (trouble.empty())
    std::printf("\nPlot: %s and plot.svg; numbers: %s.\n", (s.out / "plot.png").c_str(), p.written);
  else
    std::printf("\n%s\n", trouble.c_str());
  std::printf("Took %.0f s.\n", std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  return 0;
}

}  // namespace

std::vector<std::string> choose_by_name(program const& p, std::vector<std::string> const& given) {
  std::vector<std::string> known;
  std::string text;
  for (auto const& e : p.entries) {
    known.emplace_back(e.name);
    text += (text.empty() ? "" : ", ") + known.back();
  }
  if (given.empty()) return known;
  for (auto const& name : given)
    if (std::find(known.begin(), known.end(), name) == known.end())
      throw seqmix::option_error(std::string(p.name) + ": " + p.option + ": unknown architecture '" + name +
                                 "'; compiled in are " + text);
  return given;
}

int run_program(program const& p, int argc, char** argv) {
  settings s;
  s.program = p.name;
  s.window = p.window;
  s.threads = std::max(1, int(std::thread::hardware_concurrency()));
  bool list = false;
  CLI::App app{p.description, p.name};
  app.add_flag("--list", list, "prints the names of what is compiled in, and ends");
  app.add_option("--text", s.text, "folder of prepared text (domains.json and a folder a domain)");
  app.add_option("--out", s.out, "folder of this study (default: a new one under results/)");
  app.add_option(p.option, s.architectures, p.choosing)->delimiter(',');
  app.add_option("--minutes", s.minutes, "time for training and measuring all of them")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--steps", s.steps, "steps of each, instead of --minutes")->check(CLI::PositiveNumber);
  app.add_option("--seed", s.seed, "of start values and of the order of the text")->capture_default_str();
  app.add_flag("--resume", s.resume, "goes on with an interrupted study, as it was planned");
  app.add_option("--threads", s.threads, "changes the time, not the result")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  app.add_option("--chunk", s.chunk, "tokens a chunk of the selectors of chunks")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  if (s.window > 0)
    app.add_option("--window", s.window, "tokens that a sliding window sees")
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
  app.add_option("--block", s.block, "tokens a training window")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--batch", s.batch, "windows a step")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--learning-rate", s.learning_rate, "peak of the schedule")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);

  if (list) {
    for (auto const& e : p.entries) std::printf("%.*s\n", int(e.name.size()), e.name.data());
    return 0;
  }
  std::signal(SIGINT, request_stop);
  std::signal(SIGTERM, request_stop);
  try {
    return study_of(p, std::move(s));
  } catch (std::exception const& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}

}  // namespace study
