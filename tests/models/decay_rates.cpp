#include "../support/models.hpp"
#include <seqmix/models/effective_length.hpp>
#include <seqmix/models/variants.hpp>

namespace {

using namespace seqmix;
using namespace seqmix::testing;

template <class Layer>
std::vector<head_length> lengths(small_model<Layer> const& m, double offset = 0.0) {
  auto const seq = sequences::batch(2, 13);
  auto mem = m.model.template make_memory<double>(device::cpu{1}, seq, {.training = true});
  mem.run.knobs.decay_offset = offset;
  m.model.forward(mem, m.parameters.data(), m.tokens.data());
  return effective_lengths(m.model, mem);
}
/// In the first layer; what the next one reads has changed.
void expect_scaled(std::vector<head_length> const& before, std::vector<head_length> const& after, double factor) {
  DOCTEST_REQUIRE(before.size() == after.size());
  for (std::size_t i = 0; i < before.size() && before[i].layer == 0; ++i)
    DOCTEST_CHECK(std::abs(after[i].tau / before[i].tau - factor) <= 1e-12 * factor);
}

auto const mamba2_sizes = variants::mamba2_options({.heads = 4, .state = 3, .head_dim = 4});

}  // namespace

DOCTEST_TEST_CASE("effective lengths are those of the published decays") {
  small_model<variants::retnet> const m(variants::retnet_options(16, 2));
  auto const all = lengths(m);
  DOCTEST_REQUIRE(all.size() == 4);
  for (auto const& head : all)
    DOCTEST_CHECK(head.tau ==
                  doctest::Approx(-1.0 / std::log1p(-std::exp2(-5.0 - double(head.head)))).epsilon(1e-12));
}

DOCTEST_TEST_CASE("the knob decay_offset scales the rates of any gate in a run: tau is divided by e^delta") {
  small_model<variants::mamba2> const scalar(mamba2_sizes);
  expect_scaled(lengths(scalar), lengths(scalar, std::log(4.0)), 0.25);
  auto o = variants::gla_options(16, 2);
  small_model<variants::gla> const channels(o);
  expect_scaled(lengths(channels), lengths(channels, -1.0), std::exp(1.0));
  small_model<variants::mamba1> const factored(variants::mamba1_options(16, 3));
  expect_scaled(lengths(factored), lengths(factored, -10.0), std::exp(10.0));
}

DOCTEST_TEST_CASE("decay_offset at construction and on a trained model shifts the logarithms of the rates") {
  small_model<variants::mamba2> const plain(mamba2_sizes);
  auto o = mamba2_sizes;
  o.decay_offset = -2.0;
  small_model<variants::mamba2> const weak(o);
  expect_scaled(lengths(plain), lengths(weak), std::exp(2.0));
  small_model<variants::mamba2> shifted(mamba2_sizes);
  DOCTEST_CHECK(shift_decay_rates(shifted.model.parameters(), shifted.parameters.data(), -2.0) == 8);
  expect_scaled(lengths(weak), lengths(shifted), 1.0);
}

DOCTEST_TEST_CASE("a gate without a logarithm of a rate says so when its start is to be shifted") {
  auto o = variants::fox_options(16, 2);
  std::get<0>(o).decay_offset = 1.0;
  DOCTEST_CHECK_THROWS_WITH_AS(small_model<variants::fox>{o},
                               "seqmix: layer: decay_offset shifts a parameter that is the logarithm of a decay "
                               "rate; gate log_sigmoid has none; "
                               "use the knob decay_offset of a run",
                               option_error);
}

DOCTEST_TEST_CASE("the knob's gradient is the scaled formula's: both oracles on a scaled gate") {
  small_model<variants::gla> const m(variants::gla_options(16, 2));
  auto const seq = sequences::packed(model_offsets());
  auto mem = m.model.template make_memory<double>(device::cpu{1}, seq, {.training = true});
  mem.run.knobs.decay_offset = 0.7;
  buffer<double> d(m.size()), direction(m.size());
  m.model.forward(mem, m.parameters.data(), m.tokens.data());
  m.model.loss(mem, m.labels.data(), 1.0);
  m.model.backward(mem, m.parameters.data(), m.tokens.data(), d.data());
  random_numbers random(8);
  double got = 0.0;
  for (index_t i = 0; i < m.size(); ++i) got += (direction[i] = random.normal()) * d[i];
  auto const loss_at = [&](double step) {
    buffer<double> p(m.size());
    for (index_t i = 0; i < m.size(); ++i) p[i] = m.parameters[i] + step * direction[i];
    m.model.forward(mem, p.data(), m.tokens.data());
    return m.model.loss(mem, m.labels.data(), 1.0).loss;
  };
  double const step = 1e-7, difference = (loss_at(step) - loss_at(-step)) / (2 * step);
  DOCTEST_CHECK(std::abs(got - difference) <= 1e-5 * std::abs(difference));
}

DOCTEST_TEST_CASE("effective lengths need the gates of all layers") {
  small_model<variants::retnet> const m(variants::retnet_options(16, 2));
  auto mem = m.model.template make_memory<double>(device::cpu{1}, sequences::batch(2, 13), {});
  DOCTEST_CHECK_THROWS_AS(effective_lengths(m.model, mem), option_error);
}
