#pragma once

#include <algorithm>
#include <vector>

#include <seqmix/layers/parameters.hpp>
#include <seqmix/tensor/device.hpp>

namespace seqmix::inline v0::train {

/// The trained tensors of a parameter list cut into blocks of at most 4096 numbers. The cut depends on the list
/// alone, so what is computed a block at a time has the same bits on any number of threads. Gaps and fixed tensors
/// are in no block.
class trained_blocks {
 public:
  static constexpr index_t block_size = 4096;
  struct block {
    index_t offset, size;
    bool weight_decay;
  };

  trained_blocks(parameter_list const& list) {
    for (auto const& p : list.all()) {
      if (!p.trained) continue;
      for (index_t at = 0; at < p.size(); at += block_size)
        blocks_.push_back({p.offset + at, (std::min)(block_size, p.size() - at), p.weight_decay});
    }
  }

  index_t count() const noexcept { return index_t(blocks_.size()); }
  block const& operator[](index_t b) const noexcept { return blocks_[std::size_t(b)]; }

 private:
  std::vector<block> blocks_;
};

namespace detail {
template <class Device>
struct isa_of {
  using type = portable_isa;
};
template <class Isa, class Threads>
struct isa_of<device::basic_cpu<Isa, Threads>> {
  using type = Isa;
};
}  // namespace detail

}  // namespace seqmix::inline v0::train
