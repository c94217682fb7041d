# seqmix_add_precompiled(<name> [libraries...])
#   A static library with what seqmix/precompiled.hpp declares. Give it every library that changes how code is compiled
#   (OpenMP, an interface library with -march): whoever links <name> then compiles in the same way.
function(seqmix_add_precompiled name)
  get_target_property(folders seqmix::seqmix HEADER_DIRS)
  find_file(header seqmix/precompiled.hpp PATHS ${folders} NO_DEFAULT_PATH NO_CACHE REQUIRED)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${header}")
  file(READ "${header}" text)
  string(REPLACE "#pragma once" "" text "${text}")
  string(REPLACE "extern template" "template" text "${text}")
  file(CONFIGURE OUTPUT "${CMAKE_CURRENT_BINARY_DIR}/${name}.cpp" CONTENT "${text}" @ONLY)
  add_library(${name} STATIC EXCLUDE_FROM_ALL "${CMAKE_CURRENT_BINARY_DIR}/${name}.cpp")
  target_link_libraries(${name} PUBLIC seqmix::seqmix ${ARGN})
endfunction()
