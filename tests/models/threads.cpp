#include "../support/models.hpp"
#include <seqmix/models/variants.hpp>

// Sizes of several blocks everywhere: rows, tiles, chunks, output strips.

namespace {

using namespace seqmix;
using namespace seqmix::testing;

template <class Layer>
void check_threads(typename Layer::options const& o) {
  DOCTEST_CAPTURE(Layer::name());
  std::vector<index_t> const offsets{0, 300, 300, 421, 600};
  auto const seq = sequences::packed(offsets);
  small_model<Layer, float> const m(o, offsets.back());
  auto const logits = logits_of(m.model, seq, m.parameters.data(), m.tokens.data(), 1);
  auto const one = gradient_of(m, seq, 1);
  for (int threads : {1, 2, 3, 7}) {
    DOCTEST_CAPTURE(threads);
    DOCTEST_CHECK(logits_of(m.model, seq, m.parameters.data(), m.tokens.data(), threads) == logits);
    auto const now = gradient_of(m, seq, threads);
    DOCTEST_CHECK(now.loss == one.loss);
    DOCTEST_CHECK(std::equal(now.d.begin(), now.d.end(), one.d.begin()));
  }
}

}  // namespace

DOCTEST_TEST_CASE("the thread count changes no bit of logits, loss and gradients") {
  check_threads<variants::transformer_pp>(variants::attention_options(16, 4, 2));
  check_threads<variants::top1_element>(variants::attention_options(16, 4, 2));
  check_threads<variants::mamba2>({.heads = 4,
                                   .query_heads = 1,
                                   .key_heads = 1,
                                   .key_dim = 6,
                                   .value_dim = 8,
                                   .scale = 1.0,
                                   .recurrence_chunk = 16});
}
