#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include <seqmix/io/safetensors.hpp>
#include <seqmix/train/number_text.hpp>
#include <seqmix/train/trainer.hpp>
#include <seqmix/version.hpp>

namespace seqmix::inline v0::train {

/// Names and values that describe a run.
using run_facts = std::map<std::string, std::string>;

namespace detail {

inline constexpr std::string_view checkpoint_format = "seqmix checkpoint 1";

/// Options of a layer, by the `each_option` that stands beside their type.
template <class Options>
void add_options(run_facts& facts, std::string const& room, Options const& o) {
  each_option(o, [&](char const* name, auto value) { facts[room + "." + name] = number_text(value); });
}
template <class... Options>
void add_options(run_facts& facts, std::string const& room, std::tuple<Options...> const& parts) {
  std::apply(
      [&](auto const&... part) {
        int i = 0;
        (add_options(facts, room + "." + std::to_string(i++), part), ...);
      },
      parts);
}

/// What two runs must share for one to continue the other's checkpoint.
template <class Trainer>
run_facts shared_facts(Trainer const& t, run_facts facts) {
  auto const add = [&](char const* name, auto value) { facts[name] = number_text(value); };
  facts["variant"] = Trainer::model_type::name();
  facts["dtype"] = std::string(io::dtype_name(io::dtype_of<typename Trainer::value_type>));
  if constexpr (requires { t.model().settings().layer; }) {
    auto const& m = t.model().settings();
    add("vocabulary", m.vocabulary);
    add("d_model", m.d_model);
    add("layers", m.layers);
    add("tied", m.tied);
    add("norm_eps", m.norm_eps);
    add_options(facts, "layer", m.layer);
  }
  auto const& o = t.settings();
  add("seed", o.seed);
  add("steps", o.steps);
  add("batch", o.batch);
  add("block", o.block);
  add("accumulation", o.accumulation);
  add("learning_rate", o.learning_rate);
  add("warmup_fraction", o.warmup_fraction);
  add("floor", o.floor);
  add("clip", o.clip);
  add("adamw.beta1", o.adamw.beta1);
  add("adamw.beta2", o.adamw.beta2);
  add("adamw.eps", o.adamw.eps);
  add("adamw.weight_decay", o.adamw.weight_decay);
  return facts;
}

/// Calls visit(name, shape, numbers) for every tensor of a checkpoint, in the file's order.
template <class Trainer, class Visit>
void for_each_saved(Trainer& t, Visit const& visit) {
  auto const room = [&](std::string_view prefix, auto& numbers, bool moments) {
    for (auto const& p : t.model().parameters().all())
      if (p.trained || !moments)
        visit(std::string(prefix) + p.name, p.shape, std::span(numbers.data() + p.offset, std::size_t(p.size())));
  };
  room("", t.parameters(), false);
  room("optimiser.m.", t.optimiser().first_moment(), true);
  room("optimiser.v.", t.optimiser().second_moment(), true);
}

inline std::string const& fact(io::safetensors_file const& file, std::string const& name) {
  auto const at = file.metadata().find(name);
  if (at == file.metadata().end())
    io::detail::fail("load", file.path(), "is not a whole checkpoint: its metadata has no ", name);
  return at->second;
}
template <class Number>
Number number_fact(io::safetensors_file const& file, std::string const& name) {
  Number x{};
  auto const& text = fact(file, name);
  if (!read_number(text, x))
    io::detail::fail("load", file.path(), name, " must be a number, got ", io::detail::name_text(text));
  return x;
}
inline void check_format(io::safetensors_file const& file) {
  auto const at = file.metadata().find("format");
  if (at == file.metadata().end() || at->second != checkpoint_format)
    io::detail::fail("load", file.path(), "is not a checkpoint of this library: format: expected \"",
                     checkpoint_format, "\", got ",
                     at == file.metadata().end() ? "none" : io::detail::name_text(at->second));
}
inline void check_shape(io::safetensors_file const& file, std::string const& name,
                        std::vector<index_t> const& expected) {
  auto const& shape = file.at(name).shape;
  if (shape != expected)
    io::detail::fail("load", file.path(), "tensor ", io::detail::name_text(name), ": expected shape ",
                     io::detail::shape_text(expected), ", got ", io::detail::shape_text(shape));
}

}  // namespace detail

/// Saves parameters, moments and everything else a run continues from, completely or not at all: if saving fails
/// (file_error), an earlier checkpoint of that name is as it was. Parameters stand under their names, moments under
/// "optimiser.m." and "optimiser.v."; names, options and progress are in the metadata. `more` adds facts that a
/// resumed run must share, such as the name of its data.
template <class Trainer>
void save_checkpoint(std::filesystem::path const& path, Trainer const& trainer, run_facts const& more = {}) {
  using detail::number_text;
  auto metadata = detail::shared_facts(trainer, more);
  metadata["format"] = detail::checkpoint_format;
  metadata["library_version"] = number_text(SEQMIX_VERSION_MAJOR) + "." + number_text(SEQMIX_VERSION_MINOR) + "." +
                                number_text(SEQMIX_VERSION_PATCH);
  metadata["step"] = number_text(trainer.step());
  metadata["tokens"] = number_text(trainer.tokens());
  metadata["optimiser.updates"] = number_text(trainer.optimiser().updates());
  metadata["knobs.temperature"] = number_text(trainer.knobs().temperature);
  metadata["knobs.forward_temperature"] = number_text(trainer.knobs().forward_temperature);
  metadata["knobs.hard_fraction"] = number_text(trainer.knobs().hard_fraction);
  metadata["knobs.decay_offset"] = number_text(trainer.knobs().decay_offset);
  std::vector<io::safetensor> tensors;
  detail::for_each_saved(trainer, [&](std::string name, std::vector<index_t> const& shape, auto numbers) {
    tensors.push_back(io::as_safetensor(std::move(name), shape, numbers));
  });
  io::write_safetensors(path, tensors, metadata);
}

/// Makes the trainer continue where a checkpoint was saved; further steps have the bits of a run without a break.
/// Errors, with the trainer unchanged: option_error naming the first option, size or fact that differs, expected
/// and actual; file_error for a file that is not a whole checkpoint.
template <class Trainer>
void load_checkpoint(std::filesystem::path const& path, Trainer& trainer, run_facts const& more = {}) {
  io::safetensors_file const file(path);
  detail::check_format(file);
  // The variant first: all other differences follow from it.
  auto const expected = detail::shared_facts(trainer, more);
  auto const compare = [&](std::string const& name, std::string const& value) {
    auto const& saved = detail::fact(file, name);
    if (saved != value)
      throw option_error("seqmix: load " + path.string() + ": the checkpoint is of another run: " + name +
                         ": expected " + value + ", got " + saved);
  };
  compare("variant", expected.at("variant"));
  for (auto const& [name, value] : expected) compare(name, value);

  auto const step = detail::number_fact<index_t>(file, "step");
  auto const updates = detail::number_fact<index_t>(file, "optimiser.updates");
  run_knobs knobs;
  knobs.temperature = detail::number_fact<double>(file, "knobs.temperature");
  knobs.forward_temperature = detail::number_fact<double>(file, "knobs.forward_temperature");
  knobs.hard_fraction = detail::number_fact<double>(file, "knobs.hard_fraction");
  knobs.decay_offset = detail::number_fact<double>(file, "knobs.decay_offset");
  if (step < 0 || updates < 0 || updates > step)
    io::detail::fail("load", path, "step ", step, " and optimiser.updates ", updates, " cannot be");

  // Everything is checked before anything is changed.
  using value_type = typename Trainer::value_type;
  std::size_t tensors = 0;
  detail::for_each_saved(trainer, [&](std::string const& name, std::vector<index_t> const& shape, auto) {
    detail::check_shape(file, name, shape);
    if (file.at(name).type != io::dtype_of<value_type>)
      io::detail::fail("load", path, "tensor ", io::detail::name_text(name), ": expected ",
                       io::dtype_name(io::dtype_of<value_type>), ", got ", io::dtype_name(file.at(name).type));
    ++tensors;
  });
  if (file.tensors().size() != tensors)
    io::detail::fail("load", path, "expected ", tensors, " tensors, got ", file.tensors().size());
  detail::for_each_saved(trainer, [&](std::string const& name, std::vector<index_t> const&, auto numbers) {
    file.read(name, numbers);
  });
  trainer.optimiser().set_updates(updates);
  trainer.knobs() = knobs;
  trainer.set_step(step);
}

/// What a checkpoint says about its run, for a program that must know before it builds the model.
struct checkpoint_info {
  std::string variant;
  index_t step = 0, steps = 0, tokens = 0;
  std::uint64_t seed = 0;
  run_facts facts;  ///< everything under its name
};

/// Errors: file_error for a file that is not a checkpoint.
inline checkpoint_info read_checkpoint_info(std::filesystem::path const& path) {
  io::safetensors_file const file(path);
  detail::check_format(file);
  return {.variant = detail::fact(file, "variant"),
          .step = detail::number_fact<index_t>(file, "step"),
          .steps = detail::number_fact<index_t>(file, "steps"),
          .tokens = detail::number_fact<index_t>(file, "tokens"),
          .seed = detail::number_fact<std::uint64_t>(file, "seed"),
          .facts = file.metadata()};
}

}  // namespace seqmix::inline v0::train
