// GEMM cells of the sm90 generation for few rows, or few columns, of D: TMA and WGMMA by CuTe, without CUTLASS's
// collectives. The larger of A and B, "the weights", is what takes the time: all multiprocessors read it once, at the
// rate of device memory.
//
// The weights' rows lie along WGMMA's M (64 for each of two warp groups), the few rows along its N. Thread blocks stay
// and take tiles of equal height, which follows from the problem: any multiple of 8 rows up to 128, so that the last
// wave is as full as the others. K is divided among the thread blocks of a cluster. Each leaves its sums in its shared
// memory; all of them read a part of the tile from there, add it up in the order of the ranks, and store it: no
// workspace, and the same bits every time.
//
// Functions without an annotation run on the host when nvcc compiles them, and on the device under NVRTC, whose
// -default-device makes them device functions.
#pragma once

#include "atomr_cutlass/kernel_abi.h"
#include "atomr_cutlass/scaled.h"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/array.h"
#include "cutlass/cuda_host_adapter.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/layout/matrix.h"
#include "cutlass/numeric_conversion.h"

namespace atomr_cutlass {

// A is row-major. Of a column-major B either operand may be the weights, of a row-major B only B. `kFew` is the most
// rows or columns of D that a cell serves, `kRanks` the thread blocks of a cluster. With `kPromoted` the tensor cores'
// sums of fp8, of which 14 bits count, are added to others in float after each box of K.
template <class Element, class LayoutB, class ElementD, int kFew, int kRanks, bool kPromoted, class Epilogue>
struct GemmFewSm90 {
  using Args = atomr_cutlass_gemm_args;

  static constexpr bool kScaled = cute::is_same_v<Epilogue, ScaledEpilogue>;
  static constexpr bool kAlongK = cute::is_same_v<LayoutB, cutlass::layout::ColumnMajor>;
  static constexpr int kBoxBytes = 128;  // bytes of K of a row that a TMA load takes at once: the swizzle's width
  static constexpr int kBox = kBoxBytes / int(sizeof(Element));
  static constexpr int kRows = 128;              // the tallest tile
  static constexpr int kUnit = kAlongK ? 8 : 64; // heights of tiles are multiples of it
  static constexpr int kConsumers = 256;
  static constexpr int kThreads = kConsumers + 32;
  static constexpr int kMinBlocks = 1;
  static constexpr int kClusterM = 1, kClusterN = 1, kClusterK = kRanks;
  static_assert(kAlongK || sizeof(Element) == 2, "WGMMA reads elements of other widths contiguous along K only");

  // Shared memory: barriers, the ranks' sums, and the stages. An instruction reads 64 rows of weights and as many of
  // the others as it is wide, whether or not they were loaded: what follows the last stage must be there.
  static constexpr int kSharedBytes = 227 * 1024;
  static constexpr int kBarrierBytes = 1024;
  static constexpr int kOverrun = 8192;
  static constexpr int kMaxStages = 32;

  struct Params {
    cute::TmaDescriptor weights, few;
    ElementD const* c;
    ElementD* d;
    int64_t c_row, c_few, c_batch;  // strides of C and D along the weights' rows, the few rows and the batches
    int64_t d_row, d_few, d_batch;
    int32_t rows, few_rows, turned;
    int32_t height, tiles, batch_tiles, clusters;
    int32_t few_height;  // the few rows that are loaded: a multiple of 8
    int32_t group;       // boxes that are multiplied at once: stages are of whole groups
    int32_t groups, stage_boxes, stages, stages_offset;
    int32_t weights_batched, few_batched;
    ScaledParams scaled;
  };

  CUTLASS_HOST_DEVICE static constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

  // Whether A is the weights.
  static bool turned(Args const& args) { return kAlongK && args.n < args.m; }

  static bool aligned(void const* pointer, int64_t leading, int64_t batch_stride) {
    constexpr int64_t kElements = 16 / int(sizeof(Element));
    return reinterpret_cast<uint64_t>(pointer) % 16 == 0 && leading % kElements == 0 && batch_stride % kElements == 0;
  }

