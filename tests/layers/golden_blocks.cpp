#include "../support/law_layer.hpp"
#include "../support/random_numbers.hpp"
#include <seqmix/layers/mamba3_layer.hpp>
#include <seqmix/layers/mlstm_layer.hpp>
#include <seqmix/layers/slstm_layer.hpp>

// Published layers that are no product of state, gate and selector alone, with their own weights, and Mamba-3's
// mixing with its states.

namespace {

using namespace seqmix;
using namespace seqmix::testing;

/// Everything of one golden case of Mamba-3's mixing; the published operation ends with D v and silu(z).
template <class T>
class mamba3_case {
 public:
  explicit mamba3_case(golden_case const& c) : c_(c), started_(c.has("S0")) {
    auto const &v = c["V"], &q = c["Q"];
    s_ = {.seq = sequences::batch(v.extent(0), v.extent(1)),
          .heads = v.extent(2),
          .key_heads = q.extent(2),
          .angle_heads = c["Angles"].extent(2),
          .key_dim = q.extent(3),
          .value_dim = v.extent(3),
          .pairs = c["Angles"].extent(3),
          .chunk = 5};
  }
  void check() {
    index_t const R = s_.seq.rows(), H = s_.heads, V = s_.value_dim;
    auto const q = load<3>("Q", {R, s_.key_heads, s_.key_dim}), k = load<3>("K", q.extent),
               v = load<3>("V", {R, H, V}), angle = load<3>("Angles", {R, s_.angle_heads, s_.pairs});
    auto const z = load<2>("Z", {R, H * V});
    auto const g = rows("ADT"), delta = rows("DT"), raw = rows("Trap");
    T const *const q_bias = load<1>("Q_bias", {H * s_.key_dim}).data,
                   *const k_bias = load<1>("K_bias", {H * s_.key_dim}).data, *const D = load<1>("D", {H}).data;
    auto const before = start(""), after = mixing::state<T>::carve(memory_, s_), d_after = start("cot_"),
               d_before = mixing::state<T>::carve(memory_, s_);
    auto const dq = take<3>(q.extent), dk = take<3>(k.extent), dv = take<3>(v.extent),
               d_angle = take<3>(angle.extent), dg = take<3>({R, H, 1}), o = take<3>(v.extent),
               d_o = take<3>(v.extent);
    auto const d_delta = take<2>({R, H}), d_raw = take<2>({R, H}), y = take<2>(z.extent), dz = take<2>(z.extent);
    T *const dq_bias = zeros(H * s_.key_dim), *const dk_bias = zeros(H * s_.key_dim), *const dD = zeros(H);
    auto const flat = [&](auto const& x) { return view2<T>(x.data, {R, H * V}); };
    trapezoid_input<T> const in{q, k, v, {g.data, {R, H, 1}}, delta, raw, angle, q_bias, k_bias};
    auto const keep = mixing::saved<T>::template carve<device::cpu>(memory_, s_);
    auto const cot = load<2>("cot_o", {R, H * V});
    auto ws = arena::growing();
    device::cpu const dev{2};
    auto const* const initial = started_ ? &before : nullptr;
    auto last = after;
    mixing::forward(dev, s_, in, o, initial, &last, keep, true, ws);
    kernels::skip_forward(dev, v, D, o);
    kernels::output_gate_forward(dev, kernels::activation::silu, view2<T const>(flat(o)), z, y);
    kernels::output_gate_backward(dev, kernels::activation::silu, view2<T const>(flat(o)), z, cot, flat(d_o), dz);
    auto first = d_before;
    mixing::backward(dev, s_, in, keep, d_o, initial, &d_after,
                     {dq, dk, dv, dg, d_delta, d_raw, d_angle, dq_bias, dk_bias}, started_ ? &first : nullptr, ws);
    kernels::skip_backward(dev, v, D, d_o, dv, dD, ws);

    close(y.data, c_["o"]);
    check_state(last, "", {"angle", "S", "k_last", "v_last"});
    close(dq.data, c_["grad_Q"]), close(dk.data, c_["grad_K"]), close(dv.data, c_["grad_V"]);
    close(dg.data, token_first(c_["grad_ADT"])), close(d_delta.data, token_first(c_["grad_DT"]));
    close(d_raw.data, token_first(c_["grad_Trap"])), close(d_angle.data, c_["grad_Angles"]);
    close(dq_bias, c_["grad_Q_bias"]), close(dk_bias, c_["grad_K_bias"]);
    close(dD, c_["grad_D"]), close(dz.data, c_["grad_Z"]);
    if (started_) check_state(first, "grad_", {"angle0", "S0", "k0", "v0"});
  }

