#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <limits>
#include <map>
#include <span>
#include <string>
#include <sys/resource.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "train/small_models.hpp"
#include <seqmix/train/loop.hpp>

using namespace seqmix;
namespace fs = std::filesystem;

namespace {

std::string contents(fs::path const& path) { return small::bits(io::detail::read_file(path)); }

auto const corpus = small::text(2000);
data::window_sampler source() { return {corpus, small::block, 11}; }

struct files {
  small::folder folder;
  fs::path checkpoint = folder.path / "model.safetensors", log = folder.path / "log.jsonl";
};

// One process of a run: starts, or goes on from what an earlier one left. `on_step(trainer, metrics)`.
template <class Model, class OnStep>
std::string run(files const& where, train::trainer_options const& options, index_t every,
                std::atomic<bool> const* stop, OnStep const& on_step) {
  io::json_lines_log log(where.log);
  train::trainer<Model> t(small::model<Model>(), options);
  train::loop_options const loop{.checkpoint = where.checkpoint,
                                 .checkpoint_every = every,
                                 .log = &log,
                                 .stop = stop,
                                 .facts = {{"data", "words"}}};
  train::resume(t, loop);
  train::train_loop(t, source(), loop, [&](train::metrics const& m) {
    if (m.step % 4 == 0) log.append({{"step", m.step}, {"evaluation", m.loss * 2}});
    on_step(t, m);
  });
  return small::bits_of(t);
}
template <class Model>
std::string run(files const& where, train::trainer_options const& options, index_t every = 0) {
  return run<Model>(where, options, every, nullptr, [](auto const&, auto const&) {});
}

// Runs body in a child process; returns its wait status. The child ends without running destructors of the test.
template <class Body>
pid_t start_child(Body const& body) {
  auto const child = ::fork();
  DOCTEST_REQUIRE(child >= 0);
  if (child > 0) return child;
  int code = 99;
  try {
    code = body();
  } catch (...) {
  }
  ::_exit(code);
}
int status_of(pid_t child) {
  int status = 0;
  DOCTEST_REQUIRE(::waitpid(child, &status, 0) == child);
  return status;
}

template <class Model>
train::trainer<Model> trained(index_t steps, train::trainer_options const& options = small::run_options(12)) {
  train::trainer<Model> t(small::model<Model>(), options);
  while (t.step() < steps) t.step(source());
  return t;
}

template <class Error, class F>
std::string complaint_of(F const& f) {
  try {
    f();
  } catch (Error const& e) {
    return e.what();
  }
  return "";
}

}  // namespace

DOCTEST_TEST_CASE_TEMPLATE(
    "resume: stopped at step 5 and resumed, weights, curve and log are those of a straight run", Model,
    small::transformer, small::mamba) {
  files const straight, broken;
  auto const expected = run<Model>(straight, small::run_options(12));
  std::atomic<bool> stop{false};
  auto const at_five =
      run<Model>(broken, small::run_options(12), 0, &stop, [&](auto const&, auto const& m) { stop = m.step == 5; });
  DOCTEST_CHECK(at_five != expected);
  DOCTEST_CHECK(train::read_checkpoint_info(broken.checkpoint).step == 5);
  DOCTEST_CHECK(io::read_json_lines(broken.log).size() == 5 + 1);
  DOCTEST_CHECK(run<Model>(broken, small::run_options(12)) == expected);
  DOCTEST_CHECK(contents(broken.log) == contents(straight.log));
  DOCTEST_CHECK(contents(broken.checkpoint) == contents(straight.checkpoint));
  DOCTEST_CHECK(io::read_json_lines(straight.log).size() == 12 + 3);
}

DOCTEST_TEST_CASE("resume: a finished run stays as it is") {
  files const where;
  auto const expected = run<small::mamba>(where, small::run_options(3));
  auto const log = contents(where.log);
  DOCTEST_CHECK(run<small::mamba>(where, small::run_options(3)) == expected);
  DOCTEST_CHECK(contents(where.log) == log);
}

DOCTEST_TEST_CASE("resume: without a checkpoint the run begins anew and only lines without a step stay") {
  files const where;
  io::json_lines_log log(where.log);
  log.append({{"seed", 7}});
  log.append({{"step", 0}, {"evaluation", 5.5}});
  log.append({{"step", 1}, {"loss", 5.0}});
  auto t = trained<small::mamba>(0);
  DOCTEST_CHECK_FALSE(train::resume(t, {.checkpoint = where.checkpoint, .log = &log}));
  DOCTEST_CHECK(t.step() == 0);
  DOCTEST_CHECK(contents(where.log) == "{\"seed\":7}\n");
}