  static bool can_implement(Args const& args) {
    int const few = turned(args) ? args.n : args.m;
    return args.m > 0 && args.n > 0 && args.k > 0 && args.batch > 0 && few <= kFew && args.split_k == 1 &&
           aligned(args.a, args.lda, args.batch_stride_a) && aligned(args.b, args.ldb, args.batch_stride_b);
  }

  static uint64_t workspace_size(Args const&) { return 0; }
  static void clear_range(Args const&, uint64_t& offset, uint64_t& bytes) { offset = bytes = 0; }

  // Batches that are all the same matrix are one: their dimension has extent 1.
  static cute::TmaDescriptor tensor_map(void const* pointer, int inner, int outer, int64_t leading, int batches,
                                        int64_t batch_stride, int box_inner, int box_outer) {
    cute::TmaDescriptor map{};
#if !defined(__CUDACC_RTC__) || defined(ATOMR_CUTLASS_EVALUATE)
    uint64_t const dims[3] = {uint64_t(inner), uint64_t(outer), uint64_t(batches)};
    uint64_t const strides[2] = {uint64_t(leading) * sizeof(Element),
                                 uint64_t(batches > 1 ? batch_stride : leading) * sizeof(Element)};
    uint32_t const box[3] = {uint32_t(box_inner), uint32_t(box_outer), 1};
    uint32_t const steps[3] = {1, 1, 1};
    (void)CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeTiled)(
        &map, cute::TMA::to_CUtensorMapDataType<Element>(), 3, const_cast<void*>(pointer), dims, strides, box, steps,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
#endif
    return map;
  }

  static Params params(Args const& args) {
    Params result{};
    bool const turn = turned(args);
    int const rows = turn ? args.m : args.n, few = turn ? args.n : args.m;
    result.turned = turn;
    result.rows = rows;
    result.few_rows = few;
    result.few_height = ceil_div(few, 8) * 8;
    int clusters = args.max_active_clusters > 0 ? args.max_active_clusters : args.sm_count / kRanks;
    if (clusters < 1) clusters = 1;
    // What the busiest cluster reads: its rows of weights, and the few rows once a tile.
    int64_t least = INT64_MAX;
    for (int height = kRows; height > 0; height -= kUnit) {
      int64_t const tiles = int64_t(args.batch) * ceil_div(rows, height);
      int64_t const read = (tiles + clusters - 1) / clusters * (height + result.few_height);
      if (read < least) {
        least = read;
        result.height = height;
      }
    }
    result.batch_tiles = ceil_div(rows, result.height);
    result.tiles = result.batch_tiles * args.batch;
    result.clusters = result.tiles < clusters ? result.tiles : clusters;
    int const sums_bytes = result.few_height * pitch(result.height) * 4;
    result.stages_offset = ceil_div(kBarrierBytes + sums_bytes, 1024) * 1024;
    int const box_bytes = (result.height + result.few_height) * kBoxBytes;
    int const stages_bytes = kSharedBytes - kOverrun - result.stages_offset;
    // Narrow instructions are soon done: as many of them are issued at once as make a wait worth its time.
    result.group = result.few_height > 64 ? 1 : (result.few_height > 32 || box_bytes > 64 * kBoxBytes ? 2 : 4);
    result.groups = ceil_div(ceil_div(args.k, kBox), result.group);
    int const most = clamp(ceil_div(result.groups, kRanks), 1, kStageBoxes / result.group);
    // Long pieces of each row suit device memory; three stages keep it busy.
    int const stage_bytes = clamp(stages_bytes / 3, 0, kStageBytes);
    result.stage_boxes = result.group * clamp(stage_bytes / (box_bytes * result.group), 1, most);
    result.stages = clamp(stages_bytes / (box_bytes * result.stage_boxes), 1, kMaxStages);

    int const weights_batches = turn ? batches(args, args.batch_stride_a) : batches(args, args.batch_stride_b);
    int const few_batches = turn ? batches(args, args.batch_stride_b) : batches(args, args.batch_stride_a);
    result.weights_batched = weights_batches > 1;
    result.few_batched = few_batches > 1;
    if (turn) {
      result.weights =
          tensor_map(args.a, args.k, rows, args.lda, weights_batches, args.batch_stride_a, kBox, result.height);
      result.few = tensor_map(args.b, args.k, few, args.ldb, few_batches, args.batch_stride_b, kBox, result.few_height);
    } else {
      result.weights =
          kAlongK
              ? tensor_map(args.b, args.k, rows, args.ldb, weights_batches, args.batch_stride_b, kBox, result.height)
              : tensor_map(args.b, rows, args.k, args.ldb, weights_batches, args.batch_stride_b, 64, kBox);
      result.few = tensor_map(args.a, args.k, few, args.lda, few_batches, args.batch_stride_a, kBox, result.few_height);
    }
    result.c = static_cast<ElementD const*>(args.c);
    result.d = static_cast<ElementD*>(args.d);
    result.c_row = turn ? args.ldc : 1;
    result.c_few = turn ? 1 : args.ldc;
    result.c_batch = args.batch_stride_c;
    result.d_row = turn ? args.ldd : 1;
    result.d_few = turn ? 1 : args.ldd;
    result.d_batch = args.batch_stride_d;
    result.scaled = ScaledParams::of(args);
    return result;
  }

