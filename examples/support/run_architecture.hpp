#pragma once

#include <chrono>
#include <cstdio>
#include <fstream>
#include <optional>

#include <nlohmann/json.hpp>

#include "progress.hpp"
#include "study.hpp"
#include <seqmix/io/json_lines.hpp>
#include <seqmix/mixers/visible_tokens.hpp>
#include <seqmix/models/language_model.hpp>
#include <seqmix/train/evaluate.hpp>
#include <seqmix/train/loop.hpp>

namespace study {

namespace detail {
/// The mixer of a layer, or of the first layer of a block.
template <class L>
struct mixer_of;
template <class M, seqmix::extras E>
struct mixer_of<seqmix::layer<M, E>> {
  using type = M;
};
template <class First, class... Rest>
struct mixer_of<seqmix::block<First, Rest...>> : mixer_of<First> {};

inline double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}
}  // namespace detail

/// Trains and measures one architecture; `Layer` is repeated `layers` times.
template <class Layer>
class architecture_of final : public architecture {
 public:
  using model_type = seqmix::language_model<seqmix::pattern<Layer>>;
  using trainer_type = seqmix::train::trainer<model_type>;

  architecture_of(std::string name, typename Layer::options const& layer, index_t layers, seqmix::selection select)
      : name_(std::move(name)), select_(select) {
    options_ = {.vocabulary = 256, .d_model = 128, .layers = layers};
    options_.layer = std::tuple(layer);
  }

  std::string name() const override { return name_; }
  index_t parameters() const override { return model_type(options_).non_embedding_parameters(); }
  std::vector<std::string> without_weight_decay() const override {
    return model_type(options_).parameters().without_weight_decay();
  }

  double seconds_per_step(settings const& s, std::vector<domain> const& domains, double at_least) const override {
    trainer_type trainer(model_type(options_), trainer_options(s, 1'000'000));
    auto const source = sampler(s, domains);
    trainer.step(source);
    auto const begin = std::chrono::steady_clock::now();
    int steps = 0;
    do trainer.step(source), ++steps;
    while (detail::seconds_since(begin) < at_least);
    return detail::seconds_since(begin) / steps;
  }

  bool run(settings const& s, std::vector<domain> const& domains, index_t steps,
           std::vector<index_t> const& measured_after, std::atomic<bool> const& stop, result& out) const override {
    out.name = name_;
    out.parameters = parameters();
    out.visible = seqmix::mean_visible_tokens<typename detail::mixer_of<Layer>::type>(s.block, select_);
    out.selects_arbitrarily = seqmix::layer_selects_arbitrarily<Layer>;

    trainer_type trainer(model_type(options_), trainer_options(s, steps));
    seqmix::train::evaluator<model_type> evaluate(trainer.model(), s.block, s.batch, trainer.device());
    seqmix::io::json_lines_log log((s.out / (name_ + ".jsonl")).string());
    seqmix::train::loop_options loop;
    loop.checkpoint = s.out / (name_ + ".safetensors");
    loop.checkpoint_every = (std::max)(index_t(1), steps / 8);
    loop.log = &log;
    loop.stop = &stop;
    loop.facts = {{"text", s.text.string()}, {"data_seed", std::to_string(s.seed)}};
    seqmix::train::resume(trainer, loop);

    progress_line progress(name_, trainer.step(), steps, trainer.tokens_per_step());
    index_t const first = trainer.step();
    auto begin = std::chrono::steady_clock::now();
    double training = 0.0;
    bool const done =
        seqmix::train::train_loop(trainer, sampler(s, domains), loop, [&](seqmix::train::metrics const& m) {
          training += detail::seconds_since(begin);
          progress.show(m.step, m.loss, training);
          if (std::find(measured_after.begin(), measured_after.end(), m.step) != measured_after.end())
            log.append(measured(evaluate, trainer, domains, m, m.step == steps));
          begin = std::chrono::steady_clock::now();
        });
    progress.end();
    remember_speed(s, first, trainer, training, out);
    read_points(s, out);
    return done;
  }

 private:
  static seqmix::train::trainer_options trainer_options(settings const& s, index_t steps) {
    return {.steps = steps,
            .batch = s.batch,
            .block = s.block,
            .seed = s.seed,
            .learning_rate = s.learning_rate,
            .threads = s.threads};
  }
  static seqmix::data::window_sampler sampler(settings const& s, std::vector<domain> const& domains) {
    return {training_domain(domains).text.train, s.block, s.seed};
  }
  static nlohmann::json measured(seqmix::train::evaluator<model_type>& evaluate, trainer_type const& trainer,
                                 std::vector<domain> const& domains, seqmix::train::metrics const& m, bool last) {
    auto const bits = [&](std::vector<seqmix::data::window> domain::*windows) {
      nlohmann::json of;
      for (auto const& d : domains) of[d.name] = evaluate(trainer.parameters().data(), d.*windows).bits();
      return of;
    };
    nlohmann::json line{{"step", m.step}, {"tokens", m.tokens}, {"bits_per_byte", bits(&domain::short_windows)}};
    if (last) line["final_bits_per_byte"] = bits(&domain::long_windows);
    return line;
  }
  /// Speed is kept beside the log, one line a session, since the log of a resumed run must equal that of an
  /// unbroken one.
  static void remember_speed(settings const& s, index_t first, trainer_type const& trainer, double seconds,
                             result& out) {
    auto const path = (s.out / (out.name + ".speed.jsonl")).string();
    if (trainer.step() > first)
      seqmix::io::json_lines_log(path).append(
          {{"tokens", (trainer.step() - first) * trainer.tokens_per_step()}, {"seconds", seconds}});
    double tokens = 0.0, all = 0.0;
    for (auto const& line : seqmix::io::read_json_lines(path)) {
      tokens += line.at("tokens").get<double>();
      all += line.at("seconds").get<double>();
    }
    out.tokens_per_second = all > 0.0 ? tokens / all : 0.0;
  }
  static void read_points(settings const& s, result& out) {
    for (auto const& line : seqmix::io::read_json_lines((s.out / (out.name + ".jsonl")).string())) {
      if (!line.contains("bits_per_byte")) continue;
      point p{line.at("step").get<index_t>(), line.at("tokens").get<index_t>(), {}, {}};
      for (auto const& [name, bits] : line.at("bits_per_byte").items()) p.bits[name] = bits.template get<double>();
      if (line.contains("final_bits_per_byte"))
        p.final_bits = line.at("final_bits_per_byte").get<std::map<std::string, double>>();
      out.points.push_back(std::move(p));
    }
  }

  std::string name_;
  typename model_type::options options_;
  seqmix::selection select_;
};

}  // namespace study