 private:
  using mixing = trapezoid<gates::mamba3>;
  template <std::size_t Rank>
  view<T, Rank> take(std::array<index_t, Rank> extent) {
    auto const v = memory_.take_view<T, Rank>(extent);
    std::fill_n(v.data, v.size(), std::numeric_limits<T>::quiet_NaN());
    return v;
  }
  T* zeros(index_t count) {
    T* const p = memory_.take<T>(count);
    std::fill_n(p, count, T(0));
    return p;
  }
  template <std::size_t Rank>
  view<T const, Rank> load(golden_tensor const& t, std::array<index_t, Rank> extent) {
    auto const v = take<Rank>(extent);
    DOCTEST_REQUIRE(v.size() == t.size());
    for (index_t i = 0; i < t.size(); ++i) v.data[i] = T(t[i]);
    return v;
  }
  template <std::size_t Rank>
  view<T const, Rank> load(char const* name, std::array<index_t, Rank> extent) {
    return load<Rank>(c_[name], extent);
  }
  view2<T const> rows(char const* name) { return load<2>(token_first(c_[name]), {s_.seq.rows(), s_.heads}); }
  /// The initial state, or the cotangents of the final one. Published states are [V,K].
  mixing::state<T> start(std::string const& prefix) {
    auto const x = mixing::state<T>::carve(memory_, s_);
    bool const initial = prefix.empty();
    if (initial && !started_) return x;
    auto const put = [&](auto const& to, golden_tensor const& t) {
      DOCTEST_REQUIRE(to.size() == t.size());
      for (index_t i = 0; i < t.size(); ++i) to.data[i] = T(t[i]);
    };
    put(x.theta_nhs, c_[prefix + (initial ? "angle0" : "angle")]);
    put(x.mixer.S_nhkv, with_axes_swapped(c_[prefix + (initial ? "S0" : "S")], 2, 3));
    put(x.key_nhk, c_[prefix + (initial ? "k0" : "k_last")]);
    put(x.value_nhv, c_[prefix + (initial ? "v0" : "v_last")]);
    return x;
  }
  void check_state(mixing::state<T> const& x, std::string const& prefix, std::array<char const*, 4> const& names) {
    close(x.theta_nhs.data, c_[prefix + names[0]]);
    close(x.mixer.S_nhkv.data, with_axes_swapped(c_[prefix + names[1]], 2, 3));
    close(x.key_nhk.data, c_[prefix + names[2]]);
    close(x.value_nhv.data, c_[prefix + names[3]]);
  }
  static void close(T const* found, golden_tensor const& t) {
    auto const r = compare(found, t);
    DOCTEST_CHECK_MESSAGE(r.good, r.text);
  }

  golden_case const& c_;
  bool started_;
  trapezoid_shape s_;
  arena memory_ = arena::growing();
};

/// sLSTM's block token by token as its paper and code say it, for one sequence.
class plain_slstm {
 public:
  plain_slstm(lone_layer<slstm_layer<>, double>& layer, index_t d_model, index_t heads)
      : layer_(layer), D_(d_model), H_(heads), E_(d_model / heads) {}
  std::vector<double> operator()(std::vector<double> const& x) const {
    index_t const T = index_t(x.size()) / D_;
    std::vector<std::vector<double>> n;
    std::vector<double> y(std::size_t(D_), 0.0), c(y), norm(y), m(y), all;
    for (index_t t = 0; t < T; ++t) {
      std::vector<double> const row(x.begin() + t * D_, x.begin() + (t + 1) * D_);
      n.push_back(centred(row, 1, "norm.weight"));
      auto const u = convolved(n);
      auto const before = y;
      for (index_t j = 0; j < D_; ++j) {
        auto const at = std::size_t(j);
        double const in = gate(0, "input", j, u, before), forget = gate(1, "forget", j, u, before),
                     cell = gate(2, "cell", j, n.back(), before), output = gate(3, "output", j, n.back(), before);
        double const past = m[at] + log_sigmoid(forget), top = t == 0 ? in : std::max(past, in);
        double const keep = t == 0 ? 0.0 : std::exp(past - top), write = std::exp(in - top);
        c[at] = keep * c[at] + write * std::tanh(cell);
        norm[at] = keep * norm[at] + write;
        m[at] = top;
        y[at] = sigmoid(output) * c[at] / norm[at];
      }
      auto const h = centred(y, H_, "head_norm.weight");
      for (index_t j = 0; j < D_; ++j) all.push_back(row[std::size_t(j)] + h[std::size_t(j)]);
    }
    return all;
  }

