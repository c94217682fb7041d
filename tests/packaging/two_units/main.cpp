#include <cstdio>
#include <cstring>

#include "facts.hpp"

int main() {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
    std::puts("linked; this processor cannot run the newer unit");
    return 0;
  }
  bool const devices_must_differ = true;
#else
  bool const devices_must_differ = false;
#endif
  auto const plain = plain_unit();
  auto const newer = newer_unit();
  bool const one_layout = plain.layout == newer.layout;
  // Code for two instruction sets under one symbol would be picked by chance, so the device types must differ.
  bool const differ = std::strcmp(plain.cpu_device, newer.cpu_device) != 0;
  std::printf("one layout: %s; devices: %s and %s\n", one_layout ? "yes" : "NO", plain.cpu_device,
              newer.cpu_device);
  return one_layout && differ == devices_must_differ ? 0 : 1;
}
