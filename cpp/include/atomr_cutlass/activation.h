// Activation functions in the accumulator's precision, in the form in which CUTLASS's epilogues of both generations
// take them. CUTLASS's own tanh is an approximation of 11 bits, which is too few for results in fp32.
#pragma once

#include "atomr_cutlass/epilogue_ops.h"
#include "cutlass/array.h"
#include "cutlass/cutlass.h"

namespace atomr_cutlass {

struct Relu {
  CUTLASS_DEVICE static float apply(float x) { return ops::relu(x); }
};

struct LeakyRelu {
  CUTLASS_DEVICE static float apply(float x) { return ops::leaky_relu(x, 0.01f); }
};

struct Sigmoid {
  CUTLASS_DEVICE static float apply(float x) { return ops::sigmoid(x); }
};

struct Silu {
  CUTLASS_DEVICE static float apply(float x) { return ops::silu(x); }
};

struct Tanh {
  CUTLASS_DEVICE static float apply(float x) { return ops::tanh(x); }
};

struct Hardswish {
  CUTLASS_DEVICE static float apply(float x) { return ops::hardswish(x); }
};

struct Gelu {
  CUTLASS_DEVICE static float apply(float x) { return ops::gelu(x); }
};

struct GeluTanh {
  CUTLASS_DEVICE static float apply(float x) { return ops::gelu_tanh(x); }
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
