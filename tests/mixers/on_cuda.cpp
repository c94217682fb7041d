#include <doctest/doctest.h>

#include <seqmix/gates/gla.hpp>
#include <seqmix/gates/hgrn.hpp>
#include <seqmix/gates/kda.hpp>
#include <seqmix/gates/log_sigmoid.hpp>
#include <seqmix/gates/mamba1.hpp>
#include <seqmix/gates/mamba2.hpp>
#include <seqmix/gates/rwkv6.hpp>
#include <seqmix/gates/rwkv7.hpp>
#include <seqmix/mixers/cuda_instance.hpp>
#include <seqmix/selectors/chunks.hpp>
#include <seqmix/selectors/linear.hpp>
#include <seqmix/selectors/top1.hpp>
#include <seqmix/selectors/window.hpp>

// Which cells have CUDA kernels is known to a host compiler, without a CUDA header.

namespace {

using namespace seqmix;
using namespace seqmix::selectors;
template <class M>
constexpr bool on_cuda =
    mixer_on<M, device::cuda, float>&& mixer_on<M, device::cuda, bfloat16>&& mixer_on<M, device::cuda, float16>;
template <class M>
constexpr bool never_on_cuda = !mixer_on<M, device::cuda, float> && mixer_on<M, device::cpu, float>;

static_assert(on_cuda<attention<softmax>> && on_cuda<attention<seqmix::select<window, softmax>>>);
static_assert(on_cuda<attention<softmax, gates::log_sigmoid>>);
static_assert(on_cuda<attention<top1<>>> && on_cuda<attention<top1<top1_output::weighted>, gates::log_sigmoid>>);
static_assert(on_cuda<attention<own_plus_top1<>>> && on_cuda<attention<own_plus_top_k<>>>);
static_assert(on_cuda<recurrence<states::elementwise, gates::hgrn>>);
static_assert(on_cuda<recurrence<states::outer_product, gates::mamba1>>);
static_assert(on_cuda<recurrence<states::outer_product, gates::mamba2>>);
static_assert(on_cuda<recurrence<states::outer_product, gates::gla>>);
static_assert(on_cuda<recurrence<states::delta_rule, gates::kda>>);

static_assert(never_on_cuda<attention<linear>> && never_on_cuda<attention<linear, gates::gla>>);
static_assert(never_on_cuda<attention<softmax, gates::mamba2>>);  // it scales values
static_assert(never_on_cuda<recurrence<states::diagonal_plus_low_rank, gates::rwkv7>>);
static_assert(never_on_cuda<recurrence<states::exclusive<states::outer_product>, gates::rwkv6>>);

}  // namespace

DOCTEST_TEST_CASE("sixteen bits hold activations; what decides and adds up stays float") {
  using input = mixer_input<bfloat16>;
  static_assert(std::is_same_v<decltype(input::q_rhk), view3<bfloat16 const>>);
  static_assert(std::is_same_v<decltype(input::g_rhk), view3<float const>>);
  using state = recurrence<states::outer_product, gates::mamba2>::state<bfloat16>;
  static_assert(std::is_same_v<decltype(state::S_nhkv), view4<float>>);
  DOCTEST_CHECK(explain_on_cuda<attention<softmax>>());
}
