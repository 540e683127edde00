// The mainloop of tf32 GEMMs of the sm90 generation in which one operand reaches the tensor cores through registers,
// because WGMMA reads tf32 from shared memory contiguous along K only, in the place of CUTLASS's. Loads are those of
// mainloop_tma.h; products come in the order of CUTLASS's, and elements for one are read while those before it run.
//
// Included by cells that need it: other kernels stay what they are.
#pragma once

#include "atomr_cutlass/mainloop_tma.h"

namespace atomr_cutlass {

// Of a column-major A and a column-major B.
template <class Policy, class Tile, class ElementA, class StrideA, class ElementB, class StrideB, class TiledMma>
struct RegisterMainloop : TmaMainloop<Policy, Tile, ElementA, StrideA, ElementB, StrideB, TiledMma> {
  using Base = TmaMainloop<Policy, Tile, ElementA, StrideA, ElementB, StrideB, TiledMma>;
  using typename Base::Instruction;
  using typename Base::MainloopPipeline;
  using typename Base::Params;
  using typename Base::PipelineState;
  using typename Base::PipelineStorage;
  using typename Base::Register;
  using typename Base::TileA;
  using typename Base::TileB;
  static constexpr int kAlongM = Base::kAlongM, kGroups = Base::kGroups, kN = Base::kN, kRegisters = Base::kRegisters;
  static constexpr int kDeep = Base::kDeep, kProducts = Base::kK / kDeep;  // along K, of a stage
  static_assert(sizeof(ElementA) == 4 && kDeep == 8 && kProducts > 2 && Base::kWide == Base::kNarrow);
  static_assert(TileA::kAlongRows && !TileB::kAlongRows && TileA::Boxes::kWidthBytes == 128);

  // The hardware swizzles addresses: places in tiles are theirs where tiles begin at whole patterns.
  struct SharedStorage {
    struct alignas(1024) TensorStorage : Base::TensorStorage {};
    PipelineStorage pipeline;
  };
  using TensorStorage = typename SharedStorage::TensorStorage;

  // A thread's elements of A of a product: two rows that are eight apart, of two columns that are four apart.
  static constexpr int kElements = 4;
  struct Elements {
    uint32_t values[kAlongM][kElements];
  };

  // Reads them from a stage. A product further they lie eight lines further, which the swizzle permits to add.
  struct Reader {
    char const* at[kElements];

    CUTLASS_DEVICE Reader(char const* tile, int thread) {
      int const lane = thread % 32, row = thread / 32 * 16 + lane / 4, k = lane % 4;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kElements; ++i) {
        at[i] = tile + TileA::Boxes::place(k + i / 2 * 4, (row + i % 2 * 8) * int(sizeof(uint32_t)));
      }
    }
    CUTLASS_DEVICE void read(Elements& into, int stage, int product) const {
      CUTLASS_PRAGMA_UNROLL
      for (int m = 0; m < kAlongM; ++m) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kElements; ++i) {
          int const further = stage * TileA::kBytes + TileA::Boxes::offset(product * kDeep, m * 64 * kGroups * 4);
          into.values[m][i] = *reinterpret_cast<uint32_t const*>(at[i] + further);
        }
      }
    }
  };

  template <int... kRegister>
  CUTLASS_DEVICE static void instruct(uint32_t const (&a)[kElements], uint64_t b, Register* sums, bool add,
                                      cute::int_sequence<kRegister...>) {
    Instruction::fma(a[0], a[1], a[2], a[3], b, sums[kRegister]...,
                     add ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
  }

  template <class Pipeline, class Sums>
  CUTLASS_DEVICE void mma(Pipeline pipeline, PipelineState state, Sums& sums, int count, int thread,
                          TensorStorage& shared, Params const&) {
    PipelineState released = state;
    Reader const reader(shared.a, thread);
    uint64_t const b = TileB::descriptor(shared.b);
    auto* const registers = reinterpret_cast<Register*>(sums.data());
    Elements elements[kProducts];

    auto token = pipeline.consumer_try_wait(state);
    auto const multiply = [&](int stage, int product, bool add) {
      cute::warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int m = 0; m < kAlongM; ++m) {
        CUTLASS_PRAGMA_UNROLL
        for (int n = 0; n < kN / Base::kWide; ++n) {
          instruct(elements[product].values[m],
                   b + stage * (TileB::kBytes / 16) + TileB::further(n * Base::kWide, product * kDeep),
                   registers + (m + n * kAlongM) * kRegisters, add, cute::make_int_sequence<kRegisters>{});
        }
      }
      cute::warpgroup_commit_batch();
    };

    cute::warpgroup_fence_operand(sums);
    pipeline.consumer_wait(state, token);
    reader.read(elements[0], state.index(), 0);
    bool add = false;
    CUTLASS_PRAGMA_NO_UNROLL
    for (; count > 0; --count) {
      int const stage = state.index();
      ++state;
      cute::warpgroup_fence_operand(sums);
      CUTLASS_PRAGMA_UNROLL
      for (int product = 0; product < kProducts; ++product) {
        if (product == 0 && count > 1) token = pipeline.consumer_try_wait(state);
        if (product < kProducts - 1) {
          reader.read(elements[product + 1], stage, product + 1);
        } else if (count > 1) {
          pipeline.consumer_wait(state, token);
          reader.read(elements[0], state.index(), 0);
        }
        multiply(stage, product, product > 0 || add);
        // With the last two products under way, those before have ended: their elements may be overwritten, and after
        // the second one the stage before is free.
        cute::warpgroup_wait<2>();
        if (product == 1 && add) {
          pipeline.consumer_release(released);
          ++released;
        }
      }
      cute::warpgroup_fence_operand(sums);
      add = true;
    }
    cute::warpgroup_fence_operand(sums);
  }
};

