#pragma once

#include <seqmix/gates/detail/name_text.hpp>
#include <seqmix/gates/log_sigmoid.hpp>

namespace seqmix::inline v0::gates {

/// The forget gate of `log_sigmoid` with the other start of its authors' code: without an input head h forgets by
/// e^(-1/T_h) a token, T_h spaced by factors from Shortest to Longest tokens, b = -log(e^(1/T_h) - 1).
/// `constant_form` of it is the data-independent forget gate of the paper. Source: Lin et al. (arXiv 2503.02130);
/// the rule for b from its authors' code, which leaves the two contexts to the user.
template <unsigned Shortest = 4, unsigned Longest = 256>
struct spaced_log_sigmoid : log_sigmoid {
  static_assert(0 < Shortest && Shortest <= Longest,
                "seqmix gate: spaced_log_sigmoid<Shortest, Longest> needs 0 < Shortest <= Longest tokens");
  static constexpr auto text =
      detail::name_text{}.add("spaced_log_sigmoid<").add(Shortest).add(",").add(Longest).add(">");
  static constexpr std::string_view name = text.view();

  static double bias_initial(std::size_t, gate_element const& e) {
    double const place = e.heads > 1 ? double(e.head) / double(e.heads - 1) : 0.5;
    double const context = Shortest * std::pow(double(Longest) / double(Shortest), place);
    return -std::log(std::expm1(1.0 / context));
  }
};
static_assert(gate<spaced_log_sigmoid<>>);

}  // namespace seqmix::inline v0::gates
