// The mainloop of warp-specialized GEMMs of the sm90 generation whose operands both come from shared memory, in the
// place of CUTLASS's: the same pipeline, the same products in the same order, and a fraction of its templates.
#pragma once

#include "atomr_cutlass/kernel_abi.h"
#include "atomr_cutlass/tma_tile.h"
#include "atomr_cutlass/wgmma.h"
#include "cute/arch/cluster_sm90.hpp"
#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/gemm/collective/collective_mma.hpp"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "cutlass/pipeline/pipeline.hpp"

namespace atomr_cutlass {

// The tile of an operand in shared memory: kRows of A, or columns of B, by kDepth of K. Each of kShares thread blocks
// of a cluster loads a part of it for all of them. Element: what TMA copies the operand as.
template <class Element, class Stride, int kRows, int kDepth, int kShares>
struct OperandTile {
  static constexpr bool kAlongRows = cutlass::gemm::detail::is_major<0, Stride>();
  using Boxes = TmaTile<Element, kAlongRows ? kRows : kDepth, kAlongRows ? kDepth : kRows>;
  static constexpr int kLines = (kAlongRows ? kDepth : kRows) / kShares;  // that one block loads
  static constexpr int kBytes = Boxes::kBytes;
  static_assert(kLines * kShares == (kAlongRows ? kDepth : kRows) && kLines * Boxes::kWidthBytes % 128 == 0);

  template <class Operand>
  static cute::TmaDescriptor map(Operand const* pointer, Stride const& stride, int rows, int depth, int batches) {
    int64_t const line_stride = cute::get<kAlongRows ? 1 : 0>(stride);
    return Boxes::map(pointer, kAlongRows ? rows : depth, kAlongRows ? depth : rows, batches, line_stride,
                      cute::get<2>(stride), kShares);
  }

  // `shared`: the blocks that get what this one loads.
  CUTLASS_DEVICE static void load(cute::TmaDescriptor const& map, uint64_t* full, uint16_t shared, char* to, int share,
                                  int row, int k, int batch) {
    int const along = kAlongRows ? row : k, line = (kAlongRows ? k : row) + share * kLines;
    char* const there = to + share * kLines * Boxes::kWidthBytes;
    if constexpr (kShares > 1) {
      Boxes::load_shared(map, full, shared, there, along, line, batch);
    } else {
      Boxes::load(map, full, there, along, line, batch);
    }
  }

  // What WGMMA is told of the operand: 16-byte units from the first 8 lines to the next ones, and from one box to the
  // next. Without a swizzle it wants them the other way round for operands contiguous along rows.
  CUTLASS_DEVICE static uint64_t descriptor(char const* tile) {
    constexpr bool kSwizzled = Boxes::kWidthBytes > 16;
    constexpr uint64_t kGroup = 8 * Boxes::kWidthBytes / 16,
                       kBox = kSwizzled && !kAlongRows ? 1 : Boxes::kBoxBytes / 16;
    constexpr bool kExchanged = !kSwizzled && kAlongRows;
    constexpr uint64_t kLayout = Boxes::kWidthBytes == 128  ? 1
                                 : Boxes::kWidthBytes == 64 ? 2
                                 : Boxes::kWidthBytes == 32 ? 3
                                                            : 0;
    return (cute::cast_smem_ptr_to_uint(tile) >> 4 & 0x3FFF) | (kExchanged ? kGroup : kBox) << 16 |
           (kExchanged ? kBox : kGroup) << 32 | kLayout << 62;
  }
  // From the start of the tile to a row and an element of K where an instruction begins, in 16-byte units.
  CUTLASS_DEVICE static constexpr int further(int row, int k) {
    return Boxes::offset(kAlongRows ? k : row, (kAlongRows ? row : k) * Boxes::kElementBytes) / 16;
  }
};

// Steps along K from one on.
struct StepsFrom {
  int at;
  CUTLASS_DEVICE int operator*() const { return at; }
  CUTLASS_DEVICE StepsFrom& operator++() {
    ++at;
    return *this;
  }
};

// The operands that are loaded: both, or those of the bits of kernel_abi.h for settled ones.
struct BothOperands {
  CUTLASS_DEVICE static constexpr bool a() { return true; }
  CUTLASS_DEVICE static constexpr bool b() { return true; }
};
struct SomeOperands {
  int32_t bits;
  CUTLASS_DEVICE bool a() const { return (bits & ATOMR_CUTLASS_A_SETTLED) != 0; }
  CUTLASS_DEVICE bool b() const { return (bits & ATOMR_CUTLASS_B_SETTLED) != 0; }
};

template <class Policy, class Tile, class ElementA_, class StrideA_, class ElementB_, class StrideB_, class TiledMma_>
struct TmaMainloop {
  // What CUTLASS's kernels ask for.
  using DispatchPolicy = Policy;
  using TileShape = Tile;
  using ElementA = ElementA_;
  using StrideA = StrideA_;
  using ElementB = ElementB_;
  using StrideB = StrideB_;
  using TiledMma = TiledMma_;
  using ElementAccumulator = typename TiledMma::ValTypeC;
  using ArchTag = typename DispatchPolicy::ArchTag;
  using Cluster = typename DispatchPolicy::ClusterShape;
  static constexpr int kStages = DispatchPolicy::Stages;
  using MainloopPipeline = cutlass::PipelineTmaAsync<kStages>;
  using PipelineState = cutlass::PipelineState<kStages>;
  static constexpr int NumProducerThreadEvents = 1;

