// GEMM cells for few rows, or few columns, of D whose operands begin anywhere: rows of any length, at any address. The
// larger of A and B, "the weights", is what takes the time. TMA and cp.async read aligned rows alone, so its rows come
// by aligned loads of 16 bytes straight into registers, in which mma.sync takes them, and nothing is shifted:
//
// Rows whose beginnings lie equally far from a multiple of 16 bytes are of one class; there are at most 8 classes, and
// row r + 8 is of the class of row r.
// - Where K is contiguous, a thread block has rows of one class. Its vectors hold the same elements of K for all of
//   them, and the few rows are laid out in shared memory to match.
// - Where the weights' rows are contiguous (a row-major B), each of eight warps takes every eighth element of K, all
//   of one class. Its vectors hold columns that are shifted against those of the other warps by less than 8; the shift
//   is taken back where the warps' sums are added up.
//
// Operands of mma.sync may come in any order along K, if both come in the same one, so a thread's vectors are what its
// lane is to hold.
//
// K is divided among warps and among thread blocks until all multiprocessors are busy. Thread blocks leave their sums
// in the workspace; the last one to do so adds them up in their order, so that results do not depend on which that is.
#pragma once

#include "atomr_cutlass/dependent.h"
#include "atomr_cutlass/kernel_abi.h"
#include "atomr_cutlass/rounding.h"
#include "atomr_cutlass/unaligned.h"
#include "cute/arch/util.hpp"
#include "cutlass/array.h"
#include "cutlass/cutlass.h"
#include "cutlass/fast_math.h"
#include "cutlass/layout/matrix.h"
#include "cutlass/numeric_conversion.h"
#include "cutlass/numeric_types.h"

namespace atomr_cutlass {

// `Element` has 16 bits. A is row-major; of a column-major B either operand may be the weights, of a row-major B only
// B.
template <class Element, class LayoutB, class ElementD>
struct GemmRaggedSm80 {
  using Args = atomr_cutlass_gemm_args;

  static constexpr bool kAlongK = cutlass::platform::is_same<LayoutB, cutlass::layout::ColumnMajor>::value;
  static constexpr int kThreads = 256, kWarps = kThreads / 32, kMinBlocks = 2;
  // Two thread blocks of a multiprocessor have as much each: the rest is for the weights that are on their way, which
  // go through the L1 cache.
  static constexpr int kSharedBytes = 64 * 1024;
  static constexpr int kClusterM = 1, kClusterN = 1, kClusterK = 1;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  static constexpr bool kDependent = false;
#else
  static constexpr bool kDependent = true;
#endif
  static constexpr int kVector = 8;  // elements of 16 bytes
  static constexpr int kFewTile = kAlongK ? 64 : 16;  // the most few rows of a thread block
  static constexpr int kSums = kWarps * 16;  // rows of weights along K that all warps together have
  // Elements of K of a step: of a warp, and, of row-major weights, of all warps together.
  static constexpr int kStep = kAlongK ? 64 : 16 * kWarps;
  static constexpr int kWindow = 64;  // row-major weights: columns that a warp reads
  static constexpr int kMaxBlocks = 65535;  // the y and z extents of a grid
  // Of a matrix: the numbers of its vectors have 32 bits, those of a step beyond its end too.
  static constexpr int64_t kMostLeading = int64_t(1) << 27, kMostElements = int64_t(1) << 34;

  struct Params {
    Element const* weights;
    Element const* few;
    ElementD const* c;
    ElementD* d;
    int64_t weights_leading, few_leading;
    int64_t c_row, c_few, d_row, d_few;  // strides along the weights' rows and along the few
    int64_t weights_batch, few_batch, c_batch, d_batch;
    float* parts;  // sums of those that divide K
    uint32_t* arrived;  // of them, for each of their tiles
    float alpha, beta;
    int32_t rows, few_rows, k, batch;
    int32_t classes;  // of rows (kAlongK)
    int32_t tile, tiles;  // rows of weights of a thread block, and tiles of them
    int32_t begins;  // row-major weights: the columns among which the first tile begins
    int32_t few_tile, few_tiles;
    int32_t k_warps;  // that divide a thread block's part of K (kAlongK)
    int32_t splits, steps, split_steps;  // thread blocks that divide K; steps of all of it and of one of them
    int32_t chunk;  // steps of which the few rows are in shared memory at once
    cutlass::FastDivmod by_loaded, by_moved;  // vectors of a row of them
    int32_t settled;  // no launch that may be running writes the weights
  };

