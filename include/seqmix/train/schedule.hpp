#pragma once

#include <cmath>
#include <numbers>

#include <seqmix/tensor/view.hpp>

namespace seqmix::inline v0::train {

/// Learning rate of a step, the first being step 0: rises linearly over the steps before `warmup`, is `peak` at
/// step `warmup`, then falls along half a cosine to floor * peak at step `total`, and stays there.
struct warmup_cosine {
  double peak = 0.0;
  index_t warmup = 0, total = 1;
  double floor = 0.0;

  double at(index_t step) const noexcept {
    if (step < warmup) return peak * double(step + 1) / double(warmup + 1);
    if (step >= total) return peak * floor;
    double const way = double(step - warmup) / double(total - warmup);
    return peak * (floor + (1.0 - floor) * 0.5 * (1.0 + std::cos(std::numbers::pi * way)));
  }
};

}  // namespace seqmix::inline v0::train
