// The rows of one build, written by the generator into table.cpp.
#pragma once

#include "atomr_cutlass/kernel_abi.h"

namespace atomr_cutlass {

extern const atomr_cutlass_row* const kRows[];
extern const unsigned kRowCount;

}  // namespace atomr_cutlass

#ifdef ATOMR_CUTLASS_PACK_NAME
extern "C" __attribute__((visibility("default"), used)) inline atomr_cutlass_pack const* atomr_cutlass_pack_v1(void) {
  static atomr_cutlass_pack const pack = {ATOMR_CUTLASS_ABI_VERSION, ATOMR_CUTLASS_PACK_NAME, atomr_cutlass::kRowCount,
                                          atomr_cutlass::kRows};
  return &pack;
}
#endif
