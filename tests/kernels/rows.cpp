#include "../support/law_rows.hpp"

// Norms, output stage, SwiGLU, rotary positions, skip, embedding and loss: backward against dual numbers through
// the reference, and the cases where numbers go wrong.

namespace {

using namespace seqmix;
using namespace seqmix::testing;
using number = dual<double, 1>;

constexpr index_t R = 70, C = 21;  // two blocks of rows, a tail of channels

template <class T>
view2<T const> matrix(std::vector<T> const& x, index_t columns) {
  return {x.data(), {index_t(x.size()) / columns, columns}};
}
template <class T>
view2<T> matrix(std::vector<T>& x, index_t columns) {
  return {x.data(), {index_t(x.size()) / columns, columns}};
}

}  // namespace

DOCTEST_TEST_CASE("RMS norm: backward is the derivative of the reference, and adds where it is told to") {
  auto const x = normals(R * C, 1), w = normals(C, 2);
  for (bool add : {false, true})
    check_pullback(
        {x, w},
        [&](arrays<number> const& in) {
          std::vector<number> y(in[0].size()), rstd(std::size_t(R), number{});
          kernels::rms_norm_forward(device::reference{}, matrix(in[0], C), in[1].data(), 1e-5, matrix(y, C),
                                    rstd.data());
          return y;
        },
        [&](std::vector<double> const& dy) {
          auto y = nothing_written(R * C), rstd = nothing_written(R), dx = nothing_written(R * C);
          if (add) dx.assign(dx.size(), 0.25);
          std::vector<double> dw(std::size_t(C), 0.5);
          kernels::rms_norm_forward(device::cpu{2}, matrix(x, C), w.data(), 1e-5, matrix(y, C), rstd.data());
          with_planned_memory(2, [&](device::cpu dev, arena& ws) {
            kernels::rms_norm_backward(dev, matrix(x, C), w.data(), rstd.data(), matrix(dy, C), matrix(dx, C), add,
                                       dw.data(), ws);
          });
          for (auto& e : dx) e -= add ? 0.25 : 0.0;
          for (auto& e : dw) e -= 0.5;
          return arrays<double>{dx, dw};
        });
}

DOCTEST_TEST_CASE("layer norm: backward is the derivative of the reference") {
  auto const x = normals(R * C, 3), w = normals(C, 4), b = normals(C, 5);
  check_pullback(
      {x, w, b},
      [&](arrays<number> const& in) {
        std::vector<number> y(in[0].size()), mean(std::size_t(R), number{}), rstd(mean);
        kernels::layer_norm_forward(device::reference{}, matrix(in[0], C), in[1].data(), in[2].data(), 1e-5,
                                    matrix(y, C), mean.data(), rstd.data());
        return y;
      },
      [&](std::vector<double> const& dy) {
        auto y = nothing_written(R * C), mean = nothing_written(R), rstd = nothing_written(R),
             dx = nothing_written(R * C);
        std::vector<double> dw(std::size_t(C), 0.0), db(dw);
        kernels::layer_norm_forward(device::cpu{2}, matrix(x, C), w.data(), b.data(), 1e-5, matrix(y, C),
                                    mean.data(), rstd.data());
        with_planned_memory(2, [&](device::cpu dev, arena& ws) {
          kernels::layer_norm_backward(dev, matrix(x, C), w.data(), mean.data(), rstd.data(), matrix(dy, C),
                                       matrix(dx, C), false, dw.data(), db.data(), ws);
        });
        return arrays<double>{dx, dw, db};
      });
}

