#include "../support/golden.hpp"
#include "../support/law_rows.hpp"
#include <seqmix/kernels/cpu/convolution.hpp>

// The causal convolution: golden vectors, carried windows, packed sequences.

namespace {

using namespace seqmix;
using namespace seqmix::testing;

template <class T>
struct conv_problem {
  sequences seq;
  index_t channels = 1, width = 4;
  bool activation = false;
  std::vector<T> x, taps, bias, window;  // window and bias may be empty

  struct result {
    std::vector<T> y, window;
  };
  view2<T const> taps_cj() const { return {taps.data(), {channels, width}}; }
  view2<T const> x_rc() const { return {x.data(), {seq.rows(), channels}}; }
  view3<T const> window_ncj() const {
    return {window.empty() ? nullptr : window.data(), {seq.count(), channels, width - 1}};
  }
  result forward(int threads = 2) const {
    auto const nan = std::numeric_limits<T>::quiet_NaN();
    result r{std::vector<T>(x.size(), nan), std::vector<T>(std::size_t(seq.count() * channels * (width - 1)), nan)};
    with_planned_memory(threads, [&](device::cpu dev, arena& ws) {
      kernels::conv_forward(dev, seq, x_rc(), taps_cj(), bias.empty() ? nullptr : bias.data(), activation,
                            window_ncj(), view2<T>(r.y.data(), {seq.rows(), channels}),
                            view3<T>(r.window.data(), {seq.count(), channels, width - 1}), ws);
    });
    return r;
  }
  struct gradient {
    std::vector<T> x, taps, bias, window;
  };
  gradient backward(std::vector<T> const& dy, std::vector<T> const& d_window_out) const {
    auto const nan = std::numeric_limits<T>::quiet_NaN();
    gradient d{std::vector<T>(x.size(), nan), std::vector<T>(taps.size()), std::vector<T>(std::size_t(channels)),
               std::vector<T>(std::size_t(seq.count() * channels * (width - 1)), nan)};
    std::array<index_t, 3> const windows{seq.count(), channels, width - 1};
    with_planned_memory(2, [&](device::cpu dev, arena& ws) {
      kernels::conv_backward(dev, seq, x_rc(), taps_cj(), bias.empty() ? nullptr : bias.data(), activation,
                             window_ncj(), view2<T const>(dy.data(), {seq.rows(), channels}),
                             view3<T const>(d_window_out.empty() ? nullptr : d_window_out.data(), windows),
                             view2<T>(d.x.data(), {seq.rows(), channels}),
                             view2<T>(d.taps.data(), {channels, width}), bias.empty() ? nullptr : d.bias.data(),
                             view3<T>(d.window.data(), windows), ws);
    });
    return d;
  }
};

template <class T>
void check_golden(char const* name) {
  golden_case const c(std::string("ops/") + name);
  DOCTEST_CAPTURE(c.name());
  auto const numbers = [&](char const* tensor, bool rows = false) {
    std::vector<T> v;
    if (!c.has(tensor)) return v;
    auto const t = rows ? token_first(c[tensor]) : c[tensor].clone();
    for (double e : t.data) v.push_back(T(e));
    return v;
  };
  auto const check = [&](std::vector<T> const& found, golden_tensor const& t) {
    auto const r = compare(found.data(), t);
    DOCTEST_CHECK_MESSAGE(r.good, r.text);
  };
  conv_problem<T> p;
  p.seq = sequences::batch(c["x"].extent(0), c["x"].extent(2));
  p.channels = c["x"].extent(1);
  p.width = c["weight"].extent(1);
  p.activation = c.text("activation") == "silu";
  p.x = numbers("x", true), p.taps = numbers("weight"), p.bias = numbers("bias"), p.window = numbers("s0");
  auto const r = p.forward();
  check(r.y, token_first(c["o"]));
  if (c.has("s")) check(r.window, c["s"]);
  auto const d = p.backward(numbers("cot_o", true), numbers("cot_s"));
  check(d.x, token_first(c["grad_x"]));
  check(d.taps, c["grad_weight"]);
  check(d.bias, c["grad_bias"]);
  if (c.has("grad_s0")) check(d.window, c["grad_s0"]);
}

/// One channel, no activation, window carried from piece to piece.
struct carried_conv {
  std::vector<double> taps, window;
  std::vector<double> operator()(std::vector<double> const& piece) {
    conv_problem<double> p;
    p.seq = sequences::batch(1, index_t(piece.size()));
    p.width = index_t(taps.size());
    p.x = piece;
    p.taps = taps;
    p.window = window;
    auto const r = p.forward();
    window = r.window;
    return r.y;
  }
};
using numbers = std::vector<double>;

}  // namespace

