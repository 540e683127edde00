# The choice of kernels: has the generator write the chosen cells and, where there are any, finds the headers and nvcc.
# Sets what the generator's kernels.cmake sets, and ATOMR_CUTLASS_TABLE, the source of the row table.

set(ATOMR_CUTLASS_PRESET "default" CACHE STRING "Which kernels to compile: none, smoke, default or full")
set_property(CACHE ATOMR_CUTLASS_PRESET PROPERTY STRINGS none smoke default full)
set(ATOMR_CUTLASS_ARCHS "" CACHE STRING "Architectures to compile for, of 80;86;89;90a;100a;120a (empty: the GPUs present, else 80;90a)")
set(ATOMR_CUTLASS_PTX "" CACHE STRING "Of these, the ones to also ship as PTX, which newer GPUs translate: 80;89")
set(ATOMR_CUTLASS_OPS "" CACHE STRING "Only these operations, such as gemm (empty: all)")
set(ATOMR_CUTLASS_DTYPES "" CACHE STRING "Only these operand types, such as f16;bf16 (empty: all)")
set(ATOMR_CUTLASS_KERNELS "" CACHE STRING "Only kernels whose names match: comma-separated, * between substrings")
set(ATOMR_CUTLASS_KERNEL_FILTER_FILE "" CACHE FILEPATH "Only kernels that match this file's regular expressions")
set(ATOMR_CUTLASS_EXCLUDE_KERNELS "" CACHE STRING "No kernels whose names match: comma-separated, * as above")
set(ATOMR_CUTLASS_EPILOGUES "" CACHE STRING "Epilogue trees to build kernels of too: names, and files of trees as JSON")
set(ATOMR_CUTLASS_KEYS "" CACHE FILEPATH "Exactly the kernels of this file: a key as JSON a line")
set(ATOMR_CUTLASS_BUDGET_CELLS "" CACHE STRING "With tuned choices as ATOMR_CUTLASS_KEYS: as many kernels at most")
set(ATOMR_CUTLASS_BUDGET_MB "" CACHE STRING "With tuned choices as ATOMR_CUTLASS_KEYS: so many MB of GPU code at most")
set(ATOMR_CUTLASS_OBJECTS "build/objects" CACHE PATH "Folder that keeps compiled kernels for other builds (empty: none)")

# Runs a module of the generator and stops the build with its complaint if it has one.
function(atomr_cutlass_ask output)
  # Unlike ARGN, this keeps an argument that is a list in one piece.
  cmake_parse_arguments(PARSE_ARGV 1 ask "" "" "")
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -B -m ${ask_UNPARSED_ARGUMENTS}
    WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}"
    RESULT_VARIABLE failed OUTPUT_VARIABLE answer ERROR_VARIABLE complaint OUTPUT_STRIP_TRAILING_WHITESPACE)
  string(STRIP "${complaint}" complaint)
  if(failed)
    message(FATAL_ERROR "${complaint}")
  elseif(complaint)
    message(STATUS "${complaint}")
  endif()
  set(${output} "${answer}" PARENT_SCOPE)
endfunction()

# --- knobs that are none ---
get_cmake_property(_given CACHE_VARIABLES)
list(FILTER _given INCLUDE REGEX "^ATOMR_CUTLASS_")
execute_process(
  COMMAND "${Python_EXECUTABLE}" -B -m generator.variables check ${_given}
  WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}" RESULT_VARIABLE _wrong ERROR_VARIABLE _said)
if(_wrong)
  # The build folder remembers what it was given: the next build is not to stop at what is corrected by then.
  foreach(_name IN LISTS _given)
    get_property(_help CACHE ${_name} PROPERTY HELPSTRING)
    if(_help STREQUAL "No help, variable specified on the command line.")
      unset(${_name} CACHE)
    endif()
  endforeach()
  message(FATAL_ERROR "${_said}")
elseif(_said)
  message(WARNING "${_said}")
endif()

# --- which cells ---
set(_keys "${ATOMR_CUTLASS_KEYS}")
if(_keys)
  get_filename_component(_keys "${_keys}" ABSOLUTE BASE_DIR "${PROJECT_SOURCE_DIR}")
endif()
set(_archs "${ATOMR_CUTLASS_ARCHS}")
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND DEFINED ENV{CUDAARCHS})
  set(CMAKE_CUDA_ARCHITECTURES "$ENV{CUDAARCHS}") # as CMake does, once CUDA is enabled
endif()
if(CMAKE_CUDA_ARCHITECTURES OR NOT (_archs OR _keys))
  atomr_cutlass_ask(_archs generator.toolchain "--archs=${_archs}" "--cmake-archs=${CMAKE_CUDA_ARCHITECTURES}")
endif()
set(_filter "${ATOMR_CUTLASS_KERNEL_FILTER_FILE}")
if(_filter)
  get_filename_component(_filter "${_filter}" ABSOLUTE BASE_DIR "${PROJECT_SOURCE_DIR}")
endif()
set(_epilogues "")
set(_trees "")
foreach(_epilogue IN LISTS ATOMR_CUTLASS_EPILOGUES)
  if(_epilogue MATCHES "[./]")
    get_filename_component(_epilogue "${_epilogue}" ABSOLUTE BASE_DIR "${PROJECT_SOURCE_DIR}")
    list(APPEND _trees "${_epilogue}")
  endif()
  list(APPEND _epilogues "${_epilogue}")
