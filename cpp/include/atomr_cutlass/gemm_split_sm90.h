// GEMM cells of the sm90 generation whose thread blocks share out K as well as D: TMA and WGMMA by CuTe, without
// CUTLASS's collectives. They serve what has too few tiles for all multiprocessors, or a last wave that is not full.
//
// The steps along K of all tiles lie one after the other. As many tiles as fill whole waves are computed by a cluster
// each; the steps of the others are divided evenly among the clusters, so that a cluster computes a part of at most
// two tiles more. Inside a cluster each thread block takes a share of those steps; the sums are added up through
// distributed shared memory. The parts of a tile that clusters share lie in the workspace until the last of them has
// arrived, which adds them up in the order of K: the same bits every time. No thread block waits for one that may not
// run. Counters of arrivals are zero when the kernel starts, and when it ends.
//
// Functions without an annotation run on the host when nvcc compiles them, and on the device under NVRTC, whose
// -default-device makes them device functions.
#pragma once

#include "atomr_cutlass/kernel_abi.h"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/array.h"
#include "cutlass/cuda_host_adapter.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/layout/matrix.h"
#include "cutlass/numeric_conversion.h"

namespace atomr_cutlass {

// `kWidest` is the widest tile, a multiple of 64. A cluster has `kPair` thread blocks for neighbouring tiles, which
// load what those share once, times `kRanks` that divide K among them.
template <class Element, class LayoutA, class LayoutB, class ElementD, int kWidest, int kPair, int kRanks>
struct GemmSplitSm90 {
  using Args = atomr_cutlass_gemm_args;

  static constexpr bool kAlongKA = cute::is_same_v<LayoutA, cutlass::layout::RowMajor>;
  static constexpr bool kAlongKB = cute::is_same_v<LayoutB, cutlass::layout::ColumnMajor>;
  static constexpr int kBoxBytes = 128;  // of K of a row, which a TMA load takes at once: the swizzle's width
  static constexpr int kBox = 64;
  static constexpr int kBlockBytes = kBox * kBoxBytes;  // 64 rows of an operand, a step along K deep
  static constexpr int kRows = 128;                     // the tallest tile
  static constexpr int kConsumers = 256;
  static constexpr int kThreads = kConsumers + 128;  // a warp group that loads, and leaves registers to the others
  static constexpr int kMinBlocks = 1;
  static constexpr int kClusterM = kPair, kClusterN = 1, kClusterK = kRanks;
  static_assert(sizeof(Element) == 2, "WGMMA reads elements of other widths contiguous along K only");
  static_assert(kWidest % 64 == 0 && kWidest <= 256, "WGMMA is at most 256 columns wide");

  static constexpr int kSharedBytes = 227 * 1024;
  static constexpr int kBarrierBytes = 1024;
  static constexpr int kScratchBytes = kConsumers * 32;
  static constexpr int kMaxStages = 32;
  static constexpr int kCounters = 4096;  // at the start of the workspace
  static constexpr int kCountersBytes = kCounters * 4;
  static_assert(kPair == 1 || kPair == 2 || kPair == 4);
  static constexpr int kLeastSteps = 4;  // of a thread block's share of a tile that is divided

  struct Params {
    cute::TmaDescriptor a, b;
    ElementD const* c;
    ElementD* d;
    float* partials;
    int32_t* arrived;
    int64_t ldc, ldd, c_batch, d_batch;
    float alpha, beta;
    int32_t m, n, steps;
    int32_t height, width;         // of a tile of D
    int32_t wide;                  // columns that WGMMA computes of it, a multiple of 64
    int32_t pair_m, pair_n;  // tiles of a pair along M, which share columns of B, and along N, which share rows of A
    int32_t tiles_m, tiles_n, panel;  // pairs of tiles
    int32_t clusters, whole, cut;  // tiles that one cluster computes, and those that clusters share
    int32_t sharing;  // clusters that share the latter
    int32_t stages, stages_offset, stage_bytes, a_bytes, b_bytes;
    int32_t a_batched, b_batched;
  };

  CUTLASS_HOST_DEVICE static constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
  CUTLASS_HOST_DEVICE static constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }

  static bool aligned(void const* pointer, int64_t leading, int64_t batch_stride) {
    return reinterpret_cast<uint64_t>(pointer) % 16 == 0 && leading % 8 == 0 && batch_stride % 8 == 0;
  }

  static bool can_implement(Args const& args) {
    return args.m > 0 && args.n > 0 && args.k > 0 && args.batch > 0 && aligned(args.a, args.lda, args.batch_stride_a) &&
           aligned(args.b, args.ldb, args.batch_stride_b);
  }

  static uint64_t workspace_size(Args const& args) {
    Params const made = shape(args);
    if (made.cut == 0) return 0;
    return kCountersBytes + uint64_t(made.sharing) * 2 * kPair * kRows * made.wide * 4;
  }

  static void clear_range(Args const&, uint64_t& offset, uint64_t& bytes) { offset = bytes = 0; }

