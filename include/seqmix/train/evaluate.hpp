#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <span>
#include <string>
#include <utility>

#include <seqmix/data/windows.hpp>
#include <seqmix/models/language_model.hpp>

namespace seqmix::inline v0::train {

/// The mean loss over a text.
struct evaluation {
  double nats = 0.0;    ///< per predicted token; 0 when there is none
  index_t counted = 0;  ///< predicted tokens
  /// Bits per predicted token: bits per byte for a model of bytes.
  double bits() const noexcept { return nats / std::numbers::ln2; }
};

/// Measures the loss of a model over windows of `block` tokens, `batch` of them at once; its memory, allocated
/// once, has no room for a backward. Each window is its own sum in double and the sums are added in the windows'
/// order: with kernels that give a row the same bits in any batch, as those of `device::cpu` do, the result is the
/// same for any batch and any number of threads. The model must outlive the evaluator.
template <class Model, class T = float, class Device = device::cpu>
class evaluator {
 public:
  evaluator(Model const& model, index_t block, index_t batch, Device dev = {})
      : model_(model), block_(block), batch_(checked(block, batch)), device_(dev), x_(batch * block),
        y_(batch * block), memory_(model.template make_memory<T>(dev, sequences::batch(batch, block), {})) {
    auto plan = arena::measure();
    window_loss(plan, 0);
    scratch_block_ = buffer<std::byte>(plan.peak());
  }

  index_t block() const noexcept { return block_; }
  /// The numbers to measure with, for a trainer's that change.
  run_knobs& knobs() noexcept { return memory_.run.knobs; }

  /// `parameters` in the layout of the model. Throws shape_error for a window of another length.
  evaluation operator()(T const* parameters, std::span<data::window const> windows) {
    evaluation result;
    double sum = 0.0;
    auto const total = index_t(windows.size());
    for (index_t begin = 0; begin < total; begin += batch_) {
      index_t const rows = (std::min)(batch_, total - begin);
      fill(windows.subspan(std::size_t(begin), std::size_t(rows)));
      model_.forward(memory_, parameters, x_.data());
      arena scratch(scratch_block_);
      for (index_t row = 0; row < rows; ++row) sum += window_loss(scratch, row);
      result.counted += rows * block_;
    }
    if (result.counted > 0) result.nats = sum / double(result.counted);
    return result;
  }

 private:
  static index_t checked(index_t block, index_t batch) {
    if (block < 1 || batch < 1)
      throw option_error("seqmix: evaluator: block and batch must be at least 1, got " + std::to_string(block) +
                         " and " + std::to_string(batch));
    return batch;
  }
  /// The rows behind the last window keep tokens of an earlier batch, which nobody looks at.
  void fill(std::span<data::window const> windows) {
    index_t at = 0;
    for (auto const& w : windows) {
      if (index_t(w.x.size()) != block_ || index_t(w.y.size()) != block_)
        throw shape_error("seqmix: evaluator: expected windows of " + std::to_string(block_) + " tokens, got " +
                          std::to_string(w.x.size()) + " and " + std::to_string(w.y.size()));
      for (std::size_t t = 0; t < w.x.size(); ++t, ++at) {
        x_[at] = std::int32_t(w.x[t]);
        y_[at] = std::int32_t(w.y[t]);
        if (y_[at] >= model_.settings().vocabulary)
          throw value_error("seqmix: evaluator: token " + std::to_string(y_[at]) +
                            " is outside the vocabulary of " + std::to_string(model_.settings().vocabulary));
      }
    }
  }
  double window_loss(arena& scratch, index_t row) {
    double loss = 0.0;
    kernels::cross_entropy(device_, view2<T const>(memory_.logits_rv.slice(0, row * block_, block_)),
                           y_.data() + row * block_, 1.0, view2<T>{}, &loss, scratch);
    return loss;
  }

  Model const& model_;
  index_t block_, batch_;
  Device device_;
  buffer<std::int32_t> x_, y_;
  decltype(std::declval<Model const&>().template make_memory<T>(std::declval<Device>(), sequences{},
                                                                typename Model::memory_options{})) memory_;
  buffer<std::byte> scratch_block_;
};

}  // namespace seqmix::inline v0::train
