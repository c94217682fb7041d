#include "plan.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>

#include <nlohmann/json.hpp>

#include <seqmix/io/atomic_file.hpp>

namespace study {

namespace {

/// Points spaced by tokens, closer at the beginning: early on the losses of all architectures overlap.
std::vector<index_t> measuring_steps(index_t steps) {
  std::vector<index_t> at;
  for (double part : {0.02, 0.05, 0.10, 0.20, 0.35, 0.55, 0.80, 1.0}) {
    auto const step = std::clamp(index_t(std::llround(part * double(steps))), index_t(1), steps);
    if (at.empty() || at.back() != step) at.push_back(step);
  }
  return at;
}

/// The number of steps that the slowest architecture manages in its share of the time.
index_t steps_in_time(settings const& s, std::vector<domain> const& domains, architectures const& all,
                      nlohmann::json& record) {
  std::printf("A trial of each architecture:");
  std::fflush(stdout);
  architecture const* slowest = nullptr;
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
    throw seqmix::option_error(s.program + ": --minutes " + std::to_string(s.minutes) + " leaves " +
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

nlohmann::json facts_of(settings const& s) {
  auto format = "seqmix-" + s.program + "-1";
  std::replace(format.begin(), format.end(), '_', '-');
  nlohmann::json facts{{"format", format},
                       {"architectures", s.architectures},
                       {"seed", s.seed},
                       {"block", s.block},
                       {"batch", s.batch},
                       {"chunk", s.chunk},
                       {"learning_rate", s.learning_rate},
                       {"text", s.text.string()}};
  if (s.window > 0) facts["window"] = s.window;
  return facts;
}

}  // namespace

std::filesystem::path study_folder(settings const& s) {
  std::filesystem::path newest, next;
  for (int n = 1; next.empty(); ++n) {
    std::filesystem::path const folder = "results/" + s.program + (n > 1 ? "-" + std::to_string(n) : std::string());
    if (std::filesystem::exists(folder / "plan.json"))
      newest = folder;
    else
      next = folder;
  }
  if (!s.resume) return next;
  if (newest.empty()) throw seqmix::option_error(s.program + ": --resume: no study was begun under results/");
  return newest;
}

plan stored_plan(settings const& s) {
  auto const path = s.out / "plan.json";
  std::ifstream file(path);
  if (!file)
    throw seqmix::file_error(s.program + ": --resume: " + path.string() +
                             " cannot be read; nothing to resume there");
  auto const json = nlohmann::json::parse(file, nullptr, false);
  if (json.is_discarded()) throw seqmix::file_error(s.program + ": --resume: " + path.string() + " is not JSON");
  auto const expected = facts_of(s);
  for (auto const& [name, value] : expected.items())
    if (json.value(name, nlohmann::json()) != value)
      throw seqmix::option_error(s.program + ": --resume: " + name + " is " + value.dump() + " now and was " +
                                 json.value(name, nlohmann::json()).dump() + " in " + path.string());
  plan p;
  p.steps = json.at("steps").get<index_t>();
  p.measured_after = json.at("measured_after").get<std::vector<index_t>>();
  std::printf("Resuming %s: %ld steps for each architecture, as planned.\n", s.out.c_str(), long(p.steps));
  return p;
}

plan new_plan(settings const& s, std::vector<domain> const& domains, architectures const& all) {
  auto record = facts_of(s);
  plan p;
  p.steps = s.steps > 0 ? s.steps : steps_in_time(s, domains, all, record);
  p.measured_after = measuring_steps(p.steps);
  record["steps"] = p.steps;
  record["measured_after"] = p.measured_after;
  seqmix::io::write_file_atomically((s.out / "plan.json").string(), record.dump(2) + "\n");
  return p;
}

}  // namespace study
