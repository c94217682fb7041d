#include <algorithm>
#include <numeric>

#include "../support/golden.hpp"
#include "../support/laws.hpp"
#include <seqmix/gates/mlstm.hpp>
#include <seqmix/mixers/recurrence.hpp>
#include <seqmix/mixers/stabilised.hpp>

// The stabilised recurrences against the golden vectors and in their extremes.

namespace {

using namespace seqmix;
using namespace seqmix::testing;
using numbers = std::vector<double>;
constexpr double infinity = std::numeric_limits<double>::infinity();

/// A decay per head that is the same at every token, and a log-weight per token.
struct constant_decay {
  static constexpr std::string_view name = "constant_decay";
  static constexpr gate_spec spec{.writes = true, .log_write = true};
  static constexpr std::array<gate_parameter, 0> parameters{};
  template <class T>
  static gate_value<T> forward(std::array<T, 0> const&, std::array<T, 0> const&) noexcept {
    return {};
  }
};
/// Keys, an exclusive read with a bonus, a floor and a large eps: every branch of the kernel at once.
struct read_first {
  static constexpr std::string_view name = "read_first";
  static constexpr state_spec spec{.kind = state_kind::stabilised, .read = read_order::exclusive};
  static constexpr stabilised_spec stabilised{
      .keyed = true, .floor = true, .eps = 0.1, .start = stabiliser_start::zero};
};
static_assert(state<read_first>);

using mlstm = recurrence<states::mlstm, gates::mlstm>;
using mlstm_from_zero = recurrence<states::mlstm_from_zero, gates::mlstm>;
using wkv = recurrence<states::wkv, gates::mlstm>;
using wkv_constant = recurrence<states::wkv, constant_decay>;
/// The bonus is one number per head, whatever the keys: of an array [H,K] the first column.
struct general : recurrence<read_first, gates::mlstm> {
  using base = recurrence<read_first, gates::mlstm>;
  template <class T>
  static mixer_input<T> narrowed(mixer_input<T> in) {
    in.bonus_hk = in.bonus_hk.slice(1, 0, 1);
    return in;
  }
  template <class Device, class T>
  static void forward(Device dev, mixer_shape const& s, mixer_input<T> const& in, view3<same<T>> o,
                      state<same<T>> const* before, state<same<T>>* after, saved<same<T>> const* keep, arena& ws) {
    base::forward(dev, s, narrowed(in), o, before, after, keep, ws);
  }
  template <class Device, class T>
  static void backward(Device dev, mixer_shape const& s, mixer_input<T> const& in, view3<same<T> const> o,
                       saved<same<T>> const& keep, view3<same<T> const> d_o, state<same<T>> const* before,
                       state<same<T>> const* d_after, mixer_gradient<same<T>> d, state<same<T>>* d_before,
                       arena& ws) {
    if (!dev.dry) std::fill_n(d.bonus_hk.data, d.bonus_hk.size(), T(0));
    d.bonus_hk = d.bonus_hk.slice(1, 0, 1);
    base::backward(dev, s, narrowed(in), o, keep, d_o, before, d_after, d, d_before, ws);
  }
};
static_assert(mixer_on<mlstm, device::cpu> && mixer_on<wkv, device::cpu, double>);

template <class T>
void check(std::vector<T> const& actual, golden_tensor const& expected) {
  auto const r = compare(actual.data(), expected);
  DOCTEST_CHECK_MESSAGE(r.good, r.text);
}

/// A golden case in the library's order of rows.
struct stored_case {
  golden_case file;
  explicit stored_case(char const* name) : file(std::string("ops/") + name) {}
  golden_tensor tensor(std::string const& name) const {
    auto const& t = file[name];
    bool const head_first = file.op() == "mlstm" && t.shape.size() == 4 && t.extent(2) == tokens();
    return head_first ? token_first(t) : t.clone();
  }
  index_t tokens() const { return file["v"].extent(file.op() == "mlstm" ? 2 : 1); }
  numbers of(std::string const& name) const {
    if (!file.has(name)) return {};
    auto const t = tensor(name);
    return {t.data.begin(), t.data.end()};
  }
  /// The parts of a state behind one another, or of its derivative.
  numbers state(std::array<char const*, 3> const& names, std::string const& prefix, char const* suffix) const {
    numbers all;
    for (auto const* name : names) {
      auto const part = of(prefix + name + suffix);
      all.insert(all.end(), part.begin(), part.end());
    }
    return all;
  }
  template <class T>
  void check_state(std::vector<T> const& x, std::array<char const*, 3> const& names, std::string const& prefix,
                   char const* suffix) const {
    auto from = x.begin();
    for (auto const* name : names) {
      if (!file.has(prefix + name + suffix)) return;
      auto const expected = tensor(prefix + name + suffix);
      check(std::vector<T>(from, from + expected.size()), expected);
      from += expected.size();
    }
    DOCTEST_CHECK(from == x.end());
  }
};

/// Runs a case; what its gradients belong to is compared by the caller.
template <class M, class T>
mixer_numbers<T> run_case(stored_case const& c, mixer_shape const& s, mixer_numbers<double> const& x,
                          std::array<char const*, 3> const& states, char const* output) {
  using memory = mixer_memory<M, T>;
  auto const fill = [](memory& to, numbers const& from) {
    if (from.empty()) return;
    DOCTEST_REQUIRE(from.size() == to.numbers().size());
    std::size_t i = 0;
    to.each([&](T& e) { e = T(from[i++]); });
  };
  memory before(s), after(s), d_after(s), d_before(s);
  d_after.each([](T& e) { e = T(0); });
  fill(before, c.state(states, "", "0"));
  fill(d_after, c.state(states, "cot_", ""));
  mixer_machine<M, T> machine(s);
  auto const in = x.as<T>();
  check(machine.forward(in, &before, &after), c.tensor(output));
  c.check_state(after.numbers(), states, "", "");
  auto const cotangent = c.of(std::string("cot_") + output);
  auto const d =
      machine.backward(in, std::vector<T>(cotangent.begin(), cotangent.end()), &before, &d_after, &d_before);
  c.check_state(d_before.numbers(), states, "grad_", "0");
  return d;
}

/// The cell divides keys by sqrt(D), so its state is that of divided keys; a parallel form has none to compare.
template <class M, class T>
void check_mlstm(char const* name, index_t chunk) {
  DOCTEST_CAPTURE(name);
  DOCTEST_CAPTURE(chunk);
  stored_case const c(name);
  auto const q = c.tensor("q");
  mixer_shape s;
  s.seq = sequences::batch(q.extent(0), q.extent(1));
  s.heads = s.query_heads = s.key_heads = s.value_heads = s.gate_heads = q.extent(2);
  s.key_dim = s.value_dim = q.extent(3);
  s.chunk = chunk;
  double const scale = 1 / std::sqrt(double(s.key_dim));
  bool const divide_keys = c.file.has("C");
  if (!divide_keys) s.scale = scale;
  mixer_numbers<double> x;
  x.q = c.of("q"), x.k = c.of("k"), x.v = c.of("v"), x.write = c.of("i");
  auto const f = c.of("f");
  for (auto e : f) x.g.push_back(log_sigmoid(e));
  for (auto& e : x.k) e *= divide_keys ? scale : 1.0;
  auto d = run_case<M, T>(c, s, x, {"C", "n", "m"}, "h");
  for (auto& e : d.k) e *= T(divide_keys ? scale : 1.0);
  for (std::size_t i = 0; i < f.size(); ++i) d.g[i] *= T(sigmoid(-f[i]));
  check(d.q, c.tensor("grad_q")), check(d.k, c.tensor("grad_k")), check(d.v, c.tensor("grad_v"));
  check(d.g, c.tensor("grad_f")), check(d.write, c.tensor("grad_i"));
}

/// Channels as heads with one value each; or one head of one channel each at a time.
template <class M, class T>
void check_rwkv4(char const* name, index_t chunk) {
  DOCTEST_CAPTURE(name);
  DOCTEST_CAPTURE(chunk);
  stored_case const c(name);
  auto const k = c.tensor("k");
  mixer_shape s;
  s.seq = sequences::batch(k.extent(0), k.extent(1));
  s.heads = s.value_heads = s.gate_heads = k.extent(2);
  s.chunk = chunk;
  mixer_numbers<double> x;
  x.v = c.of("v"), x.write = c.of("k"), x.bonus = c.of("u");
  auto const w = c.of("w");
  for (index_t r = 0; r < mixer_needs<M>::gate_rows(s); ++r)
    for (auto e : w) x.g.push_back(-std::exp(e));
  auto const d = run_case<M, T>(c, s, x, {"num", "den", "max"}, "o");
  std::vector<T> d_w(w.size());
  for (std::size_t i = 0; i < d.g.size(); ++i) d_w[i % w.size()] += d.g[i] * T(x.g[i]);
  check(d.v, c.tensor("grad_v")), check(d.write, c.tensor("grad_k")), check(d.bonus, c.tensor("grad_u"));
  check(d_w, c.tensor("grad_w"));
}

mixer_shape small_shape(sequences seq, index_t heads, index_t keys, index_t values, index_t chunk) {
  mixer_shape s;
  s.seq = seq;
  s.heads = s.query_heads = s.key_heads = s.value_heads = s.gate_heads = heads;
  s.key_dim = keys;
  s.value_dim = values;
  s.chunk = chunk;
  return s;
}
constexpr std::array<index_t, 6> offsets{0, 0, 1, 6, 6, 29};

/// Log-weights from nothing to all that matters, and decays from none to the bound, in one chunk.
template <class T>
void draw_extremes(mixer_numbers<double>& x, std::uint64_t seed) {
  random_numbers random(seed);
  std::array<double, 6> const weights{-300, -30, -1, 0, 30, 300},
      decays{0, -1e-3, -1, -30, -100, double(log_decay_bound<T>)};
  for (auto& e : x.write) e = weights[std::size_t(random.below(6))];
  for (auto& e : x.g) e = decays[std::size_t(random.below(6))];
}
template <class T>
bool all_finite(std::vector<T> const& x) {
  return std::all_of(x.begin(), x.end(), [](T e) { return std::isfinite(e); });
}

/// In the extremes backward is still the derivative of forward, and float stays finite and near double.
template <class M>
void check_extremes(mixer_shape s) {
  for (index_t chunk : {1, 4, 64}) {
    DOCTEST_CAPTURE(M::name());
    DOCTEST_CAPTURE(chunk);
    s.chunk = chunk;
    auto x = random_mixer_numbers<M>(s, 41);
    draw_extremes<float>(x, 42);
    check_gradients<M>(s, x);
    mixer_machine<M, double> exact(s);
    mixer_machine<M, float> machine(s);
    auto const o = exact.forward(x);
    auto const found = machine.forward(x.template as<float>());
    DOCTEST_CHECK(all_finite(o));
    DOCTEST_CHECK(relative_difference(found, o) <= 2e-5);
    auto const d_o = random_vector<double>(o.size(), 43);
    auto const d = exact.backward(x, d_o);
    auto d_float = machine.backward(x.template as<float>(), std::vector<float>(d_o.begin(), d_o.end()));
    each_array([](std::vector<float> const& part) { DOCTEST_CHECK(all_finite(part)); }, d_float);
    DOCTEST_CHECK(relative_difference(d_float, d) <= 1e-4);
  }
}

}  // namespace