DOCTEST_TEST_CASE("the convolution gives the golden outputs, windows and gradients") {
  for (auto const* name : {"causal_conv1d", "causal_conv1d_init", "causal_conv1d_t1"}) {
    check_golden<double>(name);
    check_golden<float>(name);
  }
}

DOCTEST_TEST_CASE("P-S1: a prompt shorter than the convolution leaves the right window") {
  carried_conv conv{{1, 10, 100, 1000}, {}};
  DOCTEST_CHECK(conv({1, 2}) == numbers{1000, 2100});
  DOCTEST_CHECK(conv.window == numbers{0, 1, 2});
  DOCTEST_CHECK(conv({3}) == numbers{3210});
  DOCTEST_CHECK(conv({4}) == numbers{4321});
  DOCTEST_CHECK(conv.window == numbers{2, 3, 4});

  numbers const tokens{1, 2, 3, 4, 5, 6, 7};
  auto const whole = carried_conv{{1, 10, 100, 1000}, {}}(tokens);
  for (std::ptrdiff_t prompt : {0, 1, 2, 3, 4, 5}) {
    carried_conv steps{{1, 10, 100, 1000}, {}};
    auto found = steps({tokens.begin(), tokens.begin() + prompt});
    for (auto t = tokens.begin() + prompt; t != tokens.end(); ++t) found.push_back(steps({*t})[0]);
    DOCTEST_CHECK(found == whole);
  }
}

DOCTEST_TEST_CASE("P-C7: the window is right after pieces shorter than it") {
  carried_conv conv{{1, 10, 100, 1000}, {}};
  DOCTEST_CHECK(conv({1, 2}) == numbers{1000, 2100});
  DOCTEST_CHECK(conv.window == numbers{0, 1, 2});
  DOCTEST_CHECK(conv({3}) == numbers{3210});
  DOCTEST_CHECK(conv.window == numbers{1, 2, 3});
  DOCTEST_CHECK(conv({4, 5, 6}) == numbers{4321, 5432, 6543});
  DOCTEST_CHECK(conv.window == numbers{4, 5, 6});
}

DOCTEST_TEST_CASE("P-C4: a sequence behind another one sees nothing of it") {
  std::array<index_t, 3> const offsets{0, 2, 4};
  conv_problem<double> p{sequences::packed(offsets), 1, 3, false, {9, 9, 1, 2}, {1, 10, 100}, {}, {}};
  auto const y = p.forward().y;
  DOCTEST_CHECK(numbers{y[2], y[3]} == numbers{100, 210});
}

DOCTEST_TEST_CASE(
    "the convolution's backward is the derivative of the reference in every width, windows included") {
  std::array<index_t, 6> const offsets{0, 0, 1, 3, 10, 21};
  for (index_t width : {1, 2, 3, 4, 7})
    for (int surroundings : {0, 1, 2, 3}) {  // activation | bias
      bool const activation = surroundings % 2 == 1, bias = surroundings / 2 == 1;
      DOCTEST_CAPTURE(width);
      DOCTEST_CAPTURE(surroundings);
      index_t const C = 67, R = 21, N = 5;
      conv_problem<double> p{sequences::packed(offsets),
                             C,
                             width,
                             activation,
                             normals(R * C, 1),
                             normals(C * width, 2),
                             normals(bias ? C : 0, 3),
                             normals(N * C * (width - 1), 4)};
      check_pullback(
          {p.x, p.taps, p.bias, p.window},
          [&](auto const& in) {
            using number = dual<double, 1>;
            std::vector<number> y(in[0].size()), out(in[3].size());
            std::array<index_t, 3> const windows{N, C, width - 1};
            auto ws = arena::growing();
            kernels::conv_forward(device::reference{}, p.seq, view2<number const>(in[0].data(), {R, C}),
                                  view2<number const>(in[1].data(), {C, width}), bias ? in[2].data() : nullptr,
                                  activation, view3<number const>(in[3].data(), windows),
                                  view2<number>(y.data(), {R, C}), view3<number>(out.data(), windows), ws);
            std::vector<double> values;
            for (auto const& e : y) values.push_back(e.value);
            DOCTEST_CHECK(greatest_error(p.forward().y, values) <= 1e-13);
            y.insert(y.end(), out.begin(), out.end());
            return y;
          },
          [&](std::vector<double> const& cotangent) {
            std::vector<double> const dy(cotangent.begin(), cotangent.begin() + R * C),
                d_window(cotangent.begin() + R * C, cotangent.end());
            auto const d = p.backward(dy, d_window);
            return arrays<double>{d.x, d.taps, bias ? d.bias : std::vector<double>{}, d.window};
          });
    }
}
