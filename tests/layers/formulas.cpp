#include "../support/law_layer.hpp"
#include "../support/random_numbers.hpp"
#include <seqmix/models/variants.hpp>

// Options that no golden case has, each through a whole layer against its equations, written out token by token.

namespace {

using namespace seqmix;
using namespace seqmix::testing;
using row = std::vector<double>;

/// A layer with random weights on one sequence, and what the equations read.
template <class Layer>
class written_out {
 public:
  static constexpr index_t tokens = 9, d_model = 12;

  explicit written_out(layer_options const& o)
      : o_(with_chunk(o)), layer_(o_, d_model, sequences::batch(1, tokens)) {
    random_numbers random(17);
    for (auto const& p : layer_.list().all())
      for (index_t i = 0; p.trained && i < p.size(); ++i)
        weight(p.name.substr(std::string("layer.mixer.").size()))[i] = 0.5 * random.normal();
    for (index_t i = 0; i < tokens * d_model; ++i) x_.push_back(random.normal());
  }
  double* weight(std::string const& name) { return layer_.parameter_data("mixer." + name); }
  parameter const& shape(std::string const& name) const { return layer_.at("mixer." + name); }
  row input(index_t t) const { return {x_.begin() + t * d_model, x_.begin() + (t + 1) * d_model}; }
  row times(std::string const& name, row const& x) {
    auto const& p = shape(name);
    DOCTEST_REQUIRE(index_t(x.size()) == p.columns());
    row y(std::size_t(p.rows()), 0.0);
    for (index_t i = 0; i < p.size(); ++i)
      y[std::size_t(i / p.columns())] += weight(name)[i] * x[std::size_t(i % p.columns())];
    return y;
  }
  /// Part i of n of a row.
  static row part(row const& x, index_t i, index_t n) {
    auto const width = std::ptrdiff_t(x.size()) / n;
    return {x.begin() + i * width, x.begin() + (i + 1) * width};
  }
  static double dot(row const& a, row const& b) {
    double sum = 0;
    for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
    return sum;
  }
  /// x / rms(x)
  static row normed(row x) {
    double const unit = 1.0 / std::sqrt(dot(x, x) / double(x.size()) + 1e-5);
    for (auto& e : x) e *= unit;
    return x;
  }
  /// Of linear weights: sum_j (q_t.k_j) v_j of the first t + 1 tokens, key j weighed by `decay` to its distance.
  static row read(row const& q, std::vector<row> const& k, std::vector<row> const& v, double decay = 1.0) {
    row o(v[0].size(), 0.0);
    for (std::size_t j = 0; j < k.size(); ++j)
      for (std::size_t i = 0; i < o.size(); ++i)
        o[i] += std::pow(decay, double(k.size() - 1 - j)) * dot(q, k[j]) * v[j][i];
    return o;
  }

  /// The layer's outputs are those of `expected(t)`.
  template <class F>
  void check(F const& expected) {
    std::vector<double> y, dx;
    layer_.run(x_, x_, y, dx);
    for (index_t t = 0; t < tokens; ++t) {
      row const e = expected(t);
      for (index_t i = 0; i < d_model; ++i) {
        double const found = y[std::size_t(t * d_model + i)];
        DOCTEST_CHECK_MESSAGE(std::abs(found - e[std::size_t(i)]) <= 1e-11 * (1 + std::abs(found)), "token ", t,
                              " channel ", i, ": ", found, ", expected ", e[std::size_t(i)]);
      }
    }
  }