DOCTEST_TEST_CASE("resume: a step without counted labels survives a break") {
  auto const some = source();
  struct every_other {
    data::window_sampler const& all;
    void fill(std::uint64_t step, std::uint64_t row, std::span<std::int32_t> x, std::span<std::int32_t> y) const {
      small::ignoring<data::window_sampler>{all, step % 2 == 0 ? 1 : 0}.fill(step, row, x, y);
    }
  } const gaps{some};
  small::folder const here;
  auto const options = small::run_options(6);
  train::trainer<small::mamba> straight(small::model<small::mamba>(), options),
      first(small::model<small::mamba>(), options), second(small::model<small::mamba>(), options);
  while (!straight.finished()) straight.step(gaps);
  while (first.step() < 4) first.step(gaps);
  train::save_checkpoint(here.path / "c", first);
  train::load_checkpoint(here.path / "c", second);
  DOCTEST_CHECK(second.optimiser().updates() == 2);
  while (!second.finished()) second.step(gaps);
  DOCTEST_CHECK(small::bits_of(second) == small::bits_of(straight));
}

DOCTEST_TEST_CASE("resume: killed between a log line and its checkpoint, the log holds each step once") {
  files const straight, broken;
  auto const options = small::run_options(12);
  auto const expected = run<small::mamba>(straight, options);
  // The first kill is before any checkpoint, the others 1 and 2 steps behind one.
  for (index_t last : {2, 7, 11}) {
    auto const child = start_child([&] {
      run<small::mamba>(broken, options, 3, nullptr, [&](auto const&, auto const& m) {
        if (m.step == last) ::kill(::getpid(), SIGKILL);
      });
      return 0;
    });
    int const status = status_of(child);
    DOCTEST_REQUIRE(WIFSIGNALED(status));
    DOCTEST_CHECK(WTERMSIG(status) == SIGKILL);
    DOCTEST_CHECK(io::read_json_lines(broken.log).size() == std::size_t(last + last / 4));
  }
  DOCTEST_CHECK(train::read_checkpoint_info(broken.checkpoint).step == 9);
  DOCTEST_CHECK(run<small::mamba>(broken, options, 3) == expected);
  DOCTEST_CHECK(contents(broken.log) == contents(straight.log));
}

DOCTEST_TEST_CASE("resume: killed at any moment, also while a checkpoint is written") {
  files const straight, broken;
  auto const options = small::run_options(40);
  auto const expected = run<small::transformer>(straight, options);
  int killed = 0;
  for (unsigned round = 0; round < 12; ++round) {
    auto const child = start_child([&] {
      run<small::transformer>(broken, options, 1);
      return 0;
    });
    ::usleep(7000 + 3717 * round);
    ::kill(child, SIGKILL);
    killed += WIFSIGNALED(status_of(child));
    if (fs::exists(broken.checkpoint)) {
      auto const step = train::read_checkpoint_info(broken.checkpoint).step;
      DOCTEST_CHECK(step >= 1);
      // Every step that the checkpoint has seen is in the log.
      auto const log = io::read_json_lines(broken.log);
      DOCTEST_CHECK(std::count_if(log.begin(), log.end(), [&](auto const& line) {
                      return line.contains("loss") && line.at("step").template get<index_t>() <= step;
                    }) == step);
    }
  }
  DOCTEST_CHECK(killed > 0);
  DOCTEST_CHECK(run<small::transformer>(broken, options, 5) == expected);
  DOCTEST_CHECK(contents(broken.log) == contents(straight.log));
}

DOCTEST_TEST_CASE("resume: another number of threads continues with the same bits") {
  files const straight, broken;
  auto const expected = run<small::transformer>(straight, small::run_options(8));
  std::atomic<bool> stop{false};
  run<small::transformer>(broken, small::run_options(8, 2), 0, &stop,
                          [&](auto const&, auto const& m) { stop = m.step == 3; });
  DOCTEST_CHECK(run<small::transformer>(broken, small::run_options(8, 3)) == expected);
}

DOCTEST_TEST_CASE("checkpoint: a NaN stops the run and the last good checkpoint still loads") {
  files const where;
  auto const options = small::run_options(12);
  auto const complaint = complaint_of<value_error>([&] {
    run<small::transformer>(where, options, 2, nullptr, [](auto& t, auto const& m) {
      if (m.step == 5) t.parameters()[0] = std::numeric_limits<float>::quiet_NaN();
    });
  });
  DOCTEST_CHECK(complaint.starts_with("seqmix: trainer: step 6: the loss is nan"));
  files const straight;
  DOCTEST_CHECK(train::read_checkpoint_info(where.checkpoint).step == 4);
  DOCTEST_CHECK(run<small::transformer>(where, options, 2) == run<small::transformer>(straight, options));
  DOCTEST_CHECK(contents(where.log) == contents(straight.log));
}

