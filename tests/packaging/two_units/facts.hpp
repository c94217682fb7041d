#pragma once

#include <array>
#include <cstddef>

/// What a translation unit believes about the public types.
struct facts {
  std::array<std::size_t, 9> layout;
  char const* cpu_device;
};
facts plain_unit();
facts newer_unit();
