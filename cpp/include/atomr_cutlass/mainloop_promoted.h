// The mainloops of fp8 products in full accumulation, with scales of blocks or without: those of mainloop_tma.h, whose
// sums are added to others.
//
// Of the tensor cores' sums of fp8, 14 bits count: those of 128 elements of K are added to others in float, each times
// its scale if there are scales of blocks. CUTLASS's mainloops have as many registers for the one as for the other, and
// let the tensor cores wait while a warp group adds up. Here it multiplies the next block of K meanwhile, into a second
// set of registers for what is to be added up (kSets = 2); or tiles are so wide that there is room for one set of 64
// rows alone (kSets = 1), and the other warp group's products fill the time.
#pragma once

#include "atomr_cutlass/mainloop_tma.h"
#include "atomr_cutlass/wgmma.h"
#include "cute/arch/cluster_sm90.hpp"
#include "cute/arch/copy_sm80.hpp"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/cutlass.h"
#include "cutlass/gemm/collective/collective_mma.hpp"
#include "cutlass/gemm/dispatch_policy.hpp"

namespace atomr_cutlass {

// From one scale of blocks to the next: of rows of A and of its blocks of K, of column blocks of B and of its blocks of
// K. A block has one row of A, 128 columns of B, and 128 elements of K.
struct BlockScaleStrides {
  int64_t row, row_k, column, column_k;
};

// The scales of one product, which has this many rows and column blocks.
struct BlockScaleMatrices {
  static constexpr int kColumns = 128;

  float const* a;
  float const* b;
  int rows, columns;

  template <class Problem>
  CUTLASS_DEVICE static BlockScaleMatrices of(Problem const& problem, float const* a, float const* b) {
    return {a, b, int(cute::get<0>(problem)), (int(cute::get<1>(problem)) + kColumns - 1) / kColumns};
  }
};

// Base: TmaMainloop. kAhead: whether a second set of registers is used where there is room.
template <class Base, bool kScaled, bool kAhead>
struct PromotedMainloop : Base {
  using Base::kGroups;
  using Base::kM;
  using Base::kN;
  using Base::kStages;
  using typename Base::MainloopPipeline;
  using typename Base::PipelineState;
  using typename Base::PipelineStorage;
  using typename Base::TileA;
  using typename Base::TileB;
  // The thread that has TMA load operands, and the warp that copies scales.
  static constexpr int NumProducerThreadEvents = kScaled ? 33 : 1;

  static constexpr int kParts = Base::kAlongM;  // of 64 rows, that a warp group multiplies one by one
  static constexpr int kSets = kAhead && kParts == 1 && kN <= 128 ? 2 : 1;
  static constexpr int kSums = kN / 2;  // of a part, in a thread
  static_assert(Base::kK == 128);
  static_assert(!kScaled || kN == BlockScaleMatrices::kColumns, "a tile has one scale of B for each block of K");

  struct Scales {
    alignas(16) float scale_a[kStages * kM];
    alignas(16) float scale_b[kStages];
  };
  struct NoScales {};
  struct SharedStorage {
    struct TensorStorage : Base::TensorStorage, cute::conditional_t<kScaled, Scales, NoScales> {
    } tensors;
    PipelineStorage pipeline;
  };
  using TensorStorage = typename SharedStorage::TensorStorage;

  // Called by a warp. The last of `inputs` are BlockScaleMatrices.
  template <class Params, class Pipeline, class Inputs, class Where, class Steps>
  CUTLASS_DEVICE void load_auxiliary(Params const& params, Pipeline pipeline, PipelineState state, Inputs const& inputs,
                                     Where const& where, Steps step, int count, int lane, uint32_t,
                                     TensorStorage& shared) {
    using Copy = cute::SM80_CP_ASYNC_CACHEALWAYS<float>;
    BlockScaleMatrices const matrices = cute::get<2>(inputs);
    BlockScaleStrides const strides = params.strides;
    int const row = int(cute::get<0>(where)) * kM + lane, column = int(cute::get<1>(where)), k = int(*step);
    bool const has_b = lane == 0 && column < matrices.columns;
    // Once a stage is free nothing but the copies is left to do.
    float const* b = matrices.b + column * strides.column + k * strides.column_k;
    float const* a[kM / 32];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kM / 32; ++i) a[i] = matrices.a + (row + 32 * i) * strides.row + k * strides.row_k;

