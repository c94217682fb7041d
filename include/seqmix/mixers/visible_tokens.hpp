#pragma once

#include <seqmix/kernels/attention_shape.hpp>
#include <seqmix/mixers/mixer.hpp>

namespace seqmix::inline v0 {

namespace mixer_detail {
/// Keys seen at `query` when the first candidates are chosen.
template <class Which>
index_t visible_keys(index_t query, selection const& s) {
  index_t const always = Which::blocks(query, -1, s).size();
  if constexpr (!Which::spec.routed) return always;
  index_t const candidates = query / s.chunk + (Which::spec.own_competes ? 1 : 0);
  index_t const chosen = (std::min)(candidates, choices_per_query(Which::spec, s));
  index_t sum = always;
  for (index_t c = 0; c < chosen; ++c) sum += Which::blocks(query, c, s).size() - always;
  return sum;
}
}  // namespace mixer_detail

/// How many tokens a query of a sequence of `length` can draw on, on average over the sequence. A bounded state is
/// counted as all tokens so far, through its decay; a routed selector with its chosen chunks wherever there are
/// some; a mean of keys as one; a gated sum as the sum of its members.
template <mixer_type M>
double mean_visible_tokens(index_t length, selection const& s) {
  if (length < 1) return 0.0;
  double sum = 0.0;
  if constexpr (requires { typename M::members; }) {
    M::for_each([&]<std::size_t, class Member>() { sum += mean_visible_tokens<Member>(length, s); });
    return sum;
  } else {
    for (index_t t = 0; t < length; ++t) {
      if constexpr (M::state_type::spec.kind != state_kind::history)
        sum += double(t + 1);
      else
        sum += double(mixer_detail::visible_keys<typename M::selector_type::which_type>(t, s));
    }
    return sum / double(length);
  }
}

}  // namespace seqmix::inline v0
