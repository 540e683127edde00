// The epilogue trees that most programs ask for, in one kernel: an activation of acc + a row, or of acc. Which
// activation and what row, if any, the arguments say. A residual is C.
#pragma once

#include "atomr_cutlass/epilogue_tree.h"

namespace atomr_cutlass {

// kNarrow: what is stored has at most 16 bits. The order of `chosen` is that of the generator's COMMON_ACTIVATIONS.
template <bool kNarrow>
struct CommonTree {
  using Value = float;
  using Inputs = Operands<TreeInput<Lies::kRow, Told>>;
  using Outputs = Operands<>;

  struct Plain {
    CUTLASS_DEVICE static float evaluate(float acc, float const* in, float*) { return acc + in[0]; }
  };
  struct Relu {
    CUTLASS_DEVICE static float evaluate(float acc, float const* in, float*) { return ops::relu(acc + in[0]); }
  };
  struct Gelu {
    CUTLASS_DEVICE static float evaluate(float acc, float const* in, float*) {
      return kNarrow ? ops::narrow::gelu(acc + in[0]) : ops::gelu(acc + in[0]);
    }
  };
  struct GeluTanh {
    CUTLASS_DEVICE static float evaluate(float acc, float const* in, float*) {
      return kNarrow ? ops::narrow::gelu_tanh(acc + in[0]) : ops::gelu_tanh(acc + in[0]);
    }
  };
  struct Silu {
    CUTLASS_DEVICE static float evaluate(float acc, float const* in, float*) {
      return kNarrow ? ops::narrow::silu(acc + in[0]) : ops::silu(acc + in[0]);
    }
  };

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
