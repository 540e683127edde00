// GEMM cells of the sm90 generation that add up K in slices, one after the other: each slice by itself, then the slices
// in their order. So do cells that compute slices side by side and the kernel that adds them up (cast.h), whose bits
// these give, without a workspace.
//
// Functions without an annotation run on the host when nvcc compiles them, and on the device under NVRTC, whose
// -default-device makes them device functions.
#pragma once

#include "atomr_cutlass/cell_3x.h"
#include "atomr_cutlass/gemm_sm90.h"
#include "atomr_cutlass/kernel_abi.h"
#include "atomr_cutlass/persistent_sm90.h"
#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"

namespace atomr_cutlass {

// A mainloop of ours with a second set of sums.
template <class Base>
struct SlicedSums : Base {
  using Base::Base;
  struct Arguments : Base::Arguments {
    int32_t slices = 1;
  };
  struct Params : Base::Params {
    int32_t steps;  // of a slice
  };

  template <class Shape>
  static Params to_underlying_arguments(Shape const& shape, Arguments const& args, void* workspace) {
    constexpr int kStep = cute::size<2>(typename Base::TileShape{});
    int32_t const steps = cute::ceil_div(int32_t(cute::get<2>(shape)), kStep);
    return {Base::to_underlying_arguments(shape, args, workspace), cute::ceil_div(steps, args.slices)};
  }

  template <class Pipeline, class Sums>
  CUTLASS_DEVICE void mma(Pipeline pipeline, typename Base::PipelineState state, Sums& sums, int count, int thread,
                          typename Base::TensorStorage& shared, Params const& params) {
    Sums slice;
    cute::clear(sums);
    CUTLASS_PRAGMA_NO_UNROLL
    for (; count > 0; count -= params.steps) {
      int const steps = cute::min(count, params.steps);
      Base::mma(pipeline, state, slice, steps, thread, shared, params);
      if (count > params.steps) {
        Base::mma_tail(pipeline, state, steps);
        state.advance(steps);
      } else {
        // The kernel frees the last stage.
        cute::warpgroup_wait<0>();
      }
      cute::warpgroup_fence_operand(slice);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < cute::size(sums); ++i) sums(i) += slice(i);
    }
  }
};

template <class Whole>
struct GemmSlicedSm90 {
  using Args = typename Whole::Args;
  static_assert(Whole::kOwnKernel && !Whole::kSliced);
  using Kernel = PersistentGemm<SlicedSums<typename Whole::CollectiveMainloop>, typename Whole::CollectiveEpilogue>;
  static constexpr bool kDependent = true;

  static typename Kernel::Arguments arguments(Args const& args) {
    auto result = gemm_arguments<Kernel>(args, false);
    result.settled = args.settled;
    result.mainloop.slices = args.split_k;
    return result;
  }
  static bool can_implement(Args const& args) { return args.split_k > 0 && Kernel::can_implement(arguments(args)); }
  static void clear_range(Args const&, uint64_t& offset, uint64_t& bytes) { offset = bytes = 0; }
};

// The cell of another one, which adds up K as a whole.
template <class Cell>
struct SlicedCell;
template <class Whole>
struct SlicedCell<Cell3x<Whole>> : Cell3x<GemmSlicedSm90<Whole>> {};

}  // namespace atomr_cutlass
