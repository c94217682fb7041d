/// The limited-domain study at demo size: five byte-level architectures trained on one domain, measured on that
/// domain and on others. Base capability is the out-of-domain loss at equal in-domain loss.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <thread>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "report.hpp"
#include "study.hpp"
#include <seqmix/io/atomic_file.hpp>

namespace {

using study::index_t;

std::atomic<bool> stop_requested{false};
extern "C" void request_stop(int) { stop_requested = true; }

/// What was decided before training began; a resumed run reads it instead of deciding again.
struct plan {
  index_t steps = 0;
  std::vector<index_t> measured_after;
};

/// Points spaced by tokens, closer at the beginning: early on the losses of all architectures overlap.
std::vector<index_t> measuring_steps(index_t steps) {
  std::vector<index_t> at;
  for (double part : {0.02, 0.05, 0.10, 0.20, 0.35, 0.55, 0.80, 1.0}) {
    auto const step = std::clamp(index_t(std::llround(part * double(steps))), index_t(1), steps);
    if (at.empty() || at.back() != step) at.push_back(step);
  }
  return at;
}

using architectures = std::vector<std::unique_ptr<study::architecture>>;

/// The number of steps that the slowest architecture manages in its share of the time.
index_t steps_in_time(study::settings const& s, std::vector<study::domain> const& domains, architectures const& all,
                      nlohmann::json& record) {
  std::printf("A trial of each architecture:");
  std::fflush(stdout);
  study::architecture const* slowest = nullptr;
  double most = 0.0;
  for (auto const& a : all) {
    double const seconds = a->seconds_per_step(s, domains, 0.5);
    std::printf(" %s %.0f ms/step", a->name().c_str(), 1e3 * seconds);
    std::fflush(stdout);
    if (seconds > most) most = seconds, slowest = a.get();
  }
  most = std::max(most, slowest->seconds_per_step(s, domains, 3.0));
  double const tokens_per_second = double(s.batch * s.block) / most;
  // Measuring runs forward only, about three times as fast as training.
  double measured = 0.0;
  for (auto const& d : domains)
    measured += double((8 * d.short_windows.size() + d.long_windows.size()) * std::size_t(s.block));
  double const measuring = measured / (3.0 * tokens_per_second);
  double const share = 0.97 * (60.0 * s.minutes / double(all.size()) - measuring);
  if (share < 2.0 * most)
    throw seqmix::option_error("limited_domain: --minutes " + std::to_string(s.minutes) + " leaves " +
                               std::to_string(share) + " s of training for each of " + std::to_string(all.size()) +
                               " architectures");
  auto const steps = index_t(share / most);
  std::printf(
      "\nSlowest: %s, %.0f ms a step (%.0f tokens/s). Of %.1f minutes, %.0f s of training for each: %ld steps.\n",
      slowest->name().c_str(), 1e3 * most, tokens_per_second, s.minutes, share, long(steps));
  record["slowest"] = slowest->name();
  record["seconds_per_step"] = most;
  record["minutes"] = s.minutes;
  return steps;
}

nlohmann::json facts_of(study::settings const& s) {
  return {{"format", "seqmix-limited-domain-1"},
          {"architectures", s.architectures},
          {"seed", s.seed},
          {"block", s.block},
          {"batch", s.batch},
          {"chunk", s.chunk},
          {"learning_rate", s.learning_rate},
          {"text", s.text.string()}};
}

plan stored_plan(study::settings const& s) {
  auto const path = s.out / "plan.json";
  std::ifstream file(path);
  if (!file)
    throw seqmix::file_error("limited_domain: --resume: " + path.string() +
                             " cannot be read; nothing to resume there");
  auto const json = nlohmann::json::parse(file, nullptr, false);
  if (json.is_discarded()) throw seqmix::file_error("limited_domain: --resume: " + path.string() + " is not JSON");
  auto const expected = facts_of(s);
  for (auto const& [name, value] : expected.items())
    if (json.value(name, nlohmann::json()) != value)
      throw seqmix::option_error("limited_domain: --resume: " + name + " is " + value.dump() + " now and was " +
                                 json.value(name, nlohmann::json()).dump() + " in " + path.string());
  plan p;
  p.steps = json.at("steps").get<index_t>();
  p.measured_after = json.at("measured_after").get<std::vector<index_t>>();
  std::printf("Resuming %s: %ld steps for each architecture, as planned.\n", s.out.c_str(), long(p.steps));
  return p;
}

plan new_plan(study::settings const& s, std::vector<study::domain> const& domains, architectures const& all) {
  auto record = facts_of(s);
  plan p;
  p.steps = s.steps > 0 ? s.steps : steps_in_time(s, domains, all, record);
  p.measured_after = measuring_steps(p.steps);
  record["steps"] = p.steps;
  record["measured_after"] = p.measured_after;
  seqmix::io::write_file_atomically((s.out / "plan.json").string(), record.dump(2) + "\n");
  return p;
}

/// A folder of its own for every new study; --resume goes on with the newest.
std::filesystem::path study_folder(bool resume) {
  std::filesystem::path newest, next;
  for (int n = 1; next.empty(); ++n) {
    std::filesystem::path const folder =
        "results/limited_domain" + (n > 1 ? "-" + std::to_string(n) : std::string());
    if (std::filesystem::exists(folder / "plan.json"))
      newest = folder;
    else
      next = folder;
  }
  if (!resume) return next;
  if (newest.empty()) throw seqmix::option_error("limited_domain: --resume: no study was begun under results/");
  return newest;
}

void print_architectures(architectures const& all) {
  auto const reference = double(all.front()->parameters());
  for (auto const& a : all) {
    double const off = 100.0 * (double(a->parameters()) / reference - 1.0);
    std::printf("%-15s %8ld parameters outside the embedding (%+.2f %%)\n", a->name().c_str(),
                long(a->parameters()), off);
    if (std::abs(off) > 3.0)
      std::printf("  more than 3 %% from %s: the comparison is not fair\n", all.front()->name().c_str());
    std::string names;
    for (auto const& name : a->without_weight_decay())
      if (name.find("layers.") != 0 || name.find("layers.0.") == 0) names += (names.empty() ? "" : ", ") + name;
    std::printf("  no weight decay (layer 0 stands for all): %s\n", names.c_str());
  }
}

int run(study::settings s) {
  auto const begin = std::chrono::steady_clock::now();
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  auto const domains = study::load_domains(s);
  architectures all;
  for (auto const& name : s.architectures) all.push_back(study::make_architecture(name, s));
  if (s.out.empty()) s.out = study_folder(s.resume);
  if (!s.resume && std::filesystem::exists(s.out / "plan.json"))
    throw seqmix::option_error("limited_domain: " + s.out.string() +
                               " holds a study already; --resume continues it, --out names another folder");
  std::filesystem::create_directories(s.out);
  print_architectures(all);
  auto const p = s.resume ? stored_plan(s) : new_plan(s, domains, all);
  std::printf("Every architecture reads the same %.2f million tokens of %s in the same order; results go to %s\n\n",
              double(p.steps * s.batch * s.block) / 1e6, study::training_domain(domains).name.c_str(),
              s.out.c_str());

  std::vector<study::result> results;
  for (auto const& a : all) {
    results.emplace_back();
    if (!a->run(s, domains, p.steps, p.measured_after, stop_requested, results.back())) {
      std::printf("\nStopped. --resume --out %s goes on from here.\n", s.out.c_str());
      return 130;
    }
  }
  study::write_report(s, domains, results);
  auto const trouble = study::write_plot(s, domains, results);
  std::printf("\n%s\n", trouble.empty() ? ("Plot: " + (s.out / "plot.png").string() +
                                           " and plot.svg; numbers: points.csv, "
                                           "gaps.csv, summary.jsonl, one log an architecture.")
                                              .c_str()
                                        : trouble.c_str());
  std::printf("Took %.0f s.\n", std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  study::settings s;
  s.threads = std::max(1, int(std::thread::hardware_concurrency()));
  CLI::App app{"Trains byte-level architectures on one domain of text and measures them on it and on others."};
  app.add_option("--text", s.text, "folder of prepared text (domains.json and a folder a domain)")->required();
  app.add_option("--out", s.out, "folder of this study (default: a new one under results/)");
  app.add_option("--arch", s.architectures, "architectures to compare; the first is the reference")
      ->delimiter(',')
      ->default_val(study::architecture_names());
  app.add_option("--minutes", s.minutes, "time for training and measuring all of them")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--steps", s.steps, "steps of each, instead of --minutes")->check(CLI::PositiveNumber);
  app.add_option("--seed", s.seed, "of start values and of the order of the text")->capture_default_str();
  app.add_flag("--resume", s.resume, "goes on with an interrupted study, as it was planned");
  app.add_option("--threads", s.threads, "changes the time, not the result")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  app.add_option("--chunk", s.chunk, "tokens a chunk of top1_chunk")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--block", s.block, "tokens a training window")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--batch", s.batch, "windows a step")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--learning-rate", s.learning_rate, "peak of the schedule")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);

  std::signal(SIGINT, request_stop);
  std::signal(SIGTERM, request_stop);
  try {
    return run(std::move(s));
  } catch (std::exception const& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
