# A pack: the chosen kernels as a shared library with one exported function, loadable by any Python.

if(NOT ATOMR_CUTLASS_PACK MATCHES "^[A-Za-z0-9_][A-Za-z0-9_.-]*$")
  message(FATAL_ERROR "ATOMR_CUTLASS_PACK=${ATOMR_CUTLASS_PACK}: a name has letters, digits, '_', '.' and '-' only")
endif()
if(NOT ATOMR_CUTLASS_CELL_ARCHS)
  message(FATAL_ERROR "A pack needs kernels: ATOMR_CUTLASS_PRESET=none leaves it empty; valid: smoke, default, full")
endif()

# The kernels' own symbols stay inside: two packs, or a pack and `_core`, may hold the same kernel.
set(_exports "${PROJECT_BINARY_DIR}/pack.map")
file(CONFIGURE OUTPUT "${_exports}" CONTENT "{ global: atomr_cutlass_pack_v1; local: *; };\n")

add_library(atomr_cutlass_pack MODULE)
set_target_properties(atomr_cutlass_pack PROPERTIES PREFIX "" SUFFIX ".so" OUTPUT_NAME "${ATOMR_CUTLASS_PACK}"
                      LINK_DEPENDS "${_exports}" LIBRARY_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}")
target_compile_definitions(atomr_cutlass_pack PRIVATE ATOMR_CUTLASS_PACK_NAME="${ATOMR_CUTLASS_PACK}")
atomr_cutlass_link_kernels(atomr_cutlass_pack)
target_link_options(atomr_cutlass_pack PRIVATE "-Wl,--version-script=${_exports}" -Wl,-z,defs)
# What is loaded was built whole: the checksum is looked at before the file is opened as a library.
add_custom_command(
  TARGET atomr_cutlass_pack POST_BUILD
  COMMAND "${Python_EXECUTABLE}" -B -m generator.manifest "$<TARGET_FILE:atomr_cutlass_pack>" "${_emitted}/pack.json"
          "name=${ATOMR_CUTLASS_PACK}" "compiler=nvcc ${CMAKE_CUDA_COMPILER_VERSION}"
          "cutlass=${ATOMR_CUTLASS_HEADERS_DIGEST}" "headers=${ATOMR_CUTLASS_HEADERS}"
          "license=${ATOMR_CUTLASS_HEADERS_LICENSE}" "package=${PROJECT_VERSION}"
  WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}" VERBATIM)
# As a file: as a target it would be stripped where that is asked for, and with that lose its manifest.
install(FILES "$<TARGET_FILE:atomr_cutlass_pack>" DESTINATION .)
# Its kernels are CUTLASS's, and go where wheels of packs go.
install(FILES ${ATOMR_CUTLASS_HEADERS_LICENSE} DESTINATION . RENAME CUTLASS-LICENSE.txt)
