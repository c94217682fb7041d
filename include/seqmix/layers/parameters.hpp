#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <seqmix/layers/detail/orthogonal.hpp>
#include <seqmix/tensor/philox.hpp>
#include <seqmix/tensor/view.hpp>

namespace seqmix::inline v0 {

/// Which element of a tensor is initialised, the random numbers it may use and where its layer stands.
struct initial_element {
  index_t row, rows, column, columns;
  index_t layer, layers;
  double uniform;  ///< in (0, 1)
  double normal;   ///< standard normal
  double a, b, c;  ///< numbers of the initialiser
};

/// A tensor that is initialised as a whole: `to` [rows, columns] holds standard normal numbers and takes the start
/// values.
struct initial_matrix {
  double* to;
  index_t rows, columns;
  index_t layer, layers;
  double a, b, c;  ///< numbers of the initialiser
};

/// A rule for start values: a function of the element alone, or of the tensor's own random numbers, so that the
/// same seed gives the same bits on any number of threads and whatever other tensors exist.
struct initialiser {
  double (*value)(initial_element const&) = nullptr;
  double a = 0.0, b = 0.0, c = 0.0;
  void (*matrix)(initial_matrix const&) = nullptr;  ///< stands for `value` where the elements depend on each other

  explicit operator bool() const noexcept { return value || matrix; }
};

namespace init {
inline initialiser constant(double x) {
  return {[](initial_element const& e) { return e.a; }, x, 0.0};
}
inline initialiser normal(double deviation) {
  return {[](initial_element const& e) { return e.a * e.normal; }, deviation, 0.0};
}
inline initialiser uniform(double low, double high) {
  return {[](initial_element const& e) { return e.a + (e.b - e.a) * e.uniform; }, low, high};
}
/// U(-1/sqrt(fan in), 1/sqrt(fan in)) times a factor: the default of the frameworks' linear layers.
inline initialiser fan_in(double factor = 1.0) {
  return {[](initial_element const& e) { return e.a * (2.0 * e.uniform - 1.0) / std::sqrt(double(e.columns)); },
          factor, 0.0};
}
/// N(0, 1/fan in) times a factor.
inline initialiser normal_fan_in(double factor = 1.0) {
  return {[](initial_element const& e) { return e.a * e.normal / std::sqrt(double(e.columns)); }, factor};
}
/// The same as fan_in divided by sqrt(layers): Mamba's output projections.
inline initialiser fan_in_per_layer() {
  return {[](initial_element const& e) {
            return (2.0 * e.uniform - 1.0) / std::sqrt(double(e.columns) * double(e.layers > 0 ? e.layers : 1));
          },
          0.0, 0.0};
}
/// Glorot's uniform rule with a gain.
inline initialiser xavier(double gain) {
  return {[](initial_element const& e) {
            return e.a * (2.0 * e.uniform - 1.0) * std::sqrt(6.0 / double(e.rows + e.columns));
          },
          gain, 0.0};
}
/// Rows or columns, whichever are fewer, orthonormal and times a gain. Source: Saxe et al. (arXiv 1312.6120),
/// section 3.
inline initialiser orthogonal(double gain = 1.0) {
  return {.a = gain,
          .matrix = [](initial_matrix const& m) { detail::make_orthogonal(m.to, m.rows, m.columns, m.a); }};
}
/// Square matrices below one another, each the identity.
inline initialiser identity() {
  return {[](initial_element const& e) { return e.row % e.columns == e.column ? 1.0 : 0.0; }};
}
}  // namespace init

/// Which rule of the optimiser a tensor belongs to.
enum class optimiser_group { matrix, vector };

/// One named tensor of the flat parameter buffer.
struct parameter {
  std::string name;
  std::vector<index_t> shape;
  initialiser initial;
  bool weight_decay = false;
  bool trained = true;
  bool log_rate = false;  ///< a gate's: adding delta multiplies its decay rates by e^delta
  optimiser_group group = optimiser_group::matrix;
  index_t layer = 0, layers = 1;
  index_t offset = 0;

  index_t size() const noexcept {
    index_t n = 1;
    for (auto e : shape) n *= e;
    return n;
  }
  index_t rows() const noexcept { return shape.empty() ? 1 : shape.front(); }
  index_t columns() const noexcept { return size() / (rows() > 0 ? rows() : 1); }
};

/// Where one tensor lies in the buffer: what a layer remembers of it.
struct weight {
  index_t offset = -1;
  index_t rows = 0, columns = 0;

  explicit operator bool() const noexcept { return offset >= 0; }
  template <class T>
  view2<T> of(T* base) const noexcept {
    return {base + offset, {rows, columns}};
  }
  template <class T>
  T* data(T* base) const noexcept {
    return offset < 0 ? nullptr : base + offset;
  }
};

/// The tensors of a model in layer order, each at a multiple of 16 elements (64 bytes of float) of one buffer. The
/// gaps stay zero and are never saved. Gradients, optimiser moments and dual numbers share the layout.
class parameter_list {
 public:
  static constexpr index_t boundary = 16;