 private:
  double const* weight(std::string const& name) const { return layer_.parameter_data("mixer." + name); }
  std::vector<double> centred(std::vector<double> const& x, index_t groups, char const* gain) const {
    std::vector<double> y;
    index_t const C = D_ / groups;
    for (index_t g = 0; g < groups; ++g) {
      double mean = 0, square = 0;
      for (index_t j = g * C; j < (g + 1) * C; ++j) mean += x[std::size_t(j)] / double(C);
      for (index_t j = g * C; j < (g + 1) * C; ++j) square += std::pow(x[std::size_t(j)] - mean, 2) / double(C);
      for (index_t j = g * C; j < (g + 1) * C; ++j)
        y.push_back((x[std::size_t(j)] - mean) / std::sqrt(square + 1e-5) * (1 + weight(gain)[j]));
    }
    return y;
  }
  /// The last token's convolved row, four taps, the last one for the token itself.
  std::vector<double> convolved(std::vector<std::vector<double>> const& n) const {
    std::vector<double> u;
    for (index_t j = 0; j < D_; ++j) {
      double sum = weight("conv.bias")[j];
      for (index_t back = 0; back < std::min(index_t(4), index_t(n.size())); ++back)
        sum += weight("conv.weight")[4 * j + 3 - back] * n[n.size() - 1 - std::size_t(back)][std::size_t(j)];
      u.push_back(silu(sum));
    }
    return u;
  }
  double gate(index_t g, char const* name, index_t j, std::vector<double> const& x,
              std::vector<double> const& before) const {
    index_t const h = j / E_, o = j % E_;
    double sum = weight("bias")[g * D_ + j];
    for (index_t i = 0; i < E_; ++i)
      sum += weight(name)[(h * E_ + o) * E_ + i] * x[std::size_t(h * E_ + i)] +
             weight("recurrent")[((h * 4 + g) * E_ + o) * E_ + i] * before[std::size_t(h * E_ + i)];
    return sum;
  }

  lone_layer<slstm_layer<>, double>& layer_;
  index_t D_, H_, E_;
};

}  // namespace

DOCTEST_TEST_CASE("Mamba-3's mixing gives the golden results, states and gradients of both ends among them") {
  for (auto const& name : golden_cases("ops", "mamba3_siso")) {
    golden_case const c(name);
    mamba3_case<double>(c).check();
    mamba3_case<float>(c).check();
  }
}

DOCTEST_TEST_CASE("a Mamba-3 layer gives the golden results of the published one") {
  for (index_t chunk : {3, 64})
    check_golden<mamba3_layer<gates::mamba3, norm_kind::none, false>>(
        "layer_mamba3_siso", {.key_dim = 8, .value_dim = 8, .recurrence_chunk = chunk},
        {{"in_proj.weight", "mixer.z"},
         {"in_proj.weight", "mixer.value", {.row = 32}},
         {"in_proj.weight", "mixer.key", {.row = 64}},
         {"in_proj.weight", "mixer.query", {.row = 72}},
         {"in_proj.weight", "mixer.gate.raw", {.row = 80}},
         {"in_proj.weight", "mixer.trapezoid", {.row = 88}},
         {"in_proj.weight", "mixer.angle", {.row = 92}},
         {"dt_bias", "mixer.gate.dt_bias"},
         {"B_norm.weight", "mixer.key_norm.weight"},
         {"C_norm.weight", "mixer.query_norm.weight"},
         {"B_bias", "mixer.key.bias"},
         {"C_bias", "mixer.query.bias"},
         {"D", "mixer.skip"},
         {"out_proj.weight", "mixer.out"}});
}

DOCTEST_TEST_CASE("an mLSTM layer gives the golden results of the published one") {
  using mlstm = recurrence<states::mlstm, gates::mlstm>;
  for (index_t chunk : {3, 32})
    check_golden<mlstm_layer<mlstm, norm_kind::none, false>>(
        "layer_mlstm", {.heads = 2, .width = 32, .recurrence_chunk = chunk},
        {{"proj_up.weight", "mixer.inner"},
         {"proj_up.weight", "mixer.z", {.row = 32}},
         {"conv1d.conv.weight", "mixer.conv.weight"},
         {"conv1d.conv.bias", "mixer.conv.bias"},
         {"q_proj.weight", "mixer.query"},
         {"k_proj.weight", "mixer.key"},
         {"v_proj.weight", "mixer.value"},
         {"mlstm_cell.fgate.weight", "mixer.gate.raw", {.rows = 2}},
         {"mlstm_cell.igate.weight", "mixer.gate.raw", {.rows = 2, .our_row = 2}},
         {"mlstm_cell.fgate.bias", "mixer.gate.bias", {.rows = 2}},
         {"mlstm_cell.igate.bias", "mixer.gate.bias", {.rows = 2, .our_row = 2}},
         {"mlstm_cell.outnorm.weight", "mixer.head_norm.weight"},
         {"learnable_skip", "mixer.skip"},
         {"proj_down.weight", "mixer.out"}});
}

