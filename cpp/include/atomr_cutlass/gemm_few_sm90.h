// GEMM cells of the sm90 generation for few rows, or few columns, of D: TMA and WGMMA by CuTe, without CUTLASS's
// collectives. The larger of A and B, "the weights", is what takes the time: all multiprocessors read it once, at the
// rate of device memory.
//
// The weights' rows lie along WGMMA's M (64 for each of two warp groups), the few rows along its N. Thread blocks stay
// and take tiles of equal height, which the launch chooses (`width` of its arguments): any multiple of 8 rows up to
// 128, or of 16 up to 256 where the weights' rows are what is contiguous, so that the last wave is as full as the
// others: a multiprocessor cannot draw the share of device memory's rate of those that have nothing to do. The thread
// blocks of a cluster share the few rows, each sending to all what it loads of them (multicast), or they divide K, or
// both: `swizzle` of them, which is 1 or another power of 2, share, and have tiles side by side. Of those that
// divide K each stores a part of the tile: all write their sums into the shared memory of the one that stores them,
// which adds them up in the order of the ranks: no workspace, and the same bits every time. Tiles of at most 64 rows
// are multiplied by both warp groups, each taking half of K. A launch may ask for sums in the order of K instead
// (`swizzle` 0), as kernels for many rows add them up: K is not divided then, all thread blocks of a cluster share the
// few rows, and one warp group multiplies low tiles.
//
// The launch before may still run when a kernel starts: nothing in global memory is touched before `griddepcontrol`
// has waited for it, but for weights that are known not to be written (`bound`). Where such a launch leaves half of the
// multiprocessors free, the next one starts when all weights have been requested (`late`): its own would take memory's
// rate from them (measured: 10 to 15% of a launch). So it does where two launches fill all multiprocessors: each of a
// chain would get those that the last but one had, however unevenly they lie (measured: up to 1.5 times as long on an
// H200, presumably since one GPC has three clusters instead of two). Other launches request bound weights before their
// own warps have met: nothing is read between one launch and the next.
//
// Functions without an annotation run on the host when nvcc compiles them, and on the device under NVRTC, whose
// -default-device makes them device functions.
#pragma once

#include "atomr_cutlass/kernel_abi.h"
#include "atomr_cutlass/rounding.h"
#include "atomr_cutlass/scaled.h"
#include "atomr_cutlass/wgmma.h"
#include "cute/arch/cluster_sm90.hpp"
#include "cute/arch/copy_sm90_desc.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/array.h"
#include "cutlass/cuda_host_adapter.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/layout/matrix.h"
#include "cutlass/numeric_conversion.h"
#ifdef ATOMR_CUTLASS_EVALUATE
#include "cute/tensor.hpp"  // with it, what encodes tensor maps
#endif

namespace atomr_cutlass {

// What an epilogue computes of a run's sums, scales and C besides: nothing, unless it is a tree
// (gemm_few_sm90_tree.h) or a gate (gemm_few_sm90_gated.h).
template <class Epilogue>
struct FewEpilogue {
  static constexpr bool kIsTree = false, kScaled = cute::is_same_v<Epilogue, ScaledEpilogue>, kSource = false;
  static constexpr int kStagedBytes = 0;
  static constexpr int kColumnsOfOne = 1;  // of A B, for one of D
  struct Params {
    static Params of(atomr_cutlass_gemm_args const&) { return {}; }
  };
  struct Thread {
    CUTLASS_DEVICE Thread(Params const&, char*) {}
  };
  template <int kCount>
  CUTLASS_DEVICE static cutlass::Array<float, kCount> gated(cutlass::Array<float, kCount> const& values) {
    return values;
  }
  template <class Element, int kCount>
  CUTLASS_DEVICE static cutlass::Array<Element, kCount> results(cutlass::Array<float, kCount> const& values) {
    return cutlass::NumericArrayConverter<Element, float, kCount>::convert(values);
  }
};

// A is row-major. Of a column-major B either operand may be the weights, of a row-major B only B. `kFew` is the most
// rows or columns of D that a cell serves, `kRanks` the thread blocks of a cluster. With `kPromoted` the tensor cores'
// sums of fp8, of which 14 bits count, are added to others in float after each box of K; with `kBlockScaled` times the
// scales of that box: one for each row of A, and one for 128 columns of B.
template <class Element, class LayoutB, class ElementD, int kFew, int kRanks, bool kPromoted, bool kBlockScaled,
          class Epilogue>
struct GemmFewSm90 {
  using Args = atomr_cutlass_gemm_args;

  using Tree = FewEpilogue<Epilogue>;
  static constexpr bool kIsTree = Tree::kIsTree, kScaled = Tree::kScaled;
  static constexpr int kColumnsOfOne = Tree::kColumnsOfOne;
  static constexpr bool kAlongK = cute::is_same_v<LayoutB, cutlass::layout::ColumnMajor>;
  static constexpr int kBoxBytes = 128;  // bytes of K of a row that a TMA load takes at once: the swizzle's width
  static constexpr int kBox = kBoxBytes / int(sizeof(Element));
  static constexpr int kRows = 128;  // of a tile that its warp groups multiply at once
  // The tallest tile, and the most few rows of one taller than kRows: neighbours share cache lines of each row where
  // the weights' rows are contiguous, fewer of them the taller their tiles are.
  static constexpr int kTallest = kAlongK ? kRows : 2 * kRows, kFewOfTall = 64;
  static constexpr int kUnit = kAlongK ? 8 : 16;  // heights of tiles are multiples of it
  static constexpr int kPiece = 64;  // rows that a TMA load takes at most where they are contiguous
  static constexpr int kConsumers = 256;
  static constexpr int kRun = 4, kRunBytes = kRun * sizeof(float);  // see Runs
  static constexpr int kInTurnBits = 3, kInTurn = 1 << kInTurnBits;
  static constexpr int kThreads = kConsumers + 64;  // a warp loads the weights, another the few rows
  static constexpr int kMinBlocks = 1;
  static constexpr int kClusterM = 1, kClusterN = 1, kClusterK = kRanks;
  static constexpr bool kDependent = true;
  // TMA makes tf32 of f32.
  using Multiplied = cute::conditional_t<cute::is_same_v<Element, float>, cutlass::tfloat32_t, Element>;
  static_assert(kAlongK || sizeof(Element) == 2, "WGMMA reads elements of other widths contiguous along K only");
  static constexpr int kScaleBlock = 128;  // columns of B, and elements of K, that have one scale
  static_assert(!kBlockScaled || (kPromoted && kBox == kScaleBlock), "a box of K has one scale of each row");
  static_assert(kFew == 128 || kFew == 32);