// With both operands row-major: of D^T = B^T A^T, whose first operand is B. The kernel swaps M and N itself.
template <class Mainloop>
struct SwappedMainloop : Mainloop {
  using ElementA = typename Mainloop::ElementB;
  using StrideA = typename Mainloop::StrideB;
  using ElementB = typename Mainloop::ElementA;
  using StrideB = typename Mainloop::StrideA;
  static constexpr bool SwapAB = true;  // CUTLASS's kernels look for it

  struct Arguments {
    ElementA const* ptr_A;
    StrideA dA;
    ElementB const* ptr_B;
    StrideB dB;

    typename Mainloop::Arguments swapped() const { return {ptr_B, dB, ptr_A, dA}; }
  };

  template <class Problem>
  static auto swapped(Problem const& problem) {
    return cute::make_shape(cute::get<1>(problem), cute::get<0>(problem), cute::get<2>(problem), cute::get<3>(problem));
  }
  template <class Problem>
  static auto to_underlying_arguments(Problem const& problem, Arguments const& args, void* workspace) {
    return Mainloop::to_underlying_arguments(swapped(problem), args.swapped(), workspace);
  }
  template <class Problem>
  static bool can_implement(Problem const& problem, Arguments const& args) {
    return Mainloop::can_implement(swapped(problem), args.swapped());
  }
};

template <int kStages, class Cluster, class Schedule, class Tile, class StrideA, class StrideB, class TiledMma,
          class CopyA, class LayoutA, class ReadA, class CopyB, class LayoutB, class ReadB>
struct TmaMainloopOf<cutlass::gemm::collective::CollectiveMma<
    cutlass::gemm::MainloopSm90TmaGmmaRmemAWarpSpecialized<kStages, Cluster, Schedule>, Tile, float, StrideA, float,
    StrideB, TiledMma, CopyA, LayoutA, ReadA, cute::identity, CopyB, LayoutB, ReadB, cute::identity>> {
  using Policy = cutlass::gemm::MainloopSm90TmaGmmaRmemAWarpSpecialized<kStages, Cluster, Schedule>;
  template <class First, class Second>
  using Of = RegisterMainloop<Policy, Tile, float, First, float, Second, TiledMma>;
  static constexpr bool kSwapped = !cutlass::gemm::detail::is_major<0, StrideA>();
  // With both of them contiguous along rows, CUTLASS's kernels transpose the second in shared memory.
  static_assert(kSwapped == cutlass::gemm::detail::is_major<0, StrideB>(), "one operand is contiguous along K");
  using Type = cute::conditional_t<kSwapped, SwappedMainloop<Of<StrideB, StrideA>>, Of<StrideA, StrideB>>;
};

}  // namespace atomr_cutlass
