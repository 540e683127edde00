// The rows of one build, written by the generator into table.cpp.
#pragma once

#include "atomr_cutlass/kernel_abi.h"

namespace atomr_cutlass {

extern const atomr_cutlass_row* const kRows[];
extern const unsigned kRowCount;

}  // namespace atomr_cutlass
