// GEMM cells of the sm90 generation whose launch chooses how many columns a tile has: one kernel with a body for each
// width, among which it chooses at its start, so that each has the loops, the stages and the epilogue of a kernel of
// its own.
//
// Functions without an annotation run on the host when nvcc compiles them, and on the device under NVRTC, whose
// -default-device makes them device functions.
#pragma once

#include "atomr_cutlass/cell_3x.h"
#include "atomr_cutlass/gemm_sm90.h"
#include "atomr_cutlass/kernel_abi.h"
#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"

namespace atomr_cutlass {

// The same cell with tiles of another width.
template <class Cell, int kWidth>
struct OfWidth;
template <class A, class LayoutA, int kAlignA, class B, class LayoutB, int kAlignB, class D, class LayoutD, int kAlignD,
          class Accumulator, class Compute, class M, class N, class K, class... Others, int kWidth>
struct OfWidth<Cell3x<GemmSm90<A, LayoutA, kAlignA, B, LayoutB, kAlignB, D, LayoutD, kAlignD, Accumulator, Compute,
                               cute::Shape<M, N, K>, Others...>>,
               kWidth> {
  using Type = Cell3x<GemmSm90<A, LayoutA, kAlignA, B, LayoutB, kAlignB, D, LayoutD, kAlignD, Accumulator, Compute,
                               cute::Shape<M, cute::Int<kWidth>, K>, Others...>>;
};

// What the cells of all widths from kWidth on need.
template <class Cell, int kWidth, int kWidest, int kStep>
struct WidthNeeds {
  using Own = typename OfWidth<Cell, kWidth>::Type;
  using Wider = WidthNeeds<Cell, kWidth + kStep, kWidest, kStep>;
  static_assert(Own::kThreads == Wider::Own::kThreads &&
                alignof(typename Own::Params) == alignof(typename Wider::Own::Params));
  static constexpr int kSharedBytes = cute::max(Own::kSharedBytes, Wider::kSharedBytes);
  static constexpr int kParamsBytes = cute::max(int(sizeof(typename Own::Params)), Wider::kParamsBytes);
};
template <class Cell, int kWidest, int kStep>
struct WidthNeeds<Cell, kWidest, kWidest, kStep> {
  using Own = typename OfWidth<Cell, kWidest>::Type;
  static constexpr int kSharedBytes = Own::kSharedBytes, kParamsBytes = sizeof(typename Own::Params);
};

// The cells like Cell with tiles of kFirst to kWidest columns, in steps of kStep; a `width` of 0 is the widest.
template <class Cell, int kFirst, int kWidest, int kStep>
struct FittedCell {
  template <int kWidth>
  using Of = typename OfWidth<Cell, kWidth>::Type;
  using Widest = Of<kWidest>;
  using Needs = WidthNeeds<Cell, kFirst, kWidest, kStep>;
  using Args = typename Widest::Args;

  static constexpr bool kDependent = Widest::kDependent;
  static constexpr int kThreads = Widest::kThreads, kMinBlocks = Widest::kMinBlocks;
  static constexpr int kSharedBytes = Needs::kSharedBytes;
  static constexpr int kClusterM = Widest::kClusterM, kClusterN = Widest::kClusterN, kClusterK = Widest::kClusterK;

  struct Params {
    alignas(typename Widest::Params) char cell[Needs::kParamsBytes];  // those of the width's cell
    int32_t width;

    template <int kWidth>
    CUTLASS_HOST_DEVICE typename Of<kWidth>::Params& of() {
      return *reinterpret_cast<typename Of<kWidth>::Params*>(cell);
    }
    template <int kWidth>
    CUTLASS_HOST_DEVICE typename Of<kWidth>::Params const& of() const {
      return *reinterpret_cast<typename Of<kWidth>::Params const*>(cell);
    }
  };

  static int width(Args const& args) { return args.width == 0 ? kWidest : args.width; }

  static bool can_implement(Args const& args) {
    int const wanted = width(args);
    bool const known = wanted >= kFirst && wanted <= kWidest && (wanted - kFirst) % kStep == 0;
    return known && Widest::can_implement(args);
  }
  // Only stream-K kernels have a workspace.
  static uint64_t workspace_size(Args const& args) { return Widest::workspace_size(args); }
  static void clear_range(Args const& args, uint64_t& offset, uint64_t& bytes) {
    Widest::clear_range(args, offset, bytes);
  }

  static Params params(Args const& args) {
    Params result{};
    result.width = width(args);
    fill(result, args);
    return result;
  }
  template <int kWidth = kFirst>
  static void fill(Params& result, Args const& args) {
    if constexpr (kWidth < kWidest) {
      if (result.width != kWidth) return fill<kWidth + kStep>(result, args);
    }
    result.template of<kWidth>() = Of<kWidth>::params(args);
  }

  template <int kWidth = kFirst>
  static dim3 grid(Params const& params) {
    if constexpr (kWidth < kWidest) {
      if (params.width != kWidth) return grid<kWidth + kStep>(params);
    }
    return Of<kWidth>::grid(params.template of<kWidth>());
  }

  template <int kWidth = kFirst>
  CUTLASS_DEVICE static void run(Params const& params, char* shared) {
    if constexpr (kWidth < kWidest) {
      if (params.width != kWidth) return run<kWidth + kStep>(params, shared);
    }
    Of<kWidth>::run(params.template of<kWidth>(), shared);
  }
};

}  // namespace atomr_cutlass
