#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <seqmix/tensor/buffer.hpp>

#ifndef SEQMIX_GOLDEN_DIR
#error "seqmix tests: SEQMIX_GOLDEN_DIR must name the folder tests/golden"
#endif

/// Golden vectors: reading them and comparing with them. tests/golden/README.md says what they are.
namespace seqmix::testing {

/// One stored array, whatever its type, as doubles.
struct golden_tensor {
  std::string case_name;
  std::string name;
  std::string role;          ///< input | output | state | aux | cotangent | grad
  bool of_layer = false;     ///< belongs to a whole layer rather than to one operation
  double float_error = -1;   ///< error of the float32 reference; negative: not stored
  double rounding_only = 0;  ///< where the true value is 0: the absolute bound in double; otherwise 0
  std::vector<index_t> shape;
  buffer<double> data;

  index_t size() const noexcept { return data.size(); }
  double operator[](index_t i) const noexcept { return data[i]; }
  index_t extent(std::size_t axis) const { return shape.at(axis); }
  double greatest() const noexcept {
    double most = 0;
    for (double x : data) most = std::max(most, std::abs(x));
    return most;
  }
  template <class T>
  buffer<T> converted() const {
    buffer<T> result(size());
    for (index_t i = 0; i < size(); ++i) result[i] = T(data[i]);
    return result;
  }
  golden_tensor clone() const {
    return {case_name, name, role, of_layer, float_error, rounding_only, shape, converted<double>()};
  }
};

/// The same tensor with two axes exchanged.
inline golden_tensor with_axes_swapped(golden_tensor const& t, std::size_t a, std::size_t b) {
  auto result = t.clone();
  std::swap(result.shape.at(a), result.shape.at(b));
  auto const axes = t.shape.size();
  std::vector<index_t> at(axes, 0);  // index into t, the last axis fastest
  for (index_t from = 0; from < t.size(); ++from) {
    auto where = at;
    std::swap(where[a], where[b]);
    index_t to = 0;
    for (std::size_t axis = 0; axis < axes; ++axis) to = to * result.shape[axis] + where[axis];
    result.data[to] = t.data[from];
    for (std::size_t axis = axes; axis-- > 0;) {
      if (++at[axis] < t.shape[axis]) break;
      at[axis] = 0;
    }
  }
  return result;
}

/// Head-first [B,H,T,...], or channel-first [B,C,T], as [B,T,...]: the library's order of rows.
inline golden_tensor token_first(golden_tensor const& t) { return with_axes_swapped(t, 1, 2); }

/// One case: `golden_case c("ops/attn_t1"); c["q"]; c.params()["scale"]`.
class golden_case {
 public:
  explicit golden_case(std::string const& path) {
    auto const file = std::string(SEQMIX_GOLDEN_DIR) + "/" + path;
    auto const text = read(file + ".json");
    auto const bytes = read(file + ".bin");
    auto const json = nlohmann::json::parse(text);
    name_ = json.at("name").get<std::string>();
    op_ = json.at("op").get<std::string>();
    notes_ = json.value("notes", "");
    params_ = json.at("params");
    for (auto const& entry : json.at("tensors")) tensors_.push_back(tensor(json, entry, bytes));
  }

  std::string const& name() const noexcept { return name_; }
  std::string const& op() const noexcept { return op_; }
  std::string const& notes() const noexcept { return notes_; }
  nlohmann::json const& params() const noexcept { return params_; }
  double number(char const* key, double otherwise) const { return params_.value(key, otherwise); }
  std::string text(char const* key) const { return params_.value(key, std::string()); }

  std::vector<golden_tensor> const& tensors() const noexcept { return tensors_; }
  bool has(std::string_view tensor_name) const noexcept { return find(tensor_name) != nullptr; }
  golden_tensor const& operator[](std::string_view tensor_name) const {
    if (auto const* t = find(tensor_name)) return *t;
    throw file_error("seqmix tests: golden case " + name_ + " has no tensor " + std::string(tensor_name));
  }
  template <class T>
  buffer<T> converted(std::string_view tensor_name) const {
    return (*this)[tensor_name].template converted<T>();
  }

 private:
  static std::string read(std::string const& file) {
    std::ifstream stream(file, std::ios::binary);
    if (!stream) throw file_error("seqmix tests: cannot open " + file);
    std::string bytes(std::filesystem::file_size(file), '\0');
    stream.read(bytes.data(), std::streamsize(bytes.size()));
    if (!stream) throw file_error("seqmix tests: cannot read " + file);
    return bytes;
  }

  template <class Stored>
  static void decode(char const* from, buffer<double>& to) {
    for (index_t i = 0; i < to.size(); ++i) {
      Stored x;
      std::memcpy(&x, from + std::size_t(i) * sizeof(Stored), sizeof(Stored));
      to[i] = double(x);
    }
  }

  golden_tensor tensor(nlohmann::json const& json, nlohmann::json const& entry, std::string const& bytes) const {
    golden_tensor t;
    t.case_name = name_;
    t.name = entry.at("name").get<std::string>();
    t.role = entry.at("role").get<std::string>();
    t.of_layer = name_.starts_with("layer_");
    if (json.contains("float32_reference_max_abs_diff"))
      t.float_error = json["float32_reference_max_abs_diff"].value(t.name, -1.0);
    t.rounding_only = rounding_only(name_, t.name);
    index_t count = 1;
    for (auto const& extent : entry.at("shape")) {
      t.shape.push_back(extent.get<index_t>());
      count *= t.shape.back();
    }
    t.data = buffer<double>(count);
    auto const offset = entry.at("offset").get<std::size_t>();
    auto const size = entry.at("nbytes").get<std::size_t>();
    auto const type = entry.at("dtype").get<std::string>();
    std::size_t const width = type == "i32" ? 4 : 8;
    if (offset + size > bytes.size() || size != std::size_t(count) * width)
      throw file_error("seqmix tests: golden case " + name_ + ": tensor " + t.name + " has " +
                       std::to_string(size) + " bytes at " + std::to_string(offset) + " for " +
                       std::to_string(count) + " numbers in a file of " + std::to_string(bytes.size()));
    if (type == "f64")
      decode<double>(bytes.data() + offset, t.data);
    else if (type == "i32")
      decode<std::int32_t>(bytes.data() + offset, t.data);
    else if (type == "i64")
      decode<std::int64_t>(bytes.data() + offset, t.data);
    else
      throw file_error("seqmix tests: golden case " + name_ + ": tensor " + t.name + " has unknown type " + type);
    return t;
  }

