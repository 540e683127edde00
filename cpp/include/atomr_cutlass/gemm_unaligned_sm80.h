// GEMM cells whose operands begin anywhere: rows of any length, at any address, for products that are too small to be
// copied into rows of whole vectors first, which is what TMA reads. Rows come by cp.async of four bytes, a word, or of
// 16 where all of them begin and end at multiples of that.
//
// A thread block's tile has 64 rows and columns, or 32, as a launch chooses; a step has 64 elements of K, or 128. What
// a step needs of an operand are 64 lines of 64 elements: rows of the tile, along K, or elements of K, along the
// columns of a row-major B, whose rows begin at words. Of a tile of 32, a row has two lines; or a line has columns of
// two elements of K, 64 apart. A line along K whose row begins between words comes from half a word before it; its
// words are shifted by 16 bits in registers.
//
// A lane reads 16 bytes of a line along K at once: 8 neighbours of the 32 elements of K that its warp multiplies. Those
// are two operands of mma.sync, which may come in any order along K, if both come in the same one.
//
// K is divided among warps, and among thread blocks, which leave their sums in the workspace; the last one to do so
// adds them up in their order.
#pragma once

#include "atomr_cutlass/dependent.h"
#include "atomr_cutlass/kernel_abi.h"
#include "atomr_cutlass/rounding.h"
#include "atomr_cutlass/unaligned.h"
#include "cute/arch/util.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/layout/matrix.h"
#include "cutlass/numeric_conversion.h"
#include "cutlass/numeric_types.h"

namespace atomr_cutlass {

// `Element` has 16 bits. A and D are row-major, B may be either.
template <class Element, class LayoutB, class ElementD>
struct GemmUnalignedSm80 {
  using Args = atomr_cutlass_gemm_args;

  static constexpr bool kAlongB = cutlass::platform::is_same<LayoutB, cutlass::layout::ColumnMajor>::value;
  static constexpr int kThreads = 256, kMinBlocks = 2;
  static constexpr int kMostTile = 64, kLeastTile = 32;  // rows and columns
  static constexpr int kLines = 64, kLine = 64;  // of a step of an operand, and elements of one
  static constexpr int kStages = 5;
  static constexpr int kLineBytes = kLine * 2, kVectorBytes = 16, kWordBytes = 4;
  // Of a stage: the lines of A and B, then the word behind each of them, which is needed of those that are shifted.
  static constexpr int kLinesBytes = kLines * kLineBytes, kBehind = 2 * kLinesBytes;
  static constexpr int kBehindBytes = kLines * kWordBytes, kStageBytes = kBehind + 2 * kBehindBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static constexpr int kPart = 32;  // elements of K of a step that a warp multiplies
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
    int32_t k, tile;
    int32_t splits, steps, split_steps;  // thread blocks that divide K; steps of all of it and of one of them
    int32_t batch;
    bool settled[2];  // no launch that may be running writes the operand
  };

  CUTLASS_HOST_DEVICE static constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

  CUTLASS_HOST_DEVICE static constexpr int step(int tile) { return kLines * kLine / tile; }  // elements of K

  static int tile(Args const& args) { return args.width == 0 ? kMostTile : args.width; }
  static int64_t tiles(Args const& args) { return ceil_div(args.m, tile(args)) * ceil_div(args.n, tile(args)); }
  static int64_t steps(Args const& args) { return ceil_div(args.k, step(tile(args))); }
  static int64_t split_steps(Args const& args) { return ceil_div(steps(args), args.split_k); }
  static int64_t splits(Args const& args) { return ceil_div(steps(args), split_steps(args)); }