  static constexpr int kM = cute::size<0>(Tile{}), kN = cute::size<1>(Tile{}), kK = cute::size<2>(Tile{});
  static constexpr int kClusterM = cute::size<0>(Cluster{}), kClusterN = cute::size<1>(Cluster{});
  // TMA makes tf32 of f32, and leaves the bits of all others alone.
  template <class Element>
  using Copied = cute::conditional_t<cute::is_same_v<Element, float>, cutlass::tfloat32_t,
                                     cute::uint_bit_t<cute::sizeof_bits_v<Element>>>;
  using TileA = OperandTile<Copied<ElementA>, StrideA, kM, kK, kClusterN>;
  using TileB = OperandTile<Copied<ElementB>, StrideB, kN, kK, kClusterM>;

  struct SharedStorage {
    struct TensorStorage {
      alignas(128) char a[kStages * TileA::kBytes];
      alignas(128) char b[kStages * TileB::kBytes];
    } tensors;
    using PipelineStorage = typename MainloopPipeline::SharedStorage;
    PipelineStorage pipeline;
  };
  using TensorStorage = typename SharedStorage::TensorStorage;
  using PipelineStorage = typename SharedStorage::PipelineStorage;

  struct Arguments {
    ElementA const* ptr_A;
    StrideA dA;
    ElementB const* ptr_B;
    StrideB dB;
  };
  struct Params {
    cute::TmaDescriptor a, b;
    uint32_t tma_transaction_bytes = TileA::kBytes + TileB::kBytes;
  };

  template <class Problem>
  static Params to_underlying_arguments(Problem const& problem, Arguments const& args, void*) {
    int const k = cute::get<2>(problem), batches = cute::get<3>(problem);
    Params result{};
    result.a = TileA::map(args.ptr_A, args.dA, cute::get<0>(problem), k, batches);
    result.b = TileB::map(args.ptr_B, args.dB, cute::get<1>(problem), k, batches);
    return result;
  }
  template <class Problem>
  static bool can_implement(Problem const& problem, Arguments const&) {
    constexpr int kAlignedA = 16 / int(sizeof(ElementA)), kAlignedB = 16 / int(sizeof(ElementB));
    return cute::get<TileA::kAlongRows ? 0 : 2>(problem) % kAlignedA == 0 &&
           cute::get<TileB::kAlongRows ? 1 : 2>(problem) % kAlignedB == 0;
  }

  CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& params) {
    cute::prefetch_tma_descriptor(&params.a);
    cute::prefetch_tma_descriptor(&params.b);
  }

  // The kernel looks for the numbers of tiles in the shapes of these tensors.
  template <class Problem>
  CUTLASS_DEVICE auto load_init(Problem const& problem, Params const&) const {
    auto const tiles = [](int extent, int tile) { return (extent + tile - 1) / tile; };
    int const along_k = tiles(cute::get<2>(problem), kK), batches = cute::get<3>(problem);
    auto const operand = [&](int along) {
      return cute::make_tensor(
          static_cast<char const*>(nullptr),
          cute::make_layout(cute::make_shape(cute::_1{}, cute::_1{}, along, along_k, batches),
                            cute::make_stride(cute::_0{}, cute::_0{}, cute::_0{}, cute::_0{}, cute::_0{})));
    };
    return cute::make_tuple(operand(tiles(cute::get<0>(problem), kM)), operand(tiles(cute::get<1>(problem), kN)));
  }

  template <class Inputs, class Where, class Steps>
  CUTLASS_DEVICE void load(Params const& params, MainloopPipeline pipeline, PipelineState state, Inputs const&,
                           Where const& where, Steps step, int count, int, uint32_t rank, TensorStorage& shared) {
    load_from(params.a, params.b, pipeline, state, where, step, count, rank, shared);
  }
  template <class Pipeline, class Where, class Operands = BothOperands>
  CUTLASS_DEVICE static void load_steps(bool issues, Params const& params, Pipeline& pipeline, PipelineState& state,
                                        Where const& where, int first, int count, uint32_t rank, TensorStorage& shared,
                                        Operands operands = {}) {
    load_tile(issues, params.a, params.b, pipeline, state, where, StepsFrom{first}, count, rank, shared, operands);
  }
  template <class Where, class Steps>
  CUTLASS_DEVICE static void load_from(cute::TmaDescriptor const& map_a, cute::TmaDescriptor const& map_b,
                                       MainloopPipeline pipeline, PipelineState state, Where const& where, Steps step,
                                       int count, uint32_t rank, TensorStorage& shared) {
    if (cute::elect_one_sync()) load_tile(true, map_a, map_b, pipeline, state, where, step, count, rank, shared);
  }
  // The operands of a tile, by the thread of a warp that `issues`. The others wait with it: so the values that TMA
  // takes stay in uniform registers. Leaves `state` behind the last step's.
  template <class Pipeline, class Where, class Steps, class Operands = BothOperands>
  CUTLASS_DEVICE static void load_tile(bool issues, cute::TmaDescriptor const& map_a, cute::TmaDescriptor const& map_b,
                                       Pipeline& pipeline, PipelineState& state, Where const& where, Steps step,
                                       int count, uint32_t rank, TensorStorage& shared, Operands operands = {}) {
    int const in_m = int(rank) % kClusterM, in_n = int(rank) / kClusterM;
    uint16_t shared_a = 0, shared_b = 0;
    for (int n = 0; n < kClusterN; ++n) shared_a |= uint16_t(1) << (in_m + n * kClusterM);
    for (int m = 0; m < kClusterM; ++m) shared_b |= uint16_t(1) << (m + in_n * kClusterM);
    int const m = int(cute::get<0>(where)) * kM, n = int(cute::get<1>(where)) * kN, batch = int(cute::get<3>(where));

    CUTLASS_PRAGMA_NO_UNROLL
    for (; count > 0; --count) {
      pipeline.producer_acquire(state);
      uint64_t* const full = pipeline.producer_get_barrier(state);
      int const k = int(*step) * kK, stage = state.index();
      if (issues && operands.a()) {
        TileA::load(map_a, full, shared_a, shared.a + stage * TileA::kBytes, in_n, m, k, batch);
      }
      if (issues && operands.b()) {
        TileB::load(map_b, full, shared_b, shared.b + stage * TileB::kBytes, in_m, n, k, batch);
      }
      ++step;
      ++state;
    }
  }

