#pragma once

#include <chrono>
#include <string>

#include <seqmix/tensor/view.hpp>

namespace study {

/// One line that is written over on a terminal, or a line every ten seconds elsewhere.
class progress_line {
 public:
  progress_line(std::string name, seqmix::index_t step, seqmix::index_t steps, seqmix::index_t tokens_per_step);
  void show(seqmix::index_t step, double loss_nats, double training_seconds);
  void end();

 private:
  std::string name_;
  seqmix::index_t first_, steps_, tokens_per_step_;
  bool terminal_, shown_ = false;
  std::chrono::steady_clock::time_point last_{};
};

}  // namespace study