DOCTEST_TEST_CASE("the output stage: every order of norm and gate has the derivative of the reference") {
  for (index_t norm_width : {index_t(0), index_t(7), C})
    for (int order : {0, 1, 2}) {  // no gate, gate last, gate first
      DOCTEST_CAPTURE(norm_width);
      DOCTEST_CAPTURE(order);
      kernels::output_stage const s{norm_width, norm_width, order > 0, order == 2, 1e-5};
      index_t const groups = norm_width ? C / norm_width : 1, weights = norm_width;
      auto const o = normals(R * C, 6), z = normals(order > 0 ? R * C : 0, 7, 2.0), w = normals(weights, 8);
      auto const z_of = [&](auto& from) {
        using T = std::remove_reference_t<decltype(from[0])>;
        return view2<T>(from.data(), {R, order > 0 ? C : 0});
      };
      check_pullback(
          {o, z, w},
          [&](arrays<number> const& in) {
            std::vector<number> y(in[0].size()), rstd(std::size_t(R * groups), number{});
            kernels::output_stage_forward(device::reference{}, s, matrix(in[0], C), z_of(in[1]), in[2].data(),
                                          matrix(y, C), rstd.data());
            return y;
          },
          [&](std::vector<double> const& dy) {
            auto y = nothing_written(R * C), rstd = nothing_written(R * groups), d_o = nothing_written(R * C),
                 dz = nothing_written(index_t(z.size()));
            std::vector<double> dw(std::size_t(weights), 0.0);
            kernels::output_stage_forward(device::cpu{2}, s, matrix(o, C), z_of(z), w.data(), matrix(y, C),
                                          rstd.data());
            with_planned_memory(2, [&](device::cpu dev, arena& ws) {
              kernels::output_stage_backward(dev, s, matrix(o, C), z_of(z), w.data(), rstd.data(), matrix(dy, C),
                                             matrix(d_o, C), z_of(dz), dw.data(), ws);
            });
            return arrays<double>{d_o, dz, dw};
          });
    }
}

DOCTEST_TEST_CASE("SwiGLU: backward is the derivative of the reference") {
  auto const gate = normals(R * C, 9, 2.0), up = normals(R * C, 10);
  check_pullback(
      {gate, up},
      [&](arrays<number> const& in) {
        std::vector<number> y(in[0].size());
        kernels::swiglu_forward(device::reference{}, matrix(in[0], C), matrix(in[1], C), matrix(y, C));
        return y;
      },
      [&](std::vector<double> const& dy) {
        auto d_gate = nothing_written(R * C), d_up = nothing_written(R * C);
        kernels::swiglu_backward(device::cpu{2}, matrix(gate, C), matrix(up, C), matrix(dy, C), matrix(d_gate, C),
                                 matrix(d_up, C));
        return arrays<double>{d_gate, d_up};
      });
}

DOCTEST_TEST_CASE("rotary positions restart at boundaries, go on from carried positions, and rotate back") {
  std::array<index_t, 5> const offsets{0, 0, 3, 4, 9};
  std::array<index_t, 4> const positions{5, 1000, 0, 7};
  auto const seq = sequences::packed(offsets);
  auto const x = normals(9 * 2 * 6, 11);
  std::array<index_t, 3> const heads{9, 2, 6};
  for (index_t const* position : {static_cast<index_t const*>(nullptr), positions.data()}) {
    auto expected = x, found = x;
    auto ws = arena::growing();
    kernels::rope(device::reference{}, seq, position, 10000.0, 1.0, view3<double>(expected.data(), heads), ws);
    auto more = arena::growing();
    kernels::rope(device::cpu{2}, seq, position, 10000.0, 1.0, view3<double>(found.data(), heads), more);
    DOCTEST_CHECK(greatest_error(found, expected) <= 1e-13);
    DOCTEST_CHECK(greatest_error(found, x) > 0.1);
    kernels::rope(device::cpu{2}, seq, position, 10000.0, -1.0, view3<double>(found.data(), heads), more);
    DOCTEST_CHECK(greatest_error(found, x) <= 1e-13);
  }
}

DOCTEST_TEST_CASE("the own-token skip: backward is the derivative of the reference, shared values included") {
  index_t const H = 4, V = 5;
  for (index_t value_heads : {1, 2, 4}) {
    auto const v = normals(R * value_heads * V, 12), d = normals(H, 13);
    std::array<index_t, 3> const values{R, value_heads, V}, outputs{R, H, V};
    check_pullback(
        {v, d},
        [&](arrays<number> const& in) {
          std::vector<number> o(std::size_t(R * H * V), number{});
          kernels::skip_forward(device::reference{}, view3<number const>(in[0].data(), values), in[1].data(),
                                view3<number>(o.data(), outputs));
          return o;
        },
        [&](std::vector<double> const& d_o) {
          std::vector<double> dv(v.size(), 0.0), dd(d.size(), 0.0);
          with_planned_memory(2, [&](device::cpu dev, arena& ws) {
            kernels::skip_backward(dev, view3<double const>(v.data(), values), d.data(),
                                   view3<double const>(d_o.data(), outputs), view3<double>(dv.data(), values),
                                   dd.data(), ws);
          });
          return arrays<double>{dv, dd};
        });
  }
}

