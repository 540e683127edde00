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

  static constexpr bool kAlongA = cutlass::platform::is_same<LayoutA, cutlass::layout::RowMajor>::value;
  static constexpr bool kAlongB = cutlass::platform::is_same<LayoutB, cutlass::layout::ColumnMajor>::value;
  static constexpr int kThreads = 256, kWarps = kThreads / 32, kMinBlocks = 2;
  static constexpr int kTile = 64;  // rows, columns, and elements of K of a step
  static constexpr int kStages = 4;
  static constexpr int kEach = kTile * 8 / kThreads;  // lines of which a thread requests and moves a vector
  static constexpr int kApart = kTile / kEach;  // from one to the next
  static constexpr int kLineBytes = kTile * 2, kLoadedPitch = kLineBytes + 16;
  static constexpr int kLoadedBytes = kTile * kLoadedPitch, kMovedBytes = kTile * kLineBytes;  // of an operand
  static constexpr int kMoved = kStages * 2 * kLoadedBytes;  // where moved lines are in shared memory, of two steps
  static constexpr int kSharedBytes = kMoved + 2 * 2 * kMovedBytes;
  // Floats from one row of sums in shared memory to the next: eight rows of a half warp's pairs meet all banks.
  static constexpr int kSumsPitch = kTile + 8;
  static constexpr int kAlong = kWarps / 4;  // warps that divide K: the others have 32 rows and columns each
  static_assert(kAlong * kTile * kSumsPitch * 4 <= kSharedBytes, "sums of four that divide K");
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
    int32_t k;
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
    return args.m > 0 && args.n > 0 && args.k > 0 && args.batch > 0 && args.split_k > 0 &&
           splits(args) * args.batch <= kMaxBlocks && ceil_div(args.n, kTile) <= kMaxBlocks && is_aligned(args.a) &&
           is_aligned(args.b) && args.lda < Matrix::kMostLeading && args.ldb < Matrix::kMostLeading &&
           (kAlongA ? args.m : args.k) * args.lda < Matrix::kMostElements &&
           (kAlongB ? args.n : args.k) * args.ldb < Matrix::kMostElements && args.width == 0;
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
    auto const tiles = [&](int extent) { return uint32_t(ceil_div(extent, kTile)); };
    return dim3(tiles(params.extents[0]), tiles(params.extents[1]), uint32_t(params.splits * params.batch));
  }

  CUTLASS_DEVICE static void run(Params const& params, char* shared) {
    Place const place(params);
    int const first = place.split * params.split_steps;
    int const end = min(first + params.split_steps, params.steps);
    uint32_t const to = cute::cast_smem_ptr_to_uint(shared);
    Lines<0> a(params, place, int(blockIdx.x) * kTile, first);
    Lines<1> b(params, place, int(blockIdx.y) * kTile, first);

    // What no launch that may be running writes is requested before that has ended. Loops, so that there is little
    // code, which has to be loaded, too.
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
      if (pass == 1) wait_for_launch_before();
#pragma unroll 1
      for (int i = 0; i < kStages - 1; ++i) {
        uint32_t const loaded = to + i * 2 * kLoadedBytes;
        bool const wanted = first + i < end;
        if (wanted && params.settled[0] == (pass == 0)) a.request(params, place, loaded);
        if (wanted && params.settled[1] == (pass == 0)) b.request(params, place, loaded + kLoadedBytes);
        if (pass == 1) commit();
      }
    }

    float sums[2][4][4] = {};
    int const warp = int(threadIdx.x) / 32, part = warp / 4, row = warp % 2 * 32, column = warp / 2 % 2 * 32;
    Fragments const fragments(row, column, part);
    bool const multiplies = row < a.lines && column < b.lines;

    uint32_t loaded = to, requested = to + (kStages - 1) * 2 * kLoadedBytes, moved = to + kMoved;
    auto const next_of = [&](uint32_t place) {
      return place == to + (kStages - 1) * 2 * kLoadedBytes ? to : place + 2 * kLoadedBytes;
    };
