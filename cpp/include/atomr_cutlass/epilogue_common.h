// The epilogue trees that most programs ask for, in one kernel: an activation of acc + a row, or of acc. Which
// activation and what row, if any, the arguments say. A residual is C.
#pragma once

#include "atomr_cutlass/epilogue_tree.h"

namespace atomr_cutlass {

// kNarrow: what is stored has at most 16 bits. The order of `chosen` is that of the generator's COMMON_ACTIVATIONS.
template <bool kNarrow>
struct CommonTree {
  using Value = float;
  using Inputs = Operands<TreeInput<OperandLayout::kRow, Told>>;
  using Outputs = Operands<>;

  template <class Activation>
  struct Biased {
    CUTLASS_DEVICE static float evaluate(float acc, float const* in, float*) { return Activation::of(acc + in[0]); }
  };
  struct Plain : Biased<Plain> {
    CUTLASS_DEVICE static float of(float x) { return x; }
  };
  struct Relu : Biased<Relu> {
    CUTLASS_DEVICE static float of(float x) { return ops::relu(x); }
  };
  struct Gelu : Biased<Gelu> {
    CUTLASS_DEVICE static float of(float x) { return kNarrow ? ops::narrow::gelu(x) : ops::gelu(x); }
  };
  struct GeluTanh : Biased<GeluTanh> {
    CUTLASS_DEVICE static float of(float x) { return kNarrow ? ops::narrow::gelu_tanh(x) : ops::gelu_tanh(x); }
  };
  struct Silu : Biased<Silu> {
    CUTLASS_DEVICE static float of(float x) { return kNarrow ? ops::narrow::silu(x) : ops::silu(x); }
  };

  static constexpr int kRelu = 1;  // of `chosen`
  template <class Function>
  CUTLASS_DEVICE static void chosen(int number, Function const& f) {
    switch (number) {
      case 1: return f(Relu{});
      case 2: return f(Gelu{});
      case 3: return f(GeluTanh{});
      case 4: return f(Silu{});
      default: return f(Plain{});
    }
  }
};

template <bool kNarrow>
inline constexpr bool kIsChosen<CommonTree<kNarrow>> = true;

}  // namespace atomr_cutlass
