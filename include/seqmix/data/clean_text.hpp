#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

namespace seqmix::inline v0::data {

/// One document of a domain; the path names it and decides its place.
struct document {
  std::string path;
  std::string text;
};

/// What makes a line unwanted. Lengths are in characters (UTF-8 code points).
struct cleaning {
  std::size_t longest_line = 2000;  ///< longer lines (data, minified code) are dropped
  std::size_t repeated_line = 40;   ///< lines of at least this length are kept only the first time in a domain
};

/// The three parts of a domain.
struct text_parts {
  std::string train, validation, test;
};

namespace detail {

constexpr bool is_space(char c) noexcept { return c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == '\f'; }
constexpr bool is_letter(char c) noexcept { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
constexpr bool is_digit(char c) noexcept { return c >= '0' && c <= '9'; }
constexpr char lower(char c) noexcept { return c >= 'A' && c <= 'Z' ? char(c - 'A' + 'a') : c; }

inline void append_utf8(std::string& out, std::uint32_t code) {
  auto const tail = [&](int shift) { out += char(0x80u | ((code >> shift) & 0x3Fu)); };
  if (code < 0x80) {
    out += char(code);
  } else if (code < 0x800) {
    out += char(0xC0u | (code >> 6));
    tail(0);
  } else if (code < 0x10000) {
    out += char(0xE0u | (code >> 12));
    tail(6);
    tail(0);
  } else {
    out += char(0xF0u | (code >> 18));
    tail(12);
    tail(6);
    tail(0);
  }
}

struct named_entity {
  std::string_view name;
  std::uint32_t code;
};

/// The entities met in documentation; others stay as they are written.
inline constexpr auto named_entities = std::to_array<named_entity>({
    {"amp", '&'},      {"lt", '<'},       {"gt", '>'},        {"quot", '"'},     {"apos", '\''},
    {"nbsp", ' '},     {"ensp", ' '},     {"emsp", ' '},      {"thinsp", ' '},   {"shy", 0xAD},
    {"copy", 0xA9},    {"reg", 0xAE},     {"trade", 0x2122},  {"sect", 0xA7},    {"para", 0xB6},
    {"middot", 0xB7},  {"bull", 0x2022},  {"hellip", 0x2026}, {"ndash", 0x2013}, {"mdash", 0x2014},
    {"lsquo", 0x2018}, {"rsquo", 0x2019}, {"ldquo", 0x201C},  {"rdquo", 0x201D}, {"laquo", 0xAB},
    {"raquo", 0xBB},   {"times", 0xD7},   {"divide", 0xF7},   {"plusmn", 0xB1},  {"deg", 0xB0},
    {"micro", 0xB5},   {"frac12", 0xBD},  {"larr", 0x2190},   {"uarr", 0x2191},  {"rarr", 0x2192},
    {"darr", 0x2193},  {"harr", 0x2194},  {"rArr", 0x21D2},   {"le", 0x2264},    {"ge", 0x2265},
    {"ne", 0x2260},    {"minus", 0x2212}, {"infin", 0x221E},  {"alpha", 0x3B1},  {"beta", 0x3B2},
    {"pi", 0x3C0},     {"auml", 0xE4},    {"ouml", 0xF6},     {"uuml", 0xFC},    {"Auml", 0xC4},
    {"Ouml", 0xD6},    {"Uuml", 0xDC},    {"szlig", 0xDF},    {"eacute", 0xE9},  {"egrave", 0xE8},
    {"agrave", 0xE0},  {"ccedil", 0xE7},  {"ntilde", 0xF1},   {"aacute", 0xE1},  {"atilde", 0xE3},
    {"ecirc", 0xEA},   {"iacute", 0xED},  {"oacute", 0xF3},   {"otilde", 0xF5},  {"uacute", 0xFA},
    {"lsqb", '['},     {"rsqb", ']'},     {"oslash", 0xF8},   {"Eacute", 0xC9},  {"euro", 0x20AC},
    {"lowbar", '_'},
});

/// The code point that the digits of this base name; 0 when they are no digits or it is none.
constexpr std::uint32_t code_point(std::string_view digits, std::uint32_t base) noexcept {
  std::uint32_t code = 0;
  if (digits.size() > 7) return 0;
  for (char c : digits) {
    char const l = lower(c);
    bool const hex = base == 16 && l >= 'a' && l <= 'f';
    if (!is_digit(c) && !hex) return 0;
    code = code * base + std::uint32_t(hex ? l - 'a' + 10 : c - '0');
  }
  return code > 0x10FFFF || (code >= 0xD800 && code < 0xE000) ? 0 : code;
}

/// The number of a character reference such as "8212" or "x2014"; 0 when it is none.
constexpr std::uint32_t numeric_entity(std::string_view digits) noexcept {
  bool const hex = digits.starts_with('x') || digits.starts_with('X');
  return hex ? code_point(digits.substr(1), 16) : code_point(digits, 10);
}

/// Appends the character that the reference at the front of `html` ("&amp;...") stands for; returns its length, or
/// 0 when it is no known reference.
inline std::size_t append_entity(std::string& out, std::string_view html) {
  auto const end = html.substr(0, 12).find(';');
  if (end == std::string_view::npos || end < 2) return 0;
  auto const name = html.substr(1, end - 1);
  std::uint32_t code = name[0] == '#' ? numeric_entity(name.substr(1)) : 0;
  for (auto const& known : named_entities)
    if (known.name == name) code = known.code;
  if (code == 0) return 0;
  append_utf8(out, code == 0xA0 ? std::uint32_t(' ') : code);
  return end + 1;
}

template <std::size_t Count>
constexpr bool one_of(std::string_view name, std::array<std::string_view, Count> const& names) noexcept {
  for (auto candidate : names)
    if (candidate == name) return true;
  return false;
}

inline constexpr auto dropped_elements =
    std::to_array<std::string_view>({"script", "style", "head", "nav", "header", "footer", "svg", "aside",
                                     "noscript", "template", "button", "select", "iframe", "math", "object"});
/// Classes of the elements that hold a page's menus where the HTML is older than <nav>.
inline constexpr auto dropped_classes =
    std::to_array<std::string_view>({"nav", "navbar", "navheader", "navfooter", "menu", "mainmenu", "submenu",
                                     "nosearch", "toplang", "bottomlang"});
inline constexpr auto block_elements = std::to_array<std::string_view>(
    {"p",       "div",     "br",      "hr",         "h1",      "h2",      "h3",      "h4",      "h5",    "h6",
     "ul",      "ol",      "li",      "dl",         "dt",      "dd",      "pre",     "table",   "thead", "tbody",
     "tfoot",   "tr",      "main",    "blockquote", "form",    "body",    "article", "figure",  "title", "html",
     "section", "caption", "details", "figcaption", "summary", "address", "center",  "fieldset"});

struct html_tag {
  std::string name;  ///< lower case; empty for comments, declarations and processing instructions
  bool closing = false;
  bool self_closing = false;
  std::size_t length = 0;  ///< of the source text; 0 when the '<' starts no tag
};

inline bool starts_with_at(std::string_view text, std::size_t at, std::string_view what) {
  return text.substr(at, what.size()) == what;
}

/// Length up to and with `mark`, or all that is left.
inline std::size_t length_through(std::string_view text, std::size_t at, std::string_view mark) {
  auto const end = text.find(mark, at);
  return end == std::string_view::npos ? text.size() - at : end + mark.size() - at;
}

/// The tag at text[at] == '<'. A '>' inside a quoted attribute value does not end it.
inline html_tag read_tag(std::string_view text, std::size_t at) {
  html_tag tag;
  if (starts_with_at(text, at, "<!--")) {
    tag.length = length_through(text, at, "-->");
    return tag;
  }
  char const first = at + 1 < text.size() ? text[at + 1] : ' ';
  if (first == '!' || first == '?') {
    tag.length = length_through(text, at, ">");
    return tag;
  }
  tag.closing = first == '/';
  auto i = at + (tag.closing ? 2 : 1);
  if (i >= text.size() || !is_letter(text[i])) return tag;
  while (i < text.size() && (is_letter(text[i]) || is_digit(text[i]))) tag.name += lower(text[i++]);
  char quote = 0, before = ' ';
  for (; i < text.size(); ++i) {
    char const c = text[i];
    if (quote != 0) {
      quote = c == quote ? char(0) : quote;
    } else if (c == '>') {
      tag.self_closing = before == '/';
      break;
    } else if ((c == '"' || c == '\'') && before == '=') {
      quote = c;
    }
    if (!is_space(c)) before = c;
  }
  tag.length = (i < text.size() ? i + 1 : text.size()) - at;
  return tag;
}

/// True when a word of the tag's class attribute is one of dropped_classes.
inline bool has_dropped_class(std::string_view tag) {
  auto at = tag.find(" class=");
  if (at == std::string_view::npos) return false;
  at += 7;
  char const quote = at < tag.size() && (tag[at] == '"' || tag[at] == '\'') ? tag[at] : char(0);
  auto value = tag.substr((std::min)(at + (quote != 0 ? 1 : 0), tag.size()));
  value = value.substr(0, quote != 0 ? value.find(quote) : value.find_first_of(" \t\n>"));
  while (!value.empty()) {
    auto const end = (std::min)(value.find(' '), value.size());
    if (one_of(value.substr(0, end), dropped_classes)) return true;
    value.remove_prefix((std::min)(end + 1, value.size()));
  }
  return false;
}

/// The place after the end of the dropped element that opens at `at`, nested ones of its name counted. Without an
/// end, which HTML allows for <head>, the element ends where the body starts, or else after its own tag.
inline std::size_t skip_element(std::string_view text, std::size_t at, html_tag const& open) {
  auto const inside = at + open.length;
  if (open.self_closing) return inside;
  bool const raw = open.name == "script" || open.name == "style";
  int depth = 1;
  for (auto i = text.find('<', inside); i != std::string_view::npos; i = text.find('<', i + 1)) {
    if (raw && !starts_with_at(text, i, "</")) continue;
    auto const tag = read_tag(text, i);
    if (open.name == "head" && tag.name == "body" && !tag.closing) return i;
    if (tag.name == open.name && !tag.self_closing) depth += tag.closing ? -1 : 1;
    if (depth == 0) return i + tag.length;
    if (tag.length > 0 && !raw) i += tag.length - 1;
  }
  return inside;
}

inline void break_line(std::string& out) {
  while (!out.empty() && out.back() == ' ') out.pop_back();
  if (!out.empty() && out.back() != '\n') out += '\n';
}

/// Paragraphs and their like are set off by a blank line, which the line rules reduce to one.
inline bool sets_off(std::string_view name) {
  static constexpr auto names = std::to_array<std::string_view>(
      {"p", "h1", "h2", "h3", "h4", "h5", "h6", "pre", "table", "blockquote", "dl", "section"});
  return one_of(name, names);
}

/// Number of UTF-8 characters; a stray byte of another encoding counts as none or one.
inline std::size_t characters(std::string_view line) noexcept {
  std::size_t count = 0;
  for (char c : line) count += (static_cast<unsigned char>(c) & 0xC0u) != 0x80u ? 1 : 0;
  return count;
}

}  // namespace detail

/// The readable text of an HTML page: script, style, head, nav, header, footer, svg and other elements that are not
/// prose are dropped, so are menus known by their class, block tags become line breaks, table cells are set apart
/// by two spaces, entities become characters, white space outside <pre> runs together.
inline std::string html_to_text(std::string_view html) {
  std::string out;
  out.reserve(html.size() / 2);
  int pre = 0;
  for (std::size_t i = 0; i < html.size();) {
    char const c = html[i];
    if (c == '<') {
      auto const tag = detail::read_tag(html, i);
      if (tag.length > 0) {
        bool const dropped = !tag.closing && (detail::one_of(tag.name, detail::dropped_elements) ||
                                              detail::has_dropped_class(html.substr(i, tag.length)));
        if (dropped) {
          i = detail::skip_element(html, i, tag);
          continue;
        }
        if (detail::one_of(tag.name, detail::block_elements)) detail::break_line(out);
        if (detail::sets_off(tag.name) && !out.empty()) out += '\n';
        if ((tag.name == "td" || tag.name == "th") && !tag.closing && !out.empty() && out.back() != '\n')
          out += "  ";
        if (tag.name == "pre") pre = (std::max)(0, pre + (tag.closing ? -1 : 1));
        i += tag.length;
        continue;
      }
    }
    if (c == '&') {
      auto const length = detail::append_entity(out, html.substr(i));
      if (length > 0) {
        i += length;
        continue;
      }
    }
    bool const no_break = detail::starts_with_at(html, i, "\xC2\xA0");
    if (pre == 0 && (detail::is_space(c) || no_break)) {
      if (!out.empty() && !detail::is_space(out.back())) out += ' ';
    } else {
      out += no_break ? ' ' : c;
    }
    i += no_break ? 2 : 1;
  }
  return out;
}

namespace detail {

struct roff_character {
  std::string_view name;
  std::uint32_t code;
};

/// The special characters met in manual pages; fonts, strings and registers are no characters and give nothing.
inline constexpr auto roff_characters = std::to_array<roff_character>(
    {{"aq", '\''}, {"cq", '\''}, {"oq", '\''}, {"dq", '"'},  {"lq", '"'},  {"rq", '"'},
     {"em", '-'},  {"en", '-'},  {"hy", '-'},  {"bu", '*'},  {"ha", '^'},  {"ti", '~'},
     {"rs", '\\'}, {"co", 0xA9}, {":a", 0xE4}, {":o", 0xF6}, {":u", 0xFC}, {":A", 0xC4},
     {":O", 0xD6}, {":U", 0xDC}, {"ss", 0xDF}, {"'e", 0xE9}, {"`e", 0xE8}, {"`a", 0xE0}});

inline void append_roff_character(std::string& out, std::string_view name) {
  for (auto const& known : roff_characters)
    if (known.name == name) append_utf8(out, known.code);
  // u00E4: a code point in hexadecimal digits
  std::uint32_t const code = name.starts_with('u') && name.size() == 5 ? code_point(name.substr(1), 16) : 0;
  if (code != 0) append_utf8(out, code);
}

/// Appends one line of manual page source without its font changes and with its escapes as characters.
inline void append_roff_line(std::string& out, std::string_view line) {
  for (std::size_t i = 0; i < line.size(); ++i) {
    if (line[i] != '\\' || i + 1 == line.size()) {
      out += line[i];
      continue;
    }
    char const kind = line[++i];
    auto const rest = line.substr(i + 1);
    if (kind == '"' || kind == '#') return;  // a comment
    if (kind == '-' || kind == '.' || kind == ' ' || kind == '`' || kind == '\'') out += kind;
    if (kind == 'e' || kind == '\\') out += '\\';
    if (kind == '~' || kind == '0') out += ' ';
    if (kind == 'f' || kind == '*' || kind == 'n' || kind == '(' || kind == '[') {
      // \fB, \f(CW, \f[CB], \*R, \*(lq, \(aq, \[em]: one letter, two after '(', or up to ']'.
      bool const bare = kind == '(' || kind == '[';
      char const form = bare ? kind : rest.empty() ? ' ' : rest[0];
      auto const from = bare || (form != '(' && form != '[') ? std::size_t(0) : std::size_t(1);
      auto const close = form == '[' ? rest.find(']') : std::string_view::npos;
      auto const length = form == '(' ? 2 : form == '[' && close != std::string_view::npos ? close - from : 1;
      auto const name = rest.substr((std::min)(from, rest.size()), length);
      append_roff_character(out, name);
      i += from + name.size() + (close != std::string_view::npos ? 1 : 0);
    }
    if ((kind == 's' || kind == 'm') && !rest.empty()) {
      i += rest[0] == '[' ? length_through(rest, 0, "]") : rest[0] == '+' || rest[0] == '-' ? 2 : 1;
    }
    if ((kind == 'h' || kind == 'v' || kind == 'w') && !rest.empty() && rest[0] == '\'')
      i += rest.find('\'', 1) == std::string_view::npos ? rest.size() : length_through(rest, 1, "'") + 1;
  }
}

}  // namespace detail

/// The readable text of a manual page (man or mdoc macros): headings and text stay, layout requests go.
inline std::string roff_to_text(std::string_view page) {
  static constexpr auto with_text = std::to_array<std::string_view>(
      {"SH", "SS", "B", "I", "BR", "RB", "IR", "RI", "BI", "IB", "SM", "IP", "Sh", "Ss", "It", "Nm", "Nd", "Dq"});
  static constexpr auto breaks =
      std::to_array<std::string_view>({"SH", "SS", "PP", "P", "LP", "TP", "IP", "Sh", "Ss", "Pp", "It", "br"});
  static constexpr auto alternating = std::to_array<std::string_view>({"BR", "RB", "IR", "RI", "BI", "IB"});
  std::string out;
  bool skipping = false;  // a macro definition, up to the line ".."
  for (std::size_t at = 0; at < page.size();) {
    auto const end = (std::min)(page.find('\n', at), page.size());
    auto line = page.substr(at, end - at);
    at = end + 1;
    if (skipping) {
      skipping = !line.starts_with("..");
      continue;
    }
    bool const request = !line.empty() && (line[0] == '.' || line[0] == '\'');
    if (!request) {
      detail::append_roff_line(out, line);
      out += '\n';
      continue;
    }
    line.remove_prefix(1);
    while (!line.empty() && line[0] == ' ') line.remove_prefix(1);
    auto const space = (std::min)(line.find_first_of(" \t"), line.size());
    auto const name = line.substr(0, space);
    skipping = name == "de" || name == "ig" || name == "de1";
    if (detail::one_of(name, breaks) && !out.empty() && !out.ends_with("\n\n")) out += '\n';
    if (!detail::one_of(name, with_text)) continue;
    std::string words;
    // Alternating fonts (.BR name (1)) set their arguments without spaces between.
    bool const joined = detail::one_of(name, alternating);
    bool quoted = false;
    for (char c : line.substr((std::min)(space + 1, line.size()))) {
      if (c == '"') quoted = !quoted;
      if (c == '"' || (joined && c == ' ' && !quoted)) continue;
      words += c;
    }
    detail::append_roff_line(out, words);
    out += '\n';
  }
  return out;
}

/// A hash of a path that is the same on every machine, for the order of documents (FNV-1a, then mixed).
constexpr std::uint64_t path_hash(std::string_view path) noexcept {
  std::uint64_t hash = 1469598103934665603u;
  for (char c : path) hash = (hash ^ std::uint64_t(static_cast<unsigned char>(c))) * 1099511628211u;
  hash = (hash ^ (hash >> 30)) * 0xBF58476D1CE4E5B9u;
  hash = (hash ^ (hash >> 27)) * 0x94D049BB133111EBu;
  return hash ^ (hash >> 31);
}

/// Applies the line rules of one domain and remembers its long lines: control characters but the tab are dropped,
/// so are lines that are too long or were there before; ends of lines are trimmed; blank lines are kept one at a
/// time.
class line_cleaner {
 public:
  explicit line_cleaner(cleaning rules = {}) : rules_(rules) {}