endforeach()
set(_emitted "${PROJECT_BINARY_DIR}/cells")
set(_cutlass "")
if(CUTLASS_DIR)
  include("${PROJECT_SOURCE_DIR}/third_party/cutlass/cutlass.cmake")
  set(_cutlass "--cutlass=${ATOMR_CUTLASS_HEADERS}")
endif()
atomr_cutlass_ask(_said generator "--emit=${_emitted}" "--preset=${ATOMR_CUTLASS_PRESET}" "--archs=${_archs}"
                  "--ptx=${ATOMR_CUTLASS_PTX}" "--ops=${ATOMR_CUTLASS_OPS}" "--dtypes=${ATOMR_CUTLASS_DTYPES}"
                  "--kernels=${ATOMR_CUTLASS_KERNELS}" "--filter-file=${_filter}"
                  "--exclude=${ATOMR_CUTLASS_EXCLUDE_KERNELS}" "--keys=${_keys}" "--epilogues=${_epilogues}"
                  "--budget-cells=${ATOMR_CUTLASS_BUDGET_CELLS}" "--budget-mb=${ATOMR_CUTLASS_BUDGET_MB}" ${_cutlass})

# Emission is part of configuring, so whatever it reads makes the build configure again. Of the headers each row has a
# digest.
file(GLOB_RECURSE _generator CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/generator/*.py"
     "${PROJECT_SOURCE_DIR}/generator/templates/*" "${PROJECT_SOURCE_DIR}/cpp/include/*")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${_generator} ${_filter} ${_keys} ${_trees})

include("${_emitted}/kernels.cmake")
set(ATOMR_CUTLASS_TABLE "${_emitted}/table.cpp")
if(_keys)
  message(STATUS "Kernels: ${ATOMR_CUTLASS_CELL_COUNT} (keys of ${_keys})")
else()
  message(STATUS "Kernels: ${ATOMR_CUTLASS_CELL_COUNT} (preset ${ATOMR_CUTLASS_PRESET}, archs ${_archs})")
endif()
if(NOT ATOMR_CUTLASS_CELL_ARCHS)
  return() # no kernels, so no toolkit
endif()

# --- the headers and the compiler ---
include("${PROJECT_SOURCE_DIR}/third_party/cutlass/cutlass.cmake")
# The generator decides which of our headers are found before CUTLASS's of the same names: by its version.
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${ATOMR_CUTLASS_HEADERS}/cutlass/version.h")
atomr_cutlass_ask(ATOMR_CUTLASS_INCLUDES generator.headers includes nvcc "${ATOMR_CUTLASS_HEADERS}"
                  "${PROJECT_SOURCE_DIR}/cpp/include/atomr_cutlass")
atomr_cutlass_ask(ATOMR_CUTLASS_HEADERS_DIGEST generator.content "${ATOMR_CUTLASS_HEADERS}"
                  "${PROJECT_SOURCE_DIR}/cpp/include/atomr_cutlass")
if(CUTLASS_DIR)
  # Headers that may be edited: the digest in the rows is that of what is compiled.
  file(GLOB_RECURSE _edited CONFIGURE_DEPENDS "${ATOMR_CUTLASS_HEADERS}/cutlass/*" "${ATOMR_CUTLASS_HEADERS}/cute/*")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${_edited})
endif()
if(NOT CMAKE_CUDA_COMPILER)
  atomr_cutlass_ask(CMAKE_CUDA_COMPILER generator.toolchain --nvcc "${PROJECT_BINARY_DIR}/cuda")
endif()
if(NOT CMAKE_CUDA_HOST_COMPILER)
  set(CMAKE_CUDA_HOST_COMPILER "${CMAKE_CXX_COMPILER}")
endif()
# Where no compiler cache does it, objects are kept by what they are made of.
if(ATOMR_CUTLASS_OBJECTS AND NOT DEFINED CMAKE_CUDA_COMPILER_LAUNCHER)
  get_filename_component(_objects "${ATOMR_CUTLASS_OBJECTS}" ABSOLUTE BASE_DIR "${PROJECT_SOURCE_DIR}")
  set(CMAKE_CUDA_COMPILER_LAUNCHER "${Python_EXECUTABLE}" -B "${PROJECT_SOURCE_DIR}/generator/objects.py" "${_objects}")
endif()
# Each cell says what it is compiled for; CMake's own checks need no architecture.
set(CMAKE_CUDA_ARCHITECTURES OFF)
enable_language(CUDA)

# One compile takes gigabytes, so memory bounds how many run at once.
set(_job_mb 0)
foreach(_arch IN LISTS ATOMR_CUTLASS_CELL_ARCHS)
  if(ATOMR_CUTLASS_JOB_MB_${_arch} GREATER _job_mb)
    set(_job_mb ${ATOMR_CUTLASS_JOB_MB_${_arch}})
  endif()
endforeach()
atomr_cutlass_ask(_jobs generator.toolchain --jobs ${_job_mb})
set_property(GLOBAL APPEND PROPERTY JOB_POOLS nvcc=${_jobs})
message(STATUS "Kernels: ${_jobs} compiled at once (${_job_mb} MB each)")