  weight add(parameter p) {
    for (auto const& other : list_)
      if (other.name == p.name) throw option_error("seqmix: parameters: two tensors are named " + p.name);
    p.offset = size_;
    size_ += (p.size() + boundary - 1) / boundary * boundary;
    list_.push_back(p);
    return {p.offset, p.rows(), p.columns()};
  }
  /// One tensor for the whole model: the first layer that asks adds it, the others get the same.
  weight add_shared(parameter p) {
    for (auto const& other : list_)
      if (other.name == p.name) return {other.offset, other.rows(), other.columns()};
    return add(std::move(p));
  }
  /// True for the first layer that asks under this name: it writes what later ones read from the stream.
  bool claim(std::string_view name) {
    if (std::find(claimed_.begin(), claimed_.end(), name) != claimed_.end()) return false;
    claimed_.emplace_back(name);
    return true;
  }
  /// Elements of the whole buffer, gaps included.
  index_t size() const noexcept { return size_; }
  /// Numbers that are trained or fixed, gaps left out.
  index_t count() const noexcept {
    index_t n = 0;
    for (auto const& p : list_) n += p.size();
    return n;
  }
  std::vector<parameter> const& all() const noexcept { return list_; }
  parameter const& at(std::string_view name) const {
    for (auto const& p : list_)
      if (p.name == name) return p;
    throw option_error("seqmix: parameters: no tensor is named " + std::string(name));
  }
  /// The names of the trained tensors that weight decay leaves alone.
  std::vector<std::string> without_weight_decay() const {
    std::vector<std::string> names;
    for (auto const& p : list_)
      if (p.trained && !p.weight_decay) names.push_back(p.name);
    return names;
  }

  /// Start values: a pure function of seed and name.
  template <class T>
  void initialise(std::uint64_t seed, T* base) const {
    for (auto const& p : list_) {
      random_stream const random(seed, p.name);
      index_t const columns = p.columns();
      if (p.initial.matrix) {
        initialise_matrix(p, random, base + p.offset);
        continue;
      }
      for (index_t i = 0; i < p.size(); ++i) {
        auto const u = std::uint64_t(i);
        initial_element const e{i / columns,       p.rows(),         i % columns, columns,     p.layer,    p.layers,
                                random.uniform(u), random.normal(u), p.initial.a, p.initial.b, p.initial.c};
        base[p.offset + i] = T(p.initial.value(e));
      }
    }
  }

 private:
  template <class T>
  static void initialise_matrix(parameter const& p, random_stream const& random, T* to) {
    buffer<double> numbers(p.size());
    for (index_t i = 0; i < p.size(); ++i) numbers[i] = random.normal(std::uint64_t(i));
    p.initial.matrix(
        {numbers.data(), p.rows(), p.columns(), p.layer, p.layers, p.initial.a, p.initial.b, p.initial.c});
    for (index_t i = 0; i < p.size(); ++i) to[i] = T(numbers[i]);
  }
  std::vector<parameter> list_;
  std::vector<std::string> claimed_;
  index_t size_ = 0;
};

/// Where a layer stands: its parameter list and start values may depend on it.
struct layer_position {
  index_t index = 0, count = 1;
};

/// Adds the tensors of one layer under its name.
class parameter_room {
 public:
  parameter_room(parameter_list& list, std::string room, layer_position at)
      : list_(list), room_(std::move(room)), at_(at) {}
  parameter_room inner(std::string_view name) const { return {list_, room_ + "." + std::string(name), at_}; }
  layer_position position() const noexcept { return at_; }
  bool claim(std::string_view name) { return list_.claim(name); }

  weight matrix(std::string_view name, index_t rows, index_t columns, initialiser initial) {
    return add({.name = full(name), .shape = {rows, columns}, .initial = initial, .weight_decay = true});
  }
  weight vector(std::string_view name, index_t size, initialiser initial, bool weight_decay = false,
                bool trained = true, bool log_rate = false) {
    return add({.name = full(name),
                .shape = {size},
                .initial = initial,
                .weight_decay = weight_decay,
                .trained = trained,
                .log_rate = log_rate,
                .group = optimiser_group::vector});
  }
  /// One matrix of the whole model, whichever layer asks.
  weight shared_matrix(std::string_view name, index_t rows, index_t columns, initialiser initial,
                       bool weight_decay) {
    return list_.add_shared({.name = "shared." + std::string(name),
                             .shape = {rows, columns},
                             .initial = initial,
                             .weight_decay = weight_decay});
  }
  /// Rows that are looked up, not multiplied: no weight decay.
  weight table(std::string_view name, index_t rows, index_t columns, initialiser initial, bool trained) {
    return add({.name = full(name),
                .shape = {rows, columns},
                .initial = initial,
                .trained = trained,
                .group = optimiser_group::vector});
  }
  /// A small tensor that the optimiser treats as a vector: convolution taps.
  weight taps(std::string_view name, index_t channels, index_t width, initialiser initial) {
    return add({.name = full(name),
                .shape = {channels, width},
                .initial = initial,
                .weight_decay = true,
                .group = optimiser_group::vector});
  }

 private:
  std::string full(std::string_view name) const { return room_ + "." + std::string(name); }
  weight add(parameter p) {
    p.layer = at_.index;
    p.layers = at_.count;
    return list_.add(std::move(p));
  }
  parameter_list& list_;
  std::string room_;
  layer_position at_;
};

}  // namespace seqmix::inline v0
