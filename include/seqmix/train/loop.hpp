#pragma once

#include <atomic>
#include <filesystem>
#include <system_error>

#include <nlohmann/json.hpp>

#include <seqmix/io/json_lines.hpp>
#include <seqmix/train/checkpoint.hpp>

namespace seqmix::inline v0::train {

struct loop_options {
  std::filesystem::path checkpoint;         ///< file to save to; empty: nothing is saved
  index_t checkpoint_every = 0;             ///< steps; 0: only at the end and when stopped
  io::json_lines_log* log = nullptr;        ///< takes one line a step; nullptr: none
  std::atomic<bool> const* stop = nullptr;  ///< looked at after every step; a signal handler may set it
  run_facts facts{};                        ///< saved with the checkpoint; a resumed run must have the same
};

/// The line of a step in the log. It holds no time, so that the logs of two equal runs are equal.
inline nlohmann::json log_line(metrics const& m) {
  return {{"step", m.step},
          {"loss", m.loss},
          {"counted", m.counted},
          {"gradient_norm", m.gradient_norm},
          {"learning_rate", m.learning_rate},
          {"tokens", m.tokens}};
}

/// Prepares a run that may have been interrupted at any moment: loads the checkpoint if there is one and cuts the
/// log back to its step. Without a checkpoint the run begins anew and all lines with a step are dropped. Returns
/// whether there was a checkpoint. Errors: those of `load_checkpoint`, before the log is touched.
template <class Trainer>
bool resume(Trainer& trainer, loop_options const& options) {
  std::error_code code;
  bool const found = !options.checkpoint.empty() && std::filesystem::exists(options.checkpoint, code);
  // Not being able to look is not the same as nothing being there: the log must not be cut.
  if (code) io::detail::fail("load", options.checkpoint, code.message());
  if (found) load_checkpoint(options.checkpoint, trainer, options.facts);
  if (options.log) options.log->truncate_after(found ? trainer.step() : -1);
  return found;
}

/// Trains until all steps are done or the stop flag is set, and returns whether all are done. After each step its
/// line is appended to the log, then `on_step(metrics)` is called (progress, evaluation; it may append lines of its
/// own with that "step"), then perhaps the checkpoint is saved; in any case at the end. The log is on the disk
/// before the checkpoint that counts on it, so after `resume` the log holds each step once, whenever the run was
/// killed. Errors: those of `trainer::step` and `save_checkpoint`; the last checkpoint stays.
template <class Trainer, token_source Source, class OnStep>
bool train_loop(Trainer& trainer, Source const& source, loop_options const& options, OnStep&& on_step) {
  index_t saved = -1;
  auto const save = [&] {
    if (options.log) options.log->sync();
    if (!options.checkpoint.empty()) save_checkpoint(options.checkpoint, trainer, options.facts);
    saved = trainer.step();
  };
  auto const stopped = [&] { return options.stop && options.stop->load(); };
  while (!trainer.finished() && !stopped()) {
    metrics const done = trainer.step(source);
    if (options.log) options.log->append(log_line(done));
    on_step(done);
    if (options.checkpoint_every > 0 && trainer.step() % options.checkpoint_every == 0) save();
  }
  if (saved != trainer.step()) save();
  return trainer.finished();
}

template <class Trainer, token_source Source>
bool train_loop(Trainer& trainer, Source const& source, loop_options const& options) {
  return train_loop(trainer, source, options, [](metrics const&) {});
}

}  // namespace seqmix::inline v0::train