  // Shared memory: barriers, the ranks' sums, and the stages. An instruction reads 64 rows of weights and as many of
  // the others as it is wide, whether or not they were loaded: what follows the last stage must be there.
  static constexpr int kSharedBytes = 227 * 1024;
  static constexpr int kBarrierBytes = 1024;
  static constexpr int kSumsOffset = kBarrierBytes + Tree::kStagedBytes;
  static constexpr int kOverrun = 8192;
  static constexpr int kMaxStages = 32, kMaxSteps = 64;
  static constexpr int kSpare = 8;  // multiprocessors beside two launches from which a chain's places even out
  static constexpr int kInitAtOnce = 8;  // barriers, without a branch: more than there are do no harm
  static_assert(kMaxSteps % kInitAtOnce == 0 && kMaxStages % kInitAtOnce == 0);
  static constexpr int kStageBytes = 64 * 1024;
  // Row-major weights from so many bytes on are fetched into L2 by halves of lines: neighbouring tiles read the lines
  // between them at different times, and device memory would give them twice (measured: launches from 200 MB on take
  // 0.5 to 0.7% less, reads alone from 500 MB on 2 to 4%, below 50 MB 1 to 3% more).
  static constexpr int64_t kHalfLinesFrom = int64_t(1) << 28;
  // A stage is given back while the next one is multiplied: with a single one all would wait for ever.
  static_assert(kSharedBytes - kOverrun - kSumsOffset - (kTallest + 8) * kFewOfTall * int(sizeof(float)) >=
                2 * (kTallest + kFewOfTall) * kBoxBytes);

  struct Params {
    // `rest` is for the rows of a tile of row-major weights that are no whole piece. `few` loads a step at once, except
    // the one within one of whose boxes K ends: its boxes are loaded one by one, by `few_box`.
    cute::TmaDescriptor weights, rest, few, few_box;
    ElementD const* c;
    ElementD* d;
    int64_t c_row, c_few, c_batch;  // strides of C and D along the weights' rows, the few rows and the batches
    int64_t d_row, d_few, d_batch;
    int32_t rows, few_rows, turned;
    int32_t height, tiles, batch_tiles, clusters;
    // Thread blocks that divide K, and that share the few rows, as powers of 2: kRanks together.
    int32_t split_bits, share_bits;
    int32_t halved;  // both warp groups multiply the same rows
    int32_t warps;  // that multiply
    int32_t few_height;  // the few rows that are loaded: a multiple of 8
    int32_t group;  // boxes that a warp group multiplies at once
    int32_t step;  // boxes of K that are waited for at once: a group for each half
    int32_t steps, stage_steps, stages, stages_offset;
    int32_t weights_batched, few_batched;
    int32_t bound;  // no launch that may be running writes the weights
    int32_t late;  // the next launch starts when all weights have been requested, not at once
    int32_t fresh;  // stages that are requested before the warp that requests the weights waits for any other
    int32_t boxes;  // of K
    int32_t odd_step;  // the step within one of whose boxes K ends, or -1
    int32_t runs;  // that a thread block stores of a tile, rounded up; see Runs
    ScaledParams scaled;
    typename Tree::Params tree;
    // Scales of blocks: strides from one to the next along the weights' rows or the few, and along K. Several rows or
    // few may have one: their number is 1 << bits.
    float const *weights_scale, *few_scale;
    int64_t weights_scale_row, weights_scale_k, few_scale_row, few_scale_k;
    int32_t weights_scale_bits, few_scale_bits;
  };

  CUTLASS_HOST_DEVICE static constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

  // Whether A is the weights. Columns of A B that are one of D are neighbours in a thread's run: rows of B.
  static bool turned(Args const& args) { return kAlongK && kColumnsOfOne == 1 && args.n < args.m; }

  static bool aligned(void const* pointer, int64_t leading, int64_t batch_stride) {
    constexpr int64_t kElements = 16 / int(sizeof(Element));
    return reinterpret_cast<uint64_t>(pointer) % 16 == 0 && leading % kElements == 0 && batch_stride % kElements == 0;
  }

  static bool can_implement(Args const& args) {
    int const few = turned(args) ? args.n : args.m;
    // The arguments have no stride from one batch's block scales to the next one's.
    if (kBlockScaled && (args.batch > 1 || args.scale_a == nullptr || args.scale_b == nullptr)) return false;
    bool const shares = args.swizzle >= 0 && args.swizzle <= kRanks && (args.swizzle & (args.swizzle - 1)) == 0;
    int const tallest = few <= kFewOfTall ? kTallest : kRows;
    if (kColumnsOfOne > 1 && (args.n % kColumnsOfOne != 0 || args.amax != nullptr || args.c != nullptr)) return false;
    bool const is_height = args.width >= 0 && args.width <= tallest && args.width % kUnit == 0;
    return args.m > 0 && args.n > 0 && args.k > 0 && args.batch > 0 && few <= kFew && args.split_k == 1 && shares &&
           is_height && aligned(args.a, args.lda, args.batch_stride_a) &&
           aligned(args.b, args.ldb, args.batch_stride_b);
  }

  static uint64_t workspace_size(Args const&) { return 0; }
  static void clear_range(Args const&, uint64_t& offset, uint64_t& bytes) { offset = bytes = 0; }

  // A matrix for each batch; batches that are all the same matrix are one: their dimension has extent 1.
  struct Matrices {
    void const* pointer;
    int inner, outer;  // extents along what is contiguous, and across
    int64_t leading;
    int batches;
    int64_t batch_stride;

    cute::TmaDescriptor tensor_map(int box_inner, int box_outer, bool half_lines = false) const {
      int64_t const batch = batches > 1 ? batch_stride : leading;
      return encoded<3>(half_lines, pointer, {uint64_t(inner), uint64_t(outer), uint64_t(batches)},
                        {uint64_t(leading) * sizeof(Element), uint64_t(batch) * sizeof(Element)},
                        {uint32_t(box_inner), uint32_t(box_outer), 1});
    }

    // Of several boxes of K, which is what is contiguous, one after the other: K as boxes, without a part of one.
    cute::TmaDescriptor boxes_map(int box_outer, int boxes) const {
      int64_t const batch = batches > 1 ? batch_stride : leading;
      int const whole = inner / kBox > 0 ? inner / kBox : 1;  // without one only boxes beyond the end are loaded
      return encoded<4>(false, pointer, {uint64_t(kBox), uint64_t(outer), uint64_t(whole), uint64_t(batches)},
                        {uint64_t(leading) * sizeof(Element), uint64_t(kBoxBytes), uint64_t(batch) * sizeof(Element)},
                        {uint32_t(kBox), uint32_t(box_outer), uint32_t(boxes), 1});
    }
  };

  template <int kDimensions>
  static cute::TmaDescriptor encoded(bool half_lines, void const* pointer, uint64_t const (&extents)[kDimensions],
                                     uint64_t const (&strides)[kDimensions - 1], uint32_t const (&box)[kDimensions]) {
    cute::TmaDescriptor map{};
#if !defined(__CUDACC_RTC__) || defined(ATOMR_CUTLASS_EVALUATE)
    uint32_t const steps[4] = {1, 1, 1, 1};
    (void)CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeTiled)(
        &map, cute::TMA::to_CUtensorMapDataType<Multiplied>(), kDimensions, const_cast<void*>(pointer), extents,
        strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
        half_lines ? CU_TENSOR_MAP_L2_PROMOTION_L2_64B : CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
#endif
    return map;
  }