DOCTEST_TEST_CASE("mLSTM gives the golden outputs, states and gradients in "
                  "every chunk size") {
  for (index_t chunk : {1, 5, 32}) {
    for (auto const* name : {"mlstm_parallel", "mlstm_parallel_t1"}) {
      check_mlstm<mlstm, double>(name, chunk);
      check_mlstm<mlstm, float>(name, chunk);
    }
    for (auto const* name : {"mlstm_recurrent", "mlstm_recurrent_init"}) {
      check_mlstm<mlstm_from_zero, double>(name, chunk);
      check_mlstm<mlstm_from_zero, float>(name, chunk);
    }
  }
}

DOCTEST_TEST_CASE("RWKV-4 gives the golden outputs, states and gradients with "
                  "its decay once or at every token") {
  for (index_t chunk : {1, 5, 32})
    for (auto const* name : {"rwkv4", "rwkv4_init", "rwkv4_t1"}) {
      check_rwkv4<wkv, double>(name, chunk);
      check_rwkv4<wkv, float>(name, chunk);
      check_rwkv4<wkv_constant, double>(name, chunk);
      check_rwkv4<wkv_constant, float>(name, chunk);
    }
}

DOCTEST_TEST_CASE("a stabilised state of a user's own reads before it writes, "
                  "with keys, a floor and an eps") {
  auto s = law_shape<general>(sequences::packed(offsets));
  for (index_t chunk : {1, 4, 64}) {
    DOCTEST_CAPTURE(chunk);
    s.chunk = chunk;
    check_gradients<general>(s, random_mixer_numbers<general>(s, 44));
  }
}