  static Params params(Args const& args) {
    Params result = shape(args);
    result.arrived = static_cast<int32_t*>(args.workspace);
    result.partials = reinterpret_cast<float*>(static_cast<char*>(args.workspace) + kCountersBytes);
    result.a = tensor_map(args.a, args.m, args.k, args.lda, args.batch, args.batch_stride_a, kAlongKA, result.height,
                          result.pair_n);
    result.b = tensor_map(args.b, args.n, args.k, args.ldb, args.batch, args.batch_stride_b, kAlongKB, result.width,
                          result.pair_m);
    return result;
  }

  static dim3 grid(Params const& params) { return dim3(params.clusters * kPair, 1, kRanks); }

  CUTLASS_DEVICE static void run(Params const& params, char* shared) {
    Place place;
    place.barriers = reinterpret_cast<Barriers*>(shared);
    place.scratch = reinterpret_cast<Run*>(shared + kBarrierBytes);
    place.sums = reinterpret_cast<float*>(shared + kBarrierBytes + kScratchBytes);
    place.stages = shared + params.stages_offset;
    place.rank = kRanks > 1 ? int(blockIdx.z) : 0;
    place.pair = kPair > 1 ? int(blockIdx.x) % kPair : 0;
    place.pair_m = kPair > 1 ? place.pair % params.pair_m : 0;
    place.pair_n = kPair > 1 ? place.pair / params.pair_m : 0;
    place.cluster = int(blockIdx.x) / kPair;
    bool begun = false;
    int const warp = cutlass::canonical_warp_idx_sync();
    if (warp >= kConsumers / 32) {
      cutlass::arch::warpgroup_reg_dealloc<56>();
      bool const loads = warp == kConsumers / 32;
      if (loads && cute::elect_one_sync()) {
        cute::prefetch_tma_descriptor(&params.a);
        cute::prefetch_tma_descriptor(&params.b);
        int const warps = params.height > 64 ? 8 : 4;
        for (int i = 0; i < params.stages; ++i) {
          Full::init(&place.barriers->full[i], 1);
          Empty::init(&place.barriers->empty[i], warps * (params.pair_m + params.pair_n - 1));
        }
        Empty::init(&place.barriers->sums_full, kRanks);
        Empty::init(&place.barriers->sums_empty, kRanks * kConsumers / 32);
        cutlass::arch::fence_barrier_init();
        cutlass::arch::fence_view_async_shared();
      }
      begin();
      if (loads) produce(params, place);
      __syncwarp();
    } else {
      cutlass::arch::warpgroup_reg_alloc<224>();
      begin();
      begun = consume<64>(params, place, warp);
    }
    end(begun);
  }

 private:
  struct Barriers {
    uint64_t full[kMaxStages], empty[kMaxStages];
    uint64_t sums_full, sums_empty;
    int32_t last;
  };
  static_assert(sizeof(Barriers) <= kBarrierBytes);

  using Full = cutlass::arch::ClusterTransactionBarrier;
  using Empty = cutlass::arch::ClusterBarrier;

  static constexpr int kRun = 8;  // columns that a thread adds up at once

  struct Run {
    float4 low, high;

    CUTLASS_DEVICE void operator+=(Run const& other) {
      low = {low.x + other.low.x, low.y + other.low.y, low.z + other.low.z, low.w + other.low.w};
      high = {high.x + other.high.x, high.y + other.high.y, high.z + other.high.z, high.w + other.high.w};
    }
  };

  struct Place {
    Barriers* barriers;
    float* sums;
    Run* scratch;
    char* stages;
    int rank, pair, pair_m, pair_n, cluster;
  };

  // No thread block speaks to another before that one has its barriers. Without a pair that is late enough to be
  // waited for when the first tile is done.
  CUTLASS_DEVICE static void begin() {
    __syncthreads();
    if constexpr (kPair * kRanks > 1) cute::cluster_arrive_relaxed();
    if constexpr (kPair > 1) cute::cluster_wait();
  }

  // Shared memory that others read or write stays until they have.
  CUTLASS_DEVICE static void end(bool waited) {
    if constexpr (kPair * kRanks > 1) {
      if (kPair == 1 && !waited) cute::cluster_wait();
      cute::cluster_arrive();
      cute::cluster_wait();
    }
  }

  // The thread block of the cluster with a rank along K and a place in the pair.
  CUTLASS_DEVICE static uint32_t block_of(int rank, int pair) { return uint32_t(rank * kPair + pair); }

  // Steps along K of a tile, which a cluster computes.
  struct Segment {
    int tile, first, end;
  };

  // What a cluster computes: its share of the tiles that are divided, then whole ones.
  struct Walk {
    int step = 0, end = 0, tile;

    CUTLASS_DEVICE Walk(Params const& params, Place const& place) : tile(place.cluster) {
      if (tile < params.sharing) {
        int64_t const all = int64_t(params.cut) * params.steps;
        step = int(all * tile / params.sharing);
        end = int(all * (tile + 1) / params.sharing);
      }
    }

    CUTLASS_DEVICE bool next(Params const& params, Segment& segment) {
      if (step < end) {
        int const index = step / params.steps;
        segment.tile = params.whole + index;
        segment.first = step - index * params.steps;
        segment.end = min(params.steps, segment.first + end - step);
        step += segment.end - segment.first;
        return true;
      }
      if (tile >= params.whole) return false;
      segment = {tile, 0, params.steps};
      tile += params.clusters;
      return true;
    }
  };

