# What the library's own programs are built with. Included at top level only; no consumer sees these targets:
#   seqmix_developer   the warnings and, when asked for, the sanitizers
#   seqmix_native      -march=native, when SEQMIX_NATIVE is on
#   seqmix_program     seqmix + developer + OpenMP: what every own program links
#   seqmix_formats     nlohmann-json and zstd, for io/ and data/

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Debug, Release, RelWithDebInfo or MinSizeRel" FORCE)
endif()
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

# find_package with a sentence that says how to go on.
macro(seqmix_need package switch)
  find_package(${package} ${ARGN} QUIET)
  if(NOT ${package}_FOUND)
    message(FATAL_ERROR "seqmix: ${package} was not found; run scripts/install_dependencies.sh tests, or configure with -D${switch}=OFF")
  endif()
endmacro()

include("${CMAKE_CURRENT_LIST_DIR}/warnings.cmake")
add_library(seqmix_developer INTERFACE)
target_compile_options(seqmix_developer INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:${seqmix_warnings};$<$<BOOL:${SEQMIX_WARNINGS_AS_ERRORS}>:-Werror>>")

if(SEQMIX_SANITIZE)
  target_compile_options(seqmix_developer INTERFACE
    -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g1)
  target_link_options(seqmix_developer INTERFACE -fsanitize=address,undefined)
  target_compile_definitions(seqmix_developer INTERFACE _GLIBCXX_ASSERTIONS)
endif()

add_library(seqmix_native INTERFACE)
if(SEQMIX_NATIVE)
  target_compile_options(seqmix_native INTERFACE -march=native)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # g++ 12 reports both inside its own AVX-512 headers.
    target_compile_options(seqmix_native INTERFACE -Wno-maybe-uninitialized -Wno-uninitialized)
  endif()
endif()

add_library(seqmix_program INTERFACE)
target_link_libraries(seqmix_program INTERFACE seqmix::seqmix seqmix_developer)
find_package(OpenMP QUIET)
if(OpenMP_CXX_FOUND)
  target_link_libraries(seqmix_program INTERFACE OpenMP::OpenMP_CXX)
else()
  message(STATUS "seqmix: OpenMP was not found, the programs will use one thread")
endif()

if(SEQMIX_TESTS OR SEQMIX_EXAMPLES)
  seqmix_need(nlohmann_json "SEQMIX_TESTS=OFF -DSEQMIX_EXAMPLES" 3.11)
  find_path(SEQMIX_ZSTD_INCLUDE zstd.h)
  find_library(SEQMIX_ZSTD_LIBRARY zstd)
  if(NOT SEQMIX_ZSTD_INCLUDE OR NOT SEQMIX_ZSTD_LIBRARY)
    message(FATAL_ERROR "seqmix: zstd was not found; run scripts/install_dependencies.sh examples")
  endif()
  add_library(seqmix_formats INTERFACE)
  target_include_directories(seqmix_formats SYSTEM INTERFACE "${SEQMIX_ZSTD_INCLUDE}")
  target_link_libraries(seqmix_formats INTERFACE nlohmann_json::nlohmann_json "${SEQMIX_ZSTD_LIBRARY}")
endif()