  // What instructions take of the few rows, and steps of a warp that are loaded before one is multiplied: as registers
  // allow.
  CUTLASS_HOST_DEVICE static constexpr int width(int few) { return few <= 8 ? 8 : !kAlongK ? 16 : few <= 32 ? 32 : 64; }
  CUTLASS_HOST_DEVICE static constexpr int ahead(int width) { return kAlongK && width <= 32 ? 3 : 2; }

  // Bytes from one of the few rows to the next in shared memory: a warp's loads of several rows meet all banks, 64
  // bytes beyond lines for loads of 16 bytes, 32 for loads of 8, of which each warp has rows of its own.
  CUTLASS_HOST_DEVICE static constexpr int pitch(int chunk) {
    return kAlongK ? chunk * kStep * 2 + 64 : chunk * kStep * 2 / kWarps + 32;
  }

  CUTLASS_HOST_DEVICE static constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

  static bool turned(Args const& args) { return kAlongK && args.n < args.m; }

  static int64_t smaller(Args const& args) { return turned(args) ? args.n : args.m; }

  // The most few rows of a thread block.
  static int few_tile(Args const& args) { return kAlongK && args.swizzle > 1 ? args.swizzle : kFewTile; }

  // K is divided among `split_k` thread blocks. Where it is contiguous, `width` is the rows of weights of a tile and
  // `swizzle`, if more than 1, its few rows.
  static bool can_implement(Args const& args) {
    auto const is_aligned = [](void const* pointer) { return reinterpret_cast<uint64_t>(pointer) % 2 == 0; };
    bool const is_width =
        kAlongK ? args.width == 0 || args.width == 16 || args.width == 32 || args.width == 64 || args.width == kSums
                : args.width == 0;
    bool const is_few_tile =
        args.swizzle <= 1 || (kAlongK && (args.swizzle == 8 || args.swizzle == 32 || args.swizzle == 64));
    // Elements of a vector belong to one row of weights, or two.
    bool const is_long = args.k >= kVector && (kAlongK || args.n >= kVector);
    return is_long && args.m > 0 && args.n > 0 && args.batch > 0 && int64_t(args.split_k) * args.batch <= kMaxBlocks &&
           is_aligned(args.a) && is_aligned(args.b) && args.lda < kMostLeading && args.ldb < kMostLeading &&
           args.m * args.lda < kMostElements && (kAlongK ? args.n : args.k) * args.ldb < kMostElements && is_width &&
           is_few_tile && args.split_k > 0 && Division(args).tiles <= kMaxBlocks && Division(args).most_chunk(args) > 0;
  }

  // How the thread blocks divide a problem.
  struct Division {
    int32_t classes;  // of rows (kAlongK)
    int32_t tile, tiles;  // rows of weights of a thread block, and tiles of them
    int32_t begins;  // row-major weights: the columns among which the first tile begins
    int32_t k_warps;  // that divide a thread block's part of K (kAlongK)
    int32_t few_tiles;
    int32_t steps, split_steps, splits;  // steps of K, and of each of those that divide it

    explicit Division(Args const& args) {
      bool const turn = turned(args);
      int64_t const rows = turn ? args.m : args.n, leading = turn ? args.lda : args.ldb;
      int32_t shift = kVector;  // the power of 2 by which rows shift against a vector
      while (leading % shift != 0) shift /= 2;
      few_tiles = int32_t(ceil_div(smaller(args), few_tile(args)));
      if constexpr (kAlongK) {
        classes = kVector / shift;
        tile = args.width == 0 ? kSums : args.width;
        k_warps = kSums / tile;
        tiles = int32_t(ceil_div(ceil_div(rows, classes), tile)) * classes;
        begins = 1;
        steps = int32_t(ceil_div(int64_t(args.k) + kVector - 1, kStep));
      } else {
        classes = k_warps = 1;
        // Windows begin at vectors, tiles anywhere: a window has room for every shift of its tile. The first
        // begins less than `shift` columns before the matrix, so that tiles shift by multiples of that only; no matter
        // where the matrix begins, they are as many.
        if (args.batch > 1) {
          while (args.batch_stride_b % shift != 0) shift /= 2;
        }
        tile = kWindow - kVector + shift;
        tiles = int32_t(ceil_div(rows + shift - 1, tile));
        begins = shift;
        steps = int32_t(ceil_div(args.k, kStep));
      }
      if (steps < 1) steps = 1;
      split_steps = int32_t(ceil_div(steps, args.split_k));
      splits = int32_t(ceil_div(steps, split_steps));
    }

