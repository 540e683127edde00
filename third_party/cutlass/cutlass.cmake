# Sets ATOMR_CUTLASS_HEADERS, the folder that holds cutlass/ and cute/, and ATOMR_CUTLASS_HEADERS_LICENSE.
include_guard(GLOBAL)

set(CUTLASS_DIR "" CACHE PATH "A checkout of another CUTLASS (or its include folder) to use instead of the pinned headers")

# Downloads the wheel of PIN, which pip checks against its hash, and unpacks the headers into the build folder.
# Without its dependencies: the headers need none of them.
function(atomr_cutlass_fetch_headers destination)
  set(pin "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/PIN")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${pin}")
  file(SHA256 "${pin}" wanted)
  set(stamp "${destination}/FETCHED")
  if(EXISTS "${stamp}")
    file(READ "${stamp}" present)
    if(present STREQUAL wanted)
      return()
    endif()
  endif()

  message(STATUS "Fetching the CUTLASS headers")
  file(REMOVE_RECURSE "${destination}")
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -m pip download --disable-pip-version-check --quiet --no-deps --require-hashes
            --only-binary :all: --dest "${destination}" --requirement "${pin}"
    RESULT_VARIABLE failed ERROR_VARIABLE log)
  if(failed)
    message(FATAL_ERROR "The pinned CUTLASS headers could not be fetched. -DCUTLASS_DIR=PATH uses a checkout instead.\n${log}")
  endif()
  file(GLOB wheel "${destination}/*.whl")
  # With today's dates: what was compiled with the headers of another pin is older than any of these.
  file(ARCHIVE_EXTRACT INPUT "${wheel}" DESTINATION "${destination}" TOUCH
       PATTERNS "cutlass_library/source/include/*" "*.dist-info/licenses/LICENSE.txt")
  file(REMOVE "${wheel}")
  file(WRITE "${stamp}" "${wanted}")
endfunction()

if(CUTLASS_DIR)
  get_filename_component(_cutlass "${CUTLASS_DIR}" ABSOLUTE BASE_DIR "${CMAKE_SOURCE_DIR}")
  find_path(ATOMR_CUTLASS_HEADERS cutlass/cutlass.h PATHS "${_cutlass}/include" "${_cutlass}" NO_CACHE NO_DEFAULT_PATH)
  if(NOT ATOMR_CUTLASS_HEADERS)
    message(FATAL_ERROR "CUTLASS_DIR=${CUTLASS_DIR} holds no cutlass/cutlass.h, nor does its include folder")
  endif()
else()
  set(_cutlass "${CMAKE_BINARY_DIR}/cutlass")
  atomr_cutlass_fetch_headers("${_cutlass}")
  set(ATOMR_CUTLASS_HEADERS "${_cutlass}/cutlass_library/source/include")
endif()
get_filename_component(_beside "${ATOMR_CUTLASS_HEADERS}/.." ABSOLUTE)
file(GLOB _licenses "${_beside}/LICENSE.txt" "${_cutlass}/LICENSE.txt" "${_cutlass}/*.dist-info/licenses/LICENSE.txt")
set(ATOMR_CUTLASS_HEADERS_LICENSE "")
if(_licenses)
  list(GET _licenses 0 ATOMR_CUTLASS_HEADERS_LICENSE)  # of a checkout the first two are the same
endif()