  // A block that left before its cluster has read what it loaded would take its shared memory with it.
  CUTLASS_DEVICE void load_tail(MainloopPipeline pipeline, PipelineState state) {
    if (cute::elect_one_sync()) pipeline.producer_tail(state);
  }

  // CuTe's instruction, or the one as wide as the tile where CuTe has but narrower ones: its sums lie in the registers
  // in the narrower ones' order.
  using Instruction = typename TiledMma::MMA_Op;
  using Register = typename cute::remove_extent<typename Instruction::CRegisters>::type;
  static constexpr int kRegisters = cute::extent<typename Instruction::CRegisters>::value;
  static constexpr int kGroups = decltype(cute::size(TiledMma{}))::value / 128;
  using Whole = Wgmma<ElementA, kN, TileA::kAlongRows, TileB::kAlongRows>;
  static constexpr int kNarrow = cute::size<1>(typename TiledMma::AtomShape_MNK{});
  static constexpr bool kWhole = kN != kNarrow && Whole::kDefined && cute::sizeof_bits_v<ElementA> <= 16 &&
                                 cute::is_same_v<ElementAccumulator, float> && cute::is_same_v<ElementA, ElementB>;
  static constexpr int kWide = kWhole ? kN : kNarrow;
  static constexpr int kDeep = cute::size<2>(typename TiledMma::AtomShape_MNK{});
  static constexpr int kAlongM = kM / (64 * kGroups);
  static_assert(kAlongM * 64 * kGroups == kM && kN % kNarrow == 0 && kK % kDeep == 0);
  static_assert(cute::sizeof_bits_v<ElementA> != 16 || kWide == kN,
                "a tile is as wide as the instruction that multiplies it: see wgmma_widths.h");

  template <int... kRegister>
  CUTLASS_DEVICE static void instruct(uint64_t a, uint64_t b, Register* sums, bool add,
                                      cute::int_sequence<kRegister...>) {
    Instruction::fma(a, b, sums[kRegister]...,
                     add ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
  }

  // A step of K. `add`: whether its first instructions add to the sums.
  CUTLASS_DEVICE static void multiply(uint64_t a, uint64_t b, Register* sums, bool add) {
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < kK; k += kDeep) {
      CUTLASS_PRAGMA_UNROLL
      for (int m = 0; m < kAlongM; ++m) {
        CUTLASS_PRAGMA_UNROLL
        for (int n = 0; n < kN / kWide; ++n) {
          uint64_t const at_a = a + TileA::further(m * 64 * kGroups, k), at_b = b + TileB::further(n * kWide, k);
          if constexpr (kWhole) {
            auto const sum = [&](int i) -> Register& {
              return sums[i % kRegisters + (m + i / kRegisters * kAlongM) * kRegisters];
            };
            Whole::multiply(at_a, at_b, sum, k > 0 || add);
          } else {
            instruct(at_a, at_b, sums + (m + n * kAlongM) * kRegisters, k > 0 || add,
                     cute::make_int_sequence<kRegisters>{});
          }
        }
      }
    }
  }

  template <class Pipeline, class Sums>
  CUTLASS_DEVICE void mma(Pipeline pipeline, PipelineState state, Sums& sums, int count, int thread,
                          TensorStorage& shared, Params const&) {
    static_assert(sizeof(typename Sums::value_type) == sizeof(Register));
    PipelineState released = state;
    int const group = __shfl_sync(0xFFFFFFFF, thread / 128, 0);
    uint64_t const a = TileA::descriptor(shared.a) + TileA::further(64, 0) * group;
    uint64_t const b = TileB::descriptor(shared.b);
    auto const wait = [&] {
      auto const token = pipeline.consumer_try_wait(state);
      pipeline.consumer_wait(state, token);
    };
    auto const multiply_stage = [&](Sums& into, bool add) {
      cute::warpgroup_arrive();
      int const stage = state.index();
      multiply(a + stage * (TileA::kBytes / 16), b + stage * (TileB::kBytes / 16),
               reinterpret_cast<Register*>(into.data()), add);
      cute::warpgroup_commit_batch();
      ++state;
    };
    auto const release = [&] {
      pipeline.consumer_release(released);
      ++released;
    };

    cute::warpgroup_fence_operand(sums);
    wait();
    multiply_stage(sums, false);
    cute::warpgroup_fence_operand(sums);
    CUTLASS_PRAGMA_NO_UNROLL
    for (--count; count > 0; --count) {
      wait();
      cute::warpgroup_fence_operand(sums);
      multiply_stage(sums, true);
      // All but the last step have ended.
      cute::warpgroup_wait<1>();
      cute::warpgroup_fence_operand(sums);
      release();
    }
    cute::warpgroup_fence_operand(sums);
  }

