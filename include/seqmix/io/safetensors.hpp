#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <seqmix/io/atomic_file.hpp>
#include <seqmix/io/posix_file.hpp>
#include <seqmix/tensor/buffer.hpp>
#include <seqmix/tensor/error.hpp>
#include <seqmix/tensor/view.hpp>

namespace seqmix::inline v0::io {

static_assert(std::endian::native == std::endian::little, "seqmix io: safetensors files are little-endian");

/// The element types a file can hold. bf16 and f16 have no C++ type here: their bytes pass through unchanged.
enum class dtype { f32, f64, bf16, f16, i32, i64, u8 };

namespace detail {
struct dtype_row {
  std::string_view name;
  index_t size;
};
inline constexpr std::array<dtype_row, 7> dtype_rows{
    {{"F32", 4}, {"F64", 8}, {"BF16", 2}, {"F16", 2}, {"I32", 4}, {"I64", 8}, {"U8", 1}}};
}  // namespace detail

/// The spelling of the format: "F32", "BF16", ...
constexpr std::string_view dtype_name(dtype type) noexcept { return detail::dtype_rows[std::size_t(type)].name; }

/// Bytes of one element.
constexpr index_t dtype_size(dtype type) noexcept { return detail::dtype_rows[std::size_t(type)].size; }

/// A C++ type that a tensor can be read into or saved from.
template <class T>
concept tensor_element = std::same_as<T, float> || std::same_as<T, double> || std::same_as<T, std::uint8_t> ||
    std::same_as<T, std::byte> ||(std::signed_integral<T> && (sizeof(T) == 4 || sizeof(T) == 8));

/// The element type of the file that holds the numbers of a C++ type bit by bit.
template <tensor_element T>
inline constexpr dtype dtype_of = std::same_as<T, float>    ? dtype::f32
                                  : std::same_as<T, double> ? dtype::f64
                                  : sizeof(T) == 4          ? dtype::i32
                                  : sizeof(T) == 8          ? dtype::i64
                                                            : dtype::u8;

/// One tensor of a file: row-major, bytes as in the file. `bytes` belongs to somebody else (the loaded file, or the
/// caller who saves) and may have any alignment.
struct safetensor {
  std::string name;
  dtype type = dtype::f32;
  std::vector<index_t> shape;
  std::span<std::byte const> bytes;

  index_t elements() const noexcept { return index_t(bytes.size()) / dtype_size(type); }
};

/// A tensor to be saved: borrows the numbers.
template <class T>
requires tensor_element<std::remove_const_t<T>>
    safetensor as_safetensor(std::string name, std::vector<index_t> shape, std::span<T> values) {
  return {std::move(name), dtype_of<std::remove_const_t<T>>, std::move(shape), std::as_bytes(values)};
}

namespace detail {

inline constexpr std::size_t max_header_bytes = 100'000'000;  // the limit of the format
inline constexpr std::size_t max_rank = 64;

/// A name for a message: quoted, on one line, not too long.
inline std::string name_text(std::string_view name) {
  constexpr std::size_t limit = 200;
  std::string part(name.substr(0, limit));
  if (name.size() > limit) part += "...";
  return nlohmann::json(part).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
}

inline std::string shape_text(std::span<index_t const> shape) {
  std::string all = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) all += text(i ? "," : "", shape[i]);
  return all + "]";
}

/// How many bytes from the start are well-formed UTF-8 (no overlong forms, no surrogates, at most U+10FFFF).
inline std::size_t utf8_prefix(std::string_view bytes) noexcept {
  auto const byte_at = [&](std::size_t i) {
    return i < bytes.size() ? unsigned(static_cast<unsigned char>(bytes[i])) : 0u;
  };
  std::size_t at = 0;
  while (at < bytes.size()) {
    unsigned const lead = byte_at(at);
    std::size_t const tail = lead < 0x80 ? 0 : lead < 0xe0 ? 1 : lead < 0xf0 ? 2 : 3;
    if ((lead >= 0x80 && lead < 0xc2) || lead > 0xf4) return at;
    unsigned const low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
    unsigned const high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
    for (std::size_t i = 1; i <= tail; ++i) {
      unsigned const next = byte_at(at + i);
      if (next < (i == 1 ? low : 0x80u) || next > (i == 1 ? high : 0xbfu)) return at;
    }
    at += 1 + tail;
  }
  return at;
}

/// The bytes of a shape; false if an extent is negative or the product of the extents that are not 0 does not fit
/// an index (a tensor with a huge and a zero extent is refused too, since its strides would overflow).
inline bool checked_bytes(std::span<index_t const> shape, dtype type, std::uint64_t& bytes) noexcept {
  auto product = dtype_size(type);
  bool empty = false;
  for (auto extent : shape) {
    if (extent < 0) return false;
    empty = empty || extent == 0;
    if (extent == 0) continue;
    if (product > (std::numeric_limits<index_t>::max)() / extent) return false;
    product *= extent;
  }
  bytes = empty ? 0 : std::uint64_t(product);
  return true;
}

struct header_entry {
  safetensor tensor;
  std::array<std::uint64_t, 2> offsets{};
};

/// Takes the events of the JSON parser and keeps only what the format allows, so that a hostile header is refused
/// at the first wrong value and never builds a document in memory.
class header_parser {
 public:
  explicit header_parser(std::filesystem::path const& path) : path_(path) {}

