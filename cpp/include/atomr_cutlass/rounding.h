// How alpha * acc + beta * C is rounded: alpha * acc first, then the sum. Left to the compiler, now the one product is
// rounded and now the other, from kernel to kernel; kernels that serve the same rows have to agree bit by bit.
#pragma once

#include "cutlass/cutlass.h"

namespace atomr_cutlass {

template <class Value>
CUTLASS_DEVICE Value times(Value factor, Value acc) {
  return factor * acc;
}
CUTLASS_DEVICE float times(float factor, float acc) { return __fmul_rn(factor, acc); }
CUTLASS_DEVICE double times(double factor, double acc) { return __dmul_rn(factor, acc); }

// sum + beta * source.
template <class Value>
CUTLASS_DEVICE Value plus_source(Value sum, Value beta, Value source) {
  return sum + beta * source;
}
CUTLASS_DEVICE float plus_source(float sum, float beta, float source) { return __fmaf_rn(beta, source, sum); }
CUTLASS_DEVICE double plus_source(double sum, double beta, double source) { return __fma_rn(beta, source, sum); }

}  // namespace atomr_cutlass
