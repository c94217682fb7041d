#pragma once

#include <array>
#include <cstddef>
#include <string_view>

namespace seqmix::inline v0::gates::detail {

/// A name put together by the compiler: `static constexpr auto text = name_text{}.add("outer<").add(inner)`. One
/// that does not fit is an error of the compiler.
struct name_text {
  std::array<char, 192> letters{};
  std::size_t size = 0;

  constexpr name_text add(std::string_view more) const {
    auto result = *this;
    for (char letter : more) result.letters.at(result.size++) = letter;
    return result;
  }
  constexpr name_text add(unsigned number) const {
    auto const front = number > 9 ? add(number / 10) : *this;
    char const last = char('0' + number % 10);
    return front.add(std::string_view(&last, 1));
  }
  constexpr std::string_view view() const { return {letters.data(), size}; }
};

}  // namespace seqmix::inline v0::gates::detail