  bool null() { unexpected("null"); }
  bool boolean(bool value) { unexpected(value ? "true" : "false"); }
  bool number_float(double, std::string const& digits) { unexpected(digits); }
  bool number_integer(std::int64_t value) { unexpected(std::to_string(value)); }
  bool binary(nlohmann::json::binary_t&) { unexpected("binary data"); }

  bool number_unsigned(std::uint64_t value) {
    auto& entry = current();
    if (place_ == place::shape) {
      if (value > std::uint64_t((std::numeric_limits<index_t>::max)())) unexpected(std::to_string(value));
      if (entry.tensor.shape.size() == max_rank) refuse("has more than ", max_rank, " axes");
      entry.tensor.shape.push_back(index_t(value));
    } else if (place_ == place::offsets) {
      if (offset_count_ == 2) refuse("must have 2 numbers, got more");
      entry.offsets[offset_count_++] = value;
    } else {
      unexpected(std::to_string(value));
    }
    return true;
  }

  bool string(std::string& value) {
    if (place_ == place::metadata) {
      metadata[key_] = std::move(value);
    } else if (place_ == place::tensor && field_ == "dtype") {
      set_dtype(value);
    } else {
      unexpected(text("the string ", name_text(value)));
    }
    return true;
  }

  bool start_object(std::size_t) {
    if (place_ == place::document) {
      place_ = place::header;
    } else if (place_ == place::header && key_ == "__metadata__") {
      if (has_metadata_) refuse("is there twice");
      has_metadata_ = true;
      place_ = place::metadata;
    } else if (place_ == place::header) {
      entries.emplace_back().tensor.name = key_;
      seen_ = {};
      offset_count_ = 0;
      place_ = place::tensor;
    } else {
      unexpected("an object");
    }
    return true;
  }

  bool key(std::string& name) {
    if (place_ == place::tensor) {
      field_ = std::move(name);
      std::size_t const i = field_index();
      if (i == fields.size()) refuse("is not a field of the format");
      if (std::exchange(seen_[i], true)) refuse("is there twice");
      return true;
    }
    key_ = std::move(name);
    if (place_ == place::metadata && metadata.contains(key_)) refuse("is there twice");
    return true;
  }

  bool end_object() {
    if (place_ == place::tensor) {
      field_.clear();
      for (std::size_t i = 0; i < fields.size(); ++i)
        if (!seen_[i]) fail("load", path_, subject(), ": ", fields[i], " is missing");
    }
    place_ = place_ == place::header ? place::document : place::header;
    return true;
  }

  bool start_array(std::size_t) {
    if (place_ == place::tensor && field_ == "shape") {
      place_ = place::shape;
    } else if (place_ == place::tensor && field_ == "data_offsets") {
      place_ = place::offsets;
    } else {
      unexpected("an array");
    }
    return true;
  }

  bool end_array() {
    if (place_ == place::offsets && offset_count_ != 2) refuse("must have 2 numbers, got ", offset_count_);
    place_ = place::tensor;
    return true;
  }

  bool parse_error(std::size_t position, std::string const&, nlohmann::detail::exception const&) {
    fail("load", path_, "the header is not JSON at its byte ", position);
  }

  std::vector<header_entry> entries;
  std::map<std::string, std::string> metadata;

