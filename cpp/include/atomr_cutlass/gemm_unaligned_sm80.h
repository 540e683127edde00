// GEMM cells whose operands begin anywhere: rows of any length, at any address. TMA and cp.async read aligned vectors
// of 16 bytes alone, so a tile's rows come into shared memory as the vectors in which they lie, and are moved there to
// where ldmatrix reads them.
//
// A thread block's tile has 64 rows and columns. What a step needs of an operand are 64 lines of 64 elements: rows of
// the tile, along K, or elements of K, along the tile. A line lies in 9 vectors. From one step to the next all lines
// begin equally far from a multiple of 16 bytes, so that each thread adds the same number to the vectors that it loads.
//
// While a step is multiplied the next one is moved, and the ones after it are on their way. K is divided among warps,
// and among thread blocks, which leave their sums in the workspace; the last one to do so adds them up in their order.
#pragma once

#include "atomr_cutlass/kernel_abi.h"
#include "atomr_cutlass/rounding.h"
#include "atomr_cutlass/unaligned.h"
#include "cute/arch/util.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/layout/matrix.h"
#include "cutlass/numeric_conversion.h"
#include "cutlass/numeric_types.h"

namespace atomr_cutlass {

// `Element` has 16 bits. A and B may each be row-major or column-major; D is row-major.
template <class Element, class LayoutA, class LayoutB, class ElementD>
struct GemmUnalignedSm80 {
  using Args = atomr_cutlass_gemm_args;
  using Matrix = UnalignedMatrix<Element>;

  static constexpr bool kAlongK[] = {cutlass::platform::is_same<LayoutA, cutlass::layout::RowMajor>::value,
                                     cutlass::platform::is_same<LayoutB, cutlass::layout::ColumnMajor>::value};
  static constexpr int kThreads = 256, kWarps = kThreads / 32, kMinBlocks = 2;
  static constexpr int kTile = 64;  // rows, columns, and elements of K of a step
  static constexpr int kStages = 4;
  static constexpr int kLineBytes = kTile * 2, kLoadedPitch = kLineBytes + 16;
  static constexpr int kLoadedBytes = kTile * kLoadedPitch, kMovedBytes = kTile * kLineBytes;  // of an operand
  static constexpr int kMoved = kStages * 2 * kLoadedBytes;  // where moved lines are in shared memory, of two steps
  static constexpr int kSharedBytes = kMoved + 2 * 2 * kMovedBytes;
  // Floats from one row of sums in shared memory to the next: eight rows of a half warp's pairs meet all banks.
  static constexpr int kSumsPitch = kTile + 8;
  static_assert(kWarps == 8, "a warp moves every eighth line");
  static_assert(4 * kTile * kSumsPitch * 4 <= kSharedBytes, "sums of four that divide K");
  static constexpr int kClusterM = 1, kClusterN = 1, kClusterK = 1;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  static constexpr bool kDependent = false;
#else
  static constexpr bool kDependent = true;
#endif
  static constexpr int kMaxBlocks = 65535;  // the y and z extents of a grid

  struct Params {
    Element const* operands[2];
    ElementD const* c;
    ElementD* d;
    int64_t leading[2], batch_strides[2];
    int64_t ldc, ldd, c_batch, d_batch;
    float* parts;  // sums of those that divide K
    uint32_t* arrived;  // of them, for each tile
    float alpha, beta;
    int32_t extents[2];  // M and N
    int32_t k, tiles_m;
    int32_t splits, steps, split_steps;  // thread blocks that divide K; steps of all of it and of one of them
    int32_t batch;
    bool settled[2];  // no launch that may be running writes the operand
  };

  CUTLASS_HOST_DEVICE static constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

  static int64_t tiles(Args const& args) { return ceil_div(args.m, kTile) * ceil_div(args.n, kTile); }
  static int64_t split_steps(Args const& args) { return ceil_div(ceil_div(args.k, kTile), args.split_k); }
  static int64_t splits(Args const& args) { return ceil_div(ceil_div(args.k, kTile), split_steps(args)); }