  // A thread block's steps of a segment. One without any takes a step beyond the end, which is zeros.
  CUTLASS_DEVICE static void share(Params const& params, Place const& place, Segment const& segment, int& first,
                                   int& end) {
    int const count = segment.end - segment.first;
    first = segment.first + count * place.rank / kRanks;
    end = segment.first + count * (place.rank + 1) / kRanks;
    if (kRanks > 1 && first == end) {
      first = params.steps;
      end = params.steps + 1;
    }
  }

  struct Origin {
    int row, column, batch;
  };

  // Pairs are taken in panels of columns, row by row.
  CUTLASS_DEVICE static Origin origin(Params const& params, Place const& place, int tile) {
    int const in_batch = params.tiles_m * params.tiles_n, batch = tile / in_batch, index = tile - batch * in_batch;
    int const panel = index / (params.panel * params.tiles_m), first = panel * params.panel;
    int const columns = min(params.panel, params.tiles_n - first), inside = index - first * params.tiles_m;
    int const row = inside / columns, column = first + inside - row * columns;
    return {(row * params.pair_m + place.pair_m) * params.height,
            (column * params.pair_n + place.pair_n) * params.width, batch};
  }

  // Floats from one row to the next in a tile's sums: rows that a warp writes at once meet different banks.
  CUTLASS_HOST_DEVICE static constexpr int pitch(int wide) { return wide + 8; }

  // All but addresses.
  static Params shape(Args const& args) {
    Params best{};
    float least = 3.4e38f;
    for (int wide = 64; wide <= kWidest; wide += 64) {
      for (int pair_m = 1; pair_m <= kPair; pair_m *= 2) {
        for (int slices = 0; slices < 2; ++slices) {
          float clocks = 0.0f;
          Params const made = of_width(args, wide, pair_m, slices != 0, clocks);
          if (clocks < least) {
            least = clocks;
            best = made;
          }
        }
      }
    }
    return best;
  }

  static Params of_width(Args const& args, int wide, int pair_m, bool slices, float& clocks) {
    Params result{};
    result.m = args.m;
    result.n = args.n;
    result.c = static_cast<ElementD const*>(args.c);
    result.d = static_cast<ElementD*>(args.d);
    result.ldc = args.ldc;
    result.ldd = args.ldd;
    result.c_batch = args.batch_stride_c;
    result.d_batch = args.batch_stride_d;
    result.alpha = float(args.alpha);
    result.beta = float(args.beta);
    result.steps = ceil_div(args.k, kBox);
    result.wide = wide;
    int const pair_n = kPair / pair_m;
    result.pair_m = pair_m;
    result.pair_n = pair_n;
    int const rows = round_up(ceil_div(args.m, kRows), pair_m), columns = round_up(ceil_div(args.n, wide), pair_n);
    // Tiles of equal extents, which are loaded; the instructions compute whole ones. Half of one is whole boxes.
    result.height = round_up(ceil_div(args.m, rows), kAlongKA ? 8 * pair_n : 64);
    result.width = round_up(ceil_div(args.n, columns), kAlongKB ? 8 * pair_m : 64);
    result.tiles_m = ceil_div(args.m, result.height * pair_m);
    result.tiles_n = ceil_div(args.n, result.width * pair_n);
    result.panel = args.swizzle > 0 ? args.swizzle : 1;
    int clusters = args.max_active_clusters > 0 ? args.max_active_clusters : args.sm_count / (kRanks * kPair);
    if (clusters < 1) clusters = 1;
    int const tiles = result.tiles_m * result.tiles_n * args.batch;
    result.whole = tiles / clusters * clusters;
    result.cut = tiles - result.whole;
    // What is divided gains nothing where it fills a wave as it is.
    if (result.cut * 16 >= clusters * 15) {
      result.whole = tiles;
      result.cut = 0;
    }
    // Few tiles among many clusters are many parts each: a wave of whole tiles makes them fewer.
    if (result.whole >= clusters && result.cut > 0 && 2 * result.cut < clusters) {
      result.whole -= clusters;
      result.cut += clusters;
    }
    int64_t const most = int64_t(result.cut) * result.steps / (kLeastSteps * kRanks);
    result.sharing = most < clusters ? int(most) : clusters;
    if (result.sharing <= result.cut && result.sharing < clusters) {
      result.whole = tiles;
      result.cut = result.sharing = 0;
    }
    // Slices of K that are the same for all tiles are read by their thread blocks at the same time.
    bool const even = slices && result.whole == 0 && result.sharing > result.cut;
    if (even) result.sharing = result.sharing / result.cut * result.cut;
    int const busy = result.whole < clusters ? result.whole : clusters;
    result.clusters = busy > result.sharing ? busy : result.sharing;

    int const sums_bytes = result.height * pitch(wide) * 4;
    result.stages_offset = round_up(kBarrierBytes + (kRanks > 1 ? kScratchBytes + sums_bytes : 0), 1024);
    result.stage_bytes = 2 * kBlockBytes + wide / 64 * kBlockBytes;
    result.stages = (kSharedBytes - 1024 - result.stages_offset) / result.stage_bytes;
    result.a_bytes = kAlongKA ? result.height * kBoxBytes : ceil_div(result.height, 64) * kBlockBytes;
    result.b_bytes = kAlongKB ? result.width * kBoxBytes : ceil_div(result.width, 64) * kBlockBytes;
    result.a_batched = args.batch > 1 && args.batch_stride_a != 0;
    result.b_batched = args.batch > 1 && args.batch_stride_b != 0;

    // What a pair shares is read from L2 once.
    int const read_bytes = result.a_bytes / pair_n + result.b_bytes / pair_m;
    // Shared memory is read by the instructions, which are of 64 rows, and written by TMA.
    int const groups = result.height > 64 ? 2 : 1;
    int const shared_bytes = groups * kBlockBytes / 64 * (64 + wide) + result.a_bytes + result.b_bytes;
    float const parts[] = {float(4 * wide) / 0.9f, float(shared_bytes) / 125.0f,
                           float(read_bytes) / (result.cut == 0 || even ? 55.0f : 45.0f)};
    float step = parts[0];
    for (float const part : parts) step = part > step ? part : step;
    if (step < 172.0f) step = 172.0f;
    float const tile = 1000.0f + float(kRows * wide) / 32.0f;
    float const waves = float(ceil_div(result.whole, clusters));
    clocks = waves * (step * float(result.steps) / kRanks + tile);
    if (result.cut > 0) {
      float const peers = float(result.sharing) / float(result.cut);
      float const part = float(result.height * wide * 4) / kRanks;
      // Uneven slices end in one tile and begin in another.
      float const segments = result.sharing % result.cut == 0 ? 1.0f : 2.0f;
      clocks += step * float(result.steps) * float(result.cut) / float(result.sharing) / kRanks +
                segments * (3500.0f + tile) + part * (segments + peers) / 40.0f;
    }
    return result;
  }