 private:
  enum class place { document, header, metadata, tensor, shape, offsets };
  static constexpr std::array<std::string_view, 3> fields{"dtype", "shape", "data_offsets"};

  // A number outside of every tensor is refused before the entry is used.
  header_entry& current() { return entries.empty() ? nothing_ : entries.back(); }

  std::size_t field_index() const {
    return std::size_t(std::find(fields.begin(), fields.end(), field_) - fields.begin());
  }

  void set_dtype(std::string const& name) {
    for (std::size_t i = 0; i < dtype_rows.size(); ++i)
      if (dtype_rows[i].name == name) {
        current().tensor.type = dtype(i);
        return;
      }
    std::string known;
    for (auto const& row : dtype_rows) known += text(known.empty() ? "" : ", ", row.name);
    refuse("must be one of ", known, ", got ", name_text(name));
  }

  std::string subject() const {
    if (place_ == place::document) return "the header";
    if (place_ == place::metadata) return text("__metadata__ ", name_text(key_));
    if (place_ == place::header) return key_ == "__metadata__" ? key_ : text("tensor ", name_text(key_));
    auto const tensor = text("tensor ", name_text(entries.back().tensor.name));
    return field_.empty() ? tensor : text(tensor, ": ", shown_field());
  }

  std::string shown_field() const { return field_index() < fields.size() ? field_ : name_text(field_); }

  std::string_view expected() const {
    if (place_ == place::metadata || (place_ == place::tensor && field_ == "dtype")) return "a string";
    if (place_ == place::tensor) return "an array of unsigned integers";
    if (place_ == place::shape) return "unsigned integers below 2^63";
    if (place_ == place::offsets) return "two unsigned integers";
    return "an object";
  }

  template <class... What>
  [[noreturn]] void refuse(What const&... what) const {
    fail("load", path_, subject(), " ", what...);
  }
  [[noreturn]] void unexpected(std::string_view got) const { refuse("must be ", expected(), ", got ", got); }

  std::filesystem::path const& path_;
  place place_ = place::document;
  std::string key_, field_;
  std::array<bool, 3> seen_{};
  std::size_t offset_count_ = 0;
  bool has_metadata_ = false;
  header_entry nothing_;
};

}  // namespace detail

/// A safetensors file in memory, checked completely when loaded: a file that loads has unique names, known types,
/// shapes that agree with their bytes, and data without gaps, overlaps or a rest.
/// Memory: one allocation of the size of the file, and the names and shapes.
/// Errors: file_error naming the file and the tensor or field.
class safetensors_file {
 public:
  explicit safetensors_file(std::filesystem::path path) : path_(std::move(path)), bytes_(detail::read_file(path_)) {
    load();
  }

  /// The same for bytes that are in memory already; `path` is only for messages.
  safetensors_file(std::filesystem::path path, buffer<std::byte> bytes)
      : path_(std::move(path)), bytes_(std::move(bytes)) {
    load();
  }

  std::filesystem::path const& path() const noexcept { return path_; }

  /// In the order of the header. The bytes live as long as this object, also after it was moved.
  std::span<safetensor const> tensors() const noexcept { return tensors_; }

  /// The strings under "__metadata__".
  std::map<std::string, std::string> const& metadata() const noexcept { return metadata_; }

  /// Null if there is no tensor of that name.
  safetensor const* find(std::string_view name) const noexcept {
    auto const before = [&](std::size_t i, std::string_view key) { return tensors_[i].name < key; };
    auto const at = std::lower_bound(by_name_.begin(), by_name_.end(), name, before);
    return at != by_name_.end() && tensors_[*at].name == name ? &tensors_[*at] : nullptr;
  }

  /// Throws file_error if there is no tensor of that name.
  safetensor const& at(std::string_view name) const {
    if (auto const* found = find(name)) return *found;
    detail::fail("load", path_, "there is no tensor ", detail::name_text(name));
  }

  /// Copies a tensor out; throws file_error unless type and number of elements are the expected ones.
  template <tensor_element T>
  void read(std::string_view name, std::span<T> into) const {
    auto const& tensor = at(name);
    if (tensor.type != dtype_of<T>)
      refuse_tensor(tensor, "expected ", dtype_name(dtype_of<T>), ", got ", dtype_name(tensor.type));
    if (tensor.elements() != index_t(into.size()))
      refuse_tensor(tensor, "expected ", into.size(), " elements, got shape ", detail::shape_text(tensor.shape),
                    " with ", tensor.elements());
    if (!into.empty()) std::memcpy(into.data(), tensor.bytes.data(), tensor.bytes.size());
  }