 private:
  static layer_options with_chunk(layer_options o) {
    o.recurrence_chunk = 4;
    return o;
  }
  layer_options o_;
  lone_layer<Layer, double> layer_;
  row x_;
};

/// Linear attention over feature maps, without norm, gate and normaliser.
template <feature_map Map, bool Weights, key_norm Norm = key_norm::none>
using featured = layer<
    recurrence<states::outer_product, gates::none>,
    extras{
        .norm = norm_kind::none, .residual = false, .features = Map, .feature_weights = Weights, .qk_norm = Norm}>;

/// Checks such a layer of two heads; f(name of the side, head, projected numbers) gives the features.
template <class Layer, class F>
void check_features(written_out<Layer>& w, double scale, F const& f) {
  std::array<std::vector<row>, 2> k, v;
  w.check([&](index_t t) {
    row const x = w.input(t), q = w.times("query", x), key = w.times("key", x), value = w.times("value", x);
    row o;
    for (index_t h = 0; h < 2; ++h) {
      auto const at = std::size_t(h);
      k[at].push_back(f("key", h, w.part(key, h, 2)));
      v[at].push_back(w.part(value, h, 2));
      for (double e : w.read(f("query", h, w.part(q, h, 2)), k[at], v[at])) o.push_back(scale * e);
    }
    return w.times("out", o);
  });
}

}  // namespace

DOCTEST_TEST_CASE("RetNet turns neighbouring channels by the angles of its authors' code") {
  constexpr index_t H = 2, K = 6;
  auto o = variants::retnet_options(12, H);
  written_out<without_frame<variants::retnet>> w(o);
  // x cos + rotate_every_two(x) sin with angles position 10000^-linspace(0, 1, K / 2), each for two channels.
  auto const turned = [](row const& x, index_t position) {
    row y = x;
    for (std::size_t i = 0; i < x.size(); ++i) {
      double const line = double(i / 2) / double(x.size() / 2 - 1);
      double const angle = double(position) * std::pow(10000.0, -line);
      y[i] = x[i] * std::cos(angle) + (i % 2 == 0 ? -x[i + 1] : x[i - 1]) * std::sin(angle);
    }
    return y;
  };
  std::array<std::vector<row>, H> k, v;
  w.check([&](index_t t) {
    row const x = w.input(t), q = w.times("query", x), key = w.times("key", x), value = w.times("value", x),
              z = w.times("z", x);
    row y;
    for (index_t h = 0; h < H; ++h) {
      auto const at = std::size_t(h);
      k[at].push_back(turned(w.part(key, h, H), t));
      v[at].push_back(w.part(value, h, H));
      row r = w.read(turned(w.part(q, h, H), t), k[at], v[at], 1.0 - std::exp2(-5.0 - double(h)));
      for (auto& e : r) e /= std::sqrt(double(K));
      for (auto const& e : w.normed(r)) {
        auto const c = y.size();
        y.push_back(e * w.weight("head_norm.weight")[index_t(c) % index_t(r.size())] * silu(z[c]));
      }
    }
    return w.times("out", y);
  });
}

DOCTEST_TEST_CASE("each group of Mamba-2 has its own B and C, and is normed on its own") {
  constexpr index_t H = 4, N = 5, P = 3, G = 2, W = 4;
  written_out<without_frame<variants::mamba2>> w(
      variants::mamba2_options({.heads = H, .state = N, .head_dim = P, .groups = G}));
  DOCTEST_REQUIRE(w.shape("key").rows() == G * N);
  DOCTEST_REQUIRE(w.shape("head_norm.weight").size() == H * P);
  std::vector<row> xbc;
  std::array<std::vector<row>, H> S;  // [N][P]
  for (auto& s : S) s.assign(N, row(P, 0.0));
  w.check([&](index_t t) {
    row const x = w.input(t), z = w.times("z", x), raw = w.times("gate.raw", x);
    row all = w.times("value", x);
    for (auto const* name : {"key", "query"})
      for (double e : w.times(name, x)) all.push_back(e);
    xbc.push_back(all);
    row u;
    for (std::size_t c = 0; c < all.size(); ++c) {
      double sum = w.weight("conv.bias")[c];
      for (index_t back = 0; back < std::min(W, t + 1); ++back)
        sum += w.weight("conv.weight")[index_t(c) * W + W - 1 - back] * xbc[std::size_t(t - back)][c];
      u.push_back(silu(sum));
    }
    row y;
    for (index_t h = 0; h < H; ++h) {
      double const step = softplus(raw[std::size_t(h)] + w.weight("gate.dt_bias")[h]);
      double const decay = std::exp(-std::exp(w.weight("gate.A_log")[h]) * step);
      double const *const B = u.data() + H * P + h / (H / G) * N, *const C = B + G * N, *const v = u.data() + h * P;
      for (index_t p = 0; p < P; ++p) {
        double read = w.weight("skip")[h] * v[p];
        for (index_t n = 0; n < N; ++n) {
          double& s = S[std::size_t(h)][std::size_t(n)][std::size_t(p)];
          s = decay * s + step * v[p] * B[n];
          read += s * C[n];
        }
        y.push_back(read * silu(z[std::size_t(h * P + p)]));
      }
    }
    row out;
    for (index_t g = 0; g < G; ++g)
      for (double e : w.normed(w.part(y, g, G))) out.push_back(e * w.weight("head_norm.weight")[out.size()]);
    return w.times("out", out);
  });
}