  static cute::TmaDescriptor tensor_map(void const* pointer, int rows, int k, int64_t leading, int batch,
                                        int64_t batch_stride, bool along_k, int height, int shares) {
    cute::TmaDescriptor map{};
#if !defined(__CUDACC_RTC__) || defined(ATOMR_CUTLASS_EVALUATE)
    bool const batched = batch > 1 && batch_stride != 0;
    uint64_t const dims[3] = {uint64_t(along_k ? k : rows), uint64_t(along_k ? rows : k),
                              uint64_t(batched ? batch : 1)};
    uint64_t const strides[2] = {uint64_t(leading) * sizeof(Element),
                                 uint64_t(batched ? batch_stride : leading) * sizeof(Element)};
    uint32_t const box[3] = {64, uint32_t((along_k ? height : kBox) / shares), 1};
    uint32_t const steps[3] = {1, 1, 1};
    (void)CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeTiled)(
        &map, cute::TMA::to_CUtensorMapDataType<Element>(), 3, const_cast<void*>(pointer), dims, strides, box, steps,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
#endif
    return map;
  }

  // Loads a step of a tile's operand; of what thread blocks of a pair share, each loads a part for all of them.
  template <bool kAlongK>
  CUTLASS_DEVICE static void load(cute::TmaDescriptor const* map, uint64_t* full, char* to, int k, int row, int batch,
                                  int extent, int first, bool shared, uint32_t sharing) {
    auto const hint = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    for (int i = 0; i < (kAlongK ? 1 : extent); i += 64) {
      char* const there = to + (i + first) * kBoxBytes;
      int const inner = kAlongK ? k : row + i, outer = kAlongK ? row + first : k + first;
      if (kPair > 1 && shared) {
        cute::SM90_TMA_LOAD_MULTICAST_3D::copy(map, full, uint16_t(sharing), hint, there, inner, outer, batch);
      } else {
        cute::SM90_TMA_LOAD_3D::copy(map, full, hint, there, inner, outer, batch);
      }
    }
  }

  // A value that is the same for all lanes of the warp, in a register that they share: TMA takes its operands there,
  // and where the compiler does not know that they are alike it looks for those that are, for longer than the load
  // takes.
  CUTLASS_DEVICE static uint32_t uniform(uint32_t value) {
    asm volatile("redux.sync.or.b32 %0, %0, 0xffffffff;" : "+r"(value));
    return value;
  }
  CUTLASS_DEVICE static int uniform(int value) { return int(uniform(uint32_t(value))); }

