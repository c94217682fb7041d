#include <seqmix/models/variants.hpp>

// Where a layer has kernels is known at compile time.

namespace {

using namespace seqmix;

template <class L>
constexpr bool everywhere = layer_on<L, device::cpu>&& layer_on<L, device::cpu, double>&& layer_with_oracle<L>;
static_assert(everywhere<variants::gla> && everywhere<variants::transformer_pp> && everywhere<variants::gpt_neox> &&
              everywhere<variants::nsa> && everywhere<variants::rwkv7>);
static_assert(everywhere<variants::mamba3> && everywhere<variants::s4d> && everywhere<variants::mlstm> &&
              everywhere<variants::slstm>);

/// A mixer without a backward, and what is made of it.
struct forward_only : recurrence<states::outer_product, gates::none> {
  template <class Device, class T>
  static void backward(Device, mixer_shape const&, T const&) = delete;
};
using half = layer<forward_only, extras{}>;
static_assert(layer_with_oracle<half> && !layer_on<half, device::cpu>);
static_assert(!layer_on<block<half, swiglu<>>, device::cpu> && layer_with_oracle<block<half, swiglu<>>>);
static_assert(!layer_on<parallel_block<half>, device::cpu>);

/// No device of the library.
struct abacus {
  bool dry = false;
};
static_assert(!layer_on<variants::gla, abacus> && !layer_on<variants::s4d, abacus> &&
              !layer_on<variants::slstm, abacus> && !layer_on<swiglu<>, abacus>);
static_assert(!layer_on<int, device::cpu>);
// CUDA kernels are the mixers'; docs/architectures.md says so.
static_assert(mixer_on<variants::gla::mixer_type_, device::cuda> && !layer_on<variants::gla, device::cuda> &&
              !layer_on<variants::mamba3, device::cuda> && !layer_on<variants::slstm, device::cuda>);

}  // namespace