  std::string operator()(std::string_view text) {
    std::string out, line;
    out.reserve(text.size());
    bool blank = true;  // no blank line at the front
    for (std::size_t at = 0; at < text.size();) {
      auto const end = (std::min)(text.find_first_of("\n\f", at), text.size());
      bool const known = !clean_line(line, text.substr(at, end - at));
      at = end + 1;
      if (known || (line.empty() && blank)) continue;
      blank = line.empty();
      out += line;
      out += '\n';
    }
    while (out.ends_with("\n\n")) out.pop_back();
    return out == "\n" ? std::string() : out;
  }

 private:
  /// False when the rules drop the line.
  bool clean_line(std::string& line, std::string_view source) {
    line.clear();
    for (char c : source) {
      bool const control = static_cast<unsigned char>(c) < 0x20 || c == 0x7F;
      if (!control || c == '\t') line += c;
    }
    while (!line.empty() && detail::is_space(line.back())) line.pop_back();
    auto const length = detail::characters(line);
    if (length > rules_.longest_line) return false;
    return length < rules_.repeated_line || seen_.insert(path_hash(line)).second;
  }

  cleaning rules_;
  std::unordered_set<std::uint64_t> seen_;
};

/// The text of a domain: the documents in the order of the hash of their path (not of the folder listing, so that
/// the parts mix all sources), each through the line rules, set apart by a blank line, until `most` bytes are
/// there. Deterministic: the same documents give the same bytes on every machine.
inline std::string clean_domain(std::vector<document> documents, cleaning rules = {},
                                std::size_t most = (std::numeric_limits<std::size_t>::max)()) {
  std::sort(documents.begin(), documents.end(), [](document const& a, document const& b) {
    return std::pair(path_hash(a.path), std::string_view(a.path)) <
           std::pair(path_hash(b.path), std::string_view(b.path));
  });
  line_cleaner clean(rules);
  std::string text;
  for (auto& source : documents) {
    if (text.size() >= most) break;
    auto const cleaned = clean(source.text);
    source.text = std::string();
    if (cleaned.empty()) continue;
    if (!text.empty()) text += '\n';
    text += cleaned;
  }
  return text;
}

/// Divides a domain's text: the first `part` bytes are test, the next validation, the rest training. In a domain of
/// less than 4 * `part` bytes both are a quarter of it. Parts end at a line's end where one is within 4,096 bytes.
inline text_parts split_domain(std::string_view text, std::size_t part = 500000) {
  part = (std::min)(part, text.size() / 4);
  auto const cut = [&](std::size_t at) {
    auto const line = at == 0 ? std::string_view::npos : text.rfind('\n', at - 1);
    return line != std::string_view::npos && at - line <= 4096 ? line + 1 : at;
  };
  auto const first = cut(part);
  auto const second = (std::max)(first, cut(first + part));
  return {std::string(text.substr(second)), std::string(text.substr(first, second - first)),
          std::string(text.substr(0, first))};
}

}  // namespace seqmix::inline v0::data
