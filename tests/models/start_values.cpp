#include "../support/models.hpp"
#include <seqmix/models/variants.hpp>

// Start values of whole models: a wrapper that initialises all projections alike must not reach the mixers' own.

namespace {

using namespace seqmix;
using namespace seqmix::testing;

template <class Layer>
struct started {
  using model_type = language_model<pattern<Layer>>;
  model_type model;
  buffer<double> numbers;
  static typename model_type::options sized(index_t d_model, typename Layer::options const& o) {
    typename model_type::options m{.d_model = d_model, .layers = 3};
    std::get<0>(m.layer) = o;
    return m;
  }
  started(index_t d_model, typename Layer::options const& o)
      : model(sized(d_model, o)), numbers(model.parameters().size()) {
    model.parameters().initialise(11, numbers.data());
  }
  /// holds(number, its index) for a tensor of every layer.
  template <class F>
  void each(std::string const& name, F const& holds) const {
    for (int l = 0; l < 3; ++l) {
      auto const& p = model.parameters().at("layers." + std::to_string(l) + "." + name);
      for (index_t i = 0; i < p.size(); ++i) {
        double const x = numbers[p.offset + i];
        DOCTEST_CHECK_MESSAGE(holds(x, i, l), p.name, " [", i, "] = ", x);
      }
    }
  }
  bool decays(std::string const& name) const { return model.parameters().at("layers.1." + name).weight_decay; }
};
bool published_step(double bias) {
  double const step = std::log1p(std::exp(bias));
  return step >= 1e-4 * (1 - 1e-9) && step <= 1e-1 * (1 + 1e-9);
}

}  // namespace

DOCTEST_TEST_CASE(
    "P-I1: a model of Mamba-1 layers starts with A = 1 .. N in every channel, published steps and D = 1") {
  started<variants::mamba1> const m(16, variants::mamba1_options(16, 5));
  m.each("mixer.gate.A_log",
         [](double a, index_t i, int) { return std::abs(std::exp(a) - double(i % 5 + 1)) < 1e-12; });
  m.each("mixer.gate.dt_bias", [](double b, index_t, int) { return published_step(b); });
  m.each("mixer.skip", [](double d, index_t, int) { return d == 1.0; });
  for (auto const* name : {"mixer.gate.A_log", "mixer.gate.dt_bias", "mixer.skip", "mixer.conv.bias"})
    DOCTEST_CHECK_MESSAGE(!m.decays(name), name);
}

DOCTEST_TEST_CASE("P-I1: Gated DeltaNet and Kimi Delta Attention keep the start values of their gates in a model") {
  started<variants::gated_deltanet> const m(16, variants::gated_deltanet_options(4, 4));
  m.each("mixer.gate.A_log", [](double a, index_t, int) { return std::exp(a) <= 16.0; });
  m.each("mixer.gate.dt_bias", [](double b, index_t, int) { return published_step(b); });
  started<variants::kda> const k(16, variants::kda_options(4, 4));
  k.each("mixer.gate.A_log", [](double a, index_t, int) { return a >= 0.0 && std::exp(a) <= 16.0; });
  k.each("mixer.gate.dt_bias", [](double b, index_t, int) { return published_step(b); });
}

DOCTEST_TEST_CASE("RWKV-7 starts with its published mixtures, bonuses and gains, which depend on the layer") {
  started<variants::rwkv7> const m(16, variants::rwkv7_options(16, 8));
  auto const power = [](double p) {
    return [p](double mu, index_t i, int l) {
      return std::abs(mu - (1.0 - std::pow(double(i) / 16.0, p * (1.0 - double(l) / 3.0)))) < 1e-12;
    };
  };
  m.each("mixer.shift.query", power(0.2));
  m.each("mixer.shift.raw", power(0.9));
  m.each("mixer.shift.key", power(0.7));
  m.each("mixer.bonus", [](double u, index_t, int) { return u == -0.04; });
  m.each("mixer.removal_mix", [](double k, index_t, int) { return k == 1.02; });
  m.each("mixer.out", [](double w, index_t, int) { return w == 0.0; });
  m.each("mixer.head_norm.weight",
         [](double w, index_t, int l) { return std::abs(w - std::pow((1.0 + l) / 3.0, 0.7)) < 1e-12; });
  for (auto const* name : {"mixer.bonus", "mixer.shift.key", "mixer.removal", "mixer.gate.w0"})
    DOCTEST_CHECK_MESSAGE(!m.decays(name), name);
}

DOCTEST_TEST_CASE("RWKV-7's second low-rank factors start as orthogonal matrices of its published gain") {
  // Published as [rank, C], rows first: gain 0.1, times sqrt(rank / C) where the rank is greater. Ours are [C,
  // rank].
  for (index_t d_model : {16, 48}) {
    started<variants::rwkv7> const m(d_model, variants::rwkv7_options(d_model, 8));
    for (auto const* name : {"gate.raw.up", "rate.up", "first_value.up", "z.up"}) {
      auto const& p = m.model.parameters().at(std::string("layers.1.mixer.") + name);
      index_t const C = p.rows(), rank = p.columns();
      DOCTEST_REQUIRE(C == d_model);
      DOCTEST_REQUIRE(rank == 32);
      double const* const w = m.numbers.data() + p.offset;
      double const gain = 0.1 * (rank > C ? std::sqrt(double(rank) / double(C)) : 1.0);
      index_t const n = std::min(C, rank);
      for (index_t i = 0; i < n; ++i)
        for (index_t j = 0; j < n; ++j) {
          double sum = 0;
          for (index_t k = 0; k < std::max(C, rank); ++k)
            sum += C > rank ? w[k * rank + i] * w[k * rank + j] : w[i * rank + k] * w[j * rank + k];
          DOCTEST_CHECK_MESSAGE(std::abs(sum - (i == j ? gain * gain : 0.0)) <= 1e-14, p.name, " ", i, " ", j);
        }
    }
    m.each("mixer.gate.raw.down", [](double x, index_t, int) { return x == 0.0; });
  }
}

DOCTEST_TEST_CASE("HGRN's bounds start at l / L and are one tensor of the model") {
  started<variants::hgrn> const m(16, variants::hgrn_options(16));
  auto const& bounds = m.model.parameters().at("shared.gate.lower_bound");
  DOCTEST_CHECK(bounds.shape == std::vector<index_t>{3, 16});
  index_t shared = 0;
  for (auto const& p : m.model.parameters().all())
    shared += p.name.find("lower_bound") != std::string::npos ? 1 : 0;
  DOCTEST_CHECK(shared == 1);
  for (index_t i = 0; i < bounds.size(); ++i) DOCTEST_CHECK(m.numbers[bounds.offset + i] == 0.0);
}
