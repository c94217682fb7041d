#pragma once

#include <array>
#include <charconv>
#include <cmath>
#include <concepts>
#include <string>
#include <string_view>
#include <system_error>

namespace seqmix::inline v0::train::detail {

/// The shortest digits that read back as the same number.
template <class Number>
requires std::integral<Number> || std::floating_point<Number> std::string number_text(Number x) {
  if constexpr (std::floating_point<Number>)
    if (std::isnan(x)) return "nan";
  std::array<char, 64> digits{};
  auto const end = std::to_chars(digits.data(), digits.data() + digits.size(), x).ptr;
  return std::string(digits.data(), end);
}
inline std::string number_text(bool x) { return x ? "true" : "false"; }

/// False unless the whole text is one number of that type.
template <class Number>
bool read_number(std::string_view text, Number& x) noexcept {
  auto const [end, code] = std::from_chars(text.data(), text.data() + text.size(), x);
  return code == std::errc{} && end == text.data() + text.size();
}

}  // namespace seqmix::inline v0::train::detail