DOCTEST_TEST_CASE("the embedding's gradient adds the rows of equal tokens") {
  std::vector<std::int32_t> const tokens{2, 0, 2, 2};
  std::vector<double> const dx{1, 2, 3, 4, 5, 6, 7, 8};
  std::vector<double> d(6, 1.0);
  kernels::embedding_backward(device::cpu{2}, tokens.data(), view2<double const>(dx.data(), {4, 2}),
                              view2<double>(d.data(), {3, 2}));
  DOCTEST_CHECK(d == std::vector<double>{4, 5, 1, 1, 14, 17});
}

namespace {

template <class T>
struct loss_result {
  double loss;
  index_t counted;
  std::vector<T> d;
};
template <class T>
loss_result<T> cross_entropy(std::vector<T> const& logits, index_t vocabulary,
                             std::vector<std::int32_t> const& labels, double scale = 1.0) {
  loss_result<T> r{-1.0, -1, std::vector<T>(logits.size(), std::numeric_limits<T>::quiet_NaN())};
  with_planned_memory(2, [&](device::cpu dev, arena& ws) {
    r.counted = kernels::cross_entropy(dev, matrix(logits, vocabulary), labels.data(), scale,
                                       matrix(r.d, vocabulary), &r.loss, ws);
  });
  return r;
}

}  // namespace

DOCTEST_TEST_CASE_TEMPLATE("P-N5: logits at -inf but one", T, float, double) {
  T const infinity = std::numeric_limits<T>::infinity();
  for (index_t vocabulary : {6, 100003}) {
    std::vector<T> logits(std::size_t(vocabulary), -infinity);
    logits[4] = T(10);
    auto const right = cross_entropy(logits, vocabulary, {4});
    DOCTEST_CHECK(right.loss == 0.0);
    DOCTEST_CHECK(std::all_of(right.d.begin(), right.d.end(), [](T x) { return x == T(0); }));
    auto const wrong = cross_entropy(logits, vocabulary, {1});
    DOCTEST_CHECK(wrong.loss == std::numeric_limits<double>::infinity());
    DOCTEST_CHECK(std::none_of(wrong.d.begin(), wrong.d.end(), [](T x) { return x != x; }));
  }
}

DOCTEST_TEST_CASE("P-T3: labels to ignore") {
  std::vector<double> const logits{1, 2, 0, 0, 1, 3, 2, 2, 2};
  auto const some = cross_entropy(logits, 3, {-100, 1, -100});
  DOCTEST_CHECK(some.counted == 1);
  DOCTEST_CHECK(some.loss == doctest::Approx(2.1698460196).epsilon(1e-9));
  std::vector<double> const expected{0, 0, 0, 0.0420100661, -0.8858048006, 0.8437947345, 0, 0, 0};
  DOCTEST_CHECK(greatest_error(some.d, expected) <= 1e-9);
  for (std::size_t i : {0u, 1u, 2u, 6u, 7u, 8u}) DOCTEST_CHECK(some.d[i] == 0.0);
  auto const none = cross_entropy(logits, 3, {-100, -100, -100});
  DOCTEST_CHECK(none.counted == 0);
  DOCTEST_CHECK(none.loss == 0.0);
  DOCTEST_CHECK(none.d == std::vector<double>(9, 0.0));
  auto const all = cross_entropy(logits, 3, {0, 1, 2});
  DOCTEST_CHECK(all.counted == 3);
  DOCTEST_CHECK(all.loss / 3 == doctest::Approx(1.5586880909).epsilon(1e-9));
}

DOCTEST_TEST_CASE("the loss's scale multiplies its gradient only, and the logits may be overwritten by it") {
  auto logits = normals(R * C, 14);
  std::vector<std::int32_t> labels;
  for (index_t r = 0; r < R; ++r) labels.push_back(std::int32_t(r % C));
  auto const plain = cross_entropy(logits, C, labels), scaled = cross_entropy(logits, C, labels, 0.125);
  DOCTEST_CHECK(plain.loss == scaled.loss);
  for (std::size_t i = 0; i < plain.d.size(); ++i)
    DOCTEST_CHECK(std::abs(plain.d[i] * 0.125 - scaled.d[i]) <= 1e-16);
  double loss = 0;
  with_planned_memory(1, [&](device::cpu dev, arena& ws) {
    kernels::cross_entropy(dev, matrix(std::as_const(logits), C), labels.data(), 1.0, matrix(logits, C), &loss, ws);
  });
  DOCTEST_CHECK(logits == plain.d);
}
