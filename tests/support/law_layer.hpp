#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "golden.hpp"
#include <seqmix/layers/block.hpp>
#include <seqmix/layers/channel_mix.hpp>
#include <seqmix/layers/layer.hpp>

/// Whole layers against golden vectors, their weights loaded by published names.
namespace seqmix::testing {

/// A variant's mixing part without what the published layers leave to their caller: no norm in front, no residual
/// around; everything else is the variant's.
namespace detail {
template <class Layer>
struct without_frame;
template <class Mixer, extras E>
struct without_frame<layer<Mixer, E>> {
  static constexpr extras inner = [] {
    auto e = E;
    e.norm = norm_kind::none;
    e.residual = false;
    return e;
  }();
  using type = layer<Mixer, inner>;
};
template <class First, class... Others>
struct without_frame<block<First, Others...>> : without_frame<First> {};
template <bool Receptance, norm_kind Norm>
struct without_frame<channel_mix<Receptance, Norm>> {
  using type = channel_mix<Receptance, norm_kind::none>;  // adds its input nevertheless
};
}  // namespace detail
template <class Layer>
using without_frame = typename detail::without_frame<Layer>::type;

/// How a published number stands for one of ours.
struct relation {
  double (*ours)(double) = [](double x) { return x; };
  double (*slope)(double) = [](double) { return 1.0; };  ///< derivative of ours by the published number
};
inline constexpr relation one_minus{[](double x) { return 1.0 - x; }, [](double) { return -1.0; }};
inline constexpr relation one_plus{[](double x) { return 1.0 + x; }, [](double) { return 1.0; }};
inline constexpr relation logit{[](double x) { return std::log(x / (1.0 - x)); },
                                [](double x) { return 1.0 / (x * (1.0 - x)); }};

/// Which numbers of a published tensor are which of ours, row by row; ours has the rows and columns of its
/// parameter (a vector: one column). Whatever its shape, the published tensor counts as rows of as many columns as
/// ours; `transposed`: as matrices [columns, rows] behind one another, of which `matrix` is meant.
/// Without a published name: the numbers of ours keep their start value.
struct weight_name {
  char const* published;
  char const* ours;
  struct place {
    index_t row = 0;      ///< first one, of the published tensor or of each of its transposed matrices
    index_t rows = 0;     ///< 0: as many as ours has from `our_row` on
    index_t our_row = 0;  ///< first one of ours
    bool transposed = false;
    index_t matrix = 0;
  } at{};
  relation as{};
};

/// Rows of one published tensor that are cut into equal blocks, one per head, each with the same parts in it.
struct weight_part {
  char const* ours;
  index_t rows;
};
inline void add_interleaved(std::vector<weight_name>& names, char const* published, index_t heads,
                            std::vector<weight_part> const& parts) {
  index_t row = 0;
  for (index_t h = 0; h < heads; ++h)
    for (auto const& p : parts) {
      names.push_back({published, p.ours, {.row = row, .rows = p.rows, .our_row = h * p.rows}});
      row += p.rows;
    }
}

/// Where the layer stands and how its rows divide, where that is not plain.
struct layer_place {
  layer_position position{};
  std::vector<index_t> offsets{};  ///< of packed sequences over all rows of x; empty: a batch
  bool adds_input = false;         ///< the layer is x + f(x), the published one f(x)
};

/// One layer outside a model, with planned memory filled with NaN.
template <class Layer, class T>
class lone_layer {
 public:
  lone_layer(typename Layer::options const& o, index_t d_model, sequences seq, layer_position at = {})
      : layer_(o, d_model, room(at)), run_{device::cpu{2}, nullptr, seq}, d_model_(d_model),
        parameters_(list_.size()), gradient_(list_.size()) {
    run_.training = true;
    list_.initialise(1, parameters_.data());
  }
  parameter_list const& list() const { return list_; }
  /// A tensor of the layer, or of the whole model where it has none of this name.
  parameter const& at(std::string const& name) const {
    auto const full = "layer." + name;
    for (auto const& p : list_.all())
      if (p.name == full) return p;
    return list_.at("shared." + name);
  }
  T* parameter_data(std::string const& name) { return parameters_.data() + at(name).offset; }
  T const* gradient(std::string const& name) const { return gradient_.data() + at(name).offset; }

