# With SEQMIX_CUDA, at top level only. Device code is for CMAKE_CUDA_ARCHITECTURES, 80 and 90 when nothing else is asked.
# tests/cuda/run.sh and benchmarks/cuda/run.sh build the same programs without CMake.
#   seqmix_add_cuda_program(<name> <sources>...)   an executable of .cu and .cpp files
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES "80;90" CACHE STRING "Which GPUs device code is compiled for")
endif()
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  message(FATAL_ERROR "seqmix: nvcc was not found; set CUDACXX to where it is, or configure with -DSEQMIX_CUDA=OFF")
endif()
enable_language(CUDA)

function(seqmix_add_cuda_program name)
  add_executable(${name} ${ARGN})
  target_include_directories(${name} SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  target_link_libraries(${name} PRIVATE seqmix::seqmix seqmix_developer)
  # CMake 3.25 does not know that nvcc can C++20, so there is no cuda_std_20 to ask for.
  target_compile_options(${name} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:-std=c++20 -Xcompiler -Wall,-Wextra,-Wno-restrict>"
    "$<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${SEQMIX_WARNINGS_AS_ERRORS}>>:SHELL:--Werror all-warnings>")
endfunction()
