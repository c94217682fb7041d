#pragma once

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <seqmix/tensor/error.hpp>
#include <seqmix/tensor/view.hpp>

#ifndef SEQMIX_GOLDEN_DIR
#error "seqmix tests: SEQMIX_GOLDEN_DIR must name the folder tests/golden"
#endif

/// The stored cases of tests/golden, read with nothing but the standard library: a machine with a GPU has no more.
/// tests/golden/README.md says what they are, and how closely a float must agree.
namespace seqmix::testing {

/// One JSON value. Null, true and false are `word`s.
struct golden_json {
  enum class kind { word, number, text, array, object };
  kind is = kind::word;
  std::string text;  ///< of a word or a text
  double number = 0;
  std::vector<golden_json> items;  ///< of an array, or the values of an object
  std::vector<std::string> names;  ///< of an object's values

  golden_json const* find(std::string_view name) const {
    for (std::size_t i = 0; i < names.size(); ++i)
      if (names[i] == name) return &items[i];
    return nullptr;
  }
  golden_json const& at(std::string_view name) const {
    if (auto const* const found = find(name)) return *found;
    throw file_error("seqmix tests: golden file: there is no \"" + std::string(name) + "\"");
  }
  std::string const& as_text() const { return expect(kind::text, "a text").text; }
  index_t as_index() const {
    auto const n = index_t(expect(kind::number, "a number").number);
    if (double(n) != number || n < 0) throw file_error("seqmix tests: golden file: a count is expected");
    return n;
  }
  golden_json const& expect(kind wanted, char const* what) const {
    if (is != wanted) throw file_error(std::string("seqmix tests: golden file: ") + what + " is expected");
    return *this;
  }
};

/// Reads one JSON text and refuses everything else. Texts have no escapes but those of quote and backslash.
class golden_json_reader {
 public:
  explicit golden_json_reader(std::string_view text) : text_(text) {}
  golden_json read() {
    auto const result = value(0);
    skip_space();
    if (at_ != text_.size()) fail("the end");
    return result;
  }

