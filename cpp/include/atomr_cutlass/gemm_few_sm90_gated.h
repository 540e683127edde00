// The gated epilogue (epilogue_gated.h) of kernels for few rows: a thread's run of four columns of A B is two of D.
#pragma once

#include "atomr_cutlass/epilogue_gated.h"
#include "atomr_cutlass/gemm_few_sm90_tree.h"

namespace atomr_cutlass {

template <class Gate, bool kScaled_>
struct FewEpilogue<GatedEpilogue<Gate, kScaled_>> : FewConverted {
  static constexpr bool kScaled = kScaled_;
  static constexpr int kColumnsOfOne = 2;

  template <int kCount>
  CUTLASS_DEVICE static cutlass::Array<float, kCount / 2> gated(cutlass::Array<float, kCount> const& values) {
    cutlass::Array<float, kCount / 2> made;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount / 2; ++i) {
      made[i] = Gate::evaluate(values[2 * i], nullptr, nullptr) * values[2 * i + 1];
    }
    return made;
  }
};

}  // namespace atomr_cutlass