DOCTEST_TEST_CASE("log-weights of 300 and -300 among decays to the bound leave "
                  "no NaN and exact derivatives") {
  check_extremes<mlstm>(small_shape(sequences::packed(offsets), 2, 3, 4, 4));
  check_extremes<wkv>(small_shape(sequences::packed(offsets), 3, 1, 4, 4));
  check_extremes<wkv>(small_shape(sequences::packed(offsets), 70, 1, 1, 4));
}

DOCTEST_TEST_CASE_TEMPLATE("tokens of no weight are not seen, and a row that has seen nothing is 0", M, mlstm,
                           wkv) {
  for (index_t values : {1, 3}) {
    auto const s = small_shape(sequences::batch(1, 4), 2, 1, values, 8);
    auto x = random_mixer_numbers<M>(s, 45);
    for (std::size_t i : {0u, 1u, 2u, 3u}) x.write[i] = -infinity;
    mixer_memory<M, double> after(s), d_after(s);
    mixer_machine<M, double> machine(s);
    auto const o = machine.forward(x, nullptr, &after);
    auto const width = std::ptrdiff_t(s.heads * values);
    DOCTEST_CHECK(numbers(o.begin(), o.begin() + 2 * width) == numbers(std::size_t(2 * width), 0.0));
    auto d = machine.backward(x, numbers(o.size(), 1.0));
    each_array([](numbers const& part) { DOCTEST_CHECK(all_finite(part)); }, d);

    auto const rest = with_sequences(s, sequences::batch(1, 2));
    mixer_memory<M, double> expected(rest);
    auto const o_rest = mixer_machine<M, double>(rest).forward(rows_of<M>(s, x, 2, 2), nullptr, &expected);
    DOCTEST_CHECK(relative_difference(numbers(o.begin() + 2 * width, o.end()), o_rest) <= 1e-14);
    DOCTEST_CHECK(relative_difference(after.numbers(), expected.numbers()) <= 1e-14);

    for (auto& e : x.write) e = -infinity;
    DOCTEST_CHECK(machine.forward(x, nullptr, &after) == numbers(o.size(), 0.0));
    DOCTEST_CHECK(after.state.m_nh(0, 1) == -infinity);
    DOCTEST_CHECK(after.state.S_nhkv(0, 1, 0, 0) == 0.0);
    DOCTEST_CHECK(reference_mixer<M, double>(s, x) == numbers(o.size(), 0.0));
  }
}