 private:
  [[noreturn]] void fail(char const* expected) const {
    throw file_error(std::string("seqmix tests: golden file: expected ") + expected + " at byte " +
                     std::to_string(at_));
  }
  void skip_space() {
    while (at_ < text_.size() && std::string_view(" \n\r\t").find(text_[at_]) != std::string_view::npos) ++at_;
  }
  bool takes(char c) {
    skip_space();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  golden_json value(int depth) {
    if (depth > 16) fail("less depth");
    golden_json result;
    if (takes('{')) {
      result.is = golden_json::kind::object;
      list('}', [&] {
        if (!takes('"')) fail("a name in quotes");
        result.names.push_back(text());
        if (!takes(':')) fail("':'");
        result.items.push_back(value(depth + 1));
      });
    } else if (takes('[')) {
      result.is = golden_json::kind::array;
      list(']', [&] { result.items.push_back(value(depth + 1)); });
    } else if (takes('"')) {
      result.is = golden_json::kind::text;
      result.text = text();
    } else if (at_ < text_.size() && (text_[at_] == '-' || (text_[at_] >= '0' && text_[at_] <= '9'))) {
      result.is = golden_json::kind::number;
      auto const* const begin = text_.data() + at_;
      auto const end = std::from_chars(begin, text_.data() + text_.size(), result.number);
      if (end.ec != std::errc() || !std::isfinite(result.number)) fail("a number");
      at_ += std::size_t(end.ptr - begin);
    } else {
      for (std::string_view word : {"null", "true", "false"})
        if (text_.substr(at_, word.size()) == word) result.text = word;
      if (result.text.empty()) fail("a value");
      at_ += result.text.size();
    }
    return result;
  }
  template <class Item>
  void list(char closing, Item const& item) {
    if (takes(closing)) return;
    do item();
    while (takes(','));
    if (!takes(closing)) fail("',' or the end of a list");
  }
  /// Behind the opening quote.
  std::string text() {
    std::string result;
    for (; at_ < text_.size() && text_[at_] != '"'; ++at_) {
      if (static_cast<unsigned char>(text_[at_]) < 0x20) fail("a text without control characters");
      if (text_[at_] == '\\') {
        ++at_;
        if (at_ >= text_.size() || (text_[at_] != '"' && text_[at_] != '\\')) fail("an escaped quote or backslash");
      }
      result += text_[at_];
    }
    if (!takes('"')) fail("the end of a text");
    return result;
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

/// One stored array as doubles, in C order.
struct golden_tensor {
  std::string name, role;  ///< input | output | state | aux | cotangent | grad
  std::vector<index_t> shape;
  std::vector<double> data;
  double float_error = -1;  ///< of the float32 reference; negative: not stored

  index_t extent(std::size_t axis) const { return shape.at(axis); }
  /// Of floats: operations the greater of 4 stored errors and 16 eps of the greatest entry; gradients 64 eps.
  double tolerance() const {
    constexpr double eps = 0x1p-23;
    double most = 0;
    for (double x : data) most = std::max(most, std::fabs(x));
    return role == "grad" ? 64 * eps * most : std::max(4 * float_error, 16 * eps * most);
  }
};

/// One case: `golden_case c("top1/top1_element_hard_st"); c["q"].data; c.number("scale", 1.0)`.
class golden_case {
 public:
  explicit golden_case(std::string const& path) {
    auto const file = std::string(SEQMIX_GOLDEN_DIR) + "/" + path;
    auto const text = read(file + ".json"), bytes = read(file + ".bin");
    auto const json = golden_json_reader(text).read();
    name_ = json.at("name").as_text();
    op_ = json.at("op").as_text();
    params_ = json.at("params");
    auto const* const errors = json.find("float32_reference_max_abs_diff");
    for (auto const& entry : json.at("tensors").expect(golden_json::kind::array, "a list of tensors").items) {
      tensors_.push_back(tensor(entry, bytes));
      auto& t = tensors_.back();
      if (auto const* const error = errors ? errors->find(t.name) : nullptr) t.float_error = error->number;
    }
  }

  std::string const& name() const { return name_; }
  std::string const& op() const { return op_; }
  /// Of `params`; otherwise where there is none of that name, or null.
  double number(char const* key, double otherwise) const {
    auto const* const found = params_.find(key);
    if (!found || found->text == "null") return otherwise;
    return found->expect(golden_json::kind::number, "a number").number;
  }
  std::string text(char const* key) const {
    auto const* const found = params_.find(key);
    return found ? found->as_text() : std::string();
  }
  bool has(std::string_view tensor_name) const { return find(tensor_name) != nullptr; }
  golden_tensor const& operator[](std::string_view tensor_name) const {
    if (auto const* const t = find(tensor_name)) return *t;
    throw file_error("seqmix tests: golden case " + name_ + " has no tensor " + std::string(tensor_name));
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
  static void decode(std::string_view from, std::vector<double>& to) {
    for (std::size_t i = 0; i < from.size(); i += sizeof(Stored)) {
      Stored x;
      std::memcpy(&x, from.data() + i, sizeof(Stored));
      to.push_back(double(x));
    }
  }
  golden_tensor tensor(golden_json const& entry, std::string const& bytes) const {
    golden_tensor t;
    t.name = entry.at("name").as_text();
    t.role = entry.at("role").as_text();
    std::size_t count = 1;
    for (auto const& extent : entry.at("shape").expect(golden_json::kind::array, "a shape").items) {
      t.shape.push_back(extent.as_index());
      count *= std::size_t(t.shape.back());
    }
    auto const offset = std::size_t(entry.at("offset").as_index());
    auto const size = std::size_t(entry.at("nbytes").as_index());
    auto const& type = entry.at("dtype").as_text();
    if (offset + size > bytes.size() || size != count * (type == "i32" ? 4U : 8U))
      throw file_error("seqmix tests: golden case " + name_ + ": tensor " + t.name + " has " +
                       std::to_string(size) + " bytes at " + std::to_string(offset) + " for " +
                       std::to_string(count) + " numbers in a file of " + std::to_string(bytes.size()));
    auto const part = std::string_view(bytes).substr(offset, size);
    if (type == "f64")
      decode<double>(part, t.data);
    else if (type == "i32")
      decode<std::int32_t>(part, t.data);
    else if (type == "i64")
      decode<std::int64_t>(part, t.data);
    else
      throw file_error("seqmix tests: golden case " + name_ + ": tensor " + t.name + " has unknown type " + type);
    return t;
  }
  golden_tensor const* find(std::string_view tensor_name) const {
    for (auto const& t : tensors_)
      if (t.name == tensor_name) return &t;
    return nullptr;
  }

  std::string name_, op_;
  golden_json params_;
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

}  // namespace seqmix::testing
