#pragma once

#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "golden.hpp"
#include <seqmix/layers/parameters.hpp>
#include <seqmix/layers/pass.hpp>

/// Whole layers against golden vectors, their weights loaded by published names.
namespace seqmix::testing {

/// `rows` rows of the published tensor from `published_row` on are those of ours from `row` on; rows 0: all of
/// ours.
struct weight_name {
  char const* published;
  index_t published_row;
  char const* ours;
  index_t rows = 0;
};

/// One layer outside a model, with planned memory filled with NaN.
template <class Layer, class T>
class lone_layer {
 public:
  lone_layer(typename Layer::options const& o, index_t d_model, sequences seq)
      : layer_(o, d_model, parameter_room(list_, "layer", {0, 1})), run_{device::cpu{2}, nullptr, seq},
        d_model_(d_model), parameters_(list_.size()), gradient_(list_.size()) {
    run_.training = true;
    list_.initialise(1, parameters_.data());
  }
  parameter_list const& list() const { return list_; }
  T* parameter(std::string const& name) { return parameters_.data() + list_.at("layer." + name).offset; }
  T const* gradient(std::string const& name) const { return gradient_.data() + list_.at("layer." + name).offset; }

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

template <class Layer, class T>
void check_golden_layer(golden_case const& c, typename Layer::options const& o,
                        std::vector<weight_name> const& names) {
  DOCTEST_CAPTURE(c.name());
  DOCTEST_CAPTURE(Layer::name());
  auto const& x = c["x"];
  lone_layer<Layer, T> layer(o, x.extent(2), sequences::batch(x.extent(0), x.extent(1)));
  auto const rows_of = [&](weight_name const& n, golden_tensor const& t) {
    auto const& ours = layer.list().at("layer." + std::string(n.ours));
    index_t const rows = n.rows > 0 ? n.rows : ours.rows(), width = t.size() / t.extent(0);
    DOCTEST_REQUIRE(rows == ours.rows());
    DOCTEST_REQUIRE(width * rows == ours.size());
    DOCTEST_REQUIRE(n.published_row + rows <= t.extent(0));
    return std::pair(n.published_row * width, rows * width);
  };
  for (auto const& n : names) {
    auto const& t = c["w:" + std::string(n.published)];
    auto const [begin, count] = rows_of(n, t);
    for (index_t i = 0; i < count; ++i) layer.parameter(n.ours)[i] = T(t[begin + i]);
  }
  auto const numbers = [](golden_tensor const& t) {
    std::vector<T> v;
    for (double e : t.data) v.push_back(T(e));
    return v;
  };
  std::vector<T> y, dx;
  layer.run(numbers(x), numbers(c["cot_y"]), y, dx);
  auto const check = [&](T const* found, golden_tensor const& t) {
    auto const r = compare(found, t);
    DOCTEST_CHECK_MESSAGE(r.good, r.text);
  };
  check(y.data(), c["y"]);
  check(dx.data(), c["grad_x"]);
  index_t loaded = 0;
  for (auto const& t : c.tensors()) {
    if (!t.name.starts_with("grad_w:")) continue;
    buffer<T> joined(t.size());
    for (auto const& n : names) {
      if (t.name != "grad_w:" + std::string(n.published)) continue;
      auto const [begin, count] = rows_of(n, t);
      std::copy_n(layer.gradient(n.ours), count, joined.data() + begin);
      loaded += count;
    }
    check(joined.data(), t);
  }
  // Nothing of the layer was left at its initial value unless it is a constant.
  index_t trained = 0;
  for (auto const& p : layer.list().all()) trained += p.trained ? p.size() : 0;
  DOCTEST_CHECK(loaded == trained);
}

}  // namespace seqmix::testing