 private:
  template <class... What>
  [[noreturn]] void refuse(What const&... what) const {
    detail::fail("load", path_, what...);
  }
  template <class... What>
  [[noreturn]] void refuse_tensor(safetensor const& tensor, What const&... what) const {
    refuse("tensor ", detail::name_text(tensor.name), ": ", what...);
  }

  void load() {
    auto const header = header_text();
    detail::header_parser parser(path_);
    nlohmann::json::sax_parse(header.begin(), header.end(), &parser);
    metadata_ = std::move(parser.metadata);
    std::span<std::byte const> const data(bytes_.data() + 8 + header.size(),
                                          std::size_t(bytes_.size()) - 8 - header.size());
    for (auto const& entry : parser.entries) check_entry(entry, data.size());
    check_names(parser.entries);
    check_layout(parser.entries, data.size());
    tensors_.reserve(parser.entries.size());
    for (auto& entry : parser.entries) {
      entry.tensor.bytes = data.subspan(entry.offsets[0], entry.offsets[1] - entry.offsets[0]);
      tensors_.push_back(std::move(entry.tensor));
    }
  }

  std::string_view header_text() const {
    auto const size = std::size_t(bytes_.size());
    if (size < 8) refuse("has ", size, " bytes, expected at least the 8 of the header length");
    std::uint64_t length = 0;
    std::memcpy(&length, bytes_.data(), 8);
    auto const shown = detail::text("the header length ", length);
    if (length < 2) refuse(shown, " is below 2, the least a header can have");
    if (length > detail::max_header_bytes)
      refuse(shown, " is above the limit of ", detail::max_header_bytes, " bytes");
    if (length > size - 8) refuse(shown, " is more than the ", size - 8, " bytes that follow it");
    std::string_view const header(reinterpret_cast<char const*>(bytes_.data()) + 8, std::size_t(length));
    if (header.front() != '{') refuse("the header is not a JSON object: it must begin with {");
    if (auto const good = detail::utf8_prefix(header); good < header.size())
      refuse("the header is not UTF-8 at its byte ", good + 1);
    // The JSON parser would take a zero byte for the end and hide what follows.
    if (auto const zero = header.find('\0'); zero != header.npos)
      refuse("the header is not JSON at its byte ", zero + 1);
    return header;
  }

  void check_entry(detail::header_entry const& entry, std::size_t data_size) const {
    auto const& tensor = entry.tensor;
    auto const [begin, end] = entry.offsets;
    auto const offsets = detail::text("data_offsets [", begin, ",", end, "]");
    if (begin > end) refuse_tensor(tensor, offsets, " end before they begin");
    if (end > data_size) refuse_tensor(tensor, offsets, " end behind the ", data_size, " bytes of data");
    auto const shape = detail::text("shape ", detail::shape_text(tensor.shape), " of ", dtype_name(tensor.type));
    std::uint64_t bytes = 0;
    if (!detail::checked_bytes(tensor.shape, tensor.type, bytes)) refuse_tensor(tensor, shape, " overflows");
    if (bytes != end - begin)
      refuse_tensor(tensor, shape, " needs ", bytes, " bytes, ", offsets, " have ", end - begin);
  }

  void check_names(std::vector<detail::header_entry> const& entries) {
    auto const name = [&](std::size_t i) -> std::string const& { return entries[i].tensor.name; };
    by_name_.resize(entries.size());
    std::iota(by_name_.begin(), by_name_.end(), std::size_t(0));
    std::sort(by_name_.begin(), by_name_.end(), [&](auto a, auto b) { return name(a) < name(b); });
    auto const twin =
        std::adjacent_find(by_name_.begin(), by_name_.end(), [&](auto a, auto b) { return name(a) == name(b); });
    if (twin != by_name_.end()) refuse("tensor ", detail::name_text(name(*twin)), " is there twice");
  }