  static dim3 grid(Params const& params) { return dim3(params.clusters, 1, kRanks); }

  CUTLASS_DEVICE static void run(Params const& params, char* shared) {
    Place place;
    place.barriers = reinterpret_cast<Barriers*>(shared);
    place.sums = shared + kBarrierBytes;
    place.stages = shared + params.stages_offset;
    place.rank = int(blockIdx.z);
    // A rank without any K takes boxes beyond the end, which are zeros.
    int const first = params.groups * place.rank / kRanks, end = params.groups * (place.rank + 1) / kRanks;
    place.first_box = (first < end ? first : params.groups) * params.group;
    place.end_box = (first < end ? end : params.groups + 1) * params.group;
    place.weights_bytes = params.height * kBoxBytes;
    place.few_bytes = params.few_height * kBoxBytes;
    place.stage_bytes = (place.weights_bytes + place.few_bytes) * params.stage_boxes;
    int const warp = cutlass::canonical_warp_idx_sync();
    bool const producer = warp == kConsumers / 32 && cute::elect_one_sync();
    Cursor cursor(params, place);
    if (producer) {
      cute::prefetch_tma_descriptor(&params.weights);
      cute::prefetch_tma_descriptor(&params.few);
      int const warps = params.height > 64 ? 8 : 4;
      for (int i = 0; i < params.stages; ++i) {
        Full::init(&place.barriers->full[i], 1);
        Empty::init(&place.barriers->empty[i], warps);
      }
      Empty::init(&place.barriers->sums_full, kRanks);
      Empty::init(&place.barriers->sums_empty, kRanks * kConsumers / 32);
      cutlass::arch::fence_barrier_init();
      cutlass::arch::fence_view_async_shared();
      // The first loads wait for nobody.
      for (int i = 0; i < params.stages && cursor.tile < params.tiles; ++i) load(params, place, cursor);
    }
    // No thread block speaks to another before that one has its barriers.
    __syncthreads();
    if constexpr (kRanks > 1) cute::cluster_arrive_relaxed();
    if (warp == kConsumers / 32) {
      while (producer && cursor.tile < params.tiles) {
        Empty::wait(&place.barriers->empty[cursor.stage], cursor.phase);
        load(params, place, cursor);
      }
      __syncwarp();
      if constexpr (kRanks > 1) cute::cluster_wait();
    } else {
      if (params.group == 4) {
        consume<16, 4>(params, place, warp);
      } else {
        consume<16, 2>(params, place, warp);
      }
    }
  }

 private:
  static constexpr int kStageBoxes = 16;
  static constexpr int kStageBytes = 64 * 1024;

  struct Barriers {
    uint64_t full[kMaxStages], empty[kMaxStages];
    uint64_t sums_full, sums_empty;
  };
  static_assert(sizeof(Barriers) <= kBarrierBytes);

  using Full = cutlass::arch::ClusterTransactionBarrier;
  using Empty = cutlass::arch::ClusterBarrier;

  struct Place {
    Barriers* barriers;
    char* sums;
    char* stages;
    int rank, first_box, end_box;
    int weights_bytes, few_bytes, stage_bytes;  // of a box, and of a stage
  };