  // K is divided among `split_k` thread blocks.
  static bool can_implement(Args const& args) {
    auto const is_aligned = [](void const* pointer) { return reinterpret_cast<uint64_t>(pointer) % 2 == 0; };
    return args.m > 0 && args.n > 0 && args.k > 0 && args.batch > 0 && args.batch <= kMaxBlocks && args.split_k > 0 &&
           splits(args) <= kMaxBlocks && tiles(args) < (int64_t(1) << 31) && is_aligned(args.a) && is_aligned(args.b) &&
           args.lda < Matrix::kMostLeading && args.ldb < Matrix::kMostLeading &&
           (kAlongK[0] ? args.m : args.k) * args.lda < Matrix::kMostElements &&
           (kAlongK[1] ? args.n : args.k) * args.ldb < Matrix::kMostElements && args.width == 0;
  }

  static uint64_t workspace_size(Args const& args) {
    return SumsWorkspace::size(tiles(args) * args.batch, splits(args), kTile * kTile);
  }
  static void clear_range(Args const&, uint64_t& offset, uint64_t& bytes) { offset = bytes = 0; }

  static Params params(Args const& args) {
    Params result{};
    result.operands[0] = static_cast<Element const*>(args.a);
    result.operands[1] = static_cast<Element const*>(args.b);
    result.c = static_cast<ElementD const*>(args.c);
    result.d = static_cast<ElementD*>(args.d);
    result.leading[0] = args.lda;
    result.leading[1] = args.ldb;
    result.batch_strides[0] = args.batch_stride_a;
    result.batch_strides[1] = args.batch_stride_b;
    result.ldc = args.ldc;
    result.ldd = args.ldd;
    result.c_batch = args.batch_stride_c;
    result.d_batch = args.batch_stride_d;
    result.alpha = float(args.alpha);
    result.beta = float(args.beta);
    result.extents[0] = args.m;
    result.extents[1] = args.n;
    result.k = args.k;
    result.tiles_m = int32_t(ceil_div(args.m, kTile));
    result.steps = int32_t(ceil_div(args.k, kTile));
    result.split_steps = int32_t(split_steps(args));
    result.splits = int32_t(splits(args));
    result.batch = args.batch;
    if (result.splits > 1) {
      auto* const workspace = static_cast<char*>(args.workspace);
      result.arrived = reinterpret_cast<uint32_t*>(workspace);
      result.parts = reinterpret_cast<float*>(workspace + SumsWorkspace::counters(tiles(args) * args.batch));
    }
    result.settled[0] = (args.settled & ATOMR_CUTLASS_A_SETTLED) != 0;
    result.settled[1] = (args.settled & ATOMR_CUTLASS_B_SETTLED) != 0;
    return result;
  }

  static dim3 grid(Params const& params) {
    int64_t const tiles = params.tiles_m * ceil_div(params.extents[1], kTile);
    return dim3(uint32_t(tiles), uint32_t(params.splits), uint32_t(params.batch));
  }

  CUTLASS_DEVICE static void run(Params const& params, char* shared) {
    int const tile_n = int(blockIdx.x) / params.tiles_m, tile_m = int(blockIdx.x) - tile_n * params.tiles_m;
    int const first = int(blockIdx.y) * params.split_steps;
    int const end = min(first + params.split_steps, params.steps);
    uint32_t const to = cute::cast_smem_ptr_to_uint(shared);
    Lines<0> a(params, tile_m * kTile, first);
    Lines<1> b(params, tile_n * kTile, first);

    // What no launch that may be running writes is requested before that has ended. Loops, so that there is little
    // code, which has to be loaded, too.
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
      if (pass == 1) wait_for_launch_before();
#pragma unroll 1
      for (int i = 0; i < kStages - 1; ++i) {
        uint32_t const loaded = to + i * 2 * kLoadedBytes;
        bool const wanted = first + i < end;
        if (wanted && params.settled[0] == (pass == 0)) a.request(params, loaded, first + i);
        if (wanted && params.settled[1] == (pass == 0)) b.request(params, loaded + kLoadedBytes, first + i);
        if (pass == 1) commit();
      }
    }

    float sums[2][4][4] = {};
    // Of at most 32 rows four warps along K have each a share of K, else two.
    int const warp = int(threadIdx.x) / 32, k_warps = a.lines <= 32 ? 4 : 2;
    int const row = k_warps == 2 ? warp % 2 * 32 : 0, column = (k_warps == 2 ? warp / 2 % 2 : warp % 2) * 32;
    int const part = k_warps == 2 ? warp / 4 : warp / 2;