    CUTLASS_PRAGMA_NO_UNROLL
    for (; count > 0; --count) {
      pipeline.producer_acquire(state);
      int const stage = state.index();
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kM / 32; ++i) {
        if (row + 32 * i < matrices.rows) Copy::copy(*a[i], shared.scale_a[stage * kM + lane + 32 * i]);
        a[i] += strides.row_k;
      }
      if (has_b) Copy::copy(*b, shared.scale_b[stage]);
      b += strides.column_k;
      pipeline.producer_commit(state, cutlass::arch::cpasync_barrier_arrive_noinc);
      ++state;
    }
  }

  template <class Pipeline, class Accumulators, class Params>
  CUTLASS_DEVICE void mma(Pipeline pipeline, PipelineState read, Accumulators& accumulators, int count, int thread,
                          TensorStorage& shared, Params const&) {
    static_assert(decltype(cute::size(accumulators))::value == kParts * kSums);
    int const group = __shfl_sync(0xFFFFFFFF, thread / 128, 0);
    uint64_t const a = TileA::descriptor(shared.a) + TileA::further(64, 0) * group;
    uint64_t const b = TileB::descriptor(shared.b);
    float* const sums = accumulators.data();
    // The thread's two rows of each part.
    int const row = group * 64 + thread % 128 / 32 * 16 + thread % 32 / 4;

    float first[kSums], scale_first[2] = {1, 1};

    // Multiplies a part, and reads its scales meanwhile.
    auto const issue = [&](int part, int stage, float (&to)[kSums], float (&scale)[2]) {
      wgmma_fence(to);
      cute::warpgroup_arrive();
      uint64_t const at_a = a + stage * (TileA::kBytes / 16), at_b = b + stage * (TileB::kBytes / 16);
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < Base::kK; k += Base::kDeep) {
        uint64_t const part_a = at_a + TileA::further(part * 64 * kGroups, k);
        CUTLASS_PRAGMA_UNROLL
        for (int n = 0; n < kN; n += Base::kWide) {
          uint64_t const part_b = at_b + TileB::further(n, k);
          if constexpr (Base::kWhole) {
            Base::Whole::multiply(part_a, part_b, [&](int i) -> float& { return to[i]; }, k > 0);
          } else {
            Base::instruct(part_a, part_b, to + n / 2, k > 0, cute::make_int_sequence<Base::kRegisters>{});
          }
        }
      }
      cute::warpgroup_commit_batch();
      wgmma_fence(to);
      if constexpr (kScaled) {
        float const of_b = shared.scale_b[stage];
        float const* of_a = &shared.scale_a[stage * kM + part * 64 * kGroups + row];
        scale[0] = of_a[0] * of_b;
        scale[1] = of_a[8] * of_b;
      }
    };
    auto const promote = [&](int part, float (&from)[kSums], float const(&scale)[2]) {
      wgmma_fence(from);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSums; ++i) {
        // Those of an instruction of CuTe's, of all parts, then those of the next one along N.
        constexpr int kTogether = Base::kRegisters;
        float& sum = sums[i % kTogether + (part + i / kTogether * kParts) * kTogether];
        sum = kScaled ? sum + scale[i / 2 % 2] * from[i] : sum + from[i];
      }
    };

    cute::clear(accumulators);
    if constexpr (kSets == 1) {
      auto there = pipeline.consumer_try_wait(read);
      for (; count > 0; --count) {
        pipeline.consumer_wait(read, there);
        CUTLASS_PRAGMA_UNROLL
        for (int part = 0; part < kParts; ++part) {
          issue(part, read.index(), first, scale_first);
          cute::warpgroup_wait<0>();
          if (part == kParts - 1) {
            pipeline.consumer_release(read);
            ++read;
            // Of what never comes the hardware would wait for long.
            if (count > 1) there = pipeline.consumer_try_wait(read);
          }
          promote(part, first, scale_first);
        }
      }
    } else {
      // The loop is free of branches: the compiler would otherwise wait for all products before it lets any registers
      // of theirs be read.
      PipelineState done = read;
      auto const next = [&](float (&to)[kSums], float (&to_scale)[2], float (&from)[kSums], float (&from_scale)[2]) {
        pipeline.consumer_wait(read);
        issue(0, read.index(), to, to_scale);
        ++read;
        cute::warpgroup_wait<1>();
        pipeline.consumer_release(done);
        ++done;
        promote(0, from, from_scale);
      };
      float second[kSums], scale_second[2] = {1, 1};
      pipeline.consumer_wait(read);
      issue(0, read.index(), first, scale_first);
      ++read;
      for (--count; count > 1; count -= 2) {
        next(second, scale_second, first, scale_first);
        next(first, scale_first, second, scale_second);
      }
      if (count == 1) {
        next(second, scale_second, first, scale_first);
        cute::warpgroup_wait<0>();
        promote(0, second, scale_second);
      } else {
        cute::warpgroup_wait<0>();
        promote(0, first, scale_first);
      }
      pipeline.consumer_release(done);
    }
  }

  // `mma` has released everything.
  template <class Pipeline>
  CUTLASS_DEVICE void mma_tail(Pipeline const&, PipelineState, int) {}
  template <class Pipeline>
  CUTLASS_DEVICE static void release_last(Pipeline&, PipelineState, int) {}
};