  void check_layout(std::vector<detail::header_entry> const& entries, std::size_t data_size) const {
    std::vector<std::size_t> order(entries.size());
    std::iota(order.begin(), order.end(), std::size_t(0));
    std::sort(order.begin(), order.end(), [&](auto a, auto b) { return entries[a].offsets < entries[b].offsets; });
    std::uint64_t at = 0;
    for (auto i : order) {
      auto const begin = entries[i].offsets[0];
      if (begin != at)
        refuse_tensor(entries[i].tensor, "data_offsets begin at ", begin, ", expected ", at,
                      begin < at ? ": it overlaps the tensor before it" : ": there is a gap before it");
      at = entries[i].offsets[1];
    }
    if (at < data_size)
      refuse("has ", data_size, " bytes of data, its tensors end at ", at, ": there are trailing bytes");
  }

  std::filesystem::path path_;
  buffer<std::byte> bytes_;
  std::vector<safetensor> tensors_;
  std::vector<std::size_t> by_name_;
  std::map<std::string, std::string> metadata_;
};

namespace detail {

inline std::string json_string(std::string const& value, char const* what, std::filesystem::path const& path) {
  if (utf8_prefix(value) != value.size()) fail("write", path, what, " ", name_text(value), " is not UTF-8");
  return nlohmann::json(value).dump();
}

/// The counted header with the 8 bytes of its length, padded with spaces to a multiple of 64 bytes.
inline std::string header_of(std::filesystem::path const& path, std::span<safetensor const> tensors,
                             std::map<std::string, std::string> const& metadata) {
  std::string header(8, '\0');
  header += "{";
  if (!metadata.empty()) {
    header += "\"__metadata__\":{";
    for (auto const& [key, value] : metadata)
      header += text(json_string(key, "metadata key", path), ":", json_string(value, "metadata value", path), ",");
    header.back() = '}';
    header += ",";
  }
  std::uint64_t at = 0;
  for (auto const& tensor : tensors) {
    auto const end = at + tensor.bytes.size();
    header += text(json_string(tensor.name, "tensor", path), ":{\"dtype\":\"", dtype_name(tensor.type),
                   "\",\"shape\":", shape_text(tensor.shape), ",\"data_offsets\":[", at, ",", end, "]},");
    at = end;
  }
  if (header.back() == ',') header.pop_back();
  header += "}";
  header.resize((header.size() + alignment - 1) / alignment * alignment, ' ');
  std::uint64_t const length = header.size() - 8;
  if (length > max_header_bytes)
    fail("write", path, "the header needs ", length, " bytes, the limit is ", max_header_bytes);
  std::memcpy(header.data(), &length, 8);
  return header;
}

inline void check_tensors(std::filesystem::path const& path, std::span<safetensor const> tensors) {
  std::vector<std::string_view> names;
  for (auto const& tensor : tensors) {
    auto const about = text("tensor ", name_text(tensor.name));
    if (tensor.name == "__metadata__") fail("write", path, about, " has the name the format keeps for metadata");
    auto const shape = text(": shape ", shape_text(tensor.shape), " of ", dtype_name(tensor.type));
    if (tensor.shape.size() > max_rank) fail("write", path, about, " has more than ", max_rank, " axes");
    std::uint64_t bytes = 0;
    if (!checked_bytes(tensor.shape, tensor.type, bytes))
      fail("write", path, about, shape, " has a negative extent or overflows");
    if (bytes != tensor.bytes.size())
      fail("write", path, about, shape, " needs ", bytes, " bytes, got ", tensor.bytes.size());
    names.push_back(tensor.name);
  }
  std::sort(names.begin(), names.end());
  auto const twin = std::adjacent_find(names.begin(), names.end());
  if (twin != names.end()) fail("write", path, "tensor ", name_text(*twin), " is there twice");
}

}  // namespace detail

/// Saves tensors in the given order, completely or not at all (see write_file_atomically). The data begin at a
/// multiple of 64 bytes. Deterministic: the same content gives the same bytes, also after loading and saving again.
/// Errors: file_error naming the path and the tensor or the system's reason; an earlier file is as it was.
inline void write_safetensors(std::filesystem::path const& path, std::span<safetensor const> tensors,
                              std::map<std::string, std::string> const& metadata = {}) {
  detail::check_tensors(path, tensors);
  auto const header = detail::header_of(path, tensors, metadata);
  std::vector<std::span<std::byte const>> pieces{std::as_bytes(std::span(header))};
  for (auto const& tensor : tensors) pieces.push_back(tensor.bytes);
  write_file_atomically(path, pieces);
}

}  // namespace seqmix::inline v0::io