#pragma unroll 1
    for (int step = first - 1; step < end; ++step) {
      wait_for_step();
      __syncthreads();  // the step has been moved, and the loaded lines of the next one are there
      uint32_t const used = 2 * (to + kMoved) + 2 * kMovedBytes - moved;  // the other one
      if (step + 1 < end) {
        int const of_k = params.k - (step + 1) * kTile;
        a.move(loaded, moved, of_k);
        b.move(loaded + kLoadedBytes, moved + kMovedBytes, of_k);
      }
      if (step + kStages < end) {
        a.request(params, place, requested);
        b.request(params, place, requested + kLoadedBytes);
      }
      commit();
      if (step >= first && multiplies) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kTile / 16 / kAlong; ++i) fragments.use(used, i * kAlong, sums);
      }
      loaded = next_of(loaded);
      requested = next_of(requested);
      moved = used;
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
    store(params, place, shared, part, row, column, sums);
  }

 private:
  CUTLASS_DEVICE static void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
  CUTLASS_DEVICE static void wait_for_step() { asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory"); }

  struct Place {
    int batch, split;

    CUTLASS_DEVICE explicit Place(Params const& params) {
      batch = int(blockIdx.z);
      split = 0;
      if (params.splits > 1) {
        batch = int(blockIdx.z) / params.splits;
        split = int(blockIdx.z) - batch * params.splits;
      }
    }
  };

  // The lines of operand A (0) or B (1) that a thread block reads. A thread requests a vector of one line, and perhaps
  // the ninth of another; a warp moves four lines that are 8 apart, all of which begin equally far from a vector.
  template <int kOperand>
  struct Lines {
    static constexpr bool kLong = kOperand == 0 ? kAlongA : kAlongB;  // lines lie along K

    uint4 const* vectors;  // the first whole one of the matrix
    uint32_t whole;  // how many there are
    uint32_t next, ninth;  // of the next step, counted from that one
    uint32_t further;  // from a step to the next
    uint32_t to, to_ninth;  // where they go in shared memory
    uint32_t moved_shift;  // elements of the first vector of the lines that a warp moves which lie before them
    uint32_t moved_from, moved_to;
    int lines;  // rows or columns of the tile
    bool wanted[kEach], wants_ninth;  // whether the thread's vectors have anything of the tile

    CUTLASS_DEVICE Lines(Params const& params, Place const& place, int begin, int first_step) {
      int64_t const leading = params.leading[kOperand];
      Matrix const matrix(params.operands[kOperand] + place.batch * params.batch_strides[kOperand],
                          kLong ? params.extents[kOperand] : params.k, leading,
                          kLong ? params.k : params.extents[kOperand]);
      vectors = matrix.vectors + matrix.first;
      whole = matrix.whole;
      lines = min(params.extents[kOperand] - begin, kTile);
      int64_t const at = kLong ? matrix.lead + begin * leading + first_step * kTile
                               : matrix.lead + begin + first_step * kTile * leading;
      int const line = int(threadIdx.x) / 8, x = int(threadIdx.x) % 8, of_ninth = int(threadIdx.x) % kTile;
      int const warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
      int const moved = warp % 8 + lane / 8 * 8 + warp / 8 * 32;
      // Elements of a line's first vector that lie before it.
      auto const shift = [&](int other) { return (uint32_t(at) + uint32_t(other) * uint32_t(leading)) % 8; };
      next = uint32_t((at + line * leading) / 8 + x) - matrix.first;
      ninth = uint32_t((at + of_ninth * leading) / 8 + 8) - matrix.first;
      further = kLong ? 8 : 8 * uint32_t(leading);
      to = line * kLoadedPitch + x * 16;
      to_ninth = of_ninth * kLoadedPitch + kLineBytes;
      moved_shift = shift(warp % 8);
      moved_from = moved * kLoadedPitch + lane % 8 * 16;
      moved_to = moved * kLineBytes + (lane % 8 ^ moved % 8) * 16;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kEach; ++i) wanted[i] = kLong ? line + i * kApart < lines : x * 8 - int(shift(line)) < lines;
      // Of lines that begin with a vector the ninth has nothing. Other threads have those of the other operand.
      int const reach = kTile - int(shift(of_ninth));
      wants_ninth = int(threadIdx.x) / kTile == kOperand && reach < kTile && (kLong ? of_ninth < lines : reach < lines);
    }

    CUTLASS_DEVICE void request(Params const& params, Place const& place, uint32_t from) {
      uint32_t const apart = kApart / 8 * uint32_t(params.leading[kOperand]);
      bool const is_ninth_whole = ninth < whole;
      bool rest = wants_ninth && !is_ninth_whole;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kEach; ++i) {
        bool const is_whole = next + i * apart < whole;
        if (wanted[i] && is_whole) load_vector(from + to + i * kApart * kLoadedPitch, next + i * apart);
        rest |= wanted[i] && !is_whole;
      }
      if (wants_ninth && is_ninth_whole) load_vector(from + to_ninth, ninth);
      if (rest) {
        // Beside the matrix, or where it begins or ends: a loop, so that it is little code.
#pragma unroll 1
        for (int i = 0; i <= kEach; ++i) {
          uint32_t const index = i < kEach ? next + i * apart : ninth;
          if (index == whole || index == ~0u) {
            store_partial(params, place, index, from + (i < kEach ? to + i * kApart * kLoadedPitch : to_ninth));
          }
        }
      }
      next += further;
      ninth += further;
    }

    CUTLASS_DEVICE void load_vector(uint32_t at, uint32_t index) const {
      asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(at), "l"(vectors + index) : "memory");
    }

    CUTLASS_DEVICE void store_partial(Params const& params, Place const& place, uint32_t index, uint32_t at) const {
      Element const* const begin = params.operands[kOperand] + place.batch * params.batch_strides[kOperand];
      Element const* const end = begin +
                                 ((kLong ? params.extents[kOperand] : params.k) - 1) * params.leading[kOperand] +
                                 (kLong ? params.k : params.extents[kOperand]);
      uint32_t const first = reinterpret_cast<uint64_t>(begin) % 16 > 0 ? 1 : 0;
      uint4 const found = Matrix::partial(begin, end, index + first);
      asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(found.x), "r"(found.y), "r"(found.z),
                   "r"(found.w)
                   : "memory");
    }

    // Moves a step's lines to where ldmatrix reads them: lines of 128 bytes, whose vectors are exchanged by the line,
    // so that eight lines' vectors meet all banks. Zeros follow the end of K, of which `of_k` elements are left. A warp
    // moves lines that are 8 apart, all of which begin equally far from a vector.
    CUTLASS_DEVICE void move(uint32_t from, uint32_t into, int of_k) const {
      uint32_t words[kEach][8];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kEach; ++i) {
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%8];\nld.shared.v4.u32 {%4, %5, %6, %7}, [%8 + 16];"
                     : "=r"(words[i][0]), "=r"(words[i][1]), "=r"(words[i][2]), "=r"(words[i][3]), "=r"(words[i][4]),
                       "=r"(words[i][5]), "=r"(words[i][6]), "=r"(words[i][7])
                     : "r"(from + moved_from + i * kApart * kLoadedPitch));
      }
      switch (moved_shift / 2) {  // the same for all lines of the warp
        case 0: store<0>(words, into, of_k); break;
        case 1: store<1>(words, into, of_k); break;
        case 2: store<2>(words, into, of_k); break;
        default: store<3>(words, into, of_k);
      }
    }

    template <int kWords>
    CUTLASS_DEVICE void store(uint32_t const (&words)[kEach][8], uint32_t into, int of_k) const {
      uint32_t made[kEach][4];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kEach; ++i) {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < 4; ++j) {
          made[i][j] = __funnelshift_r(words[i][j + kWords], words[i][j + kWords + 1], moved_shift % 2 * 16);
        }
      }
      if (of_k < kTile) {
        int const lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kEach; ++i) {
          CUTLASS_PRAGMA_UNROLL
          for (int j = 0; j < 4; ++j) {
            int const low = kLong ? lane % 8 * 8 + 2 * j : warp % 8 + lane / 8 * 8 + warp / 8 * 32 + i * kApart;
            made[i][j] &= (low < of_k ? 0xffffu : 0u) | (low + (kLong ? 1 : 0) < of_k ? 0xffff0000u : 0u);
          }
        }
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kEach; ++i) {
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(into + moved_to + i * kApart * kLineBytes),
                     "r"(made[i][0]), "r"(made[i][1]), "r"(made[i][2]), "r"(made[i][3]));
      }
    }
  };

  // Loads four 8x8 matrices; of lines across K transposed.
  template <bool kTransposed>
  CUTLASS_DEVICE static void load(uint32_t at, uint32_t (&found)[4]) {
    if constexpr (kTransposed) {
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(found[0]), "=r"(found[1]), "=r"(found[2]), "=r"(found[3])
                   : "r"(at));
    } else {
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(found[0]), "=r"(found[1]), "=r"(found[2]), "=r"(found[3])
                   : "r"(at));
    }
  }

  // Where a warp's 32 rows and columns are among the moved lines, by lanes: eight lanes have the addresses of a matrix.
  struct Fragments {
    uint32_t a[2], b[2];  // of 16 rows or columns each

    CUTLASS_DEVICE Fragments(int row, int column, int part) {
      int const lane = int(threadIdx.x) % 32;
      int const low = lane % 16, high = lane / 16, pair = lane / 8 % 2, eight = lane % 8;
      auto const address = [](int line, int vector) { return line * kLineBytes + (vector ^ line % 8) * 16; };
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2; ++i) {
        a[i] = kAlongA ? address(row + i * 16 + low, part * 2 + high)
                       : address(part * 16 + high * 8 + eight, row / 8 + i * 2 + pair);
        b[i] = kMovedBytes + (kAlongB ? address(column + i * 16 + high * 8 + eight, part * 2 + pair)
                                      : address(part * 16 + low, column / 8 + i * 2 + high));
      }
    }

    // Multiplies 16 elements of K, those of the warp or so many further ones beyond them.
    CUTLASS_DEVICE void use(uint32_t moved, int further, float (&sums)[2][4][4]) const {
      uint32_t of_a[2][4], of_b[2][4];
      // Along K two vectors for 16 elements: of those 32 further another bit of the address.
      auto const at = [&](uint32_t place, bool along_k) {
        return moved + (along_k ? place ^ uint32_t(further * 32) : place + further * 16 * kLineBytes);
      };
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2; ++i) {
        load<!kAlongA>(at(a[i], kAlongA), of_a[i]);
        load<!kAlongB>(at(b[i], kAlongB), of_b[i]);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2; ++i) {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < 4; ++j) {
          multiply_16_8_16<Element>(sums[i][j], of_a[i], of_b[j / 2][j % 2 * 2], of_b[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  };

  // Adds up the sums of the warps, and of thread blocks, and stores D.
  CUTLASS_DEVICE static void store(Params const& params, Place const& place, char* shared, int part, int row,
                                   int column, float (&sums)[2][4][4]) {
    int const tile_m = int(blockIdx.x), tile_n = int(blockIdx.y);
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
      CUTLASS_PRAGMA_UNROLL
      for (int i = 1; i < kAlong; ++i) sum += from[i * kTile * kSumsPitch];
      return sum;
    };
    int64_t const d_begin = place.batch * params.d_batch + tile_m * kTile * params.ldd + tile_n * kTile;
    int64_t const c_begin = place.batch * params.c_batch + tile_m * kTile * params.ldc + tile_n * kTile;
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
    int64_t const tile = (int64_t(place.batch) * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    float* const parts = params.parts + tile * params.splits * (kTile * kTile);
#pragma unroll 4
    for (int at = int(threadIdx.x); at < count; at += kThreads) {
      __stcg(parts + place.split * (kTile * kTile) + at, of_warps(at));
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