DOCTEST_TEST_CASE(
    "checkpoint: holds every tensor under its name, moments of the trained ones, and what the run is") {
  small::folder const here;
  auto t = trained<small::mamba>(2);
  t.knobs().temperature = 0.1;
  train::save_checkpoint(here.path / "c", t, {{"data", "words"}});
  io::safetensors_file const file(here.path / "c");
  auto const& list = t.model().parameters();
  DOCTEST_CHECK(file.tensors().size() == 3 * list.all().size());
  index_t elements = 0;
  for (auto const& tensor : file.tensors()) elements += tensor.elements();
  DOCTEST_CHECK(elements == 3 * list.count());
  DOCTEST_CHECK(elements < 3 * list.size());
  auto const& dt = list.at("layers.1.mixer.gate.dt_bias");
  for (auto const& [prefix, numbers] :
       std::map<std::string, float const*>{{"", t.parameters().data()},
                                           {"optimiser.m.", t.optimiser().first_moment().data()},
                                           {"optimiser.v.", t.optimiser().second_moment().data()}}) {
    std::vector<float> read(2);
    file.read<float>(prefix + dt.name, read);
    DOCTEST_CHECK(read[0] == numbers[dt.offset]);
    DOCTEST_CHECK(read[1] == numbers[dt.offset + 1]);
  }
  auto const info = train::read_checkpoint_info(here.path / "c");
  DOCTEST_CHECK(info.variant == small::mamba::name());
  DOCTEST_CHECK(info.step == 2);
  DOCTEST_CHECK(info.steps == 12);
  DOCTEST_CHECK(info.seed == 7);
  DOCTEST_CHECK(info.tokens == 2 * 3 * small::block);
  for (auto const& [name, value] : std::map<std::string, std::string>{{"format", "seqmix checkpoint 1"},
                                                                      {"data", "words"},
                                                                      {"layer.0.heads", "2"},
                                                                      {"d_model", "16"},
                                                                      {"learning_rate", "0.01"},
                                                                      {"library_version", "0.1.0"},
                                                                      {"knobs.temperature", "0.1"}})
    DOCTEST_CHECK(info.facts.at(name) == value);
  train::trainer<small::mamba> other(small::model<small::mamba>(), small::run_options(12));
  train::load_checkpoint(here.path / "c", other, {{"data", "words"}});
  DOCTEST_CHECK(other.knobs().temperature == 0.1);
  DOCTEST_CHECK(small::bits_of(other) == small::bits_of(t));
}

DOCTEST_TEST_CASE(
    "checkpoint: one of another variant, shape, seed, schedule or text is refused and changes nothing") {
  small::folder const here;
  auto const path = here.path / "c";
  train::save_checkpoint(path, trained<small::mamba>(2), {{"data", "words"}});
  auto const begin = "seqmix: load " + path.string() + ": the checkpoint is of another run: ";
  auto const refused = [&](auto t, train::run_facts const& facts = {{"data", "words"}}) {
    auto const before = small::bits_of(t);
    auto const text = complaint_of<option_error>([&] { train::load_checkpoint(path, t, facts); });
    DOCTEST_CHECK(before == small::bits_of(t));
    DOCTEST_CHECK(t.step() == 0);
    return text;
  };
  auto const base = small::run_options(12);
  DOCTEST_CHECK(refused(trained<small::transformer>(0)) ==
                begin + "variant: expected " + small::transformer::name() + ", got " + small::mamba::name());
  auto shape = small::options<small::mamba>();
  shape.layers = 3;
  DOCTEST_CHECK(refused(train::trainer<small::mamba>(small::mamba(shape), base)) ==
                begin + "layers: expected 3, got 2");
  shape = small::options<small::mamba>();
  std::get<0>(shape.layer).recurrence_chunk = 8;
  DOCTEST_CHECK(refused(train::trainer<small::mamba>(small::mamba(shape), base)) ==
                begin + "layer.0.recurrence_chunk: expected 8, got 32");
  auto other = base;
  other.seed = 8;
  DOCTEST_CHECK(refused(trained<small::mamba>(0, other)) == begin + "seed: expected 8, got 7");
  other = base;
  other.steps = 13;
  DOCTEST_CHECK(refused(trained<small::mamba>(0, other)) == begin + "steps: expected 13, got 12");
  other = base;
  other.learning_rate = 0.02;
  DOCTEST_CHECK(refused(trained<small::mamba>(0, other)) == begin + "learning_rate: expected 0.02, got 0.01");
  other = base;
  other.adamw.weight_decay = 0.0;
  DOCTEST_CHECK(refused(trained<small::mamba>(0, other)) == begin + "adamw.weight_decay: expected 0, got 0.1");
  DOCTEST_CHECK(refused(trained<small::mamba>(0), {{"data", "numbers"}}) ==
                begin + "data: expected numbers, got words");
  train::trainer<small::mamba, double> wide(small::model<small::mamba>(), base);
  DOCTEST_CHECK(refused(std::move(wide)) == begin + "dtype: expected F64, got F32");
}