  // K is divided among `split_k` thread blocks. `width` is the rows and columns of a tile; 0 is the most.
  static bool can_implement(Args const& args) {
    auto const begins_at = [](void const* at, uint64_t bytes) { return reinterpret_cast<uint64_t>(at) % bytes == 0; };
    return args.m > 0 && args.n > 0 && args.k > 0 && args.batch > 0 && args.split_k > 0 &&
           (args.width == 0 || args.width == kLeastTile || args.width == kMostTile) &&
           splits(args) * args.batch <= kMaxBlocks && ceil_div(args.n, tile(args)) <= kMaxBlocks &&
           begins_at(args.a, sizeof(Element)) && begins_at(args.b, kAlongB ? sizeof(Element) : kWordBytes) &&
           (kAlongB || (args.ldb % 2 == 0 && (args.batch == 1 || args.batch_stride_b % 2 == 0)));
  }

  static uint64_t workspace_size(Args const& args) {
    return SumsWorkspace::size(tiles(args) * args.batch, splits(args), tile(args) * tile(args));
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
    result.tile = tile(args);
    result.steps = int32_t(steps(args));
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
    auto const tiles = [&](int extent) { return uint32_t(ceil_div(extent, params.tile)); };
    return dim3(tiles(params.extents[0]), tiles(params.extents[1]), uint32_t(params.splits * params.batch));
  }

  CUTLASS_DEVICE static void run(Params const& params, char* shared) {
    if (params.tile == kMostTile) {
      compute<kMostTile>(params, shared);
    } else {
      compute<kLeastTile>(params, shared);
    }
  }

 private:
  template <int kTile>
  CUTLASS_DEVICE static void compute(Params const& params, char* shared) {
    // Warps that divide a step; the others have 32 rows each, and half of the columns.
    constexpr int kParts = step(kTile) / kPart, kRowWarps = kTile / 32, kColumns = kTile / 2;
    static_assert(kParts * kRowWarps * 2 * 32 == kThreads);
    Place const place(params);
    int const first = place.split * params.split_steps;
    int const end = min(first + params.split_steps, params.steps);
    uint32_t const to = cute::cast_smem_ptr_to_uint(shared);
    Lines<0, kTile> a(params, place, int(blockIdx.x) * kTile, first);
    Lines<1, kTile> b(params, place, int(blockIdx.y) * kTile, first);
    Behind<kTile> behind(params, a, b);
    bool const is_behind_settled = behind.is_b ? params.settled[1] : params.settled[0];

    // What no launch that may be running writes is requested before that has ended. Loops, so that there is little
    // code, which has to be loaded, too.
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
      if (pass == 1) wait_for_launch_before();
      if (is_behind_settled == (pass == 0)) behind.load_end(params, first);
#pragma unroll 1
      for (int i = 0; i < kStages - 1; ++i) {
        bool const wanted = first + i < end;
        if (wanted && params.settled[0] == (pass == 0)) a.request(params, to + i * kStageBytes, first + i);
        if (wanted && params.settled[1] == (pass == 0)) b.request(params, to + i * kStageBytes, first + i);
        if (wanted && is_behind_settled == (pass == 0)) behind.request(params, to + i * kStageBytes, first + i);
        if (pass == 1) commit();
      }
    }

    float sums[2][kColumns / 8][4] = {};
    int const warp = int(threadIdx.x) / 32, part = warp / (2 * kRowWarps);
    int const row = warp % kRowWarps * 32, column = warp / kRowWarps % 2 * kColumns;
    bool const multiplies = row < a.extent && column < b.extent;
    Fragments<0, kTile, 4> const of_a(params, a, row, part);
    Fragments<1, kTile, kColumns / 8> const of_b(params, b, column, part);