  template <class Pipeline>
  CUTLASS_DEVICE void mma_tail(Pipeline pipeline, PipelineState released, int count) {
    cute::warpgroup_wait<0>();
    release_last(pipeline, released, count);
  }
  template <class Pipeline>
  CUTLASS_DEVICE static void release_last(Pipeline& pipeline, PipelineState released, int count) {
    released.advance(count - 1);
    pipeline.consumer_release(released);
  }
};

// Of a mainloop of CUTLASS's whether TmaMainloop takes its place.
template <class Policy>
inline constexpr bool kReplaced = false;
template <int kStages, class Cluster, class Schedule>
inline constexpr bool kReplaced<cutlass::gemm::MainloopSm90TmaGmmaWarpSpecialized<kStages, Cluster, Schedule>> = true;

// The mainloop for what CUTLASS's builder makes; Built itself where an operand goes through registers. Of those whose
// sums are promoted see mainloop_promoted.h.
template <class Built>
struct TmaMainloopOf {
  using Type = Built;
};
template <class Policy, class Tile, class ElementA, class StrideA, class ElementB, class StrideB, class TiledMma,
          class CopyA, class LayoutA, class CopyB, class LayoutB>
struct TmaMainloopOf<
    cutlass::gemm::collective::CollectiveMma<Policy, Tile, ElementA, StrideA, ElementB, StrideB, TiledMma, CopyA,
                                             LayoutA, void, cute::identity, CopyB, LayoutB, void, cute::identity>> {
  using Built =
      cutlass::gemm::collective::CollectiveMma<Policy, Tile, ElementA, StrideA, ElementB, StrideB, TiledMma, CopyA,
                                               LayoutA, void, cute::identity, CopyB, LayoutB, void, cute::identity>;
  using Type = cute::conditional_t<kReplaced<Policy>,
                                   TmaMainloop<Policy, Tile, ElementA, StrideA, ElementB, StrideB, TiledMma>, Built>;
};

// One whose tile's 192 rows are multiplied by three warp groups, for what CUTLASS's builder makes of 128 rows.
template <class Built, class Tile, int kStages>
struct ThreeGroupsMainloopOf;
template <int kBuilt, class Cluster, class Schedule, class BuiltTile, class ElementA, class StrideA, class ElementB,
          class StrideB, class TiledMma, class... Copies, class Tile, int kStages>
struct ThreeGroupsMainloopOf<cutlass::gemm::collective::CollectiveMma<
                                 cutlass::gemm::MainloopSm90TmaGmmaWarpSpecialized<kBuilt, Cluster, Schedule>,
                                 BuiltTile, ElementA, StrideA, ElementB, StrideB, TiledMma, Copies...>,
                             Tile, kStages> {
  using Policy = cutlass::gemm::MainloopSm90TmaGmmaWarpSpecialized<kStages, Cluster, Schedule>;
  using Groups = cute::Layout<cute::Shape<cute::_3, cute::_1, cute::_1>>;
  using Mma = decltype(cute::make_tiled_mma(typename TiledMma::Atom{}, Groups{}));
  using Type = TmaMainloop<Policy, Tile, ElementA, StrideA, ElementB, StrideB, Mma>;
};

}  // namespace atomr_cutlass
