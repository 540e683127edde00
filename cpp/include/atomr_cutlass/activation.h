// Activation functions in the accumulator's precision, in the form in which CUTLASS's epilogues of both generations
// take them. CUTLASS's own tanh is an approximation of 11 bits, which is too few for results in fp32.
#pragma once

#include "cutlass/array.h"
#include "cutlass/cutlass.h"

namespace atomr_cutlass {

struct Relu {
  // Written so that NaN stays NaN.
  CUTLASS_DEVICE static float apply(float x) { return x < 0.0f ? 0.0f : x; }
};

struct LeakyRelu {
  CUTLASS_DEVICE static float apply(float x) { return x > 0.0f ? x : 0.01f * x; }
};

struct Sigmoid {
  CUTLASS_DEVICE static float apply(float x) { return 1.0f / (1.0f + expf(-x)); }
};

struct Silu {
  CUTLASS_DEVICE static float apply(float x) { return x * Sigmoid::apply(x); }
};

struct Tanh {
  CUTLASS_DEVICE static float apply(float x) { return tanhf(x); }
};

struct Hardswish {
  CUTLASS_DEVICE static float apply(float x) {
    float const shifted = x + 3.0f;
    // fminf and fmaxf would turn NaN into a number; the product with x keeps it.
    return x * fminf(fmaxf(shifted, 0.0f), 6.0f) * (1.0f / 6.0f);
  }
};

struct Gelu {
  CUTLASS_DEVICE static float apply(float x) { return 0.5f * x * erfcf(x * -0.70710678118654752f); }
};

struct GeluTanh {
  // (1 + tanh(t)) / 2 is sigmoid(2 t), which does not cancel for negative t.
  CUTLASS_DEVICE static float apply(float x) {
    return x * Sigmoid::apply(2.0f * 0.79788456080286536f * x * (1.0f + 0.044715f * x * x));
  }
};

// CUTLASS wants a template over the element type, which is instantiated for single values and for arrays.
template <class Function>
struct Activation {
  template <class T>
  struct Of {
    static bool const kIsHeavy = true;
    CUTLASS_DEVICE T operator()(T const& x) const { return Function::apply(x); }
  };
  template <class T, int kCount>
  struct Of<cutlass::Array<T, kCount>> {
    static bool const kIsHeavy = true;
    CUTLASS_DEVICE cutlass::Array<T, kCount> operator()(cutlass::Array<T, kCount> const& x) const {
      cutlass::Array<T, kCount> result;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) result[i] = Function::apply(x[i]);
      return result;
    }
  };
};

}  // namespace atomr_cutlass