    int used = 0, requested = (kStages - 1) * kStageBytes;
    auto const next_of = [](int stage) { return stage == (kStages - 1) * kStageBytes ? 0 : stage + kStageBytes; };
#pragma unroll 1
    for (int step = first; step < end; ++step) {
      wait_for_step();
      __syncthreads();  // the step is there, and the one before has been multiplied
      if (step + kStages - 1 < end) {
        a.request(params, to + requested, step + kStages - 1);
        b.request(params, to + requested, step + kStages - 1);
        behind.request(params, to + requested, step + kStages - 1);
      }
      commit();
      if (multiplies) {
        uint32_t words_a[4][4], words_b[kColumns / 8][4];
        of_a.load(shared, used, words_a);
        of_b.load(shared, used, words_b);
        if (int const of_k = params.k - step * GemmUnalignedSm80::step(kTile); of_k < GemmUnalignedSm80::step(kTile)) {
          of_a.keep(of_k, part, words_a);
          of_b.keep(of_k, part, words_b);
        }
        CUTLASS_PRAGMA_UNROLL
        for (int half = 0; half < 2; ++half) {
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < 2; ++i) {
            auto const &low = words_a[2 * i], &high = words_a[2 * i + 1];
            uint32_t const fragment[4] = {low[2 * half], high[2 * half], low[2 * half + 1], high[2 * half + 1]};
            CUTLASS_PRAGMA_UNROLL
            for (int j = 0; j < kColumns / 8; ++j) {
              multiply_16_8_16<Element>(sums[i][j], fragment, words_b[j][2 * half], words_b[j][2 * half + 1]);
            }
          }
        }
      }
      used = next_of(used);
      requested = next_of(requested);
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
    store<kTile, kParts>(params, place, shared, part, row, column, sums);
  }

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

  // Vectors of a line in shared memory are exchanged by the line, so that what a warp reads at once meets all banks:
  // along K eight lanes read four vectors of two neighbours; across K ldmatrix reads a vector each of lines 0, 1, 8, 9,
  // 16, 17, 24 and 25, or of those 2, 4 or 6 further (Fragments).
  template <bool kLong>
  CUTLASS_DEVICE static int exchanged(int line) {
    return kLong ? line % 2 * 4 : line % 2 + line / 8 % 4 * 2;
  }

  // Vectors and words of which `left` elements, at least one, are the line's; else zeros. A word may bring the element
  // behind K as well, which is taken out of the fragments (Fragments::keep).
  template <int kBytes>
  CUTLASS_DEVICE static void copy_if(uint32_t at, char const* from, int left) {
    int const bytes = left > 0 ? kBytes : 0;
    if constexpr (kBytes == kVectorBytes) {
      asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes)
                   : "memory");
    } else {
      asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 4, %2;" ::"r"(at), "l"(from), "r"(bytes)  // or 0
                   : "memory");
    }
  }

  template <int kBytes>
  CUTLASS_DEVICE static void copy(uint32_t at, char const* from) {
    if constexpr (kBytes == kVectorBytes) {
      asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
    } else {
      asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 4;" ::"r"(at), "l"(from) : "memory");
    }
  }

  // The lines of operand A (0) or B (1) that a thread block reads.
  template <int kOperand, int kTile>
  struct Lines {
    static constexpr bool kLong = kOperand == 0 || kAlongB;  // lines lie along K
    static constexpr int kStep = step(kTile);

    Element const* tile;  // its first element, in the first step
    char const* next;  // what the thread requests of its first line, in the next step
    uint32_t to;  // where it goes in a stage
    int extent;  // rows or columns of the tile
    int first;  // the thread's first line
    int begin;  // what it requests of each line, as elements from the step's, or tile's, beginning
    uint32_t parity;  // whether the tile's first row begins between words (bit 0)
    bool by_vectors;  // at once; else words
    // The tile's last row, if it is the matrix's and one element alone of its last word belongs to it, so that no word
    // is read there; else -1.
    int end_row;
    bool is_shifted;  // whether any line may be

    CUTLASS_DEVICE Lines(Params const& params, Place const& place, int of_tile, int first_step) {
      int64_t const leading = params.leading[kOperand], batch_stride = params.batch_strides[kOperand];
      Element const* const operand = params.operands[kOperand] + place.batch * batch_stride;
      // By the address, of which parameters that are kept for other addresses must not know.
      auto const address = reinterpret_cast<uint64_t>(operand);
      int const along = kLong ? params.k : params.extents[kOperand];
      by_vectors = (uint32_t(address) | uint32_t(leading * 2) | uint32_t(along * 2)) % kVectorBytes == 0;
      is_shifted = kLong && (uint32_t(address) | uint32_t(leading * 2)) % kWordBytes != 0;
      int const bytes = by_vectors ? kVectorBytes : kWordBytes, lanes = kLineBytes / bytes;
      first = int(threadIdx.x) / lanes;
      if (!kLong && !by_vectors) first = first % 2 + first / 2 * 8;
      int const x = int(threadIdx.x) % lanes * (bytes / 2);
      extent = min(params.extents[kOperand] - of_tile, kTile);
      Element const* const at = operand + (kLong ? of_tile * leading + first_step * kStep  // K is contiguous
                                                 : of_tile + int64_t(first_step) * kStep * leading);
      parity = uint32_t(reinterpret_cast<uint64_t>(at) / 2);
      tile = at;
      to = kOperand * kLinesBytes + first * kLineBytes + (x / 8 ^ exchanged<kLong>(first)) * kVectorBytes + x % 8 * 2;
      if constexpr (kLong) {
        begin = first / kTile * kLine + x - shift_of(params, first);
        next = reinterpret_cast<char const*>(at + first % kTile * leading + begin);
      } else {
        begin = x % kTile;
        first += x / kTile * kLines;
        next = reinterpret_cast<char const*>(at + first * leading + begin);
      }
      bool const has_end = kLong && of_tile + kTile >= params.extents[kOperand] && !by_vectors;
      end_row = has_end && (params.k + shift_of(params, extent - 1)) % 2 != 0 ? extent - 1 : -1;
    }

    // Elements of the first word of a line that lie before it.
    CUTLASS_DEVICE int shift_of(Params const& params, int line) const {
      return int(parity + uint32_t(line % kTile) * uint32_t(params.leading[kOperand])) & 1;
    }

    CUTLASS_DEVICE void request(Params const& params, uint32_t stage, int step) {
      int64_t const leading = params.leading[kOperand] * 2;
      int const of_k = params.k - step * kStep;  // what is left of it from this step on
      if (by_vectors) {
        request_by<kVectorBytes>(leading, stage + to, of_k);
      } else {
        request_by<kWordBytes>(leading, stage + to, of_k);
      }
      next += kLong ? kStep * 2 : kStep * leading;
    }

   private:
    template <int kBytes>
    CUTLASS_DEVICE void request_by(int64_t leading, uint32_t stage_to, int of_k) const {
      constexpr int kEach = kLines * kLineBytes / kBytes / kThreads, kApart = kLines / kEach;
      constexpr int kRows = kTile < kApart ? 1 : kTile / kApart;  // of a thread's lines along K
      // From the thread's first line to another one. Of lines across K all are exchanged alike.
      auto const further = [](int i) { return kLong || kBytes == kVectorBytes ? i * kApart : i % 4 * 2 + i / 4 * 32; };
      auto const to_of = [&](int i) { return stage_to + further(i) * kLineBytes; };
      auto const from = [&](int i) {
        return kLong ? next + i % kRows * kApart * leading + i / kRows * kLineBytes : next + further(i) * leading;
      };
      bool const is_whole = of_k >= kStep && extent == kTile;
      if (is_whole) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kEach; ++i) copy<kBytes>(to_of(i), from(i));
        return;
      }
      // Of large tiles with lines across K all at once would spill registers.
      constexpr int kUnrolled = kAlongB || kTile == kLeastTile ? kEach : 2;