    // Steps whose few rows fit into shared memory, as they lie and as they are moved: as many for each warp as it loads
    // ahead, or a multiple. Instructions read rows beyond the few, of which nobody uses the results.
    int32_t most_chunk(Args const& args) const {
      int const all = int(few(args)), wide = width(all), whole = ahead(wide) * k_warps;
      int const read = kAlongK ? wide : (kWarps - 1) * all + wide, planes = kAlongK ? 1 : kWarps;
      int chunk = kSharedBytes / (2 * kStep * all) / whole * whole;
      while (chunk > 0 && (planes * all * pitch(chunk) + all * (chunk * kStep * 2 + 16) > kSharedBytes ||
                           read * pitch(chunk) > kSharedBytes)) {
        chunk -= whole;
      }
      return chunk;
    }
    static int64_t few(Args const& args) { return cutlass::platform::min(smaller(args), int64_t(few_tile(args))); }
    int64_t blocks(Args const& args) const { return int64_t(tiles) * few_tiles * args.batch; }
    // Sums of one of those that divide K.
    int64_t room(Args const& args) const { return (kAlongK ? tile : kWindow) * few(args); }
  };

  static uint64_t workspace_size(Args const& args) {
    Division const made(args);
    return SumsWorkspace::size(made.blocks(args), made.splits, made.room(args));
  }
  // The counters are 0 before the first launch, and again after each.
  static void clear_range(Args const&, uint64_t& offset, uint64_t& bytes) { offset = bytes = 0; }

  static Params params(Args const& args) {
    bool const turn = turned(args);
    Division const made(args);
    Params result{};
    result.weights = static_cast<Element const*>(turn ? args.a : args.b);
    result.few = static_cast<Element const*>(turn ? args.b : args.a);
    result.c = static_cast<ElementD const*>(args.c);
    result.d = static_cast<ElementD*>(args.d);
    result.weights_leading = turn ? args.lda : args.ldb;
    result.few_leading = turn ? args.ldb : args.lda;
    result.c_row = turn ? args.ldc : 1;
    result.c_few = turn ? 1 : args.ldc;
    result.d_row = turn ? args.ldd : 1;
    result.d_few = turn ? 1 : args.ldd;
    result.weights_batch = turn ? args.batch_stride_a : args.batch_stride_b;
    result.few_batch = turn ? args.batch_stride_b : args.batch_stride_a;
    result.c_batch = args.batch_stride_c;
    result.d_batch = args.batch_stride_d;
    if (made.splits > 1) {
      auto* const workspace = static_cast<char*>(args.workspace);
      result.arrived = reinterpret_cast<uint32_t*>(workspace);
      result.parts = reinterpret_cast<float*>(workspace + SumsWorkspace::counters(made.blocks(args)));
    }
    result.alpha = float(args.alpha);
    result.beta = float(args.beta);
    result.rows = turn ? args.m : args.n;
    result.few_rows = turn ? args.n : args.m;
    result.k = args.k;
    result.batch = args.batch;
    result.classes = made.classes;
    result.tile = made.tile;
    result.tiles = made.tiles;
    result.begins = made.begins;
    result.few_tile = few_tile(args);
    result.few_tiles = made.few_tiles;
    result.k_warps = made.k_warps;
    result.splits = made.splits;
    result.steps = made.steps;
    result.split_steps = made.split_steps;
    int const whole = ahead(width(int(made.few(args)))) * made.k_warps;
    int const chunk = made.most_chunk(args), needed = int(ceil_div(made.split_steps, whole)) * whole;
    result.chunk = chunk < needed ? chunk : needed;
    int const vectors = result.chunk * (kStep / kVector);
    result.by_loaded = cutlass::FastDivmod(vectors + 1);
    result.by_moved = cutlass::FastDivmod(vectors);
    result.settled = (args.settled & (turn ? ATOMR_CUTLASS_A_SETTLED : ATOMR_CUTLASS_B_SETTLED)) != 0;
    return result;
  }