    for (int step = first - 1; step < end; ++step) {
      wait_for_step();
      __syncthreads();  // the step has been moved, and the loaded lines of the next one are there
      int const next = step + 1 - first, ahead = next + kStages - 1;
      uint32_t const from = to + next % kStages * 2 * kLoadedBytes, moved = to + kMoved + next % 2 * 2 * kMovedBytes;
      if (step + 1 < end) {
        typename Lines<0>::Words of_a;
        typename Lines<1>::Words of_b;
        a.load(from, of_a);
        b.load(from + kLoadedBytes, of_b);
        a.store(moved, params.k - (step + 1) * kTile, of_a);
        b.store(moved + kMovedBytes, params.k - (step + 1) * kTile, of_b);
      }
      if (first + ahead < end) {
        uint32_t const loaded = to + ahead % kStages * 2 * kLoadedBytes;
        a.request(params, loaded, first + ahead);
        b.request(params, loaded + kLoadedBytes, first + ahead);
      }
      commit();
      if (step < first) continue;
      uint32_t const used = to + kMoved + (next + 1) % 2 * 2 * kMovedBytes;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2; ++i) {
        int const at = part + i * k_warps;
        if (at < kTile / 16) use(used, row, column, at, sums);
      }
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
    store(params, shared, tile_m, tile_n, k_warps, part, row, column, sums);
  }

 private:
  CUTLASS_DEVICE static void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
  CUTLASS_DEVICE static void wait_for_step() { asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory"); }

  // The lines of operand A (0) or B (1) that a thread block reads. A thread requests a vector of two lines, 32 apart,
  // and perhaps the ninth of another; a warp moves every eighth line.
  template <int kOperand>
  struct Lines {
    static constexpr bool kLong = kAlongK[kOperand];  // lines lie along K

    Matrix matrix;
    uint32_t next, ninth;  // vectors of the next step
    uint32_t lead;  // elements of line 0's first vector that lie before it
    uint32_t moved_shift;  // the same of the lines that a warp moves
    int moved_lines;  // how many these are
    int lines;  // rows or columns of the tile
    int reach, reach_ninth;  // elements of the line before the vectors

    CUTLASS_DEVICE Lines(Params const& params, int begin, int first_step)
        : matrix(params.operands[kOperand] + blockIdx.z * params.batch_strides[kOperand],
                 kLong ? params.extents[kOperand] : params.k, params.leading[kOperand],
                 kLong ? params.k : params.extents[kOperand]) {
      int64_t const leading = params.leading[kOperand];
      lines = min(params.extents[kOperand] - begin, kTile);
      int64_t const at = kLong ? matrix.lead + begin * leading + first_step * kTile
                               : matrix.lead + begin + first_step * kTile * leading;
      lead = uint32_t(at % 8);
      int const line = int(threadIdx.x) / 8, x = int(threadIdx.x) % 8, of_ninth = int(threadIdx.x) % kTile;
      int const warp = int(threadIdx.x) / 32;
      moved_shift = uint32_t(shift(params, warp));
      moved_lines = (lines - warp + kWarps - 1) / kWarps;
      next = uint32_t((at + line * leading) / 8 + x);
      ninth = uint32_t((at + of_ninth * leading) / 8 + 8);
      reach = x * 8 - shift(params, line);
      reach_ninth = kTile - shift(params, of_ninth);
      // A ninth vector has nothing of lines that begin with one; other threads have those of the other operand.
      if (int(threadIdx.x) / kTile != kOperand) reach_ninth = kTile;
    }

    // Elements of a line's first vector that lie before it.
    CUTLASS_DEVICE int shift(Params const& params, int line) const {
      return int((lead + uint32_t(line) * uint32_t(params.leading[kOperand])) % 8);
    }

    // Elements of a line that there are from a step on, or along the tile.
    CUTLASS_DEVICE int left(Params const& params, int step) const { return kLong ? params.k - step * kTile : lines; }

    CUTLASS_DEVICE void request(Params const& params, uint32_t to, int step) {
      uint32_t const leading = uint32_t(params.leading[kOperand]);
      int const there = left(params, step);
      uint32_t const at = to + int(threadIdx.x) / 8 * kLoadedPitch + int(threadIdx.x) % 8 * 16;
      uint32_t const at_ninth = to + int(threadIdx.x) % kTile * kLoadedPitch + kLineBytes;
      bool const wanted = reach < there, wants_ninth = reach_ninth < min(there, kTile);
      request_vector(wanted, next, at);
      request_vector(wanted, next + 4 * leading, at + 32 * kLoadedPitch);
      request_vector(wants_ninth, ninth, at_ninth);
      if ((wanted && (matrix.is_partial(next) || matrix.is_partial(next + 4 * leading))) ||
          (wants_ninth && matrix.is_partial(ninth))) {
        // Hardly ever: a loop, so that it is little code.
#pragma unroll 1
        for (int i = 0; i < 3; ++i) {
          uint32_t const index = i < 2 ? next + i * 4 * leading : ninth;
          if ((i < 2 ? wanted : wants_ninth) && matrix.is_partial(index)) {
            store_partial(params, index, i < 2 ? at + i * 32 * kLoadedPitch : at_ninth);
          }
        }
      }
      next += kLong ? 8 : 8 * leading;
      ninth += kLong ? 8 : 8 * leading;
    }

    CUTLASS_DEVICE void request_vector(bool wanted, uint32_t index, uint32_t to) const {
      if (wanted && matrix.is_whole(index)) {
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(matrix.vectors + index)
                     : "memory");
      }
    }

    CUTLASS_DEVICE void store_partial(Params const& params, uint32_t index, uint32_t to) const {
      Element const* const begin = params.operands[kOperand] + blockIdx.z * params.batch_strides[kOperand];
      Element const* const end = begin +
                                 ((kLong ? params.extents[kOperand] : params.k) - 1) * params.leading[kOperand] +
                                 (kLong ? params.k : params.extents[kOperand]);
      uint4 const found = Matrix::partial(begin, end, index);
      asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(found.x), "r"(found.y), "r"(found.z),
                   "r"(found.w)
                   : "memory");
    }

