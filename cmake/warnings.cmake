# The warnings of the developer's build and of the strict consumers in tests/packaging.
set(seqmix_warnings
  -Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Wold-style-cast -Wcast-qual -Wcast-align
  -Wdouble-promotion -Wundef -Wextra-semi -Wnon-virtual-dtor -Woverloaded-virtual
  -Wimplicit-fallthrough -Wformat=2)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  list(APPEND seqmix_warnings -Wduplicated-cond -Wduplicated-branches -Wlogical-op)
  # g++ 12 and 13 report -Wrestrict inside their own std::string when a literal is put before a temporary (GCC bug 105651).
  if(CMAKE_CXX_COMPILER_VERSION VERSION_LESS 14)
    list(APPEND seqmix_warnings -Wno-restrict)
  endif()
endif()
if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  # g++ follows the flow into inlined code of other libraries (nlohmann-json, CLI11) and reports it there.
  list(APPEND seqmix_warnings -Wnull-dereference)
endif()
