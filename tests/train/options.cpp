#include <doctest/doctest.h>

#include <seqmix/models/variants.hpp>
#include <seqmix/train/checkpoint.hpp>

// A checkpoint compares the options of every layer, so every options type must name them.

namespace {

using namespace seqmix;

template <class... Layers>
std::size_t fewest_named() {
  std::size_t fewest = 1000;
  auto const count = [&]<class L>(std::type_identity<L>) {
    train::run_facts facts;
    train::detail::add_options(facts, "layer", typename L::options{});
    fewest = facts.size() < fewest ? facts.size() : fewest;
  };
  (count(std::type_identity<Layers>{}), ...);
  return fewest;
}

}  // namespace

DOCTEST_TEST_CASE("the options of every kind of layer are named for checkpoints") {
  DOCTEST_CHECK(fewest_named<variants::transformer_pp, variants::gpt_neox, variants::rwkv7, variants::mamba3,
                             variants::s4d, variants::mlstm, variants::slstm>() >= 3);
}