#pragma unroll kUnrolled
      for (int i = 0; i < kEach; ++i) {
        if constexpr (kLong) {
          int const row = first % kTile + i % kRows * kApart, left = of_k - begin - i / kRows * kLine;
          if (row < extent && (left != 1 || row != end_row)) copy_if<kBytes>(to_of(i), from(i), left);
        } else {
          copy_if<kBytes>(to_of(i), from(i), first + further(i) < of_k ? extent - begin : 0);
        }
      }
    }
  };

  // The words behind lines along K: one thread each for the lines of A, then of B. So is an operand's last element,
  // where no word may be read, since it ends behind the matrix: it comes into a register at first and is stored where
  // asynchronous copies leave its word out.
  template <int kTile>
  struct Behind {
    static constexpr int kStep = step(kTile);

    char const* next;  // in the next step
    uint32_t to;  // in a stage
    uint32_t end;  // the matrix's last element, of the thread that has its row
    int end_row;  // of its operand
    bool is_b, wanted, has_end;

    CUTLASS_DEVICE Behind(Params const& params, Lines<0, kTile> const& a, Lines<1, kTile> const& b) {
      is_b = int(threadIdx.x) >= kLines;
      end = 0;
      if (is_b && kAlongB) {
        find(params, b);
      } else {
        find(params, a);
      }
      if (int(threadIdx.x) >= (kAlongB ? 2 : 1) * kLines) wanted = has_end = false;
    }

    // Before the requests of the thread's operand, which starts at the first step.
    CUTLASS_DEVICE void load_end(Params const& params, int first_step) {
      // From the word behind the first step's line to element K - 1.
      if (has_end) end = *reinterpret_cast<uint16_t const*>(next + 2 * (params.k - 1 - first_step * kStep - last()));
    }

    CUTLASS_DEVICE void request(Params const& params, uint32_t stage, int step) {
      int const of_k = params.k - step * kStep, left = of_k - last();
      if (wanted && (left != 1 || line() % kTile != end_row)) copy_if<kWordBytes>(stage + to, next, left);
      next += kStep * 2;
      if (has_end && of_k <= kStep) store_end(stage, of_k - 1);
    }

   private:
    CUTLASS_DEVICE static int line() { return int(threadIdx.x) % kLines; }
    // The last element of the line, from the step's beginning.
    CUTLASS_DEVICE static int last() { return line() / kTile * kLine + kLine - 1; }

    template <int kOperand>
    CUTLASS_DEVICE void find(Params const& params, Lines<kOperand, kTile> const& lines) {
      bool const is_row = line() % kTile < lines.extent;
      wanted = is_row && lines.is_shifted && lines.shift_of(params, line()) != 0;
      end_row = lines.end_row;
      has_end = line() == end_row;
      next = reinterpret_cast<char const*>(lines.tile) +  // two bytes an element
             2 * (line() % kTile * params.leading[kOperand] + last());
      to = kBehind + (kOperand * kLines + line()) * kWordBytes;
    }

    // The element `at` of the step's.
    CUTLASS_DEVICE void store_end(uint32_t stage, int at) const {
      int const of_line = at / kLine * kTile + end_row, word = (at % kLine + (wanted ? 1 : 0)) / 2;
      // clang-format off
      uint32_t const to_end = word == kLine / 2 ? kBehind + of_line * kWordBytes
                                                : of_line * kLineBytes + (word / 4 ^ exchanged<true>(of_line)) * kVectorBytes +
                                                      word % 4 * kWordBytes;
      // clang-format on
      uint32_t const of_b = word == kLine / 2 ? kBehindBytes : kLinesBytes;
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(stage + to_end + (is_b ? of_b : 0)), "r"(end) : "memory");
    }
  };

  // What a lane reads of a warp's rows or columns: of each eight of them a vector of K of one. Lane l has row l / 4 and
  // elements l % 4 * 8 to l % 4 * 8 + 7 of the 32 of K that the warp multiplies.
  template <int kOperand, int kTile, int kEights>
  struct Fragments {
    static constexpr bool kLong = kOperand == 0 || kAlongB;

    uint32_t at;  // of the first eight, in a stage
    uint32_t behind, behind_further;  // of the word behind a vector, and from eight lines to the next
    int bits;  // by which words are shifted
    bool is_shifted;

    CUTLASS_DEVICE Fragments(Params const& params, Lines<kOperand, kTile> const& lines, int begin, int part) {
      int const lane = int(threadIdx.x) % 32, half = part / (kLine / kPart), in_line = part % (kLine / kPart) * kPart;
      is_shifted = lines.is_shifted;
      if constexpr (kLong) {
        int const line = half * kTile + begin + lane / 4, vector = in_line / 8 + lane % 4;
        bits = 16 * lines.shift_of(params, line);
        auto const address = [&](int of_line) {
          return kOperand * kLinesBytes + line * kLineBytes + (of_line ^ exchanged<true>(line)) * kVectorBytes;
        };
        bool const is_last = vector + 1 == kLine / 8;
        at = address(vector);
        behind = is_last ? kBehind + kOperand * kBehindBytes + line * kWordBytes : address(vector + 1);
        behind_further = 8 * (is_last ? kWordBytes : kLineBytes);
      } else {
        // Of matrix i lanes 8 i to 8 i + 7 have the addresses: of elements of K that lie where those of A do.
        int const line = in_line + lane % 8 / 2 * 8 + lane / 8 * 2 + lane % 2, vector = half * (kTile / 8) + begin / 8;
        at = kOperand * kLinesBytes + line * kLineBytes + (vector ^ exchanged<false>(line)) * kVectorBytes;
      }
    }

    // Of lines along K, takes out what lies behind K, of which `of_k` elements are left.
    CUTLASS_DEVICE static void keep(int of_k, int part, uint32_t (&words)[kEights][4]) {
      if constexpr (!kLong) return;
      int const first = part * kPart + int(threadIdx.x) % 4 * 8;
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < 4; ++j) {
        int const low = first + 2 * j;
        uint32_t const kept = (low < of_k ? 0xffffu : 0u) | (low + 1 < of_k ? 0xffff0000u : 0u);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kEights; ++i) words[i][j] &= kept;
      }
    }

    CUTLASS_DEVICE void load(char const* shared, int stage, uint32_t (&words)[kEights][4]) const {
      if constexpr (kLong) {
        char const* const from = shared + stage + at;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kEights; ++i) {
          uint4 const found = *reinterpret_cast<uint4 const*>(from + i * 8 * kLineBytes);
          words[i][0] = found.x, words[i][1] = found.y, words[i][2] = found.z, words[i][3] = found.w;
        }
        if (!is_shifted) return;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kEights; ++i) {
          uint32_t last = 0;
          if (bits != 0) last = *reinterpret_cast<uint32_t const*>(shared + stage + behind + i * behind_further);
          CUTLASS_PRAGMA_UNROLL
          for (int j = 0; j < 3; ++j) words[i][j] = __funnelshift_r(words[i][j], words[i][j + 1], bits);
          words[i][3] = __funnelshift_r(words[i][3], last, bits);
        }
      } else {
        uint32_t const from = cute::cast_smem_ptr_to_uint(shared) + stage + at;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kEights; ++i) {
          asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                       : "=r"(words[i][0]), "=r"(words[i][1]), "=r"(words[i][2]), "=r"(words[i][3])
                       : "r"(from ^ uint32_t(i * kVectorBytes)));
        }
      }
    }
  };

  // Adds up the sums of the warps, and of thread blocks, and stores D.
  template <int kTile, int kParts>
  CUTLASS_DEVICE static void store(Params const& params, Place const& place, char* shared, int part, int row,
                                   int column, float (&sums)[2][kTile / 16][4]) {
    // Floats from one row of sums in shared memory to the next: eight rows of a half warp's pairs meet all banks.
    constexpr int kPitch = kTile + 8;
    static_assert(kParts * kTile * kPitch * 4 <= kSharedBytes);
    int const tile_m = int(blockIdx.x), tile_n = int(blockIdx.y);
    int const lane = int(threadIdx.x) % 32;
    auto* const all = reinterpret_cast<float*>(shared);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kTile / 16; ++j) {
        float* const to = all + (part * kTile + row + i * 16 + lane / 4) * kPitch + column + j * 8 + lane % 4 * 2;
        *reinterpret_cast<float2*>(to) = make_float2(sums[i][j][0], sums[i][j][1]);
        *reinterpret_cast<float2*>(to + 8 * kPitch) = make_float2(sums[i][j][2], sums[i][j][3]);
      }
    }
    __syncthreads();
    int const rows = min(params.extents[0] - tile_m * kTile, kTile);
    int const columns = min(params.extents[1] - tile_n * kTile, kTile);
    int64_t const d_begin = place.batch * params.d_batch + tile_m * kTile * params.ldd + tile_n * kTile;
    int64_t const c_begin = place.batch * params.c_batch + tile_m * kTile * params.ldc + tile_n * kTile;
    // Neighbours are stored at once where rows of D begin at pairs.
    struct alignas(2 * sizeof(ElementD)) Pair {
      ElementD elements[2];
    };
    bool const by_pairs = reinterpret_cast<uint64_t>(params.d + d_begin) % sizeof(Pair) == 0 && params.ldd % 2 == 0;
    // A pair of columns of a row, as they are counted from 0.
    auto const store_pair = [&](int pair, float2 sum) {
      int const in_row = pair / (kTile / 2), in_column = pair % (kTile / 2) * 2;
      if (in_column >= columns) return;
      bool const is_whole = in_column + 1 < columns;
      float values[2] = {times(params.alpha, sum.x), times(params.alpha, sum.y)};
      if (params.beta != 0.0f) {
        ElementD const* const c = params.c + c_begin + in_row * params.ldc + in_column;
        values[0] = plus_source(values[0], params.beta, float(c[0]));
        if (is_whole) values[1] = plus_source(values[1], params.beta, float(c[1]));
      }
      using Convert = cutlass::NumericConverter<ElementD, float>;
      ElementD* const d = params.d + d_begin + in_row * params.ldd + in_column;
      Pair const made{{Convert::convert(values[0]), Convert::convert(values[1])}};
      if (by_pairs && is_whole) {
        *reinterpret_cast<Pair*>(d) = made;
        return;
      }
      d[0] = made.elements[0];
      if (is_whole) d[1] = made.elements[1];
    };
    auto const of_warps = [&](int pair) {
      float const* const from = all + pair / (kTile / 2) * kPitch + pair % (kTile / 2) * 2;
      float2 sum = *reinterpret_cast<float2 const*>(from);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 1; i < kParts; ++i) {
        float2 const next = *reinterpret_cast<float2 const*>(from + i * kTile * kPitch);
        sum.x += next.x, sum.y += next.y;
      }
      return sum;
    };
    int const count = rows * (kTile / 2);
    if (params.splits == 1) {
#pragma unroll 4
      for (int pair = int(threadIdx.x); pair < count; pair += kThreads) store_pair(pair, of_warps(pair));
      return;
    }
    constexpr int kPairs = kTile * kTile / 2;
    int64_t const tile = (int64_t(place.batch) * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    auto* const parts = reinterpret_cast<float2*>(params.parts) + tile * params.splits * kPairs;
#pragma unroll 4
    for (int pair = int(threadIdx.x); pair < count; pair += kThreads) {
      __stcg(parts + place.split * kPairs + pair, of_warps(pair));
    }
    if (!SumsWorkspace::is_last(params.arrived + tile, params.splits, reinterpret_cast<uint32_t*>(shared))) return;
    // Many loads at once: they come from L2.
    constexpr int kMine = kPairs / kThreads;
    float2 sums_of_all[kMine] = {};
#pragma unroll(16 / kMine)
    for (int i = 0; i < params.splits; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kMine; ++j) {
        int const pair = int(threadIdx.x) + j * kThreads;
        if (pair >= count) continue;
        float2 const next = __ldcg(parts + i * kPairs + pair);
        sums_of_all[j].x += next.x, sums_of_all[j].y += next.y;
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kMine; ++j) {
      int const pair = int(threadIdx.x) + j * kThreads;
      if (pair < count) store_pair(pair, sums_of_all[j]);
    }
  }
};

}  // namespace atomr_cutlass