  // Floats from one of the few rows to the next in a tile's sums: the rows that the lanes of a warp write differ by
  // two, and meet different banks.
  CUTLASS_HOST_DEVICE static constexpr int pitch(int height) { return height + 4; }

  static int clamp(int value, int least, int most) { return value < least ? least : (value > most ? most : value); }

  static int batches(Args const& args, int64_t stride) { return stride != 0 ? args.batch : 1; }

  // What is loaded next, and the stage that it goes to.
  struct Cursor {
    int tile, box, stage = 0;
    uint32_t phase = 1;

    CUTLASS_DEVICE Cursor(Params const& params, Place const& place) : tile(int(blockIdx.x)), box(place.first_box) {}
  };

  CUTLASS_DEVICE static void load(Params const& params, Place const& place, Cursor& cursor) {
    auto const weights_hint = uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST);
    auto const few_hint = uint64_t(cute::TMA::CacheHintSm90::EVICT_LAST);
    int const batch = cursor.tile / params.batch_tiles, row = cursor.tile % params.batch_tiles * params.height;
    int const weights_batch = params.weights_batched ? batch : 0, few_batch = params.few_batched ? batch : 0;
    int const count = min(params.stage_boxes, place.end_box - cursor.box);
    uint64_t* const full = &place.barriers->full[cursor.stage];
    Full::arrive_and_expect_tx(full, uint32_t(count * (place.weights_bytes + place.few_bytes)));
    char* to = place.stages + cursor.stage * place.stage_bytes;
    for (int i = 0; i < count; ++i, to += place.weights_bytes) {
      int const k = (cursor.box + i) * kBox;
      if constexpr (kAlongK) {
        cute::SM90_TMA_LOAD_3D::copy(&params.weights, full, weights_hint, to, k, row, weights_batch);
      } else {
        for (int at = 0; at < params.height; at += 64) {
          cute::SM90_TMA_LOAD_3D::copy(&params.weights, full, weights_hint, to + at * kBoxBytes, row + at, k,
                                       weights_batch);
        }
      }
    }
    to = place.stages + cursor.stage * place.stage_bytes + params.stage_boxes * place.weights_bytes;
    for (int i = 0; i < count; ++i, to += place.few_bytes) {
      cute::SM90_TMA_LOAD_3D::copy(&params.few, full, few_hint, to, (cursor.box + i) * kBox, 0, few_batch);
    }
    cursor.box += params.stage_boxes;
    if (cursor.box >= place.end_box) {
      cursor.box = place.first_box;
      cursor.tile += params.clusters;
    }
    if (++cursor.stage == params.stages) {
      cursor.stage = 0;
      cursor.phase ^= 1;
    }
  }

