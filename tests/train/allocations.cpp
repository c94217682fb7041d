// Counts every allocation of this test program. Alone in its file, so that no compiler looks through a
// new-expression into std::malloc and complains of a mismatch.
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

#include "train/small_models.hpp"

namespace {

std::atomic<long> count{0};

void* allocate(std::size_t size, std::size_t boundary) {
  ++count;
  void* const p = std::aligned_alloc(boundary, (size / boundary + 1) * boundary);
  if (!p) throw std::bad_alloc();
  return p;
}

}  // namespace

long small::allocations() noexcept { return count; }

void* operator new(std::size_t size) { return allocate(size, alignof(std::max_align_t)); }
void* operator new[](std::size_t size) { return allocate(size, alignof(std::max_align_t)); }
void* operator new(std::size_t size, std::align_val_t boundary) { return allocate(size, std::size_t(boundary)); }
void* operator new[](std::size_t size, std::align_val_t boundary) { return allocate(size, std::size_t(boundary)); }
void operator delete(void* p) noexcept { std::free(p); }
void operator delete[](void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }
void operator delete[](void* p, std::size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }
