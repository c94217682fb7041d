#include "progress.hpp"

#include <cstdio>
#include <numbers>
#include <unistd.h>

namespace study {

progress_line::progress_line(std::string name, seqmix::index_t step, seqmix::index_t steps,
                             seqmix::index_t tokens_per_step)
    : name_(std::move(name)), first_(step), steps_(steps), tokens_per_step_(tokens_per_step),
      terminal_(isatty(1) != 0) {}

void progress_line::show(seqmix::index_t step, double loss_nats, double training_seconds) {
  auto const now = std::chrono::steady_clock::now();
  auto const pause = terminal_ ? std::chrono::milliseconds(200) : std::chrono::milliseconds(10000);
  if (step != steps_ && shown_ && now - last_ < pause) return;
  last_ = now;
  shown_ = true;
  double const per_step = training_seconds / double(step - first_);
  auto const left = long(double(steps_ - step) * per_step + 0.5);
  std::printf("%s%-16s step %5ld/%ld   loss %.3f bits/byte   %6.0f tokens/s   %ld:%02ld left%s",
              terminal_ ? "\r" : "", name_.c_str(), long(step), long(steps_), loss_nats / std::numbers::ln2,
              double(tokens_per_step_) / per_step, left / 60, left % 60, terminal_ ? "   " : "\n");
  std::fflush(stdout);
}

void progress_line::end() {
  if (terminal_ && shown_) std::printf("\n");
}

}  // namespace study