  // With instructions as narrow as the few rows, kGroup boxes at once.
  template <int kWide, int kGroup>
  CUTLASS_DEVICE static void consume(Params const& params, Place const& place, int warp) {
    if constexpr (kWide < kFew) {
      if (params.few_height > kWide) {
        consume<2 * kWide, kWide >= 64 ? 1 : (kWide >= 32 ? 2 : kGroup)>(params, place, warp);
        return;
      }
    }
    using namespace cute;
    constexpr auto kMajor = kAlongK ? GMMA::Major::K : GMMA::Major::MN;
    using Atom = decltype(GMMA::ss_op_selector<Element, Element, float, Shape<_64, Int<kWide>, Int<kBox>>, kMajor,
                                               GMMA::Major::K>());
    using WeightsAtom = conditional_t<kAlongK, GMMA::Layout_K_SW128_Atom<Element>, GMMA::Layout_MN_SW128_Atom<Element>>;
    using WeightsLayout = decltype(tile_to_shape(WeightsAtom{}, Shape<_64, Int<kBox>>{}));
    using FewLayout = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{}, Shape<Int<kWide>, Int<kBox>>{}));

    int const first_row = warp / 4 * 64, lane = int(threadIdx.x) % 32;
    bool const multiplies = first_row < params.height;
    auto mma = make_tiled_mma(Atom{});
    auto const slice = mma.get_thread_slice(int(threadIdx.x) % 128);
    Tensor sums = partition_fragment_C(mma, Shape<_64, Int<kWide>>{});
    Tensor const places = slice.partition_C(make_identity_tensor(Shape<_64, Int<kWide>>{}));
    auto const release = [&](int stage) {
      if (lane == 0) Empty::arrive(&place.barriers->empty[stage]);
    };
    int stage = 0;
    uint32_t phase = 0, tile_phase = 0;
    bool begun = false;
    for (int tile = int(blockIdx.x); tile < params.tiles; tile += params.clusters) {
      if (multiplies) {
        if constexpr (kPromoted) clear(sums);
        mma.accumulate_ = GMMA::ScaleOut::Zero;
        int in_stage = 0, before = -1;  // boxes, and the stage of which the last ones are being multiplied
        for (int box = place.first_box; box < place.end_box; box += kGroup) {
          if (in_stage == 0) Full::wait(&place.barriers->full[stage], phase);
          char* const first = place.stages + stage * place.stage_bytes;
          char* const weights = first + in_stage * place.weights_bytes + first_row * kBoxBytes;
          char* const few = first + params.stage_boxes * place.weights_bytes + in_stage * place.few_bytes;
          Tensor const a = slice.make_fragment_A(
              slice.partition_A(make_tensor(make_smem_ptr(reinterpret_cast<Element*>(weights)), WeightsLayout{})));
          Tensor const b = slice.make_fragment_B(
              slice.partition_B(make_tensor(make_smem_ptr(reinterpret_cast<Element*>(few)), FewLayout{})));
          if constexpr (kPromoted) {
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < kGroup; ++i) {
              Tensor part = make_fragment_like(sums);
              mma.accumulate_ = GMMA::ScaleOut::Zero;
              warpgroup_fence_operand(part);
              warpgroup_arrive();
              multiply(mma, a, b, part, i * place.weights_bytes, i * place.few_bytes);
              warpgroup_commit_batch();
              warpgroup_wait<0>();
              warpgroup_fence_operand(part);
              CUTLASS_PRAGMA_UNROLL
              for (int j = 0; j < size(sums); ++j) sums(j) += part(j);
            }
          } else {
            warpgroup_fence_operand(sums);
            warpgroup_arrive();
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < kGroup; ++i) {
              multiply(mma, a, b, sums, i * place.weights_bytes, i * place.few_bytes);
            }
            warpgroup_commit_batch();
            warpgroup_wait<1>();
            warpgroup_fence_operand(sums);
          }
          if (before >= 0) {
            release(before);
            before = -1;
          }
          in_stage += kGroup;
          if (in_stage == params.stage_boxes || box + kGroup == place.end_box) {
            in_stage = 0;
            before = stage;
            if (++stage == params.stages) {
              stage = 0;
              phase ^= 1;
            }
          }
        }
        warpgroup_wait<0>();
        warpgroup_fence_operand(sums);
        release(before);
      }
      // The sums before these have been read.
      if (begun) empty_sums(place, tile_phase ^ 1);
      if (multiplies) {
        float* const to = reinterpret_cast<float*>(place.sums) + first_row;
        int const rows = params.height - first_row, wide = pitch(params.height);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < size(sums); ++i) {
          int const row = int(get<0>(places(i))), other = int(get<1>(places(i)));
          if (row < rows && other < params.few_height) to[other * wide + row] = sums(i);
        }
      }
      cutlass::arch::NamedBarrier::sync(kConsumers, 0);
      if constexpr (kRanks > 1) {
        if (!begun) cluster_wait();
        // One thread speaks for the thread block: this fence is dear.
        if (warp == 0 && lane < kRanks) {
          asm volatile("fence.acq_rel.cluster;" ::: "memory");
          Empty::arrive(&place.barriers->sums_full, uint32_t(lane), 1u);
        }
        wait_for_cluster(&place.barriers->sums_full, tile_phase);
      }
      store(params, place, tile);
      if constexpr (kRanks > 1) {
        // What was read has been used.
        asm volatile("" ::: "memory");
        __syncwarp();
        if (lane < kRanks) Empty::arrive(&place.barriers->sums_empty, uint32_t(lane), 1u);
      }
      begun = true;
      tile_phase ^= 1;
    }
    // Shared memory that others read stays until they have.
    if constexpr (kRanks > 1) empty_sums(place, tile_phase ^ 1);
  }

  // The box of K that lies so many bytes behind the one of the descriptors.
  template <class Mma, class A, class B, class C>
  CUTLASS_DEVICE static void multiply(Mma& mma, A const& a, B const& b, C& c, int weights_bytes, int few_bytes) {
    cute::Tensor const weights = cute::make_tensor(a.data() + weights_bytes / 16, a.layout());
    cute::Tensor const few = cute::make_tensor(b.data() + few_bytes / 16, b.layout());
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < cute::size<2>(a); ++k) {
      cute::gemm(mma, weights(cute::_, cute::_, k), few(cute::_, cute::_, k), c);
      mma.accumulate_ = cute::GMMA::ScaleOut::One;
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

  CUTLASS_DEVICE static void empty_sums(Place const& place, uint32_t phase) {
    if constexpr (kRanks > 1) {
      Empty::wait(&place.barriers->sums_empty, phase);
    } else {
      cutlass::arch::NamedBarrier::sync(kConsumers, 0);
    }
  }

  // Four sums of a rank.
  CUTLASS_DEVICE static float4 sums_of(float const* sums, int rank) {
    if constexpr (kRanks == 1) return *reinterpret_cast<float4 const*>(sums);
    float4 read;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(read.x), "=f"(read.y), "=f"(read.z), "=f"(read.w)
                 : "r"(cute::set_block_rank(cute::cast_smem_ptr_to_uint(sums), uint32_t(rank))));
    return read;
  }

  // Adds up and stores this rank's part of a tile, four rows of weights at a time.
  CUTLASS_DEVICE static void store(Params const& params, Place const& place, int tile) {
    constexpr int kRun = 4;
    int const batch = tile / params.batch_tiles, tile_row = tile % params.batch_tiles * params.height;
    int const runs = params.height / kRun, count = runs * params.few_rows, wide = pitch(params.height);
    int const first = count * place.rank / kRanks, end = count * (place.rank + 1) / kRanks;
    ScaledParams const& scaled = params.scaled;
    float const scale_d = kScaled ? scaled.output() : 1.0f;
    LargestAbsolute largest;
    auto const* const sums = reinterpret_cast<float const*>(place.sums);
    for (int i = first + int(threadIdx.x); i < end; i += kConsumers) {
      // Neighbours store next to one another.
      int const other = params.turned ? i % params.few_rows : i / runs;
      int const run = params.turned ? i / params.few_rows : i % runs;
      float4 sum = sums_of(sums + other * wide + run * kRun, 0);
      CUTLASS_PRAGMA_UNROLL
      for (int rank = 1; rank < kRanks; ++rank) {
        float4 const part = sums_of(sums + other * wide + run * kRun, rank);
        sum = {sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w};
      }
      float const values[kRun] = {sum.x, sum.y, sum.z, sum.w};
      int const row = tile_row + kRun * run;
      ElementD* const d = params.d + batch * params.d_batch + row * params.d_row + other * params.d_few;
      ElementD const* const c = params.c + batch * params.c_batch + row * params.c_row + other * params.c_few;
      cutlass::Array<ElementD, kRun> results;
      cutlass::NumericConverter<ElementD, float> convert;
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kRun; ++j) {
        bool const inside = row + j < params.rows;
        float scale = scaled.alpha;
        if constexpr (kScaled) {
          int const m = params.turned ? row + j : other, n = params.turned ? other : row + j;
          scale = inside ? scaled.row(m, m + 1) * scaled.column(n, n + 1) : 0.0f;
        }
        float value = scale * values[j];
        if (scaled.needs_c() && inside) value += scaled.beta * float(c[j * params.c_row]);
        if (kScaled && inside) largest.see(value);
        results[j] = convert(value * scale_d);
      }
      if (!params.turned && row + kRun <= params.rows && reinterpret_cast<uint64_t>(d) % sizeof(results) == 0) {
        *reinterpret_cast<cutlass::AlignedArray<ElementD, kRun>*>(d) =
            reinterpret_cast<cutlass::AlignedArray<ElementD, kRun> const&>(results);
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < kRun; ++j) {
          if (row + j < params.rows) d[j * params.d_row] = results[j];
        }
      }
    }
    if (kScaled && scaled.amax != nullptr) largest.store(scaled.amax);
  }
};

}  // namespace atomr_cutlass