// One with scales of blocks, of the product that the kernel computes. Base: PromotedMainloop. Scales: a pointer to
// them, or to such pointers.
template <class Base, class Scales = float const*>
struct BlockScaledMainloop : Base {
  struct Arguments : Base::Arguments {
    Scales ptr_SFA, ptr_SFB;
    BlockScaleStrides strides;
  };
  struct Params : Base::Params {
    Scales scale_a, scale_b;
    BlockScaleStrides strides;
  };

  template <class Problem>
  static Params to_underlying_arguments(Problem const& problem, Arguments const& args, void* workspace) {
    return {Base::to_underlying_arguments(problem, args, workspace), args.ptr_SFA, args.ptr_SFB, args.strides};
  }

  template <class Problem>
  CUTLASS_DEVICE auto load_init(Problem const& problem, Params const& params) const {
    auto const tiles = Base::load_init(problem, params);
    return cute::make_tuple(cute::get<0>(tiles), cute::get<1>(tiles),
                            BlockScaleMatrices::of(problem, params.scale_a, params.scale_b));
  }
};

// The mainloop for what CUTLASS's builder makes; Built itself unless it is of fp8 in full accumulation.
template <class Built>
struct PromotedMainloopOf {
  using Type = Built;
};
template <int kStages, class Cluster, class Schedule, class Tile, class ElementA, class StrideA, class ElementB,
          class StrideB, class TiledMma, class... Copies>
struct PromotedMainloopOf<cutlass::gemm::collective::CollectiveMma<
    cutlass::gemm::MainloopSm90TmaGmmaWarpSpecializedFP8<kStages, Cluster, Schedule>, Tile, ElementA, StrideA, ElementB,
    StrideB, TiledMma, Copies...>> {
  using Type =
      PromotedMainloop<TmaMainloop<cutlass::gemm::MainloopSm90TmaGmmaWarpSpecializedFP8<kStages, Cluster, Schedule>,
                                   Tile, ElementA, StrideA, ElementB, StrideB, TiledMma>,
                       false, true>;
};
// Of those with scales of blocks only cooperative ones multiply ahead: small tiles, which wait for memory, lose by it.
template <int kStages, class Cluster, class Schedule, class Tile, class ElementA, class StrideA, class ScalesA,
          class ElementB, class StrideB, class ScalesB, class TiledMma, class... Copies>
struct PromotedMainloopOf<cutlass::gemm::collective::CollectiveMma<
    cutlass::gemm::MainloopSm90TmaGmmaWarpSpecializedBlockwiseFP8<kStages, Cluster, Schedule>, Tile, ElementA,
    cute::tuple<StrideA, ScalesA>, ElementB, cute::tuple<StrideB, ScalesB>, TiledMma, Copies...>> {
  using Type = BlockScaledMainloop<PromotedMainloop<
      TmaMainloop<cutlass::gemm::MainloopSm90TmaGmmaWarpSpecializedBlockwiseFP8<kStages, Cluster, Schedule>, Tile,
                  ElementA, StrideA, ElementB, StrideB, TiledMma>,
      true, cute::is_same_v<Schedule, cutlass::gemm::KernelTmaWarpSpecializedCooperativeFP8Blockwise>>>;
};

}  // namespace atomr_cutlass