  static int available(Args const& args) {
    int const clusters = args.max_active_clusters > 0 ? args.max_active_clusters : args.sm_count / kRanks;
    return clusters < 1 ? 1 : clusters;
  }

  static Params params(Args const& args) {
    Params result{};
    bool const turn = turned(args);
    int const rows = turn ? args.m : args.n, few = turn ? args.n : args.m;
    result.turned = turn;
    result.rows = rows;
    result.few_rows = few;
    result.few_height = ceil_div(few, 8) * 8;
    bool const in_order = args.swizzle == 0;
    while (1 << result.share_bits < (in_order ? kRanks : args.swizzle)) ++result.share_bits;
    while (1 << (result.share_bits + result.split_bits) < kRanks) ++result.split_bits;
    result.height = args.width != 0 ? args.width : kRows;
    bool const is_low = result.height <= 64;
    result.halved = is_low && !in_order;
    result.warps = kConsumers / 32 / (is_low && in_order ? 2 : 1);
    result.batch_tiles = ceil_div(rows, result.height << result.share_bits);
    result.tiles = result.batch_tiles * args.batch;
    int const clusters = available(args);
    result.clusters = result.tiles < clusters ? result.tiles : clusters;
    int const split = 1 << result.split_bits;
    result.runs = ceil_div(result.height / kRun * few, kInTurn * split) * kInTurn;
    int const sums = split > 1 ? split * result.runs * kRun : result.few_height * pitch(result.height);
    int const sums_bytes = (result.halved ? 2 : 1) * sums * int(sizeof(float));
    result.stages_offset = ceil_div(kSumsOffset + sums_bytes, 1024) * 1024;
    int const box_bytes = weights_bytes(result.height) + result.few_height * kBoxBytes;
    int const stages_bytes = kSharedBytes - kOverrun - result.stages_offset;
    // Narrow instructions are soon done: two boxes of them are issued at once.
    bool const is_tall = result.height > kRows;
    result.group = is_tall || result.few_height > (result.halved ? 32 : 64) ? 1 : 2;
    result.step = result.group * (result.halved ? 2 : 1);
    result.steps = ceil_div(ceil_div(args.k, kBox), result.step);
    int const most = clamp(ceil_div(result.steps, split), 1, kStageBoxes / result.step);
    // Long pieces of each row suit device memory; three stages keep it busy.
    int const stage_bytes = clamp(stages_bytes / 3, 0, kStageBytes), step_bytes = box_bytes * result.step;
    result.stage_steps = clamp(stage_bytes / step_bytes, 1, most);
    result.stages = clamp(stages_bytes / (step_bytes * result.stage_steps), 1, kMaxSteps / result.stage_steps);
    if (result.stages > kMaxStages) result.stages = kMaxStages;

    Matrices const a{args.a, args.k, args.m, args.lda, batches(args, args.batch_stride_a), args.batch_stride_a};
    Matrices const b{args.b,   kAlongK ? args.k : args.n,          kAlongK ? args.n : args.k,
                     args.ldb, batches(args, args.batch_stride_b), args.batch_stride_b};
    Matrices const weights = turn ? a : b, few_rows = turn ? b : a;
    result.weights_batched = weights.batches > 1;
    result.few_batched = few_rows.batches > 1;
    if constexpr (kAlongK) {
      result.weights = weights.tensor_map(kBox, result.height);
    } else {
      bool const half_lines = int64_t(rows) * args.k * weights.batches * int(sizeof(Element)) >= kHalfLinesFrom;
      result.weights = weights.tensor_map(kPiece, kBox, half_lines);
      int const rest = result.height % kPiece;
      if (rest != 0) result.rest = weights.tensor_map(rest, kBox, half_lines);
    }
    result.few = few_rows.boxes_map(result.few_height, result.step);
    result.odd_step = -1;
    if (args.k % kBox != 0) {
      result.few_box = few_rows.tensor_map(kBox, result.few_height);
      result.odd_step = args.k / kBox / result.step;
    }
    result.c = static_cast<ElementD const*>(args.c);
    result.d = static_cast<ElementD*>(args.d);
    result.c_row = turn ? args.ldc : 1;
    result.c_few = turn ? 1 : args.ldc;
    result.c_batch = args.batch_stride_c;
    result.d_row = turn ? args.ldd : 1;
    result.d_few = turn ? 1 : args.ldd;
    result.d_batch = args.batch_stride_d;
    result.bound = (args.settled & (turn ? ATOMR_CUTLASS_A_SETTLED : ATOMR_CUTLASS_B_SETTLED)) != 0;
    int const of_two = 2 * kRanks * result.clusters;  // thread blocks of two launches
    result.late = of_two <= args.sm_count && (result.bound || of_two + kSpare > args.sm_count);
    // As many stages as the warp that requests the weights makes barriers for itself, each at most once: nobody has to
    // give them back. While a launch before this one is still reading, on other multiprocessors, there is no haste.
    if (result.bound && !result.late) result.fresh = clamp(kInitAtOnce / result.stage_steps, 0, result.stages);
    result.scaled = ScaledParams::of(args);
    result.tree = Tree::Params::of(args);
    result.boxes = ceil_div(args.k, kBox);
    if constexpr (kBlockScaled) {
      result.scaled.scale_a = result.scaled.scale_b = nullptr;
      auto const a = static_cast<float const*>(args.scale_a), b = static_cast<float const*>(args.scale_b);
      constexpr int kBits = 7;
      static_assert(1 << kBits == kScaleBlock);
      result.weights_scale = turn ? a : b;
      result.weights_scale_row = turn ? args.scale_stride_a : args.scale_stride_b;
      result.weights_scale_k = turn ? args.scale_k_stride_a : args.scale_k_stride_b;
      result.weights_scale_bits = turn ? 0 : kBits;
      result.few_scale = turn ? b : a;
      result.few_scale_row = turn ? args.scale_stride_b : args.scale_stride_a;
      result.few_scale_k = turn ? args.scale_k_stride_b : args.scale_k_stride_a;
      result.few_scale_bits = turn ? kBits : 0;
    }
    return result;
  }

  static dim3 grid(Params const& params) { return dim3(params.clusters, 1, kRanks); }

