#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include <seqmix/models/language_model.hpp>
#include <seqmix/train/adamw.hpp>
#include <seqmix/train/clip.hpp>
#include <seqmix/train/number_text.hpp>
#include <seqmix/train/schedule.hpp>

namespace seqmix::inline v0::train {

struct trainer_options {
  index_t steps = 1;              ///< of the whole run: the learning rate is at its floor after them
  index_t batch = 1;              ///< rows of one micro-batch
  index_t block = 1;              ///< tokens a row
  index_t accumulation = 1;       ///< micro-batches a step
  std::uint64_t seed = 0;         ///< of the parameters' start values
  double learning_rate = 1e-3;    ///< the schedule's peak
  double warmup_fraction = 0.05;  ///< of the steps
  double floor = 0.1;             ///< last learning rate as a fraction of the peak
  double clip = 1.0;              ///< largest norm of the gradient; 0: not clipped
  train::adamw_options adamw{};
  int threads = 1;  ///< changes no result
};

/// What one step did.
struct metrics {
  index_t step = 0;            ///< steps done, this one included
  double loss = 0.0;           ///< nats per counted label, before the update
  index_t counted = 0;         ///< labels that were not ignored
  double gradient_norm = 0.0;  ///< before clipping
  double learning_rate = 0.0;
  index_t tokens = 0;  ///< tokens read in all, this step included
};

/// Gives the tokens x and labels y [rows * block] of rows first_row... of a step, counted from 0, as a pure
/// function of these numbers: a resumed run reads what the interrupted one would have. A negative label is ignored.
/// `data::window_sampler` is one.
template <class S>
concept token_source = requires(S const& s, std::uint64_t step, std::uint64_t first_row,
                                std::span<std::int32_t> to) {
  s.fill(step, first_row, to, to);
};

/// Trains a model: owns parameters, gradients, moments and the memory of a forward and backward, all allocated at
/// construction. A step allocates nothing. Every step is a function of the options, the parameters and the tokens:
/// the same bits for any number of threads, and from a checkpoint as without a break.
template <class Model, class T = float, class Device = device::cpu>
class trainer {
 public:
  using model_type = Model;
  using value_type = T;

  trainer(Model model, trainer_options const& options, Device dev = {})
      : model_(std::move(model)), o_(checked(options)), device_(with_threads(dev, o_.threads)),
        blocks_(model_.parameters()), optimiser_(model_.parameters(), o_.adamw),
        parameters_(model_.parameters().size()), gradients_(model_.parameters().size()), x_(rows() * o_.block),
        y_(rows() * o_.block),
        memory_(model_.template make_memory<T>(device_, sequences::batch(o_.batch, o_.block), {.training = true})) {
    model_.parameters().initialise(o_.seed, parameters_.data());
    auto plan = arena::measure();
    clip_global_norm(device_, blocks_, gradients_.data(), 0.0, plan);
    scratch_block_ = buffer<std::byte>(plan.peak());
  }

  Model const& model() const noexcept { return model_; }
  trainer_options const& settings() const noexcept { return o_; }
  Device device() const noexcept { return device_; }
  warmup_cosine schedule() const noexcept {
    return {o_.learning_rate, index_t(std::llround(o_.warmup_fraction * double(o_.steps))), o_.steps, o_.floor};
  }

  /// Steps done.
  index_t step() const noexcept { return step_; }
  bool finished() const noexcept { return step_ >= o_.steps; }
  index_t tokens_per_step() const noexcept { return rows() * o_.block; }
  /// Tokens read so far.
  index_t tokens() const noexcept { return step_ * tokens_per_step(); }

  /// Flat buffers in the layout of `model().parameters()`. The gradients are those of the last step, clipped.
  buffer<T>& parameters() noexcept { return parameters_; }
  buffer<T> const& parameters() const noexcept { return parameters_; }
  buffer<T> const& gradients() const noexcept { return gradients_; }
  adamw<T>& optimiser() noexcept { return optimiser_; }
  adamw<T> const& optimiser() const noexcept { return optimiser_; }
  /// The numbers that may change between steps; saved in checkpoints.
  run_knobs& knobs() noexcept { return memory_.run.knobs; }
  run_knobs const& knobs() const noexcept { return memory_.run.knobs; }
  /// For a checkpoint that restores the rest too.
  void set_step(index_t step) noexcept { step_ = step; }

