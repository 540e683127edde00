// The scaled epilogue: D = saturating_cast(scale_d * (alpha * scale_a * scale_b * A B + beta * C)), with scales that
// are on the device. scale_a is absent, one float, or one for each row of A; scale_b likewise for the columns of B;
// scale_d is absent or one float. `amax`, where there is one, becomes the largest absolute value before scale_d.
//
// Which of them a problem has is decided at run time: one kernel serves all forms.
#pragma once

#include "atomr_cutlass/kernel_abi.h"
#include "cutlass/cutlass.h"

namespace atomr_cutlass {

// What the generated sources choose from.
struct LinearEpilogue {};
struct ScaledEpilogue {};

struct ScaledParams {
  float const* scale_a;
  float const* scale_b;
  float const* scale_d;
  float* amax;
  float alpha, beta;
  int32_t form_a, form_b;
  // Whether alpha * scale_b is rounded first, not alpha * scale_a. Kernels of column-major D serve a row-major D as
  // D^T, with A and B in each other's places, and have to agree with the others bit by bit.
  bool alpha_by_column = false;

  static ScaledParams of(atomr_cutlass_gemm_args const& args) {
    return {static_cast<float const*>(args.scale_a),
            static_cast<float const*>(args.scale_b),
            static_cast<float const*>(args.scale_d),
            static_cast<float*>(args.amax),
            float(args.alpha),
            float(args.beta),
            args.scale_form_a,
            args.scale_form_b};
  }

  CUTLASS_DEVICE bool needs_c() const { return beta != 0.0f; }
  // Whether all elements have the same scales.
  CUTLASS_DEVICE bool uniform() const { return form_a == 0 && form_b == 0; }

  // 0 beyond the edges, where nothing may be read.
  CUTLASS_DEVICE float row(int m, int count) const {
    if (m >= count) return 0.0f;
    float const scale = scale_a == nullptr ? 1.0f : scale_a[form_a == 0 ? 0 : m];
    return alpha_by_column ? scale : alpha * scale;
  }
  CUTLASS_DEVICE float column(int n, int count) const {
    if (n >= count) return 0.0f;
    float const scale = scale_b == nullptr ? 1.0f : scale_b[form_b == 0 ? 0 : n];
    return alpha_by_column ? alpha * scale : scale;
  }
  CUTLASS_DEVICE float output() const { return scale_d == nullptr ? 1.0f : *scale_d; }
};

// The largest absolute value of what a thread has seen, as bits: those of floats that are not negative are ordered as
// integers, with every NaN above infinity.
struct LargestAbsolute {
  uint32_t bits = 0;

  CUTLASS_DEVICE void see(float value) {
    uint32_t const other = __float_as_uint(value) & 0x7fffffffu;
    bits = bits > other ? bits : other;
  }

  // Called by all threads of a warp.
  CUTLASS_DEVICE void store(float* amax) const {
    uint32_t const largest = __reduce_max_sync(0xffffffffu, bits);
    if (threadIdx.x % 32 == 0) atomicMax(reinterpret_cast<uint32_t*>(amax), largest);
  }
};

}  // namespace atomr_cutlass
