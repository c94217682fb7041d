# One translation unit for each cell of the grid, so that they compile side by side; SEQMIX_ABLATION_CELLS says which.
set(ablation_all
  history-none-softmax history-none-window history-none-top1_element history-none-top1_chunk history-none-linear
  history-constant-softmax history-constant-window history-constant-top1_element history-constant-top1_chunk
  history-constant-linear
  history-mamba2-softmax history-mamba2-window history-mamba2-top1_element history-mamba2-top1_chunk
  history-mamba2-linear history-gla-linear
  outer_product-none-linear outer_product-constant-linear outer_product-mamba2-linear outer_product-gla-linear
  delta_rule-none-linear delta_rule-constant-linear delta_rule-mamba2-linear delta_rule-gla-linear)
list(LENGTH ablation_all ablation_count)
set(SEQMIX_ABLATION_CELLS all CACHE STRING "Cells that examples/ablation_grid is compiled with: all, or names with ';'")
set(ablation_cells ${SEQMIX_ABLATION_CELLS})
if(ablation_cells STREQUAL "all")
  set(ablation_cells ${ablation_all})
endif()

set(ablation_declarations)
set(ablation_entries)
foreach(ablation_cell IN LISTS ablation_cells)
  if(NOT ablation_cell IN_LIST ablation_all)
    message(FATAL_ERROR "seqmix: SEQMIX_ABLATION_CELLS: ablation_grid has no cell '${ablation_cell}'; it has ${ablation_all}")
  endif()
  string(MAKE_C_IDENTIFIER "${ablation_cell}" ablation_function)
  set(ablation_file "${CMAKE_CURRENT_BINARY_DIR}/ablation_grid_cells/${ablation_cell}.cpp")
  configure_file("${CMAKE_CURRENT_LIST_DIR}/cell.cpp.in" "${ablation_file}" @ONLY)
  list(APPEND sources "${ablation_file}")
  string(APPEND ablation_declarations "std::unique_ptr<architecture> make_${ablation_function}(settings const&);\n")
  string(APPEND ablation_entries "          {\"${ablation_cell}\", make_${ablation_function}},\n")
endforeach()
set(ablation_file "${CMAKE_CURRENT_BINARY_DIR}/ablation_grid_cells/cells.cpp")
configure_file("${CMAKE_CURRENT_LIST_DIR}/cells.cpp.in" "${ablation_file}" @ONLY)
list(APPEND sources "${ablation_file}")
set(libraries seqmix_example_precompiled)