DOCTEST_TEST_CASE("an sLSTM layer is what its paper and code say, written out token by token") {
  index_t const D = 12, H = 3, T = 9;
  lone_layer<slstm_layer<>, double> layer({.heads = H}, D, sequences::batch(1, T));
  random_numbers random(3);
  for (auto const& p : layer.list().all())
    for (index_t i = 0; i < p.size(); ++i)
      layer.parameter_data(p.name.substr(std::string("layer.").size()))[i] = 0.7 * random.normal();
  std::vector<double> x, y, dx;
  for (index_t i = 0; i < T * D; ++i) x.push_back(random.normal());
  auto const expected = plain_slstm(layer, D, H)(x);
  layer.run(x, x, y, dx);
  for (std::size_t i = 0; i < y.size(); ++i) {
    DOCTEST_CHECK(std::abs(y[i] - expected[i]) <= 1e-12);
    DOCTEST_CHECK(std::isfinite(dx[i]));
  }
}

DOCTEST_TEST_CASE("Mamba-3, mLSTM and sLSTM layers have the published sizes and start values") {
  parameter_list list;
  parameter_room const third(list, "m", {2, 3});
  mamba3_layer<> const mamba3({}, 64, third.inner("mamba3"));
  mlstm_layer<> const mlstm({}, 24, third.inner("mlstm"));
  slstm_layer<> const slstm({}, 24, third.inner("slstm"));
  DOCTEST_CHECK(mamba3.settings().heads == 2);
  DOCTEST_CHECK(list.at("m.mamba3.mixer.angle").rows() == 32);
  DOCTEST_CHECK(mlstm.settings().width == 64);
  buffer<double> x(list.size());
  list.initialise(1, x.data());
  auto const at = [&](char const* name, index_t i) { return x[list.at(std::string("m.") + name).offset + i]; };
  for (char const* one :
       {"mamba3.mixer.key.bias", "mamba3.mixer.query.bias", "mamba3.mixer.skip", "mlstm.mixer.skip"})
    DOCTEST_CHECK(at(one, 1) == 1.0);
  for (char const* zero : {"mlstm.mixer.gate.raw", "slstm.mixer.recurrent", "slstm.mixer.bias"})
    DOCTEST_CHECK(at(zero, 0) == 0.0);
  DOCTEST_CHECK(at("mlstm.mixer.gate.bias", 0) == 3.0);
  DOCTEST_CHECK(at("mlstm.mixer.gate.bias", 3) == 6.0);
  DOCTEST_CHECK(at("slstm.mixer.bias", 24) == 5.0);
  DOCTEST_CHECK(at("slstm.mixer.bias", 24 + 5) == -7.0);
  DOCTEST_CHECK(at("slstm.mixer.bias", 24 + 1) == doctest::Approx(5.0 - 12.0 * std::pow(0.2, 1.6)));
  auto const deviation = [&](char const* name) {
    auto const& p = list.at(std::string("m.") + name);
    double sum = 0;
    for (index_t i = 0; i < p.size(); ++i) sum += x[p.offset + i] * x[p.offset + i];
    return std::sqrt(sum / double(p.size()));
  };
  for (char const* small : {"mlstm.mixer.inner", "mlstm.mixer.query", "slstm.mixer.forget"})
    DOCTEST_CHECK(deviation(small) == doctest::Approx(std::sqrt(0.4 / 24)).epsilon(0.15));
  DOCTEST_CHECK(deviation("mlstm.mixer.out") == doctest::Approx(2.0 / (3 * std::sqrt(24.0))).epsilon(0.15));
}

DOCTEST_TEST_CASE("Mamba-3, mLSTM and sLSTM layers name the option that does not fit") {
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
  refuses([&] { mamba3_layer<>({.heads = 3, .key_heads = 2}, 16, room); },
          "key_heads must divide heads = 3, got 2");
  refuses([&] { mamba3_layer<>({.rotated = 1.5}, 64, room); }, "rotated is a part");
  refuses([&] { mamba3_layer<>({}, 16, room); }, "heads, key_dim and value_dim must be at least 1, got 0");
  refuses([&] { mlstm_layer<>({.heads = 5, .width = 16}, 16, room); },
          "heads must divide the inner width 16, got 5");
  refuses([&] { mlstm_layer<>({.heads = 2, .width = 18}, 16, room); },
          "block must divide the inner width 18, got 4");
  refuses([&] { slstm_layer<>({.heads = 3}, 16, room); }, "heads must divide d_model = 16, got 3");
}
