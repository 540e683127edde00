// A mainloop of fp8 products in full accumulation, over the loads and the pipeline of one of CUTLASS's.
//
// Of the tensor cores' sums of fp8, 14 bits count: those of 128 elements of K are added to others in float, each times
// its scale if there are scales of blocks. CUTLASS's mainloops have as many registers for the one as for the other, and
// let the tensor cores wait while a warp group adds up. Here it multiplies the next block of K meanwhile, into a second
// set of registers for what is to be added up (kSets = 2); or tiles are so wide that there is room for one set of 64
// rows alone (kSets = 1), and the other warp group's products fill the time.
#pragma once

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/gemm/collective/collective_mma.hpp"

namespace atomr_cutlass {

template <class Mainloop, bool kScaled>
struct PromotedMainloop : Mainloop {
  using Mainloop::Mainloop;
  using typename Mainloop::MainloopPipeline;
  using typename Mainloop::Params;
  using typename Mainloop::PipelineState;
  using typename Mainloop::TensorStorage;
  using typename Mainloop::TiledMma;

  static constexpr int kTileM = cute::size<0>(typename Mainloop::TileShape{});
  static constexpr int kTileN = cute::size<1>(typename Mainloop::TileShape{});
  static constexpr int kWarpGroup = cutlass::NumThreadsPerWarpGroup;
  static constexpr int kGroups = cute::size(TiledMma{}) / kWarpGroup;
  static constexpr int kParts = kTileM / (64 * kGroups);  // of 64 rows, that a warp group multiplies one by one
  static constexpr int kSets = kParts == 1 && kTileN <= 128 ? 2 : 1;
  static_assert(cute::size<1>(typename TiledMma::AtomShape_MNK{}) == kTileN, "one instruction is as wide as a tile");
  static_assert(!kScaled || kTileN == 128, "a tile has one scale of B for each block of K");
  static_assert(kParts == 1 || kParts == 2);

  template <class Accumulators>
  CUTLASS_DEVICE void mma(MainloopPipeline pipeline, PipelineState read, Accumulators& sums, int k_tiles, int thread,
                          TensorStorage& shared, Params const&) {
    using namespace cute;
    int const group = __shfl_sync(0xffffffffu, thread / kWarpGroup, 0);
    TiledMma tiled_mma;
    auto const slice = tiled_mma.get_slice(Layout<Int<kGroups>, Int<kWarpGroup>>{}(group));
    Tensor const a = slice.make_fragment_A(
        slice.partition_A(make_tensor(make_smem_ptr(shared.smem_A.data()), typename Mainloop::SmemLayoutA{})));
    Tensor const b = slice.make_fragment_B(
        slice.partition_B(make_tensor(make_smem_ptr(shared.smem_B.data()), typename Mainloop::SmemLayoutB{})));

    using Part = decltype(make_fragment_like(sums(_, _0{}, _0{})));
    Part first;
    // The thread's two rows of each part.
    int const row = group * 64 + thread % kWarpGroup / 32 * 16 + thread % 32 / 4;
    float scale_first[2] = {1, 1};

    // Multiplies a part, and reads its scales meanwhile.
    auto const issue = [&](int part, int stage, Part& to, float (&scale)[2]) {
      warpgroup_fence_operand(to);
      warpgroup_arrive();
      tiled_mma.accumulate_ = GMMA::ScaleOut::Zero;
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < size<2>(a); ++k) {
        cute::gemm(tiled_mma, a(_, part, k, stage), b(_, _0{}, k, stage), to);
        tiled_mma.accumulate_ = GMMA::ScaleOut::One;
      }
      warpgroup_commit_batch();
      warpgroup_fence_operand(to);
      if constexpr (kScaled) {
        float const of_b = shared.smem_SFB[stage];
        float const* of_a = &shared.smem_SFA[stage * kTileM + part * 64 * kGroups + row];
        scale[0] = of_a[0] * of_b;
        scale[1] = of_a[8] * of_b;
      }
    };
    auto const promote = [&](int part, Part& from, float const(&scale)[2]) {
      warpgroup_fence_operand(from);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < size(from); ++i) {
        float& sum = sums(_, part, _0{})(i);
        sum = kScaled ? sum + scale[i / 2 % 2] * from(i) : sum + from(i);
      }
    };

    clear(sums);
    if constexpr (kSets == 1) {
      for (; k_tiles > 0; --k_tiles) {
        pipeline.consumer_wait(read);
        CUTLASS_PRAGMA_UNROLL
        for (int part = 0; part < kParts; ++part) {
          issue(part, read.index(), first, scale_first);
          warpgroup_wait<0>();
          if (part == kParts - 1) pipeline.consumer_release(read);
          promote(part, first, scale_first);
        }
        ++read;
      }
    } else {
      // The loop is free of branches: the compiler would otherwise wait for all products before it lets any registers
      // of theirs be read.
      PipelineState done = read;
      auto const next = [&](Part& to, float (&to_scale)[2], Part& from, float const(&from_scale)[2]) {
        pipeline.consumer_wait(read);
        issue(0, read.index(), to, to_scale);
        ++read;
        warpgroup_wait<1>();
        pipeline.consumer_release(done);
        ++done;
        promote(0, from, from_scale);
      };
      Part second;
      float scale_second[2] = {1, 1};
      pipeline.consumer_wait(read);
      issue(0, read.index(), first, scale_first);
      ++read;
      for (--k_tiles; k_tiles > 1; k_tiles -= 2) {
        next(second, scale_second, first, scale_first);
        next(first, scale_first, second, scale_second);
      }
      if (k_tiles == 1) {
        next(second, scale_second, first, scale_first);
        warpgroup_wait<0>();
        promote(0, second, scale_second);
      } else {
        warpgroup_wait<0>();
        promote(0, first, scale_first);
      }
      pipeline.consumer_release(done);
    }
  }

  // `mma` has released everything.
  CUTLASS_DEVICE void mma_tail(MainloopPipeline, PipelineState, int) {}
};

// The mainloop for one that CUTLASS's builder makes: of fp8 in full accumulation, ours.
template <class Mainloop>
struct PromotedMainloopOf {
  using Type = Mainloop;
};
template <int kStages, class Cluster, class Schedule, class... Rest>
struct PromotedMainloopOf<cutlass::gemm::collective::CollectiveMma<
    cutlass::gemm::MainloopSm90TmaGmmaWarpSpecializedFP8<kStages, Cluster, Schedule>, Rest...>> {
  using Type =
      PromotedMainloop<cutlass::gemm::collective::CollectiveMma<
                           cutlass::gemm::MainloopSm90TmaGmmaWarpSpecializedFP8<kStages, Cluster, Schedule>, Rest...>,
                       false>;
};
// Of those with scales of blocks the cooperative ones: small tiles, which wait for memory, gain nothing.
template <int kStages, class Cluster, class... Rest>
struct PromotedMainloopOf<cutlass::gemm::collective::CollectiveMma<
    cutlass::gemm::MainloopSm90TmaGmmaWarpSpecializedBlockwiseFP8<
        kStages, Cluster, cutlass::gemm::KernelTmaWarpSpecializedCooperativeFP8Blockwise>,
    Rest...>> {
  using Type =
      PromotedMainloop<cutlass::gemm::collective::CollectiveMma<
                           cutlass::gemm::MainloopSm90TmaGmmaWarpSpecializedBlockwiseFP8<
                               kStages, Cluster, cutlass::gemm::KernelTmaWarpSpecializedCooperativeFP8Blockwise>,
                           Rest...>,
                       true>;
};

}  // namespace atomr_cutlass