  /// One update from `accumulation` micro-batches. The gradient is that of the mean loss over the counted labels of
  /// the whole step. A step without counted labels has loss 0 and changes nothing but the number of steps.
  /// Errors: value_error naming the step when the loss or the gradient is not finite, or a token or label is
  /// outside the vocabulary; parameters, moments and step are then as they were before.
  template <token_source Source>
  metrics step(Source const& source) {
    source.fill(std::uint64_t(step_), std::uint64_t(0), std::span(x_.data(), std::size_t(x_.size())),
                std::span(y_.data(), std::size_t(y_.size())));
    metrics done{.step = step_ + 1, .learning_rate = schedule().at(step_), .tokens = tokens() + tokens_per_step()};
    for (auto label : y_) done.counted += label >= 0;
    if (done.counted > 0) {
      gradients_.fill(T(0));
      double const scale = 1.0 / double(done.counted);
      double sum = 0.0;
      for (index_t micro = 0; micro < o_.accumulation; ++micro) sum += accumulate(micro, scale);
      done.loss = sum * scale;
      arena scratch(scratch_block_);
      done.gradient_norm = clip_global_norm(device_, blocks_, gradients_.data(), o_.clip, scratch);
      require_finite("gradient norm", done.gradient_norm, done.loss);
      optimiser_.step(device_, parameters_.data(), gradients_.data(), done.learning_rate);
    }
    ++step_;
    return done;
  }

 private:
  index_t rows() const noexcept { return o_.batch * o_.accumulation; }

  static trainer_options const& checked(trainer_options const& o) {
    auto const require = [](bool good, char const* what, auto got) {
      if (!good) throw option_error(std::string("seqmix: trainer: ") + what + ", got " + detail::number_text(got));
    };
    require(o.steps >= 1, "steps must be at least 1", o.steps);
    require(o.batch >= 1, "batch must be at least 1", o.batch);
    require(o.block >= 1, "block must be at least 1", o.block);
    require(o.accumulation >= 1, "accumulation must be at least 1", o.accumulation);
    require(std::isfinite(o.learning_rate) && o.learning_rate >= 0, "learning_rate must be finite and not negative",
            o.learning_rate);
    require(o.warmup_fraction >= 0 && o.warmup_fraction <= 1, "warmup_fraction must be in [0, 1]",
            o.warmup_fraction);
    require(o.floor >= 0 && o.floor <= 1, "floor must be in [0, 1]", o.floor);
    require(o.clip >= 0, "clip must not be negative", o.clip);
    require(o.threads >= 1, "threads must be at least 1", o.threads);
    return o;
  }
  static Device with_threads(Device dev, int threads) {
    if constexpr (is_cpu<Device>) dev.threads = threads;
    return dev;
  }

  double accumulate(index_t micro, double scale) {
    auto const* const x = x_.data() + micro * o_.batch * o_.block;
    auto const* const y = y_.data() + micro * o_.batch * o_.block;
    model_.forward(memory_, parameters_.data(), x);
    auto const sum = model_.loss(memory_, y, scale);
    require_finite("loss", sum.loss, sum.loss / double((std::max)(sum.counted, index_t(1))));
    model_.backward(memory_, parameters_.data(), x, gradients_.data());
    return sum.loss;
  }
  void require_finite(char const* what, double value, double loss) const {
    if (std::isfinite(value)) return;
    throw value_error("seqmix: trainer: step " + std::to_string(step_ + 1) + ": the " + what + " is " +
                      detail::number_text(value) + " (loss " + detail::number_text(loss) +
                      "); the parameters are as they were after step " + std::to_string(step_));
  }

  Model model_;
  trainer_options o_;
  Device device_;
  trained_blocks blocks_;
  adamw<T> optimiser_;
  buffer<T> parameters_, gradients_;
  buffer<std::int32_t> x_, y_;
  decltype(std::declval<Model const&>().template make_memory<T>(std::declval<Device>(), sequences{},
                                                                typename Model::memory_options{})) memory_;
  buffer<std::byte> scratch_block_;
  index_t step_ = 0;
};

}  // namespace seqmix::inline v0::train
