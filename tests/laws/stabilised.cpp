#include "../support/laws.hpp"
#include <seqmix/gates/mlstm.hpp>
#include <seqmix/gates/none.hpp>
#include <seqmix/gates/retention.hpp>
#include <seqmix/gates/rwkv4.hpp>
#include <seqmix/mixers/recurrence.hpp>
#include <seqmix/mixers/stabilised.hpp>

namespace {

using namespace seqmix;
using namespace seqmix::testing;

using mlstm = recurrence<states::mlstm, gates::mlstm>;
using mlstm_from_zero = recurrence<states::mlstm_from_zero, gates::retention>;
using wkv = recurrence<states::wkv, gates::rwkv4>;
/// The same with as many heads as channels, more than one block of lanes.
struct wkv_channels : wkv {};

}  // namespace

namespace seqmix::testing {
template <>
mixer_shape law_shape<wkv_channels>(sequences seq, index_t) {
  mixer_shape s;
  s.seq = seq;
  s.heads = s.value_heads = s.gate_heads = 70;
  s.chunk = 4;
  return s;
}
}  // namespace seqmix::testing

DOCTEST_TEST_CASE("the laws hold for mLSTM (P-C3, P-S2)") { check_laws<mlstm>(); }

DOCTEST_TEST_CASE("the laws hold for mLSTM from zero with a constant gate and "
                  "equal weights (P-C3, P-S2)") {
  check_laws<mlstm_from_zero>();
}

DOCTEST_TEST_CASE("the laws hold for RWKV-4's state with several values a head "
                  "(P-C3, P-S2)") {
  check_laws<wkv>();
}

DOCTEST_TEST_CASE("the laws hold for RWKV-4's state with a head per channel (P-C3, P-S2)") {
  check_laws<wkv_channels>();
}
