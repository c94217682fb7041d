#pragma once

#include <seqmix/concepts/state.hpp>

namespace seqmix::inline v0::states {

/// mLSTM's matrix memory: C = e^(g + m_before - m) C + e^(write - m) k v', n likewise without v',
/// m = max(g + m_before, write), read as C' q / (max(|n' q|, e^-m) + 1e-6).
/// Source: Beck et al. (arXiv 2405.04517), section 2.3, and the eps of the published code.
template <stabiliser_start Start>
struct basic_mlstm {
  static constexpr std::string_view name = Start == stabiliser_start::none ? "mlstm" : "mlstm_from_zero";
  static constexpr state_spec spec{.kind = state_kind::stabilised};
  static constexpr stabilised_spec stabilised{.keyed = true, .floor = true, .eps = 1e-6, .start = Start};
};

/// Nothing precedes the first token, as in the published parallel form.
using mlstm = basic_mlstm<stabiliser_start::none>;
/// The running maximum starts at 0, as in the published recurrent form; it differs through eps alone.
using mlstm_from_zero = basic_mlstm<stabiliser_start::zero>;
static_assert(state<mlstm> && state<mlstm_from_zero>);

}  // namespace seqmix::inline v0::states