    // What a warp moves of a step: of each of its lines the words in which a lane's elements lie.
    struct Words {
      uint32_t low[kTile / kWarps], high[kTile / kWarps];
    };

    // A warp's lines are 8 apart, so that all of them begin equally far from a vector.
    CUTLASS_DEVICE void load(uint32_t from, Words& words) const {
      uint32_t const lane = threadIdx.x % 32, warp = threadIdx.x / 32;
      uint32_t const at = from + warp * kLoadedPitch + (moved_shift / 2 + lane) * 4, high = at + moved_shift % 2 * 4;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kTile / kWarps; ++i) {
        if (kLong && i >= moved_lines) break;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(words.low[i]) : "r"(at + i * kWarps * kLoadedPitch));
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(words.high[i]) : "r"(high + i * kWarps * kLoadedPitch));
      }
    }

    // Stores them where ldmatrix reads them: lines of 128 bytes, whose vectors are exchanged by the line, so that eight
    // lines' vectors meet all banks. Zeros follow the end of K, of which `of_k` elements are left.
    CUTLASS_DEVICE void store(uint32_t to, int of_k, Words const& words) const {
      uint32_t const lane = threadIdx.x % 32, warp = threadIdx.x / 32, bits = moved_shift % 2 * 16;
      uint32_t const at = to + warp * kLineBytes + ((lane / 4) ^ warp) * 16 + lane % 4 * 4;
      uint32_t kept = ~0u;
      if (kLong && of_k < kTile) {
        kept = (2 * int(lane) < of_k ? 0xffffu : 0u) | (2 * int(lane) + 1 < of_k ? 0xffff0000u : 0u);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kTile / kWarps; ++i) {
        if (kLong && i >= moved_lines) break;
        uint32_t word = __funnelshift_r(words.low[i], words.high[i], bits) & kept;
        if (!kLong && int(warp) + i * kWarps >= of_k) word = 0;
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(at + i * kWarps * kLineBytes), "r"(word));
      }
    }
  };

  // Loads four 8x8 matrices; of lines across K transposed.
  template <bool kTransposed>
  CUTLASS_DEVICE static void load(uint32_t from, int line, int vector, uint32_t (&found)[4]) {
    uint32_t const at = from + line * kLineBytes + (vector ^ (line % 8)) * 16;
    if constexpr (kTransposed) {
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(found[0]), "=r"(found[1]), "=r"(found[2]), "=r"(found[3])
                   : "r"(at)
                   : "memory");
    } else {
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(found[0]), "=r"(found[1]), "=r"(found[2]), "=r"(found[3])
                   : "r"(at)
                   : "memory");
    }
  }

  // Multiplies 32 rows and columns of 16 elements of K, those from 16 * part on.
  CUTLASS_DEVICE static void use(uint32_t moved, int row, int column, int part, float (&sums)[2][4][4]) {
    int const lane = int(threadIdx.x) % 32;
    // Matrices by lanes: eight lanes have the addresses of each.
    int const low = lane % 16, high = lane / 16, pair = lane / 8 % 2, eight = lane % 8;
    uint32_t a[2][4], b[2][4];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2; ++i) {
      if constexpr (kAlongK[0]) {
        load<false>(moved, row + i * 16 + low, part * 2 + high, a[i]);
      } else {
        load<true>(moved, part * 16 + high * 8 + eight, row / 8 + i * 2 + pair, a[i]);
      }
      if constexpr (kAlongK[1]) {
        load<false>(moved + kMovedBytes, column + i * 16 + high * 8 + eight, part * 2 + pair, b[i]);
      } else {
        load<true>(moved + kMovedBytes, part * 16 + low, column / 8 + i * 2 + high, b[i]);
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < 4; ++j)
        multiply_16_8_16<Element>(sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
  }

  // Adds up the sums of the warps, and of thread blocks, and stores D.
  CUTLASS_DEVICE static void store(Params const& params, char* shared, int tile_m, int tile_n, int k_warps, int part,
                                   int row, int column, float (&sums)[2][4][4]) {
    int const lane = int(threadIdx.x) % 32;
    auto* const all = reinterpret_cast<float*>(shared);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < 4; ++j) {
        float* const to = all + (part * kTile + row + i * 16 + lane / 4) * kSumsPitch + column + j * 8 + lane % 4 * 2;
        *reinterpret_cast<float2*>(to) = make_float2(sums[i][j][0], sums[i][j][1]);
        *reinterpret_cast<float2*>(to + 8 * kSumsPitch) = make_float2(sums[i][j][2], sums[i][j][3]);
      }
    }
    __syncthreads();
    int const rows = min(params.extents[0] - tile_m * kTile, kTile);
    int const columns = min(params.extents[1] - tile_n * kTile, kTile);
    auto const of_warps = [&](int at) {
      float const* from = all + at / kTile * kSumsPitch + at % kTile;
      float sum = *from;
      for (int i = 1; i < k_warps; ++i) sum += from[i * kTile * kSumsPitch];
      return sum;
    };
    int64_t const d_begin = blockIdx.z * params.d_batch + tile_m * kTile * params.ldd + tile_n * kTile;
    int64_t const c_begin = blockIdx.z * params.c_batch + tile_m * kTile * params.ldc + tile_n * kTile;
    auto const store_one = [&](int at, float sum) {
      int const in_row = at / kTile, in_column = at % kTile;
      if (in_column >= columns) return;
      float value = times(params.alpha, sum);
      if (params.beta != 0.0f) {
        value = plus_source(value, params.beta, float(params.c[c_begin + in_row * params.ldc + in_column]));
      }
      params.d[d_begin + in_row * params.ldd + in_column] = cutlass::NumericConverter<ElementD, float>::convert(value);
    };
    int const count = rows * kTile;
    if (params.splits == 1) {
#pragma unroll 4
      for (int at = int(threadIdx.x); at < count; at += kThreads) store_one(at, of_warps(at));
      return;
    }
    int64_t const tile = int64_t(blockIdx.z) * gridDim.x + blockIdx.x;
    float* const parts = params.parts + tile * params.splits * (kTile * kTile);
#pragma unroll 4
    for (int at = int(threadIdx.x); at < count; at += kThreads) {
      __stcg(parts + blockIdx.y * (kTile * kTile) + at, of_warps(at));
    }
    if (!SumsWorkspace::is_last(params.arrived + tile, params.splits, reinterpret_cast<uint32_t*>(shared))) return;
    for (int at = int(threadIdx.x); at < count; at += kThreads) {
      float sum = 0;
#pragma unroll 8
      for (int i = 0; i < params.splits; ++i) sum += __ldcg(parts + i * (kTile * kTile) + at);
      store_one(at, sum);
    }
  }
};

}  // namespace atomr_cutlass