  // All lanes of a warp go through the steps, and one of them loads.
  CUTLASS_DEVICE static void produce(Params const& params, Place const& place) {
    // Thread blocks of the cluster that have the same rows of A, and the same columns of B.
    uint32_t same_a = 0, same_b = 0;
    for (int i = 0; i < params.pair_n; ++i) same_a |= 1u << block_of(place.rank, place.pair_m + i * params.pair_m);
    for (int i = 0; i < params.pair_m; ++i) same_b |= 1u << block_of(place.rank, place.pair_n * params.pair_m + i);
    same_a = uniform(same_a);
    same_b = uniform(same_b);
    int const share_a = uniform((kAlongKA ? params.height : kBox) / params.pair_n * place.pair_n);
    int const share_b = uniform((kAlongKB ? params.width : kBox) / params.pair_m * place.pair_m);
    bool const elected = cute::elect_one_sync();
    int stage = 0;
    uint32_t phase = 1;
    Walk walk(params, place);
    Segment segment;
    while (walk.next(params, segment)) {
      Origin const at = origin(params, place, segment.tile);
      int const row = uniform(at.row), column = uniform(at.column), batch = uniform(at.batch);
      int const a_batch = params.a_batched ? batch : 0, b_batch = params.b_batched ? batch : 0;
      int first, end;
      share(params, place, segment, first, end);
      int const begin = uniform(first), count = uniform(end - first);
      for (int i = 0; i < count; ++i) {
        Empty::wait(&place.barriers->empty[stage], phase);
        if (elected) {
          uint64_t* const full = &place.barriers->full[stage];
          Full::arrive_and_expect_tx(full, uint32_t(params.a_bytes + params.b_bytes));
          char* const a = place.stages + stage * params.stage_bytes;
          char* const b = a + 2 * kBlockBytes;
          int const k = (begin + i) * kBox;
          load<kAlongKA>(&params.a, full, a, k, row, a_batch, params.height, share_a, params.pair_n > 1, same_a);
          load<kAlongKB>(&params.b, full, b, k, column, b_batch, params.width, share_b, params.pair_m > 1, same_b);
        }
        if (++stage == params.stages) {
          stage = 0;
          phase ^= 1;
        }
      }
    }
  }

  template <int kWide>
  CUTLASS_DEVICE static bool consume(Params const& params, Place const& place, int warp) {
    if constexpr (kWide < kWidest) {
      if (params.wide > kWide) return consume<kWide + 64>(params, place, warp);
    }
    using namespace cute;
    constexpr auto kMajorA = kAlongKA ? GMMA::Major::K : GMMA::Major::MN;
    constexpr auto kMajorB = kAlongKB ? GMMA::Major::K : GMMA::Major::MN;
    using Atom =
        decltype(GMMA::ss_op_selector<Element, Element, float, Shape<_64, Int<kWide>, Int<kBox>>, kMajorA, kMajorB>());
    using AtomA = conditional_t<kAlongKA, GMMA::Layout_K_SW128_Atom<Element>, GMMA::Layout_MN_SW128_Atom<Element>>;
    using AtomB = conditional_t<kAlongKB, GMMA::Layout_K_SW128_Atom<Element>, GMMA::Layout_MN_SW128_Atom<Element>>;
    using LayoutSA = decltype(tile_to_shape(AtomA{}, Shape<_64, Int<kBox>>{}, Step<_2, _1>{}));
    using LayoutSB = decltype(tile_to_shape(AtomB{}, Shape<Int<kWide>, Int<kBox>>{}, Step<_2, _1>{}));

    int const first_row = warp / 4 * 64, lane = int(threadIdx.x) % 32;
    bool const multiplies = first_row < params.height;
    auto mma = make_tiled_mma(Atom{});
    auto const slice = mma.get_thread_slice(int(threadIdx.x) % 128);
    Tensor sums = partition_fragment_C(mma, Shape<_64, Int<kWide>>{});
    Tensor const a0 = slice.make_fragment_A(slice.partition_A(
        make_tensor(make_smem_ptr(reinterpret_cast<Element*>(place.stages + first_row * kBoxBytes)), LayoutSA{})));
    Tensor const b0 = slice.make_fragment_B(slice.partition_B(
        make_tensor(make_smem_ptr(reinterpret_cast<Element*>(place.stages + 2 * kBlockBytes)), LayoutSB{})));
    auto const release = [&](int stage) {
      if constexpr (kPair > 1) {
        bool const loads = lane % params.pair_m == place.pair_m || lane / params.pair_m == place.pair_n;
        if (lane < kPair && loads) Empty::arrive(&place.barriers->empty[stage], block_of(place.rank, lane), 1u);
      } else {
        if (lane == 0) Empty::arrive(&place.barriers->empty[stage]);
      }
    };
    int stage = 0;
    uint32_t phase = 0, tile_phase = 0;
    bool begun = false;
    Walk walk(params, place);
    Segment segment;
    while (walk.next(params, segment)) {
      int step, end;
      share(params, place, segment, step, end);
      if (multiplies) {
        mma.accumulate_ = GMMA::ScaleOut::Zero;
        int before = -1;
        do {
          Full::wait(&place.barriers->full[stage], phase);
          int const offset = stage * (params.stage_bytes / 16);
          Tensor const a = make_tensor(a0.data() + offset, a0.layout());
          Tensor const b = make_tensor(b0.data() + offset, b0.layout());
          warpgroup_fence_operand(sums);
          warpgroup_arrive();
          CUTLASS_PRAGMA_UNROLL
          for (int k = 0; k < size<2>(a); ++k) {
            cute::gemm(mma, a(_, _, k), b(_, _, k), sums);
            mma.accumulate_ = GMMA::ScaleOut::One;
          }
          warpgroup_commit_batch();
          warpgroup_wait<1>();
          warpgroup_fence_operand(sums);
          if (before >= 0) release(before);
          before = stage;
          if (++stage == params.stages) {
            stage = 0;
            phase ^= 1;
          }
        } while (++step < end);
        warpgroup_wait<0>();
        warpgroup_fence_operand(sums);
        release(before);
      }
      if constexpr (kRanks == 1) {
        finish(params, place, segment, sums, multiplies);
      } else {
        if (begun) Empty::wait(&place.barriers->sums_empty, tile_phase ^ 1);
        if (multiplies) {
          int const row = first_row + warp % 4 * 16 + lane / 4;
          float* const to = place.sums + row * pitch(kWide) + lane % 4 * 2;
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < kWide / 8; ++i) {
            CUTLASS_PRAGMA_UNROLL
            for (int half = 0; half < 2; ++half) {
              if (row + 8 * half < params.height) {
                *reinterpret_cast<float2*>(to + 8 * half * pitch(kWide) + 8 * i) =
                    make_float2(sums(4 * i + 2 * half), sums(4 * i + 2 * half + 1));
              }
            }
          }
        }
        cutlass::arch::NamedBarrier::sync(kConsumers, 0);
        if (!begun && kPair == 1) cluster_wait();
        // One thread speaks for the thread block: this fence is dear.
        if (warp == 0 && lane < kRanks) {
          asm volatile("fence.acq_rel.cluster;" ::: "memory");
          Empty::arrive(&place.barriers->sums_full, block_of(lane, place.pair), 1u);
        }
        wait_for_cluster(&place.barriers->sums_full, tile_phase);
        add_up(params, place, segment, lane);
      }
      begun = true;
      tile_phase ^= 1;
    }
    return begun;
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

