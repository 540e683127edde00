// The rows of one build, written by the generator into table.cpp.
#pragma once

#include "atomr_cutlass/abi_layout.h"

namespace atomr_cutlass {

extern const atomr_cutlass_row* const kRows[];
extern const unsigned kRowCount;

}  // namespace atomr_cutlass

#ifdef ATOMR_CUTLASS_PACK_NAME
// Not in the function: the loader would take a static variable of an inline function for that of a pack loaded before.
static atomr_cutlass_pack const atomr_cutlass_this_pack = {
    ATOMR_CUTLASS_ABI_VERSION,         atomr_cutlass::abi::kStructCount,
    atomr_cutlass::abi::kLayoutDigest, atomr_cutlass::abi::kStructs,
    ATOMR_CUTLASS_PACK_NAME,           atomr_cutlass::kRows,
    atomr_cutlass::kRowCount,          0};

extern "C" __attribute__((visibility("default"), used)) inline atomr_cutlass_pack const* atomr_cutlass_pack_v1(void) {
  return &atomr_cutlass_this_pack;
}
#endif