  static dim3 grid(Params const& params) {
    return dim3(uint32_t(params.few_tiles), uint32_t(params.tiles), uint32_t(params.splits * params.batch));
  }

  CUTLASS_DEVICE static void run(Params const& params, char* shared) {
    switch (width(most_few(params))) {
      case 8: compute<8>(params, shared); break;
      case 16:
        if constexpr (!kAlongK) compute<16>(params, shared);
        break;
      case 32:
        if constexpr (kAlongK) compute<32>(params, shared);
        break;
      default:
        if constexpr (kAlongK) compute<64>(params, shared);
    }
  }

 private:
  // What a thread block computes. Found again wherever it is needed: else it would take registers all the time, and so
  // its own place in the grid is read in a way that the compiler does not take for the same.
  struct Place {
    int batch, few_begin, few;
    int unit, split;  // its tile of this batch and these few rows, of all that are added up, and its part of K
    int row;  // the first row of weights (kAlongK: and of the class, of which the next one is `classes` further)
    int first_step, end_step;

    CUTLASS_DEVICE explicit Place(Params const& params) {
      uint32_t x, y, z;
      asm volatile("mov.u32 %0, %%ctaid.x;\nmov.u32 %1, %%ctaid.y;\nmov.u32 %2, %%ctaid.z;"
                   : "=r"(x), "=r"(y), "=r"(z));
      few_begin = int(x) * params.few_tile;
      few = min(params.few_rows - few_begin, params.few_tile);
      batch = int(z) / params.splits;
      split = int(z) - batch * params.splits;
      unit = (batch * params.tiles + int(y)) * params.few_tiles + int(x);
      first_step = split * params.split_steps;
      end_step = min(first_step + params.split_steps, params.steps);
      if constexpr (kAlongK) {
        int const of_class = int(y) % params.classes, tile = int(y) / params.classes;
        row = tile * params.tile * params.classes + of_class;
      } else {
        // By the address, of which parameters that are kept for other addresses must not know.
        uint32_t const element = uint32_t(reinterpret_cast<uint64_t>(params.weights) / sizeof(Element));
        row = int(y) * params.tile - int(element % uint32_t(params.begins));
        if (row >= params.rows) end_step = first_step;
      }
    }
  };

  // The weights as vectors of memory, wherever their rows begin; nothing before the first element and behind the last
  // one is read.
  struct Matrix {
    uint4 const* vectors;  // from the one on in which the matrix begins
    uint32_t lead;  // elements of that one which lie before the matrix
    uint32_t first, whole;  // the first whole vector, and the number of them

    CUTLASS_DEVICE Matrix(Element const* at, int64_t outer, int64_t leading, int64_t inner) {
      auto const address = reinterpret_cast<uint64_t>(at);
      vectors = reinterpret_cast<uint4 const*>(address / 16 * 16);
      lead = uint32_t(address % 16 / sizeof(Element));
      int64_t const elements = lead + (outer - 1) * leading + inner;
      first = lead > 0 ? 1 : 0;
      whole = uint32_t(elements / kVector) - first;
    }

    // Whether the matrix begins or ends in a vector.
    CUTLASS_DEVICE bool is_partial(uint32_t index) const { return index + 1 == first || index - first == whole; }

    // A vector, which is read once; zeros unless all of it lies in the matrix. Not by the path for memory that nobody
    // writes (`nc`): the launch before may write it while this one has begun.
    CUTLASS_DEVICE uint4 load(uint32_t index, bool wanted) const {
      uint4 found{};
      if (wanted && index - first < whole) {
        asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w)
                     : "l"(vectors + index));
      }
      return found;
    }