  /// What runs through the model beside x: read or written by the layer, and its derivative.
  void set_stream(std::vector<T>& stream, std::vector<T>& d_stream) {
    index_t const width = index_t(stream.size()) / run_.rows();
    run_.stream_rc = {stream.data(), {run_.rows(), width}};
    run_.d_stream_rc = {d_stream.data(), {run_.rows(), width}};
  }

  /// y of x, and dx of dy with the parameters' gradients on the way.
  void run(std::vector<T> const& x, std::vector<T> const& dy, std::vector<T>& y, std::vector<T>& dx) {
    y.assign(x.size(), nan);
    dx.assign(x.size(), nan);
    auto plan = arena::measure();
    layer_.template carve_saved<T>(plan, run_);
    auto saved_block = poisoned(plan.used());
    arena pieces(saved_block);
    auto const keep = layer_.template carve_saved<T>(pieces, run_);
    auto const planned = [&](auto const& f) {
      auto dry = run_;
      dry.device.dry = true;
      auto measure = arena::measure();
      f(dry, measure);
      auto block = poisoned(measure.peak());
      arena ws(block);
      f(run_, ws);
    };
    run_.parameters = parameters_.data();
    planned([&](auto const& run, arena& ws) {
      layer_.forward(run, shaped(x.data()), shaped(y.data()), keep, nullptr, nullptr, ws);
    });
    planned([&](auto const& run, arena& ws) {
      layer_.backward(run, shaped(x.data()), keep, shaped(dy.data()), shaped(dx.data()), nullptr, nullptr, nullptr,
                      gradient_.data(), ws);
    });
  }

