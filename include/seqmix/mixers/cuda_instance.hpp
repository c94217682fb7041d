#pragma once

#include <seqmix/mixers/mixer.hpp>

namespace seqmix::inline v0 {

namespace mixer_detail {
template <class Kernel>
struct cuda_functions {
  static constexpr auto forward = &Kernel::forward;
  static constexpr auto backward = &Kernel::backward;
};
template <class Kernel>
requires requires { &Kernel::carve; }
struct cuda_functions<Kernel> {
  static constexpr auto forward = &Kernel::forward;
  static constexpr auto backward = &Kernel::backward;
  static constexpr auto carve = &Kernel::carve;
};

template <>
struct cuda_functions<void> {};

template <class M, class T>
struct cuda_functions_of {};
template <class State, class Gate, class Selector, class T>
requires(State::spec.kind != state_kind::history) struct cuda_functions_of<mixer<State, Gate, Selector>, T>
    : cuda_functions<cuda_recurrence<State, Gate, T>> {
};
template <class State, class Gate, class Selector, class T>
requires(State::spec.kind == state_kind::history) struct cuda_functions_of<mixer<State, Gate, Selector>, T>
    : cuda_functions<cuda_attention<Gate, Selector, T>> {
  static constexpr auto remember = &kernels::cuda_history<T>::remember;
  static constexpr auto add_remembered = &kernels::cuda_history<T>::add_remembered;
};
}  // namespace mixer_detail

/// Prose for an author: `static_assert(seqmix::explain_on_cuda<my_mixer>());` says why it runs on no device.
template <class M, class T = float>
consteval bool explain_on_cuda() {
  static_assert(mixer_type<M>, "seqmix mixer: the first argument must satisfy seqmix::mixer_type");
  static_assert(
      mixer_on<M, device::cuda, T>,
      "seqmix cuda: this cell has no CUDA kernels; those are for history read by softmax, top1 or chosen "
      "chunks under a gate that biases scores per head, and for elementwise, outer_product and delta_rule; "
      "take device::cpu");
  return true;
}

/// Emits the CUDA kernels that a mixer calls for one storage type, for programs whose other files are plain C++: in
/// a .cu file that includes the kernels (seqmix/kernels/cuda/*.cuh),
///
///     template struct seqmix::cuda_instance<seqmix::attention<seqmix::selectors::softmax>, float>;
///
/// Cost: what one forward and one backward take nvcc, some seconds an architecture.
template <class M, class T>
struct cuda_instance : mixer_detail::cuda_functions_of<M, T> {
  static_assert(explain_on_cuda<M, T>());
};

}  // namespace seqmix::inline v0