DOCTEST_TEST_CASE("RWKV-4's state of channels gives the numbers of the same state of heads") {
  // One head of V channels shares its decay and weights; V heads of one channel have them V times.
  index_t const V = 37;
  auto const heads = small_shape(sequences::packed(offsets), 1, 1, V, 4);
  auto const channels = small_shape(sequences::packed(offsets), V, 1, 1, 4);
  auto const x = random_mixer_numbers<wkv>(heads, 46);
  auto y = x;
  auto const repeat = [&](numbers const& from) {
    numbers to;
    for (auto e : from) to.insert(to.end(), std::size_t(V), e);
    return to;
  };
  y.g = repeat(x.g), y.write = repeat(x.write), y.bonus = repeat(x.bonus);
  mixer_machine<wkv, double> a(heads), b(channels);
  auto const o = a.forward(x);
  DOCTEST_CHECK(relative_difference(b.forward(y), o) <= 1e-13);
  auto const d_o = random_vector(o.size(), 47);
  auto const d = a.backward(x, d_o), d_channels = b.backward(y, d_o);
  auto const sums = [&](numbers const& from) {
    numbers to;
    for (auto p = from.begin(); p != from.end(); p += V) to.push_back(std::accumulate(p, p + V, 0.0));
    return to;
  };
  DOCTEST_CHECK(relative_difference(d_channels.v, d.v) <= 1e-12);
  DOCTEST_CHECK(relative_difference(sums(d_channels.g), d.g) <= 1e-12);
  DOCTEST_CHECK(relative_difference(sums(d_channels.write), d.write) <= 1e-12);
  DOCTEST_CHECK(relative_difference(sums(d_channels.bonus), d.bonus) <= 1e-12);
}