  CUTLASS_DEVICE static void run(Params const& params, char* shared) {
    Place place;
    place.barriers = reinterpret_cast<Barriers*>(shared);
    place.staged = shared + kBarrierBytes;
    place.sums = shared + kSumsOffset;
    place.stages = shared + params.stages_offset;
    int const rank = int(blockIdx.z), split = 1 << params.split_bits, share = 1 << params.share_bits;
    place.part = rank >> params.share_bits;
    place.member = rank & (share - 1);
    place.first_member = rank - place.member;
    // A rank without any K takes boxes beyond the end, which are zeros.
    int const first = params.steps * place.part >> params.split_bits;
    int const end = params.steps * (place.part + 1) >> params.split_bits;
    place.first_step = first < end ? first : params.steps;
    place.end_step = first < end ? end : params.steps + 1;
    place.weights_bytes = weights_bytes(params.height);
    place.few_bytes = params.few_height * kBoxBytes;
    place.step_bytes = (place.weights_bytes + place.few_bytes) * params.step;
    place.loaded_bytes = (params.height + params.few_height) * kBoxBytes * params.step;
    int const warp = cutlass::canonical_warp_idx_sync();
    if (cute::elect_one_sync()) {
      Barriers& barriers = *place.barriers;
      if (warp == kWeightsWarp) {
        init<Full>(barriers.full, 0, kInitAtOnce, 1);
        cutlass::arch::fence_view_async_shared();
      } else if (warp == kFewWarp) {
        cute::prefetch_tma_descriptor(&params.weights);
        cute::prefetch_tma_descriptor(&params.few);
        if (params.odd_step >= 0) cute::prefetch_tma_descriptor(&params.few_box);
        if (!kAlongK && params.height % kPiece != 0) cute::prefetch_tma_descriptor(&params.rest);
      } else if (warp < kBarrierWarps) {
        if (warp == 0) {
          init<Empty>(barriers.empty, 0, params.stages, params.warps * share);
          Full::init(&barriers.sums_full, 1);
          Empty::init(&barriers.sums_empty, split * kConsumers / 32);
        } else {
          init<Full>(barriers.full, kInitAtOnce, params.stages * params.stage_steps, 1);
        }
        cutlass::arch::fence_barrier_init();
        cutlass::arch::fence_view_async_shared();
      }
    }
    __syncwarp();
    if (warp != kWeightsWarp) {
      if (warp < kBarrierWarps) cutlass::arch::NamedBarrier::arrive(kBarrierThreads, kBarriersReady);
      cutlass::arch::NamedBarrier::sync(kThreads, kWeightsReady);
      if constexpr (kRanks > 1) cute::cluster_arrive_relaxed();
    } else if (params.fresh == 0) {
      announce_weights();
      cutlass::arch::NamedBarrier::sync(kBarrierThreads, kBarriersReady);
    }
    if (warp == kWeightsWarp) {
      load<true>(params, place);
      __syncwarp();
      if constexpr (kRanks > 1) cute::cluster_wait();
    } else if (warp == kFewWarp) {
      // No thread block writes into another before that one has its barriers.
      if (kRanks > 1 && share > 1) cute::cluster_wait();
      load<false>(params, place);
      __syncwarp();
      if (kRanks > 1 && share == 1) cute::cluster_wait();
    } else {
      asm volatile("griddepcontrol.wait;" ::: "memory");
      multiply_and_store(params, place, warp);
    }
  }

 private:
  static constexpr int kStageBoxes = 16;
  static constexpr int kWeightsWarp = kConsumers / 32, kFewWarp = kWeightsWarp + 1;
  enum : uint32_t { kAmongConsumers, kWeightsReady, kBarriersReady };  // named barriers
  // Warps that make the barriers that the warp which loads the weights does not make itself, and the threads of all.
  static constexpr int kBarrierWarps = 2, kBarrierThreads = 32 * (kBarrierWarps + 1);

  struct Barriers {
    uint64_t full[kMaxSteps], empty[kMaxStages];
    uint64_t sums_full, sums_empty;
  };
  static_assert(sizeof(Barriers) <= kBarrierBytes);

  using Full = cutlass::arch::ClusterTransactionBarrier;
  using Empty = cutlass::arch::ClusterBarrier;

  struct Place {
    Barriers* barriers;
    char* staged;  // rows and columns of a tree
    char* sums;
    char* stages;
    int part, member, first_member;  // of K, among those that share the few rows, and the rank of their first
    int first_step, end_step;
    int weights_bytes, few_bytes, step_bytes;  // in shared memory: of a box, and of a step
    int loaded_bytes;  // of a step
  };

  // Bytes of a box of weights in shared memory. Lines there are as wide as the swizzle, also where TMA fills but a part
  // of each.
  CUTLASS_HOST_DEVICE static constexpr int weights_bytes(int height) {
    return kAlongK ? height * kBoxBytes : ceil_div(height, kPiece) * kBox * kBoxBytes;
  }

  // Floats from one of the few rows to the next in the sums of a tile whose K is not divided: the rows that the lanes
  // of a warp write differ by two, and meet different banks.
  CUTLASS_HOST_DEVICE static constexpr int pitch(int height) { return height + 4; }

  // Whether the thread blocks of a cluster divide K.
  CUTLASS_DEVICE static bool divides_k(Params const& params) { return kRanks > 1 && params.split_bits > 0; }

  static int clamp(int value, int least, int most) { return value < least ? least : (value > most ? most : value); }

  static int batches(Args const& args, int64_t stride) { return stride != 0 ? args.batch : 1; }

  // A thread block's tiles, one after the other: counted without divisions, whose results leave uniform registers.
  struct Tile {
    int index, batch = 0, in_batch;

    CUTLASS_DEVICE explicit Tile(Params const& params) : index(int(blockIdx.x)), in_batch(int(blockIdx.x)) {
      settle(params);
    }
    CUTLASS_DEVICE void next(Params const& params) {
      index += params.clusters;
      in_batch += params.clusters;
      settle(params);
    }
    CUTLASS_DEVICE int row(Params const& params, Place const& place) const {
      return ((in_batch << params.share_bits) + place.member) * params.height;
    }

   private:
    CUTLASS_DEVICE void settle(Params const& params) {
      for (; in_batch >= params.batch_tiles; in_batch -= params.batch_tiles) ++batch;
    }
  };