  /// The list of README.md, "What needs more".
  static double rounding_only(std::string_view case_name, std::string_view tensor_name) {
    bool const equal_keys =
        case_name == "attn_keys_fixed_head" && (tensor_name == "grad_q" || tensor_name == "grad_key_const");
    bool const one_token = case_name == "linear_attn_norm_t1" && tensor_name == "grad_q";
    return equal_keys || one_token ? 1e-14 : 0.0;
  }

  golden_tensor const* find(std::string_view tensor_name) const noexcept {
    for (auto const& t : tensors_)
      if (t.name == tensor_name) return &t;
    return nullptr;
  }

  std::string name_, op_, notes_;
  nlohmann::json params_;
  std::vector<golden_tensor> tensors_;
};

/// "folder/case" of every case of a folder whose name begins with `prefix`, sorted.
inline std::vector<std::string> golden_cases(std::string const& folder, std::string_view prefix = "") {
  std::vector<std::string> names;
  for (auto const& entry : std::filesystem::directory_iterator(std::string(SEQMIX_GOLDEN_DIR) + "/" + folder))
    if (entry.path().extension() == ".json" && entry.path().stem().string().starts_with(prefix))
      names.push_back(folder + "/" + entry.path().stem().string());
  std::sort(names.begin(), names.end());
  return names;
}

/// How far a result of type T may be from a tensor, absolutely:
///   double  1e-10 of the greatest entry
///   float   operations: the greater of 4 stored errors and 16 eps of the greatest entry; layers and gradients: 64
///   eps
template <class T>
double golden_tolerance(golden_tensor const& expected) {
  constexpr double eps = 0x1p-23;
  static_assert(std::is_same_v<T, float> || std::is_same_v<T, double>);
  double const greatest = expected.greatest();
  if (std::is_same_v<T, double>) return std::max(1e-10 * greatest, expected.rounding_only);
  if (expected.rounding_only > 0) return 64 * eps;
  if (expected.of_layer || expected.role == "grad") return 64 * eps * greatest;
  return std::max(4 * expected.float_error, 16 * eps * greatest);
}

/// What a comparison found; use as `auto const r = compare(...); DOCTEST_CHECK_MESSAGE(r.good, r.text);`
struct comparison {
  bool good = false;
  double error = 0;  ///< greatest absolute difference
  double tolerance = 0;
  std::string text;
};

namespace detail {
inline std::string short_text(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", x);
  return text;
}
inline std::string index_text(std::vector<index_t> const& shape, index_t flat) {
  std::vector<index_t> at(shape.size());
  for (std::size_t axis = shape.size(); axis-- > 0; flat /= shape[axis]) at[axis] = flat % shape[axis];
  std::string text;
  for (index_t i : at) text.append(text.empty() ? "[" : ",").append(std::to_string(i));
  return text.append("]");
}
}  // namespace detail

/// Compares `expected.size()` dense numbers. A NaN never agrees.
template <class T>
comparison compare(T const* actual, golden_tensor const& expected) {
  comparison result{true, 0, golden_tolerance<T>(expected), ""};
  index_t worst = 0;
  for (index_t i = 0; i < expected.size(); ++i) {
    double const error = std::abs(double(actual[i]) - expected[i]);
    if (error <= result.error) continue;  // false for NaN too
    result.error = error;
    worst = i;
    if (error != error) break;
  }
  result.good = result.error <= result.tolerance;
  if (expected.size() > 0)
    result.text = expected.case_name + ", " + expected.name + ": error " + detail::short_text(result.error) +
                  ", tolerance " + detail::short_text(result.tolerance) + ", worst at " +
                  detail::index_text(expected.shape, worst) + ": got " + std::to_string(actual[worst]) +
                  ", expected " + std::to_string(expected[worst]);
  return result;
}

/// Compares a strided view; its last axes may be the tensor's with leading axes joined ([R,H,K] and [B,T,H,K]).
template <class T, std::size_t Rank>
comparison compare(view<T, Rank> const& actual, golden_tensor const& expected) {
  using value_type = std::remove_const_t<T>;
  if (actual.size() != expected.size())
    return {false, 0, 0,
            expected.case_name + ", " + expected.name + ": expected " + std::to_string(expected.size()) +
                " numbers, got " + std::to_string(actual.size())};
  buffer<value_type> dense(actual.size());
  std::array<index_t, Rank> at{};
  for (auto& x : dense) {
    index_t offset = 0;
    for (std::size_t axis = 0; axis < Rank; ++axis) offset += at[axis] * actual.stride[axis];
    x = actual.data[offset];
    for (std::size_t axis = Rank; axis-- > 0;) {
      if (++at[axis] < actual.extent[axis]) break;
      at[axis] = 0;
    }
  }
  return compare(static_cast<value_type const*>(dense.data()), expected);
}

}  // namespace seqmix::testing