DOCTEST_TEST_CASE("a norm of groups of channels stands in front of any gate, groups across heads too") {
  using gated = layer<recurrence<states::outer_product, gates::none>, extras{.norm = norm_kind::none,
                                                                             .residual = false,
                                                                             .head_norm = output_norm::full_width,
                                                                             .output_gate = true,
                                                                             .gate_map = activation::sigmoid}>;
  layer_options o{.heads = 2, .key_dim = 3, .value_dim = 6};
  o.norm_groups = 3;
  written_out<gated> w(o);
  std::array<std::vector<row>, 2> k, v;
  w.check([&](index_t t) {
    row const x = w.input(t), q = w.times("query", x), key = w.times("key", x), value = w.times("value", x),
              z = w.times("z", x);
    row r, y;
    for (index_t h = 0; h < 2; ++h) {
      auto const at = std::size_t(h);
      k[at].push_back(w.part(key, h, 2));
      v[at].push_back(w.part(value, h, 2));
      for (double e : w.read(w.part(q, h, 2), k[at], v[at])) r.push_back(e / std::sqrt(3.0));
    }
    for (index_t g = 0; g < 3; ++g)
      for (double e : w.normed(w.part(r, g, 3))) {
        auto const c = y.size();
        y.push_back(e * w.weight("head_norm.weight")[c] * sigmoid(z[c]));
      }
    return w.times("out", y);
  });
}

DOCTEST_TEST_CASE("feature_order is nu of the deterministic parameter-free projection") {
  for (index_t nu : {1, 3}) {
    layer_options o{.heads = 2, .key_dim = 3, .value_dim = 4};
    o.feature_order = nu;
    written_out<featured<feature_map::dpfp, false, key_norm::l1>> w(o);
    check_features(w, 1.0 / std::sqrt(double(2 * 3 * nu)), [&](char const*, index_t, row const& u) {
      row x;
      for (double e : u) x.push_back(std::max(e, 0.0));
      for (double e : u) x.push_back(-std::max(e, 0.0));
      row y;
      double sum = 1e-6;
      for (std::size_t j = 1; j <= std::size_t(nu); ++j)
        for (std::size_t i = 0; i < x.size(); ++i) {
          y.push_back(x[i] * x[(i + x.size() - j) % x.size()]);
          sum += std::abs(y.back());
        }
      for (auto& e : y) e /= sum;
      return y;
    });
  }
}

DOCTEST_TEST_CASE("Hedgehog's features are softmax([2u, -2u]) of trained images u of each head") {
  constexpr index_t K = 3;
  using hedgehog = featured<feature_map::hedgehog, true>;
  written_out<hedgehog> w({.heads = 2, .key_dim = K, .value_dim = 4});
  check_features(w, 1.0 / std::sqrt(2.0 * K), [&](std::string const& side, index_t h, row const& x) {
    row y;
    double sum = 0;
    for (double sign : {2.0, -2.0})
      for (index_t i = h * K; i < (h + 1) * K; ++i) {
        double u = w.weight(side + "_features.bias")[i];
        for (index_t j = 0; j < K; ++j) u += w.weight(side + "_features.weight")[i * K + j] * x[std::size_t(j)];
        sum += y.emplace_back(std::exp(sign * u));
      }
    for (auto& e : y) e /= sum;
    return y;
  });
}