DOCTEST_TEST_CASE("checkpoint: a file that is not a whole checkpoint is refused and changes nothing") {
  small::folder const here;
  auto const path = here.path / "c";
  auto t = trained<small::mamba>(1);
  auto const load = [&] {
    auto const before = small::bits_of(t);
    auto const text = complaint_of<file_error>([&] { train::load_checkpoint(path, t); });
    DOCTEST_CHECK(before == small::bits_of(t));
    DOCTEST_CHECK(t.step() == 1);
    return text;
  };
  auto const begin = "seqmix: load " + path.string() + ": ";
  DOCTEST_CHECK(load() == "seqmix: read " + path.string() + ": cannot be opened: No such file or directory");
  io::write_safetensors(path, {});
  DOCTEST_CHECK(load() ==
                begin + "is not a checkpoint of this library: format: expected \"seqmix checkpoint 1\", got none");

  train::save_checkpoint(path, trained<small::mamba>(2));
  auto const whole = io::safetensors_file(path);
  auto const save = [&](std::size_t first, std::map<std::string, std::string> metadata) {
    io::write_safetensors(path, whole.tensors().subspan(first), metadata);
  };
  auto metadata = whole.metadata();
  save(1, metadata);
  DOCTEST_CHECK(load() == begin + "there is no tensor \"model.embedding\"");
  metadata.erase("optimiser.updates");
  save(0, metadata);
  DOCTEST_CHECK(load() == begin + "is not a whole checkpoint: its metadata has no optimiser.updates");
  metadata["optimiser.updates"] = "2x";
  save(0, metadata);
  DOCTEST_CHECK(load() == begin + "optimiser.updates must be a number, got \"2x\"");
  metadata["optimiser.updates"] = "3";
  save(0, metadata);
  DOCTEST_CHECK(load() == begin + "step 2 and optimiser.updates 3 cannot be");
  std::vector<io::safetensor> tensors(whole.tensors().begin(), whole.tensors().end());
  std::swap(tensors[0].shape[0], tensors[0].shape[1]);
  io::write_safetensors(path, tensors, whole.metadata());
  DOCTEST_CHECK(load() == begin + "tensor \"model.embedding\": expected shape [256,16], got [16,256]");
  std::swap(tensors[0].shape[0], tensors[0].shape[1]);
  tensors.push_back(tensors[0]);
  tensors.back().name = "more";
  io::write_safetensors(path, tensors, whole.metadata());
  DOCTEST_CHECK(load().ends_with(" tensors, got " + std::to_string(tensors.size())));
  save(0, whole.metadata());
  train::load_checkpoint(path, t);
  DOCTEST_CHECK(t.step() == 2);
}

DOCTEST_TEST_CASE(
    "checkpoint: when the disk is full the run stops with the reason and the earlier checkpoint stays") {
  files const where;
  auto const options = small::run_options(12);
  std::atomic<bool> stop{false};
  run<small::transformer>(where, options, 0, &stop, [&](auto const&, auto const& m) { stop = m.step == 5; });
  auto const before = contents(where.checkpoint);
  auto const child = start_child([&] {
    rlimit const limit{20000, 20000};
    std::signal(SIGXFSZ, SIG_IGN);
    if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) return 2;
    auto const complaint = complaint_of<file_error>([&] { run<small::transformer>(where, options, 2); });
    bool const good =
        complaint.starts_with("seqmix: write " + where.checkpoint.string() + ": failed after 20000 of ") &&
        complaint.ends_with("File too large");
    return good ? 0 : 1;
  });
  int const status = status_of(child);
  DOCTEST_CHECK(WIFEXITED(status));
  DOCTEST_CHECK(WEXITSTATUS(status) == 0);
  DOCTEST_CHECK(contents(where.checkpoint) == before);
  DOCTEST_CHECK(std::distance(fs::directory_iterator(where.folder.path), fs::directory_iterator()) == 2);
  files const straight;
  DOCTEST_CHECK(run<small::transformer>(where, options) == run<small::transformer>(straight, options));
  DOCTEST_CHECK(contents(where.log) == contents(straight.log));
}

DOCTEST_TEST_CASE("resume: a checkpoint that does not fit leaves the log alone") {
  files const where;
  run<small::mamba>(where, small::run_options(3));
  auto const log = contents(where.log), checkpoint = contents(where.checkpoint);
  auto const complaint = complaint_of<option_error>([&] { run<small::transformer>(where, small::run_options(3)); });
  DOCTEST_CHECK(complaint.find("variant: expected ") != complaint.npos);
  DOCTEST_CHECK(contents(where.log) == log);
  DOCTEST_CHECK(contents(where.checkpoint) == checkpoint);
}
