#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include <nlohmann/json.hpp>

#include <seqmix/data/lines.hpp>
#include <seqmix/data/zstd_lines.hpp>
#include <seqmix/tensor/error.hpp>

namespace seqmix::inline v0::data {

/// The sets that SlimPajama's documents come from.
enum class slimpajama_set : std::uint8_t { common_crawl, c4, github, book, arxiv, wikipedia, stack_exchange };

/// The names in `meta.redpajama_set_name`, in the order of slimpajama_set.
inline constexpr std::array<std::string_view, 7> slimpajama_set_names{
    "RedPajamaCommonCrawl", "RedPajamaC4",        "RedPajamaGithub",       "RedPajamaBook",
    "RedPajamaArXiv",       "RedPajamaWikipedia", "RedPajamaStackExchange"};

constexpr std::string_view name_of(slimpajama_set set) noexcept { return slimpajama_set_names[std::size_t(set)]; }

/// The training domain of a limited-domain study: the two sets of web text.
constexpr bool in_domain(slimpajama_set set) noexcept {
  return set == slimpajama_set::common_crawl || set == slimpajama_set::c4;
}

/// A line of a data file that is not what it should be.
struct record_error : file_error {
  std::string path;
  std::uint64_t line;  ///< from 1

  record_error(std::string file, std::uint64_t number, std::string const& what)
      : file_error("seqmix: slimpajama: " + file + " line " + std::to_string(number) + ": " + what),
        path(std::move(file)), line(number) {}
};

/// Bytes of text taken from each set so far; one count is used over several files to limit them together.
using slimpajama_count = std::array<std::size_t, slimpajama_set_names.size()>;

namespace detail {

/// The longest beginning of at most `bytes` bytes that ends between two UTF-8 characters.
constexpr std::string_view utf8_head(std::string_view text, std::size_t bytes) noexcept {
  if (text.size() <= bytes) return text;
  while (bytes > 0 && (static_cast<unsigned char>(text[bytes]) & 0xC0u) == 0x80u) --bytes;
  return text.substr(0, bytes);
}

struct slimpajama_record {
  std::string text;
  slimpajama_set set;
};

inline slimpajama_set slimpajama_set_of(std::string const& name, std::string const& path, std::uint64_t line) {
  for (std::size_t i = 0; i < slimpajama_set_names.size(); ++i)
    if (slimpajama_set_names[i] == name) return slimpajama_set(i);
  throw record_error(path, line,
                     "unknown set \"" + std::string(utf8_head(name, 40)) +
                         "\" in meta.redpajama_set_name, expected one of RedPajamaCommonCrawl, "
                         "RedPajamaC4, RedPajamaGithub, ...");
}

inline slimpajama_record parse_slimpajama(std::string_view json_line, std::string const& path, std::uint64_t line) {
  auto const json = nlohmann::json::parse(json_line, nullptr, false);
  if (json.is_discarded())
    throw record_error(path, line,
                       "not a JSON record (" + std::to_string(json_line.size()) +
                           " bytes; torn, or not a .jsonl file)");
  auto const text = json.is_object() ? json.find("text") : json.end();
  if (text == json.end() || !text->is_string())
    throw record_error(path, line, "expected a string in \"text\", got none");
  auto const meta = json.find("meta");
  bool const has_meta = meta != json.end() && meta->is_object();
  auto const set = has_meta ? meta->find("redpajama_set_name") : json.end();
  if (!has_meta || set == meta->end() || !set->is_string())
    throw record_error(path, line, "expected a string in \"meta\".\"redpajama_set_name\", got none");
  return {text->get<std::string>(), slimpajama_set_of(set->get<std::string>(), path, line)};
}

template <class Source, class OnDocument>
void read_slimpajama_lines(line_reader<Source> lines, std::size_t bytes_per_set, slimpajama_count& taken,
                           OnDocument&& on_document) {
  auto const all_full = [&] {
    for (auto bytes : taken)
      if (bytes < bytes_per_set) return false;
    return true;
  };
  std::string_view line;
  bool any = false;
  while (!all_full()) {
    if (!lines.next(line)) {
      if (!any) throw record_error(lines.path(), 1, "the file is empty, expected JSON lines");
      return;
    }
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    any = true;
    auto const record = parse_slimpajama(line, lines.path(), lines.number());
    auto& bytes = taken[std::size_t(record.set)];
    auto const text = utf8_head(record.text, bytes_per_set - bytes);
    if (bytes >= bytes_per_set) continue;
    on_document(record.set, text, lines.number());
    // A document cut at its limit closes its set, also where the cut fell before the limit to keep a character
    // whole.
    bytes = text.size() < record.text.size() ? bytes_per_set : bytes + text.size();
  }
}

}  // namespace detail

/// Reads SlimPajama's JSON lines (`text`, `meta.redpajama_set_name`) from a .jsonl or, when the name ends in .zst,
/// a compressed file, and calls on_document(slimpajama_set, std::string_view text, std::uint64_t line) for each
/// document. Reads as a stream and stops when every set holds `bytes_per_set` bytes (the last document of a set is
/// cut there). `taken` counts on over several files. Throws record_error (a file_error) with file and line for a
/// torn line, a missing field, an unknown set; file_error when the file cannot be read or its compression is
/// damaged.
template <class OnDocument>
void read_slimpajama(std::string const& path, std::size_t bytes_per_set, slimpajama_count& taken,
                     OnDocument&& on_document) {
  if (path.ends_with(".zst"))
    detail::read_slimpajama_lines(line_reader(zstd_source(path)), bytes_per_set, taken, on_document);
  else
    detail::read_slimpajama_lines(line_reader(file_source(path)), bytes_per_set, taken, on_document);
}

}  // namespace seqmix::inline v0::data