    // A vector in which the matrix begins or ends, element by element: this is rare, and is to take few registers.
    CUTLASS_DEVICE static uint4 partial(Params const& params, uint32_t index) {
      Place const place(params);
      Element const* const begin = params.weights + place.batch * params.weights_batch;
      Element const* const end = begin + ((kAlongK ? params.rows : params.k) - 1) * params.weights_leading +
                                 (kAlongK ? params.k : params.rows);
      auto const* const at =
          reinterpret_cast<Element const*>(reinterpret_cast<uint64_t>(begin) / 16 * 16) + int64_t(index) * kVector;
      uint64_t low = 0, high = 0;
#pragma unroll 1
      for (int i = 0; i < kVector; ++i) {
        if (at + i < begin || at + i >= end) continue;
        uint64_t const element = uint64_t(reinterpret_cast<uint16_t const*>(at)[i]) << i % 4 * 16;
        (i < 4 ? low : high) |= element;
      }
      return {uint32_t(low), uint32_t(low >> 32), uint32_t(high), uint32_t(high >> 32)};
    }
  };

  // Clears the elements of a vector that are not among those from `first` to `end`; its own first one is `at`.
  CUTLASS_DEVICE static void keep(uint4& vector, int at, int first, int end) {
    uint32_t* const words = reinterpret_cast<uint32_t*>(&vector);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) {
      int const low = at + 2 * i, high = low + 1;
      words[i] &= (low >= first && low < end ? 0xffffu : 0u) | (high >= first && high < end ? 0xffff0000u : 0u);
    }
  }

  // A warp's weights. Along K: 16 rows of one class, of which a thread has two, 8 apart; of each step two vectors of
  // each row. Row-major: kWindow columns of 16 elements of K, each the 8th after the one before, of which a thread has
  // four.
  struct Weights {
    static constexpr int kVectors = 4;

    Matrix matrix;
    uint32_t next;  // the thread's first vector of the warp's next step
    uint32_t apart;  // vectors from one row, or element of K, to the next one of the thread: 8 rows are whole vectors
    int shift;  // elements of the first vector, or columns of the window, that lie before the row's, or tile's, first

    CUTLASS_DEVICE Weights(Params const& params, Place const& place)
        : matrix(params.weights + place.batch * params.weights_batch, kAlongK ? params.rows : params.k,
                 params.weights_leading, kAlongK ? params.k : params.rows),
          apart(uint32_t((kAlongK ? params.classes : 1) * params.weights_leading)) {
      int const lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
      int64_t begin = matrix.lead;
      if constexpr (kAlongK) {
        int row = place.row + (warp / params.k_warps * 16 + lane / 4) * params.classes;
        // Rows beyond the last one, which nobody stores, are others of the class.
        if (row >= params.rows) row = place.row;
        if (row + 8 * params.classes >= params.rows) apart = 0;
        begin += row * params.weights_leading;
      } else {
        begin += (warp + lane % 4 * 4 * kWarps) * params.weights_leading + place.row;
      }
      shift = int(begin % kVector);
      next = uint32_t(begin / kVector + (kAlongK ? lane % 4 : lane / 4));
      next += kAlongK ? (place.first_step + warp % params.k_warps) * (kStep / kVector)
                      : place.first_step * (kStep / kWarps) * apart;
    }

    // Loads the warp's next step, if `wanted`, and what follows the end of K, too; zeros where no matrix is left.
    CUTLASS_DEVICE void load(Params const& params, bool wanted, uint4 (&vectors)[kVectors]) {
      auto const at = [&](int i) { return next + (kAlongK ? i / 2 * apart + i % 2 * 4 : i * apart); };
      bool is_partial = false;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kVectors; ++i) {
        vectors[i] = matrix.load(at(i), wanted);
        is_partial |= matrix.is_partial(at(i));
      }
      // One branch for all of them, which is hardly ever taken, so that nothing stands between the loads.
      if (wanted && is_partial) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kVectors; ++i) {
          if (matrix.is_partial(at(i))) vectors[i] = Matrix::partial(params, at(i));
        }
      }
      next += kAlongK ? params.k_warps * (kStep / kVector) : kStep / kWarps * apart;
    }
  };

  // The few rows in shared memory: first as their vectors lie in global memory, then moved so that they begin where the
  // weights' vectors do.
  struct Few {
    int shift;  // elements that the weights' vectors begin before the row's
    uint32_t at;  // shared memory of the vectors as they lie; the others are at its beginning

    // Of a chunk of each row, moved; as they lie one more.
    CUTLASS_DEVICE static int vectors(Params const& params) { return params.chunk * (kStep / kVector); }

    // Requests those of a chunk of K from a step on which have an element of it.
    CUTLASS_DEVICE void request(Params const& params, int first_step) const {
      Place const place(params);
      Element const* const matrix = params.few + place.batch * params.few_batch;
      Element const* const first = matrix + place.few_begin * params.few_leading;
      auto const begin = reinterpret_cast<uint64_t>(matrix);
      auto const end = reinterpret_cast<uint64_t>(matrix + (params.few_rows - 1) * params.few_leading + params.k);
      int const from = first_step * kStep - shift, count = vectors(params) + 1;
      for (int i = int(threadIdx.x); i < place.few * count; i += kThreads) {
        int row = 0, x = 0;
        params.by_loaded(row, x, i);
        auto const start = reinterpret_cast<uint64_t>(first + row * params.few_leading + from);
        uint64_t const address = start / 16 * 16 + x * 16;
        int const k = from + x * kVector - int(start % 16) / 2;
        if (k + kVector <= 0 || k >= params.k) continue;
        uint32_t const to = at + i * 16;
        if (address >= begin && address + 16 <= end) {
          asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(address) : "memory");
        } else {
#pragma unroll 1
          for (int j = k < 0 ? -k : 0; j < kVector && k + j < params.k; ++j) {
            asm volatile("st.shared.u16 [%0], %1;" ::"r"(to + j * 2),
                         "h"(*reinterpret_cast<uint16_t const*>(address + j * 2))
                         : "memory");
          }
        }
      }
      asm volatile("cp.async.commit_group;" ::: "memory");
    }

    // Moves them; zeros where the rows have no elements.
    CUTLASS_DEVICE void move(Params const& params, char* shared, int first_step) const {
      int const wide = pitch(params), from = first_step * kStep - shift, count = vectors(params);
      Place const place(params);
#pragma unroll 1
      for (int i = int(threadIdx.x); i < place.few * count; i += kThreads) {
        int row = 0, x = 0;
        params.by_moved(row, x, i);
        int const k = from + x * kVector;
        // The address of the row's first element of the chunk, as far as it tells its place in a vector.
        uint32_t const element = uint32_t(reinterpret_cast<uint64_t>(params.few) / 2) +
                                 uint32_t(place.batch) * uint32_t(params.few_batch) +
                                 uint32_t(place.few_begin + row) * uint32_t(params.few_leading) + uint32_t(from);
        uint32_t const before = element % kVector;
        uint32_t words[8];
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%8];\nld.shared.v4.u32 {%4, %5, %6, %7}, [%8 + 16];"
                     : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]), "=r"(words[4]), "=r"(words[5]),
                       "=r"(words[6]), "=r"(words[7])
                     : "r"(at + (i + row) * 16)
                     : "memory");
        // By whole words first, without an index that the compiler does not know.
        CUTLASS_PRAGMA_UNROLL
        for (int step = 1; step < 4; step *= 2) {
          bool const by = (before / 2 & step) != 0;
          CUTLASS_PRAGMA_UNROLL
          for (int j = 0; j + step < 8; ++j) words[j] = by ? words[j + step] : words[j];
        }
        uint32_t const bits = before % 2 * 16;
        uint4 made{__funnelshift_r(words[0], words[1], bits), __funnelshift_r(words[1], words[2], bits),
                   __funnelshift_r(words[2], words[3], bits), __funnelshift_r(words[3], words[4], bits)};
        if (k < 0 || k + kVector > params.k) keep(made, k, 0, params.k);
        put(shared, wide, most_few(params), row, x, made);
      }
    }

   private:
    CUTLASS_DEVICE static void put(char* shared, int wide, int few, int row, int x, uint4 const& vector) {
      if constexpr (kAlongK) {
        *reinterpret_cast<uint4*>(shared + row * wide + x * 16) = vector;
      } else {
        // Each of eight elements of K is another warp's.
        auto const* const elements = reinterpret_cast<uint16_t const*>(&vector);
        CUTLASS_PRAGMA_UNROLL
        for (int warp = 0; warp < kWarps; ++warp) {
          *reinterpret_cast<uint16_t*>(shared + (warp * few + row) * wide + x * 2) = elements[warp];
        }
      }
    }
  };

  CUTLASS_DEVICE static int pitch(Params const& params) { return pitch(params.chunk); }
  CUTLASS_DEVICE static int most_few(Params const& params) { return min(params.few_rows, params.few_tile); }

  template <int kFew>
  CUTLASS_DEVICE static void compute(Params const& params, char* shared) {
    constexpr int kTiles = kAlongK ? 1 : 4;  // of 16 rows of weights
    constexpr int kAhead = ahead(kFew);
    Place const place(params);
    int const lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
    int const part = kAlongK ? warp % params.k_warps : 0, apart = kAlongK ? params.k_warps : 1;
    Weights weights(params, place);
    __shared__ int shifts[kWarps];
    if (!kAlongK && lane == 0) shifts[warp] = weights.shift;
    float sums[kTiles][kFew / 8][4] = {};
    uint4 vectors[kAhead][Weights::kVectors];

    if (!params.settled) wait_for_launch_before();
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      weights.load(params, place.first_step + part + i * apart < place.end_step, vectors[i]);
    }
    if (params.settled) wait_for_launch_before();
    int const wide = pitch(params);
    Few const few{kAlongK ? weights.shift : 0,
                  cute::cast_smem_ptr_to_uint(shared) + (kAlongK ? 1 : kWarps) * most_few(params) * wide};
    few.request(params, place.first_step);
    char const* const mine = kAlongK ? shared + lane / 4 * wide + lane % 4 * 16
                                     : shared + (warp * most_few(params) + lane / 4) * wide + lane % 4 * 8;
    for (int begin = place.first_step; begin < place.end_step; begin += params.chunk) {
      asm volatile("cp.async.wait_group 0;" ::: "memory");
      __syncthreads();
      few.move(params, shared, begin);
      __syncthreads();
      if (begin + params.chunk < place.end_step) few.request(params, begin + params.chunk);
      int const end = min(begin + params.chunk, place.end_step);
      for (int base = begin + part; base < end; base += kAhead * apart) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kAhead; ++i) {
          int const step = base + i * apart;
          if (step < end) {
            use<kFew>(params, weights, vectors[i], mine + (step - begin) * (kAlongK ? kStep * 2 : kStep * 2 / kWarps),
                      step, sums);
          }
          weights.load(params, step + kAhead * apart < place.end_step, vectors[i]);
        }
      }
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");  // of a thread block without steps
    __syncthreads();
    store<kFew>(params, shared, shifts, sums);
  }

  // Multiplies a step.
  template <int kFew, int kTiles>
  CUTLASS_DEVICE static void use(Params const& params, Weights const& weights, uint4 (&vectors)[Weights::kVectors],
                                 char const* few, int step, float (&sums)[kTiles][kFew / 8][4]) {
    int const wide = pitch(params);
    if constexpr (kAlongK) {
      // Elements of other rows, perhaps no numbers.
      if (step == 0 || (step + 1) * kStep > params.k + weights.shift) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < Weights::kVectors; ++i) {
          keep(vectors[i], step * kStep + i % 2 * 32 + int(threadIdx.x) % 4 * kVector, weights.shift,
               params.k + weights.shift);
        }
      }
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < 2; ++half) {
        uint4 const low = vectors[half], high = vectors[2 + half];
        uint32_t const a[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kFew / 8; ++i) {
          uint4 const b = *reinterpret_cast<uint4 const*>(few + i * 8 * wide + half * 64);
          multiply_16_8_16<Element>(sums[0][i], a[0], b.x, b.y);
          multiply_16_8_16<Element>(sums[0][i], a[1], b.z, b.w);
        }
      }
    } else {
      uint32_t a[kTiles][4];
      CUTLASS_PRAGMA_UNROLL
      for (int tile = 0; tile < kTiles; ++tile) {
        auto const word = [&](int i) { return reinterpret_cast<uint32_t const*>(&vectors[i])[tile]; };
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 4; ++i)
          a[tile][i] = __byte_perm(word(i / 2 * 2), word(i / 2 * 2 + 1), i % 2 ? 0x7632 : 0x5410);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kFew / 8; ++i) {
        uint2 const b = *reinterpret_cast<uint2 const*>(few + i * 8 * wide);
        CUTLASS_PRAGMA_UNROLL
        for (int tile = 0; tile < kTiles; ++tile) multiply_16_8_16<Element>(sums[tile][i], a[tile], b.x, b.y);
      }
    }
  }

  // Adds up the sums of the warps, and of thread blocks, and stores D.
  template <int kFew, int kTiles>
  CUTLASS_DEVICE static void store(Params const& params, char* shared, int const (&shifts)[kWarps],
                                   float (&sums)[kTiles][kFew / 8][4]) {
    constexpr int kAcross = kAlongK ? 16 : kWindow;  // rows of weights of a warp
    int const lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
    // Of kAlongK those that divide K one after the other, each with the rows of the tile.
    int const k_warps = kAlongK ? params.k_warps : kWarps;
    int const part = kAlongK ? warp % k_warps : warp, first = kAlongK ? warp / k_warps * kAcross : 0;
    int const height = kAlongK ? params.tile : kWindow, wide = height + 4, part_floats = kFew * wide;
    auto* const all = reinterpret_cast<float*>(shared);
    float* const to = all + part * part_floats + first + lane % 4 * 2 * wide;
    CUTLASS_PRAGMA_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      int const row = kAlongK ? lane / 4 : lane / 4 * 8 + tile * 2, further = kAlongK ? 8 : 1;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kFew / 8; ++i) {
        float* const here = to + i * 8 * wide + row;
        here[0] = sums[tile][i][0];
        here[wide] = sums[tile][i][1];
        here[further] = sums[tile][i][2];
        here[wide + further] = sums[tile][i][3];
      }
    }
    __syncthreads();
    Place const place(params);
    // Four neighbours of a thread at once. A window has more columns than a tile, which nobody stores.
    int const bits = 31 - __clz(height), count = height * place.few;
    auto const of_warps = [&](int at) {
      int const other = at >> bits, row = at & (height - 1);
      float four[4] = {};
      float const* from = all + other * wide + row;
      for (int i = 0; i < k_warps; ++i, from += part_floats) {
        if constexpr (kAlongK) {
          float4 const next = *reinterpret_cast<float4 const*>(from);
          four[0] += next.x, four[1] += next.y, four[2] += next.z, four[3] += next.w;
        } else {
          CUTLASS_PRAGMA_UNROLL
          for (int j = 0; j < 4; ++j) four[j] += from[shifts[i] + j];
        }
      }
      return make_float4(four[0], four[1], four[2], four[3]);
    };
    int const begin = int(threadIdx.x) * 4;
    constexpr int kStride = kThreads * 4;
    if (params.splits == 1) {
      for (int at = begin; at < count; at += kStride) {
        store_four(params, place, at >> bits, at & (height - 1), of_warps(at));
      }
      return;
    }
    // Of the last of the few tiles, too, each has room for as many as a whole one.
    int64_t const room = int64_t(height) * most_few(params);
    float* const parts = params.parts + int64_t(place.unit) * params.splits * room;
    for (int at = begin; at < count; at += kStride) {
      __stcg(reinterpret_cast<float4*>(parts + place.split * room + at), of_warps(at));
    }
    auto* const last = reinterpret_cast<uint32_t*>(shared);
    if (!SumsWorkspace::is_last(params.arrived + place.unit, params.splits, last)) return;
    // Eight loads at once: they come from L2.
    constexpr int kAtOnce = kAlongK ? 4 : 1;
    for (int at = begin; at < count; at += kAtOnce * kStride) {
      float4 of_all[kAtOnce] = {};
#pragma unroll(8 / kAtOnce)
      for (int i = 0; i < params.splits; ++i) {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < kAtOnce; ++j) {
          int const here = at + j * kStride;
          if (here >= count) continue;
          float4 const next = __ldcg(reinterpret_cast<float4 const*>(parts + i * room + here));
          of_all[j].x += next.x, of_all[j].y += next.y, of_all[j].z += next.z, of_all[j].w += next.w;
        }
      }
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {
        int const here = at + j * kStride;
        if (here < count) store_four(params, place, here >> bits, here & (height - 1), of_all[j]);
      }
    }
  }

  // Sums of four neighbours of a tile, for one of the few rows.
  CUTLASS_DEVICE static void store_four(Params const& params, Place const& place, int other, int in_tile, float4 sums) {
    int64_t const few = place.few_begin + other;
    int row = place.row + in_tile * params.classes;
    ElementD* d = params.d + place.batch * params.d_batch + few * params.d_few + row * params.d_row;
    ElementD const* c = params.c + place.batch * params.c_batch + few * params.c_few + row * params.c_row;
    float const four[4] = {sums.x, sums.y, sums.z, sums.w};
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (row >= 0 && row < params.rows && in_tile + i < params.tile) {
        float value = times(params.alpha, four[i]);
        if (params.beta != 0.0f) value = plus_source(value, params.beta, float(*c));
        *d = cutlass::NumericConverter<ElementD, float>::convert(value);
      }
      row += params.classes;
      d += params.classes * params.d_row;
      c += params.classes * params.c_row;
    }
  }
};

}  // namespace atomr_cutlass