  // The clusters that share a divided tile, and where their parts of it lie: a cluster has room for its part of the
  // tile with which its steps begin, and of the one with which they end. Only the first cluster can end with a tile.
  struct Peers {
    int first = 0, last = 0, ends = 0;

    Peers() = default;
    CUTLASS_DEVICE Peers(Params const& params, int index) {
      int64_t const all = int64_t(params.cut) * params.steps, begin = int64_t(index) * params.steps;
      first = cluster_of(params, begin);
      last = cluster_of(params, begin + params.steps - 1);
      ends = all * first / params.sharing < begin ? 1 : 0;
    }

    CUTLASS_DEVICE int count() const { return last - first + 1; }

    CUTLASS_DEVICE float* part(Params const& params, Place const& place, int cluster) const {
      int const room = 2 * cluster + (cluster == first ? ends : 0);
      return params.partials + int64_t(room * kPair + place.pair) * kRows * params.wide;
    }
  };

  // The cluster that computes a step of the divided tiles.
  CUTLASS_DEVICE static int cluster_of(Params const& params, int64_t step) {
    return int(((step + 1) * params.sharing - 1) / (int64_t(params.cut) * params.steps));
  }

  // Whether all clusters of a tile have left their parts; the one that asks has left its own. For all consumers.
  CUTLASS_DEVICE static bool last_to_arrive(Place const& place, int32_t* arrived, int peers) {
    cutlass::arch::NamedBarrier::sync(kConsumers, 0);
    if (threadIdx.x == 0) {
      int32_t before;
      asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(arrived) : "memory");
      place.barriers->last = before == peers - 1;
      // The next launch finds it as this one did.
      if (before == peers - 1) *arrived = 0;
    }
    cutlass::arch::NamedBarrier::sync(kConsumers, 0);
    return place.barriers->last != 0;
  }

  // What others have written, past L1, in the order of the program.
  CUTLASS_DEVICE static float4 read_sums(float4 const* from) {
    float4 read;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(read.x), "=f"(read.y), "=f"(read.z), "=f"(read.w)
                 : "l"(from)
                 : "memory");
    return read;
  }

  // The thread's index, from which nothing is computed ahead of its use: the sums leave few registers.
  CUTLASS_DEVICE static int thread() {
    int index = int(threadIdx.x);
    asm volatile("" : "+r"(index));
    return index;
  }

  // Of a cluster of one: stores a whole tile, or its part, or what all parts come to.
  template <class Sums>
  CUTLASS_DEVICE static void finish(Params const& params, Place const& place, Segment const& segment, Sums& sums,
                                    bool multiplies) {
    constexpr int kCount = int(decltype(cute::size(sums))::value);
    if (segment.end - segment.first < params.steps) {
      int const index = segment.tile - params.whole;
      Peers const peers(params, index);
      int const place_of = thread();
      float4* const mine = reinterpret_cast<float4*>(peers.part(params, place, place.cluster)) + place_of;
      if (multiplies) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kCount; i += 4) {
          __stcg(mine + i / 4 * kConsumers, make_float4(sums(i), sums(i + 1), sums(i + 2), sums(i + 3)));
        }
      }
      if (!last_to_arrive(place, params.arrived + index * kPair + place.pair, peers.count())) return;
      if (!multiplies) return;
      cute::clear(sums);
      for (int cluster = peers.first; cluster <= peers.last; ++cluster) {
        float4 const* const part = reinterpret_cast<float4 const*>(peers.part(params, place, cluster)) + place_of;
        constexpr int kAtOnce = 8;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kCount; i += 4 * kAtOnce) {
          float4 read[kAtOnce];
          CUTLASS_PRAGMA_UNROLL
          for (int j = 0; j < kAtOnce; ++j) read[j] = read_sums(part + (i / 4 + j) * kConsumers);
          CUTLASS_PRAGMA_UNROLL
          for (int j = 0; j < kAtOnce; ++j) {
            sums(i + 4 * j) += read[j].x;
            sums(i + 4 * j + 1) += read[j].y;
            sums(i + 4 * j + 2) += read[j].z;
            sums(i + 4 * j + 3) += read[j].w;
          }
        }
      }
    }
    if (multiplies) store_sums(params, place, segment.tile, sums);
  }

  // Stores a tile as the instruction leaves it: a lane holds two neighbours of each 8 columns, in two rows.
  template <class Sums>
  CUTLASS_DEVICE static void store_sums(Params const& params, Place const& place, int tile, Sums& sums) {
    constexpr int kCount = int(decltype(cute::size(sums))::value), kBlocks = kCount / 4;
    int const index = thread(), quad = index % 4, inside = index / 32 * 16 + index % 32 / 4;
    Origin const at = origin(params, place, tile);
    int const columns = min(params.width, params.n - at.column), rows = min(params.height, params.m - at.row);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) sums(i) *= params.alpha;
    if (params.beta != 0.0f) {
      ElementD const* const from = params.c + at.batch * params.c_batch + (at.row + inside) * params.ldc + at.column;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) {
        int const below = i / 2 % 2 * 8, column = i / 4 * 8 + 2 * quad + i % 2;
        if (inside + below < rows && column < columns) {
          sums(i) += params.beta * float(from[below * params.ldc + column]);
        }
      }
    }
    ElementD* to = params.d + at.batch * params.d_batch + (at.row + inside) * params.ldd + at.column;
    bool const wide = reinterpret_cast<uint64_t>(to) % 16 == 0 && params.ldd * sizeof(ElementD) % 16 == 0;
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < 2; ++half) {
      bool const stores = inside + 8 * half < rows;
      CUTLASS_PRAGMA_UNROLL
      for (int group = 0; group < kBlocks; group += 4) {
        if (8 * group < columns) {
          if constexpr (sizeof(ElementD) == 2) {
            uint32_t words[4];
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < 4; ++i) {
              int const first = 4 * (group + i) + 2 * half;
              cutlass::NumericArrayConverter<ElementD, float, 2> convert;
              cutlass::Array<float, 2> values;
              values[0] = sums(first);
              values[1] = sums(first + 1);
              auto const pair = convert(values);
              words[i] = reinterpret_cast<uint32_t const&>(pair);
            }
            // Lanes of a quad exchange their words, so that each has 8 columns.
            transpose(words, quad);
            if (stores) store_run(to, words, 8 * (group + quad), columns, wide);
          } else {
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < 4; ++i) {
              int const first = 4 * (group + i) + 2 * half;
              uint32_t const words[2] = {__float_as_uint(sums(first)), __float_as_uint(sums(first + 1))};
              if (stores) store_run(to, words, 8 * (group + i) + 2 * quad, columns, wide);
            }
          }
        }
      }
      to += 8 * params.ldd;
    }
  }

  // Word i of lane j of a quad becomes word j of lane i.
  CUTLASS_DEVICE static void transpose(uint32_t (&words)[4], int quad) {
    bool const odd = quad % 2 != 0, high = quad / 2 != 0;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; i += 2) {
      uint32_t const got = __shfl_xor_sync(0xffffffffu, odd ? words[i] : words[i + 1], 1);
      if (odd) {
        words[i] = got;
      } else {
        words[i + 1] = got;
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2; ++i) {
      uint32_t const got = __shfl_xor_sync(0xffffffffu, high ? words[i] : words[i + 2], 2);
      if (high) {
        words[i] = got;
      } else {
        words[i + 2] = got;
      }
    }
  }

  // What is not aligned, or reaches beyond the columns, is stored by single elements, in a loop: such code stands in
  // many places, and what fills the cache of instructions delays all.
  template <int kCount>
  CUTLASS_DEVICE static void store_run(ElementD* row, uint32_t const (&words)[kCount], int column, int columns,
                                       bool wide) {
    constexpr int kElements = kCount * 4 / int(sizeof(ElementD));
    using Elements = cutlass::AlignedArray<ElementD, kElements>;
    if (wide && column + kElements <= columns) {
      *reinterpret_cast<Elements*>(row + column) = reinterpret_cast<Elements const&>(words);
      return;
    }
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = 0; i < kElements && column + i < columns; ++i) {
      int const at = i * int(sizeof(ElementD)) / 4;
      uint32_t word = words[0];
      CUTLASS_PRAGMA_UNROLL
      for (int j = 1; j < kCount; ++j) word = at == j ? words[j] : word;
      if constexpr (sizeof(ElementD) == 2) {
        reinterpret_cast<uint16_t*>(row)[column + i] = uint16_t(i % 2 == 0 ? word : word >> 16);
      } else {
        reinterpret_cast<uint32_t*>(row)[column + i] = word;
      }
    }
  }

  CUTLASS_DEVICE static float4 remote(uint32_t address) {
    float4 read;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(read.x), "=f"(read.y), "=f"(read.z), "=f"(read.w)
                 : "r"(address));
    return read;
  }

  // Adds up this thread block's part of a tile over the cluster. Stores it, or leaves it in the workspace, and stores
  // what all parts come to if it is the last.
  CUTLASS_DEVICE static void add_up(Params const& params, Place const& place, Segment const& segment, int lane) {
    Origin const at = origin(params, place, segment.tile);
    // A pair may reach beyond D with one of its tiles.
    int const columns = max(min(params.width, params.n - at.column), 0);
    int const rows = max(min(params.height, params.m - at.row), 0);
    int const runs = ceil_div(columns, kRun), count = rows * runs;
    int const begin = count * place.rank / kRanks, end = count * (place.rank + 1) / kRanks;
    bool const parts = segment.end - segment.first < params.steps;
    int const index = segment.tile - params.whole;
    Peers peers;
    if (parts) peers = Peers(params, index);
    float* const mine = peers.part(params, place, place.cluster);
    uint32_t const sums = cute::cast_smem_ptr_to_uint(place.sums);
    for (int i = begin + int(threadIdx.x); i < end; i += kConsumers) {
      int const row = i / runs, column = (i - row * runs) * kRun;
      uint32_t const where = sums + uint32_t(row * pitch(params.wide) + column) * 4;
      Run run;
      CUTLASS_PRAGMA_UNROLL
      for (int rank = 0; rank < kRanks; ++rank) {
        uint32_t const there = cute::set_block_rank(where, block_of(rank, place.pair));
        Run const read{remote(there), remote(there + 16)};
        if (rank == 0) {
          run = read;
        } else {
          run += read;
        }
      }
      if (parts) {
        float4* const to = reinterpret_cast<float4*>(mine + row * params.wide + column);
        __stcg(to, run.low);
        __stcg(to + 1, run.high);
      } else {
        store(params, at, row, column, columns, run);
      }
    }
    // What was read has been used.
    asm volatile("" ::: "memory");
    __syncwarp();
    if (lane < kRanks) Empty::arrive(&place.barriers->sums_empty, block_of(lane, place.pair), 1u);
    if (!parts) return;
    int32_t* const arrived = params.arrived + (index * kPair + place.pair) * kRanks + place.rank;
    if (!last_to_arrive(place, arrived, peers.count())) return;
    // Of few runs, threads add up some of the parts each.
    int const rounded = round_up(max(end - begin, 1), 32),
              groups = rounded <= kConsumers / 2 ? kConsumers / rounded : 1;
    int const group = groups > 1 ? int(threadIdx.x) / rounded : 0;
    int const from = peers.first + peers.count() * group / groups;
    int const until = peers.first + peers.count() * (group + 1) / groups;
    int const step = groups > 1 ? count : kConsumers;
    for (int i = begin + int(threadIdx.x) - group * rounded; i < end && group < groups; i += step) {
      int const row = i / runs, column = (i - row * runs) * kRun;
      Run const run = parts_of(params, place, peers, from, until, row * params.wide + column);
      if (groups > 1) {
        place.scratch[group * rounded + i - begin] = run;
      } else {
        store(params, at, row, column, columns, run);
      }
    }
    if (groups == 1) return;
    cutlass::arch::NamedBarrier::sync(kConsumers, 0);
    int const i = begin + int(threadIdx.x);
    if (i < end) {
      int const row = i / runs, column = (i - row * runs) * kRun;
      Run run = place.scratch[i - begin];
      for (int other = 1; other < groups; ++other) run += place.scratch[other * rounded + i - begin];
      store(params, at, row, column, columns, run);
    }
  }

  // What some clusters' parts of a run come to.
  CUTLASS_DEVICE static Run parts_of(Params const& params, Place const& place, Peers const& peers, int first, int end,
                                     int offset) {
    constexpr int kAtOnce = 6;
    Run run{};
    for (int cluster = first; cluster < end; cluster += kAtOnce) {
      Run read[kAtOnce];
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {
        read[j] = Run{};
        if (cluster + j < end) {
          read[j] = read_run(peers.part(params, place, cluster + j) + offset);
        }
      }
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kAtOnce; ++j) run += read[j];
    }
    return run;
  }

  CUTLASS_DEVICE static Run read_run(float const* from) {
    return {__ldcg(reinterpret_cast<float4 const*>(from)), __ldcg(reinterpret_cast<float4 const*>(from) + 1)};
  }

  CUTLASS_DEVICE static void store(Params const& params, Origin const& at, int row, int column, int columns,
                                   Run const& run) {
    float values[kRun] = {run.low.x, run.low.y, run.low.z, run.low.w, run.high.x, run.high.y, run.high.z, run.high.w};
    int64_t const m = at.row + row;
    ElementD* const to = params.d + at.batch * params.d_batch + m * params.ldd + at.column;
    ElementD const* const from = params.c + at.batch * params.c_batch + m * params.ldc + at.column;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRun; ++i) {
      values[i] *= params.alpha;
      if (params.beta != 0.0f && column + i < columns) values[i] += params.beta * float(from[column + i]);
    }
    cutlass::NumericArrayConverter<ElementD, float, kRun> convert;
    auto const results = convert(reinterpret_cast<cutlass::Array<float, kRun> const&>(values));
    bool const wide = reinterpret_cast<uint64_t>(to + column) % (kRun * sizeof(ElementD)) == 0;
    uint32_t words[kRun * sizeof(ElementD) / 4];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < int(kRun * sizeof(ElementD) / 4); ++i) {
      words[i] = reinterpret_cast<uint32_t const*>(&results)[i];
    }
    store_run(to, words, column, columns, wide);
  }
};

}  // namespace atomr_cutlass