  // Those from `first` to `end`, or up to kInitAtOnce - 1 more: without a branch for each, and in few instructions, all
  // of which are fetched anew for each launch.
  template <class Barrier>
  CUTLASS_DEVICE static void init(uint64_t* barriers, int first, int end, int arrivals) {
#pragma unroll 1
    for (int i = first; i < end; i += kInitAtOnce) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kInitAtOnce; ++j) Barrier::init(barriers + i + j, arrivals);
    }
  }

  // Tells the others that the barriers which the warp that requests the weights makes are ready.
  CUTLASS_DEVICE static void announce_weights() {
    cutlass::arch::fence_barrier_init();
    cutlass::arch::NamedBarrier::arrive(kThreads, kWeightsReady);
    if constexpr (kRanks > 1) cute::cluster_arrive_relaxed();
  }

  // Requests a step of the weights, by one thread; its few rows are expected by the same barrier.
  CUTLASS_DEVICE static void request_weights(Params const& params, Place const& place, uint64_t* full, char* to,
                                             int step, int row, int batch) {
    auto const hint = uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST);
    int const box = step * params.step;
    Full::arrive_and_expect_tx(full, uint32_t(place.loaded_bytes));
    // Box by box: long pieces of each row suit device memory, and the first boxes are to come first.
    for (int i = 0; i < params.step; ++i, to += place.weights_bytes) {
      int const k = (box + i) * kBox;
      if constexpr (kAlongK) {
        cute::SM90_TMA_LOAD_3D::copy(&params.weights, full, hint, to, k, row, batch);
      } else {
        int piece = 0;
        for (; piece + kPiece <= params.height; piece += kPiece) {
          cute::SM90_TMA_LOAD_3D::copy(&params.weights, full, hint, to + piece * kBoxBytes, row + piece, k, batch);
        }
        if (piece < params.height) {
          cute::SM90_TMA_LOAD_3D::copy(&params.rest, full, hint, to + piece * kBoxBytes, row + piece, k, batch);
        }
      }
    }
  }

  // Requests a step of the few rows, by one thread, for all thread blocks that share them.
  CUTLASS_DEVICE static void request_few(Params const& params, Place const& place, uint64_t* full, char* to, int step,
                                         int batch) {
    auto const hint = uint64_t(cute::TMA::CacheHintSm90::EVICT_LAST);
    int const box = step * params.step, share = 1 << params.share_bits;
    if (kRanks == 1 || share == 1) {
      if (step != params.odd_step) {
        cute::SM90_TMA_LOAD_4D::copy(&params.few, full, hint, to, 0, 0, box, batch);
      } else {
#pragma unroll 1
        for (int i = 0; i < params.step; ++i) {
          cute::SM90_TMA_LOAD_3D::copy(&params.few_box, full, hint, to + i * place.few_bytes, (box + i) * kBox, 0,
                                       batch);
        }
      }
    } else {
      auto const members = uint16_t(((1 << share) - 1) << place.first_member);
      if (step != params.odd_step) {
        cute::SM90_TMA_LOAD_MULTICAST_4D::copy(&params.few, full, members, hint, to, 0, 0, box, batch);
      } else {
#pragma unroll 1
        for (int i = 0; i < params.step; ++i) {
          cute::SM90_TMA_LOAD_MULTICAST_3D::copy(&params.few_box, full, members, hint, to + i * place.few_bytes,
                                                 (box + i) * kBox, 0, batch);
        }
      }
    }
  }

  // All loads of the weights, or of the few rows. Stages are taken back as a whole, so that long pieces of each row are
  // read at once, but each step of a stage has a barrier of its own: the first is used before the last has come.
  //
  // By a warp, of which one thread issues the loads and the others wait with it: so the values that TMA takes stay in
  // uniform registers. A loop that finds them out otherwise takes 100 ns a load.
  template <bool kWeights>
  CUTLASS_DEVICE static void load(Params const& params, Place const& place) {
    bool const issues = cute::elect_one_sync();
    bool waits = !kWeights || !params.bound;  // for the launch before, when all else is ready
    int const share = 1 << params.share_bits;
    int fresh = kWeights ? params.fresh : 0;
    int stage = 0;
    uint32_t phase = 1;
    for (Tile tile(params); tile.index < params.tiles; tile.next(params)) {
      int const row = tile.row(params, place);
      int const batch = (kWeights ? params.weights_batched : params.few_batched) ? tile.batch : 0;
      for (int begin = place.first_step; begin < place.end_step; begin += params.stage_steps) {
        int const steps = min(params.stage_steps, place.end_step - begin);
        uint64_t* const full = &place.barriers->full[stage * params.stage_steps];
        char* const to = place.stages + stage * params.stage_steps * place.step_bytes;
        // Who loads nothing into a stage must not wait for it: it may be used and given back before, and the wait would
        // be for the time after that. And who skips a round may come a phase early. So each stage has its few rows from
        // one of those that share them, and always from the same.
        bool const loads = kWeights || (stage & (share - 1)) == place.member;
        if (loads && fresh == 0) Empty::wait(&place.barriers->empty[stage], phase);
        if (waits) {
          asm volatile("griddepcontrol.wait;" ::: "memory");
          if (!kWeights && !params.late) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
          waits = false;
        }
        if constexpr (kWeights) {
          // Barriers that this round does not need take part in it, before others can end it: all of a stage are in one
          // phase.
          for (int step = steps; step < params.stage_steps; ++step) {
            if (issues) Full::arrive(full + step);
          }
        }
        for (int step = 0; step < steps; ++step) {
          if (!loads || !issues) continue;
          char* const there = to + step * place.step_bytes;
          if constexpr (kWeights) {
            request_weights(params, place, full + step, there, begin + step, row, batch);
          } else {
            request_few(params, place, full + step, there + params.step * place.weights_bytes, begin + step, batch);
          }
        }
        __syncwarp();
        if (fresh > 0) {
          if (fresh == params.fresh) announce_weights();
          if (--fresh == 0) cutlass::arch::NamedBarrier::sync(kBarrierThreads, kBarriersReady);
        }
        if (++stage == params.stages) {
          stage = 0;
          phase ^= 1;
        }
      }
    }
    if (fresh > 0) cutlass::arch::NamedBarrier::sync(kBarrierThreads, kBarriersReady);
    if (kWeights && params.late) {
      asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
    }
    if constexpr (kWeights && kRanks > 1) {
      // Shared memory stays until all have used what this thread block sent them, and their signals have come.
      for (int i = 0; i < params.stages; ++i) {
        Empty::wait(&place.barriers->empty[stage], phase);
        if (++stage == params.stages) {
          stage = 0;
          phase ^= 1;
        }
      }
    }
  }

  // Sums of four rows of weights and one of the few are a run. Runs are numbered in the order in which they are stored,
  // so that neighbours are stored next to one another: first those of one of the few rows, or, where D has the few as
  // its columns, those of the same four rows. kInTurn of them belong to one of the ranks that divide K, the next ones
  // to the next rank.
  struct Runs {
    int along, few;  // runs of one of the few rows, and the few rows
    bool turned;

    CUTLASS_DEVICE explicit Runs(Params const& params)
        : along(params.height / kRun),
          few(params.few_rows),
          turned(params.turned) {}
    CUTLASS_DEVICE int count() const { return along * few; }
    CUTLASS_DEVICE int number(int run, int other) const { return turned ? run * few + other : other * along + run; }
    // Of the run of a number: which of 1 << bits ranks stores it, and its place among those of that rank.
    CUTLASS_DEVICE static int owner(int number, int bits) { return number / kInTurn & ((1 << bits) - 1); }
    CUTLASS_DEVICE static int place(int number, int bits) {
      return (number >> (kInTurnBits + bits)) * kInTurn + number % kInTurn;
    }
  };

  // What a thread adds up and stores of each tile, and the scale of all results, where they have one: found before the
  // first products, so that nothing waits for divisions or memory after them.
  struct Share {
    int first, end, step;  // numbers of the thread's first run, behind the tile's last, and to the next one
    int bytes;  // of the thread block's runs of one part of K
    int fast, fast_at, slow_at, fast_step, slow_step;  // the same, divided once, then counted
    // Elements of D: from the tile's first to the thread's first run, to its next, and further where `fast` is full.
    int64_t d_first, d_step, d_wrap;
    bool uniform = true;
    float scale, scale_d = 1.0f;

    CUTLASS_DEVICE Share(Params const& params, Place const& place) : scale(params.scaled.alpha) {
      Runs const runs(params);
      int const thread = int(threadIdx.x), bits = params.split_bits, before = place.part * kInTurn;
      end = runs.count();
      first = (thread / kInTurn * kInTurn << bits) + before + thread % kInTurn;
      step = kConsumers << bits;
      int const whole = (end >> (kInTurnBits + bits)) * kInTurn, left = end - (whole << bits) - before;
      bytes = (whole + (left < 0 ? 0 : (left < kInTurn ? left : kInTurn))) * kRunBytes;
      fast = runs.turned ? runs.few : runs.along;
      slow_at = first / fast;
      fast_at = first - slow_at * fast;
      slow_step = step / fast;
      fast_step = step - slow_step * fast;
      int const to_next = runs.turned ? 1 : kRun / kColumnsOfOne;
      int64_t const across = runs.turned ? kRun * params.d_row : params.d_few;
      d_first = slow_at * across + fast_at * to_next;
      d_step = slow_step * across + fast_step * to_next;
      d_wrap = across - fast * to_next;
      if constexpr (kScaled) {
        ScaledParams const& scaled = params.scaled;
        scale_d = scaled.output();
        uniform = scaled.uniform();
        if (uniform) scale = scaled.row(0, 1) * scaled.column(0, 1);
      }
    }
  };

  CUTLASS_DEVICE static void multiply_and_store(Params const& params, Place const& place, int warp) {
    int const lane = int(threadIdx.x) % 32, split = 1 << params.split_bits;
    Turn turn;
    Share const mine(params, place);
    typename Tree::Thread tree(params.tree, place.staged);
    for (Tile tile(params); tile.index < params.tiles; tile.next(params)) {
      ElementD* const d = params.d + tile.batch * params.d_batch +
                          tile.row(params, place) / kColumnsOfOne * params.d_row + mine.d_first;
      if constexpr (kIsTree) {
        if (!turn.first) cutlass::arch::NamedBarrier::sync(kConsumers, kAmongConsumers);  // what was staged was read
        int const row = tile.row(params, place);
        tree.begin(params.turned ? row : 0, params.turned ? 0 : row, params.turned ? params.rows : params.few_rows,
                   params.turned ? params.few_rows : params.rows, tile.batch, kConsumers);
      }
      if (kTallest > kRows && params.height > kRows) {
        multiply_times<kTallest / kRows>(params, place, tile, warp, mine, turn);
      } else {
        multiply_times<1>(params, place, tile, warp, mine, turn);
      }
      if (divides_k(params)) {
        wait_for_cluster(&place.barriers->sums_full, turn.tile_phase);
        if constexpr (kIsTree) cutlass::arch::NamedBarrier::sync(kConsumers, kAmongConsumers);  // all have staged
      } else {
        cutlass::arch::NamedBarrier::sync(kConsumers, kAmongConsumers);
      }
      if (params.halved) {
        store_parts<2>(params, place, tile, mine, tree, d);
      } else {
        store_parts<1>(params, place, tile, mine, tree, d);
      }
      if constexpr (kIsTree) tree.end();
      if constexpr (kRanks > 1) {
        // The others write the next tile's sums when all have read these, if there is a next one: a thread block may
        // leave when its own have come.
        if (divides_k(params) && tile.index + params.clusters < params.tiles) {
          asm volatile("" ::: "memory");  // what was read has been used
          __syncwarp();
          if (lane < split) {
            Empty::arrive(&place.barriers->sums_empty, uint32_t((lane << params.share_bits) + place.member), 1u);
          }
        }
      }
      turn.first = false;
      turn.tile_phase ^= 1;
    }
  }

  // Where a warp is in the stages, and in the tiles.
  struct Turn {
    int stage = 0;
    uint32_t phase = 0, tile_phase = 0;
    bool first = true;
  };

  // Scales of a box of K: those of the two rows and of all columns that a thread has of 64 x kWide sums.
  template <int kWide>
  struct BoxScales {
    float rows[2] = {0, 0}, columns[kWide / 4];

    // Zeros beyond the end of K and the edges, where nothing may be read.
    CUTLASS_DEVICE void load(Params const& params, int row, int box) {
      if constexpr (kBlockScaled) {
        bool const inside = box < params.boxes;
        int const column = int(threadIdx.x) % 4 * 2;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 2; ++i) {
          rows[i] = !inside || row + 8 * i >= params.rows
                        ? 0.0f
                        : params.weights_scale[(row + 8 * i >> params.weights_scale_bits) * params.weights_scale_row +
                                               box * params.weights_scale_k];
        }
        float const* const few = params.few_scale + box * params.few_scale_k;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kWide / 4; ++i) {
          int const at = column + i / 2 * 8 + i % 2;
          columns[i] =
              !inside || at >= params.few_rows ? 0.0f : few[(at >> params.few_scale_bits) * params.few_scale_row];
        }
      }
    }
  };

  // A tile of up to kTimes kRows rows, by instructions as wide as its few rows.
  template <int kTimes>
  CUTLASS_DEVICE static void multiply_times(Params const& params, Place const& place, Tile const& tile, int warp,
                                            Share const& mine, Turn& turn) {
    constexpr int kPair = kTimes == 1 ? 2 : 1;  // boxes at once of narrow instructions
    if (params.few_height <= 16) {
      multiply<16, kPair, kTimes>(params, place, tile, warp, mine, turn);
    } else if (kFew == 32 || params.few_height <= 32) {
      multiply<32, kPair, kTimes>(params, place, tile, warp, mine, turn);
    } else if constexpr (kFew > 32) {
      if (kTimes > 1 || params.few_height <= 64) {
        params.group == kPair ? multiply<64, kPair, kTimes>(params, place, tile, warp, mine, turn)
                              : multiply<64, 1, kTimes>(params, place, tile, warp, mine, turn);
      } else if constexpr (kTimes == 1) {
        if (params.few_height <= 96) {
          multiply<96, 1>(params, place, tile, warp, mine, turn);
        } else {
          multiply<128, 1>(params, place, tile, warp, mine, turn);
        }
      }
    }
  }

  // Leaves a tile's sums in shared memory. With instructions as narrow as the few rows, kGroup boxes at once, of kTimes
  // kRows rows.
  template <int kWide, int kGroup, int kTimes = 1>
  CUTLASS_DEVICE static void multiply(Params const& params, Place const& place, Tile const& tile, int warp,
                                      Share const& mine, Turn& turn) {
    int const half = params.halved ? warp / 4 : 0, lane = int(threadIdx.x) % 32;
    int const first_row = params.halved ? 0 : warp / 4 * 64;
    // Of 64 rows of weights and the few that an instruction is wide: in registers 4 i to 4 i + 3 a thread has the sums
    // of two rows of weights, 8 apart, and of two neighbours of the few from 8 i on.
    constexpr int kSums = kWide / 2;
    float sums[kTimes][kSums] = {};  // registers without a value would be taken from the start of the kernel on
    auto const fence = [&] {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kTimes; ++i) wgmma_fence(sums[i]);
    };
    auto const release = [&](int stage) {
      if constexpr (kRanks == 1) {
        if (lane == 0) Empty::arrive(&place.barriers->empty[stage]);
      } else {
        if (lane < 1 << params.share_bits) {
          Empty::arrive(&place.barriers->empty[stage], uint32_t(place.first_member + lane), 1u);
        }
      }
    };
    static_assert(kTimes == 1 || !kPromoted);
    float part[kPromoted ? kSums : 1] = {};
    bool add = false;
    // A thread's first row of weights; the scales of a box are read while the one before is multiplied.
    int const row = tile.row(params, place) + first_row + warp % 4 * 16 + lane / 4;
    BoxScales<kWide> scales, next_scales;
    next_scales.load(params, row, place.first_step * params.step + half * kGroup);
    int in_stage = 0, before = -1;  // steps, and the stage of which the last ones are being multiplied
    bool const multiplies = warp < params.warps;
    int const end_step = multiplies ? place.end_step : place.first_step;
    for (int step = place.first_step; step < end_step; ++step) {
      int const at = turn.stage * params.stage_steps + in_stage;
      Full::wait(&place.barriers->full[at], turn.phase);
      char* const first = place.stages + at * place.step_bytes;
      char* const weights = first + half * kGroup * place.weights_bytes + first_row * kBoxBytes;
      char* const few = first + params.step * place.weights_bytes + half * kGroup * place.few_bytes;
      uint64_t const a = wgmma_descriptor<!kAlongK, kBox>(weights), b = wgmma_descriptor<false, kWide>(few);
      if constexpr (kPromoted) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kGroup; ++i) {
          wgmma_fence(part);
          wgmma_arrive();
          box_product<kWide>(a + i * place.weights_bytes / 16, b + i * place.few_bytes / 16, part, false);
          wgmma_commit();
          scales = next_scales;
          int const box = step * params.step + half * kGroup + i;
          next_scales.load(params, row, i < kGroup - 1 ? box + 1 : box + 1 - kGroup + params.step);
          wgmma_wait<0>();
          wgmma_fence(part);
          CUTLASS_PRAGMA_UNROLL
          for (int j = 0; j < kSums; ++j) {
            sums[0][j] += kBlockScaled ? scales.rows[j / 2 % 2] * scales.columns[j / 4 * 2 + j % 2] * part[j] : part[j];
          }
        }
      } else {
        fence();
        wgmma_arrive();
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kGroup; ++i) {
          CUTLASS_PRAGMA_UNROLL
          for (int j = 0; j < kTimes; ++j) {
            box_product<kWide>(a + (i * place.weights_bytes + j * kRows * kBoxBytes) / 16, b + i * place.few_bytes / 16,
                               sums[j], i > 0 || add);
          }
        }
        add = true;
        wgmma_commit();
        wgmma_wait<1>();
        fence();
      }
      if (before >= 0) {
        release(before);
        before = -1;
      }
      if (++in_stage == params.stage_steps || step + 1 == place.end_step) {
        in_stage = 0;
        before = turn.stage;
        if (++turn.stage == params.stages) {
          turn.stage = 0;
          turn.phase ^= 1;
        }
      }
    }
    wgmma_wait<0>();
    fence();
    if (multiplies) release(before);
    __syncwarp();  // single lanes have released stages
    if (turn.first) {
      // No thread block writes into another before that one has its barriers.
      if constexpr (kRanks > 1) cute::cluster_wait();
    } else {
      // The sums before these have been read.
      empty_sums(params, place, turn.tile_phase ^ 1);
    }
    // Not before that: a phase that waits for nothing else, where a rank has no run, would end while warps still wait
    // for the end of the one before.
    if (divides_k(params) && threadIdx.x == 0) {
      Full::arrive_and_expect_tx(&place.barriers->sums_full, mine.bytes << (params.split_bits + params.halved));
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kTimes; ++i) {
      leave<kWide>(params, place, half, first_row + i * kRows + warp % 4 * 16, sums[i]);
    }
  }

  // Leaves the sums of a warp, of 16 rows from `first` on, for those who store them.
  template <int kWide>
  CUTLASS_DEVICE static void leave(Params const& params, Place const& place, int half, int first,
                                   float (&sums)[kWide / 2]) {
    int const lane = int(threadIdx.x) % 32, bits = params.split_bits;
    if (!divides_k(params)) {
      int const row = first + lane / 4, wide = pitch(params.height);
      float* const to = reinterpret_cast<float*>(place.sums) + half * params.few_height * wide + row;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kWide / 2; ++i) {
        int const below = i / 2 % 2 * 8, other = lane % 4 * 2 + i / 4 * 8 + i % 2;
        if (row + below < params.height && other < params.few_height) to[other * wide + below] = sums[i];
      }
    } else {
      Runs const runs(params);
      // After they have changed places with three others', a thread's four sums of eight of the few rows are a run.
      int const among = lane / 4 % 4, run = first / kRun + lane / 16 + among / 2 * 2;
      int other = lane % 4 * 2 + among % 2, number = runs.number(run, other);
      int const further = 8 * (runs.turned ? 1 : runs.along);
      // A thread block has its runs of each part of K, one after the other.
      int const part = (place.part << params.halved) + half;
      uint32_t const of_part = cute::cast_smem_ptr_to_uint(place.sums) + part * params.runs * kRunBytes;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kWide / 8; ++i, other += 8, number += further) {
        float* const four = sums + 4 * i;
        transpose(four, among);
        if (run >= runs.along || other >= runs.few) continue;
        uint32_t const rank = uint32_t((runs.owner(number, bits) << params.share_bits) + place.member);
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(
                         cute::set_block_rank(of_part + runs.place(number, bits) * kRunBytes, rank)),
                     "r"(cute::set_block_rank(cute::cast_smem_ptr_to_uint(&place.barriers->sums_full), rank)),
                     "f"(four[0]), "f"(four[1]), "f"(four[2]), "f"(four[3])
                     : "memory");
      }
    }
  }

  // Of four numbers of each of four lanes, 4 apart, lane `among` gets those with that index, in the order of the lanes.
  CUTLASS_DEVICE static void transpose(float* four, int among) {
    static_assert(kRun == 4);
    auto const exchange = [](float& low, float& high, bool is_high, int lanes) {
      float const got = __shfl_xor_sync(0xFFFFFFFF, is_high ? low : high, lanes);
      (is_high ? low : high) = got;
    };
    exchange(four[0], four[1], among % 2 != 0, 4);
    exchange(four[2], four[3], among % 2 != 0, 4);
    exchange(four[0], four[2], among / 2 != 0, 8);
    exchange(four[1], four[3], among / 2 != 0, 8);
  }

  // A box of K.
  template <int kWide>
  CUTLASS_DEVICE static void box_product(uint64_t weights, uint64_t few, float (&sums)[kWide / 2], bool add) {
    constexpr int kDeep = 32 / int(sizeof(Element));  // what an instruction takes of K: 32 bytes of a row
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < kBox; k += kDeep) {
      int const further = kAlongK ? 2 : kDeep * kBoxBytes / 16;  // in 16-byte units
      Wgmma<Multiplied, kWide, !kAlongK, false>::multiply(
          weights + k / kDeep * further, few + k / kDeep * 2, [&](int i) -> float& { return sums[i]; }, k > 0 || add);
    }
  }

  // Sees what the threads that arrived had written, wherever in the cluster they run.
  CUTLASS_DEVICE static void wait_for_cluster(uint64_t const* barrier, uint32_t phase) {
    uint32_t done = 0;
    while (done == 0) {
      asm volatile(
          "{\n.reg .pred p;\n"
          "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
          "selp.u32 %0, 1, 0, p;\n}"
          : "=r"(done)
          : "r"(cute::cast_smem_ptr_to_uint(barrier)), "r"(phase)
          : "memory");
    }
  }

  CUTLASS_DEVICE static void empty_sums(Params const& params, Place const& place, uint32_t phase) {
    if (divides_k(params)) {
      Empty::wait(&place.barriers->sums_empty, phase);
    } else {
      cutlass::arch::NamedBarrier::sync(kConsumers, kAmongConsumers);
    }
  }

  template <int kHalves>
  CUTLASS_DEVICE static void store_parts(Params const& params, Place const& place, Tile const& tile, Share const& mine,
                                         typename Tree::Thread& tree, ElementD* d) {
    switch (params.split_bits) {
      case 0: store<1, kHalves>(params, place, tile, mine, tree, d); break;
      case 1:
        if constexpr (kRanks >= 2) store<2, kHalves>(params, place, tile, mine, tree, d);
        break;
      case 2:
        if constexpr (kRanks >= 4) store<4, kHalves>(params, place, tile, mine, tree, d);
        break;
      default:
        if constexpr (kRanks >= 8) store<8, kHalves>(params, place, tile, mine, tree, d);
    }
  }

  // Adds up and stores this rank's part of a tile; `d` is where the thread's first run of it goes.
  template <int kSplit, int kHalves>
  CUTLASS_DEVICE static void store(Params const& params, Place const& place, Tile const& tile, Share const& mine,
                                   typename Tree::Thread& tree, ElementD* d) {
    ScaledParams const& scaled = params.scaled;
    LargestAbsolute largest;
    // Of each part of K the thread's next run, or, where K is not divided, all sums.
    int const wide = pitch(params.height), part_floats = kSplit > 1 ? params.runs * kRun : params.few_height * wide;
    auto const* sums = reinterpret_cast<float const*>(place.sums) + (kSplit > 1 ? int(threadIdx.x) * kRun : 0);
    int const tile_row = tile.row(params, place), rows = params.rows - tile_row;
    int slow_at = mine.slow_at, fast_at = mine.fast_at;
    constexpr int kUnrolled = kIsTree ? 1 : 2;  // trees have many instructions
#pragma unroll kUnrolled
    for (int i = mine.first; i < mine.end; i += mine.step) {
      int const other = params.turned ? fast_at : slow_at, row = kRun * (params.turned ? slow_at : fast_at);
      float4 parts[kSplit * kHalves];
      CUTLASS_PRAGMA_UNROLL
      for (int part = 0; part < kSplit * kHalves; ++part) {
        parts[part] =
            *reinterpret_cast<float4 const*>(sums + part * part_floats + (kSplit > 1 ? 0 : other * wide + row));
      }
      if (kSplit > 1) sums += kConsumers * kRun;
      float4 sum = parts[0];
      CUTLASS_PRAGMA_UNROLL
      for (int part = 1; part < kSplit * kHalves; ++part) {
        float4 const next = parts[part];
        sum = {sum.x + next.x, sum.y + next.y, sum.z + next.z, sum.w + next.w};
      }
      cutlass::Array<float, kRun> values;
      values[0] = sum.x, values[1] = sum.y, values[2] = sum.z, values[3] = sum.w;
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kRun; ++j) {
        float scale = mine.scale;
        if (kScaled && !mine.uniform) {
          int const m = params.turned ? tile_row + row + j : other, n = params.turned ? other : tile_row + row + j;
          scale = row + j < rows ? scaled.row(m, m + 1) * scaled.column(n, n + 1) : 0.0f;
        }
        values[j] = times(scale, values[j]);
      }
      ElementD source[kRun] = {};
      if (Tree::kSource || scaled.needs_c()) {
        ElementD const* const c =
            params.c + tile.batch * params.c_batch + (tile_row + row) * params.c_row + other * params.c_few;
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < kRun; ++j) {
          if (row + j >= rows) continue;
          if constexpr (Tree::kSource) {
            source[j] = c[j * params.c_row];
          } else {
            values[j] = plus_source(values[j], scaled.beta, float(c[j * params.c_row]));
          }
        }
      }
      if constexpr (kIsTree) tree.apply(values, params.turned, row, other, source);
      constexpr int kResults = kRun / kColumnsOfOne;
      cutlass::Array<float, kResults> gated = Tree::gated(values);
      if constexpr (kScaled) {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < kResults; ++j) {
          if (row + j * kColumnsOfOne < rows) largest.see(gated[j]);
          gated[j] *= mine.scale_d;
        }
      }
      auto const results = Tree::template results<ElementD>(gated);
      if (!params.turned && row + kRun <= rows && reinterpret_cast<uint64_t>(d) % sizeof(results) == 0) {
        *reinterpret_cast<cutlass::AlignedArray<ElementD, kResults>*>(d) =
            reinterpret_cast<cutlass::AlignedArray<ElementD, kResults> const&>(results);
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < kResults; ++j) {
          if (row + j * kColumnsOfOne < rows) d[j * params.d_row] = results[j];
        }
      }
      slow_at += mine.slow_step;
      fast_at += mine.fast_step;
      d += mine.d_step;
      if (fast_at >= mine.fast) {
        fast_at -= mine.fast;
        ++slow_at;
        d += mine.d_wrap;
      }
    }
    if (kScaled && scaled.amax != nullptr) largest.store(scaled.amax);
  }
};

}  // namespace atomr_cutlass