DOCTEST_TEST_CASE("Hadamard's features are products of two trained images of each head") {
  constexpr index_t K = 3;
  written_out<featured<feature_map::hadamard, true>> w({.heads = 2, .key_dim = K, .value_dim = 4});
  DOCTEST_CHECK(w.shape("key").rows() == 2 * K);
  check_features(w, 1.0 / std::sqrt(double(K)), [&](std::string const& side, index_t h, row const& x) {
    auto const image = [&](index_t i) {
      double u = w.weight(side + "_features.bias")[i];
      for (index_t j = 0; j < K; ++j) u += w.weight(side + "_features.weight")[i * K + j] * x[std::size_t(j)];
      return u;
    };
    row y;
    for (index_t i = 0; i < K; ++i) y.push_back(image(h * 2 * K + i) * image(h * 2 * K + K + i));
    return y;
  });
}

DOCTEST_TEST_CASE("trained images start at the identity, those that are multiplied as two linear layers") {
  parameter_list list;
  parameter_room const room(list, "m", {});
  layer_options const o{.heads = 2, .key_dim = 3, .value_dim = 4};
  featured<feature_map::hedgehog, true> const same(o, 8, room.inner("same"));
  featured<feature_map::hadamard, true> const two(o, 8, room.inner("two"));
  auto given = o;
  given.start.features = init::constant(0.25);
  featured<feature_map::relu, true> const chosen(given, 8, room.inner("chosen"));
  buffer<double> x(list.size());
  list.initialise(1, x.data());
  auto const at = [&](char const* name, index_t i) { return x[list.at(std::string("m.") + name).offset + i]; };
  for (index_t i = 0; i < 18; ++i) {
    DOCTEST_CHECK(at("same.mixer.key_features.weight", i) == (i % 9 % 4 == 0 ? 1.0 : 0.0));
    DOCTEST_CHECK(at("chosen.mixer.query_features.weight", i) == 0.25);
    double const first = at("two.mixer.key_features.weight", i),
                 second = at("two.mixer.key_features.weight", i + 9);
    DOCTEST_CHECK(std::abs(first) < 1.0 / std::sqrt(3.0));
    DOCTEST_CHECK(first != second);
  }
  for (index_t i = 0; i < 6; ++i) DOCTEST_CHECK(at("same.mixer.key_features.bias", i) == 0.0);
  DOCTEST_CHECK(list.at("m.two.mixer.key_features.weight").shape == std::vector<index_t>{12, 3});
}

DOCTEST_TEST_CASE("a layer names the number of groups or features that does not fit") {
  parameter_list list;
  parameter_room const room(list, "m", {});
  auto const refuses = [](auto const& make, char const* words) {
    try {
      make();
      DOCTEST_FAIL("accepted");
    } catch (option_error const& e) {
      DOCTEST_CHECK_MESSAGE(std::string(e.what()).find(words) != std::string::npos, e.what());
    }
  };
  auto wide = variants::mamba2_options({.heads = 2, .state = 4, .head_dim = 3});
  wide.norm_groups = 4;
  refuses([&] { variants::mamba2(wide, 8, room); }, "norm_groups must divide the width of 6, got 4");
  auto narrow = variants::gla_options(8, 2);
  narrow.norm_groups = 2;
  refuses([&] { variants::gla(narrow, 8, room); }, "norm_groups divides a norm over the full width, which this");
  layer_options none{.heads = 1, .key_dim = 3, .value_dim = 4};
  none.feature_order = 0;
  refuses([&] { featured<feature_map::dpfp, false>(none, 8, room); },
          "feature_order, nu of dpfp, must be at least 1");
}