 private:
  /// Layers before this one have claimed what only the first one writes.
  parameter_room room(layer_position at) {
    if (at.index > 0) list_.claim("first_value");
    return {list_, "layer", at};
  }
  template <class U>
  view2<U> shaped(U* p) const {
    return {p, {run_.rows(), d_model_}};
  }
  static constexpr T nan = std::numeric_limits<T>::quiet_NaN();
  static buffer<std::byte> poisoned(index_t bytes) {
    buffer<std::byte> block(bytes);
    block.fill(std::byte(0xff));
    return block;
  }
  parameter_list list_;
  Layer layer_;
  pass<device::cpu, T> run_;
  index_t d_model_;
  buffer<T> parameters_, gradient_;
};

namespace detail {

template <class T>
std::vector<T> numbers(golden_tensor const& t) {
  std::vector<T> v;
  for (double e : t.data) v.push_back(T(e));
  return v;
}
inline std::string weight_of(golden_case const& c, std::string const& published) {
  return c.has("w:" + published) ? "w:" + published : published;
}
/// f(our flat index, published flat index) for all numbers of an entry.
template <class F>
void each_number(weight_name const& n, parameter const& ours, golden_tensor const& t, F const& f) {
  index_t const columns = ours.columns(), rows = n.at.rows > 0 ? n.at.rows : ours.rows() - n.at.our_row;
  index_t const across = n.at.transposed ? t.shape.back() : t.size() / columns;
  DOCTEST_CAPTURE(n.ours);
  DOCTEST_REQUIRE(n.at.our_row + rows <= ours.rows());
  DOCTEST_REQUIRE(n.at.row + rows <= across);
  DOCTEST_REQUIRE(t.size() % columns == 0);
  DOCTEST_REQUIRE((n.at.matrix + 1) * across * columns <= t.size());
  for (index_t i = 0; i < rows; ++i)
    for (index_t j = 0; j < columns; ++j) {
      index_t const row = n.at.row + i;
      f((n.at.our_row + i) * columns + j,
        n.at.transposed ? (n.at.matrix * columns + j) * across + row : row * columns + j);
    }
}

}  // namespace detail

/// Outputs, dx and every gradient of one case; `names` must cover every trained number of the layer once.
template <class Layer, class T>
void check_golden_layer(golden_case const& c, typename Layer::options const& o,
                        std::vector<weight_name> const& names, layer_place const& place = {}) {
  DOCTEST_CAPTURE(c.name());
  DOCTEST_CAPTURE(Layer::name());
  auto const& x = c["x"];
  auto const seq =
      place.offsets.empty() ? sequences::batch(x.extent(0), x.extent(1)) : sequences::packed(place.offsets);
  lone_layer<Layer, T> layer(o, x.extent(2), seq, place.position);
  auto const check = [](auto const* found, golden_tensor const& t) {
    auto const r = compare(found, t);
    DOCTEST_CHECK_MESSAGE(r.good, r.text);
  };
  std::vector<int> given(std::size_t(layer.list().size()), 0);
  auto const give = [&](weight_name const& n, index_t our) { ++given[std::size_t(layer.at(n.ours).offset + our)]; };
  for (auto const& n : names) {
    auto const& ours = layer.at(n.ours);
    if (!n.published) {
      for (index_t i = 0; i < n.at.rows * ours.columns(); ++i) give(n, n.at.our_row * ours.columns() + i);
      continue;
    }
    auto const& t = c[detail::weight_of(c, n.published)];
    detail::each_number(n, ours, t, [&](index_t our, index_t published) {
      layer.parameter_data(n.ours)[our] = T(n.as.ours(t[published]));
      give(n, our);
    });
  }
  // Nothing of the layer was left at its start value unless it is a constant.
  for (auto const& p : layer.list().all()) {
    DOCTEST_CAPTURE(p.name);
    auto const first = given.begin() + p.offset;
    DOCTEST_CHECK(std::count(first, first + p.size(), p.trained ? 1 : 0) == p.size());
  }

  auto const input = detail::numbers<T>(x), dy = detail::numbers<T>(c["cot_y"]);
  std::vector<T> y, dx, stream, d_stream;
  if (c.has("v_first")) {
    stream = detail::numbers<T>(c["v_first"]);
    d_stream.assign(stream.size(), T(0));
  } else if (c.has("v_first_out")) {
    d_stream = detail::numbers<T>(c["cot_v_first_out"]);
    stream.assign(d_stream.size(), std::numeric_limits<T>::quiet_NaN());
  }
  layer.set_stream(stream, d_stream);
  layer.run(input, dy, y, dx);
  if (place.adds_input)
    for (std::size_t i = 0; i < y.size(); ++i) y[i] -= input[i], dx[i] -= dy[i];
  check(y.data(), c["y"]);
  check(dx.data(), c["grad_x"]);
  if (c.has("v_first")) check(d_stream.data(), c["grad_v_first"]);
  if (c.has("v_first_out")) check(stream.data(), c["v_first_out"]);
  for (auto const& t : c.tensors()) {
    if (t.role != "grad" || t.name == "grad_x" || t.name == "grad_v_first") continue;
    buffer<T> joined(t.size());
    for (auto const& n : names) {
      if (!n.published || t.name != "grad_" + detail::weight_of(c, n.published)) continue;
      auto const& value = c[detail::weight_of(c, n.published)];
      detail::each_number(n, layer.at(n.ours), t, [&](index_t our, index_t published) {
        joined[published] = layer.gradient(n.ours)[our] * T(n.as.slope(value[published]));
      });
    }
    check(static_cast<T const*>(joined.data()), t);
  }
}

/// The same in double and in float.
template <class Layer>
void check_golden(std::string const& name, typename Layer::options const& o, std::vector<weight_name> const& names,
                  layer_place const& place = {}) {
  golden_case const c("ops/" + name);
  check_golden_layer<Layer, double>(c, o, names, place);
  check_golden_layer<Layer, float>(c, o, names, place);
}

}  // namespace seqmix::testing
