#pragma once

#include <cmath>

#include <seqmix/layers/norm.hpp>

/// Start values and sizes that xLSTM's blocks share. Source: Beck et al. (arXiv 2405.04517) and the code of its
/// authors.
namespace seqmix::inline v0::detail {

/// N(0, 2 / (5 D)), whatever the matrix's own width.
inline initialiser small_start(index_t d_model) { return init::normal(std::sqrt(0.4 / double(d_model))); }
/// N(0, (2 / layers)^2 / D)
inline initialiser output_start(index_t d_model) {
  return {[](initial_element const& e) {
            return 2.0 * e.normal / (double(e.layers > 0 ? e.layers : 1) * std::sqrt(e.a));
          },
          double(d_model)};
}
/// `expand` d_model, rounded up to a multiple of 64.
inline index_t expanded_width(double expand, index_t d_model) {
  return index_t(std::ceil(expand * double(d_model) / 64.0)) * 64;
}
inline initialiser start_or(initialiser const& given, initialiser const& published) noexcept {
  return given ? given : published;
}

}  // namespace seqmix::inline v0::detail
