// GEMM cells of the sm90 generation whose operands begin anywhere: rows of any length, at any address. TMA reads rows
// that begin at multiples of 16 bytes; here aligned vectors of 16 bytes come by cp.async as they lie, are shifted where
// they are in shared memory, and are multiplied by WGMMA. Shifting takes about as long as multiplying,
// and saves the copies into rows of whole vectors that TMA's kernels need.
//
// A tile has 128 rows and 128 or 64 columns, as a launch chooses; a step has 64 elements of K. What a step needs of an
// operand are lines of 128 bytes: rows along K, or elements of K along 64 columns of a row-major B. A thread owns a
// line. One along K begins up to a vector behind the first aligned address; what lies before it is in a register from
// the step before. One across K needs the vector behind it as well.
//
// K is divided among thread blocks, which leave their sums in the workspace; the last ones to do so add them up in
// their order (unaligned_product.h).
#pragma once

#include "atomr_cutlass/dependent.h"
#include "atomr_cutlass/kernel_abi.h"
#include "atomr_cutlass/unaligned_product.h"
#include "atomr_cutlass/wgmma.h"
#include "cute/arch/util.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/layout/matrix.h"
#include "cutlass/numeric_types.h"

namespace atomr_cutlass {

// `Element` has 16 bits. A and D are row-major, B may be either.
template <class Element, class LayoutB, class ElementD>
struct GemmRealignedSm90 {
  using Args = atomr_cutlass_gemm_args;
  using Product = UnalignedProduct<Element, ElementD>;
  using Params = typename Product::Params;
  using Place = typename Product::Place;

  static constexpr bool kAlongB = cutlass::platform::is_same<LayoutB, cutlass::layout::ColumnMajor>::value;
  static constexpr int kThreads = 256, kMinBlocks = 2;
  static constexpr int kRows = 128, kMostColumns = 128, kLeastColumns = 64;
  static constexpr int kStep = 64;
  static constexpr int kLineBytes = 128, kVectorBytes = 16, kVectors = kLineBytes / kVectorBytes;
  static constexpr int kVector = kVectorBytes / 2;  // elements of one
  static constexpr int kAtOnce = 4;  // vectors that a thread has in registers
  static constexpr int kOperandBytes = kRows * kLineBytes;  // of A
  // Stages of tiles of 128 columns and of 64.
  static constexpr int stages(int columns) { return columns == kMostColumns ? 3 : 4; }
  static constexpr int stage_bytes(int columns) { return kOperandBytes + columns * kLineBytes; }
  // Behind the stages are vectors of the lines of A, and of B in a step or, along K, in the first.
  static constexpr int kExtra = stages(kMostColumns) * stage_bytes(kMostColumns), kExtraBytes = 128 * kVectorBytes;
  static_assert(stages(kLeastColumns) * stage_bytes(kLeastColumns) <= kExtra);
  static constexpr int kSharedBytes = kExtra + (1 + (kAlongB ? 1 : stages(kLeastColumns))) * kExtraBytes;
  static constexpr int kClusterM = 1, kClusterN = 1, kClusterK = 1;
  static constexpr bool kDependent = true;

  static typename Product::Tiling tiling(Args const& args) {
    return {kRows, args.width == 0 ? kMostColumns : args.width, kStep};
  }

  // K is divided among `split_k` thread blocks. `width` is the columns of a tile; 0 is the most.
  static bool can_implement(Args const& args) {
    return (args.width == 0 || args.width == kLeastColumns || args.width == kMostColumns) &&
           Product::can_launch(args, tiling(args));
  }
  static uint64_t workspace_size(Args const& args) { return Product::workspace_size(args, tiling(args)); }
  static void clear_range(Args const&, uint64_t& offset, uint64_t& bytes) { offset = bytes = 0; }
  static Params params(Args const& args) { return Product::params(args, tiling(args)); }
  static dim3 grid(Params const& params) { return Product::grid(params); }

  CUTLASS_DEVICE static void run(Params const& params, char* shared) {
    if (params.columns == kMostColumns) {
      compute<kMostColumns>(params, shared);
    } else {
      compute<kLeastColumns>(params, shared);
    }
  }

 private:
  // Addresses in shared memory: of a stage, and of the vectors behind its lines of a row-major B.
  struct Stage {
    uint32_t lines, extra;

    template <int kColumns>
    CUTLASS_DEVICE static Stage of(uint32_t shared, int i) {
      return {shared + i * stage_bytes(kColumns), shared + kExtra + (1 + i) * kExtraBytes};
    }
  };

  CUTLASS_DEVICE static void copy(uint32_t to, char const* from, bool wanted) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n}\n" ::"r"(to),
        "l"(from), "r"(int(wanted))
        : "memory");
  }
  // The first so many elements of the vector, at least none; zeros follow them.
  CUTLASS_DEVICE static void copy_part(uint32_t to, char const* from, int elements) {
    int const bytes = 2 * max(0, min(elements, kVector));
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  }
  CUTLASS_DEVICE static void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
  template <int kUnderWay>
  CUTLASS_DEVICE static void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kUnderWay) : "memory");
  }

  CUTLASS_DEVICE static char const* aligned(char const* at) {
    return reinterpret_cast<char const*>(reinterpret_cast<uint64_t>(at) & ~uint64_t(kVectorBytes - 1));
  }

  // Where a vector of a line is: WGMMA finds it there.
  CUTLASS_DEVICE static int swizzled(int line, int vector) {
    return line * kLineBytes + (vector ^ line % 8) * kVectorBytes;
  }

  CUTLASS_DEVICE static uint4 load_vector(uint32_t from) {
    uint4 read;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(read.x), "=r"(read.y), "=r"(read.z), "=r"(read.w)
                 : "r"(from)
                 : "memory");
    return read;
  }
  CUTLASS_DEVICE static void store_vector(uint32_t to, uint4 const& vector) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(vector.x), "r"(vector.y), "r"(vector.z),
                 "r"(vector.w)
                 : "memory");
  }

  // How many elements behind the beginning of one vector a vector begins that takes its end from the next one.
  struct Shift {
    bool four, two;  // elements
    int bits;  // of a word

    CUTLASS_DEVICE explicit Shift(int elements) : four(elements & 4), two(elements & 2), bits(elements % 2 * 16) {}

    CUTLASS_DEVICE uint4 operator()(uint4 const& low, uint4 const& high) const {
      uint32_t const words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      uint32_t by_four[6], by_two[5];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 6; ++i) by_four[i] = four ? words[i + 2] : words[i];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 5; ++i) by_two[i] = two ? by_four[i + 1] : by_four[i];
      return {__funnelshift_r(by_two[0], by_two[1], bits), __funnelshift_r(by_two[1], by_two[2], bits),
              __funnelshift_r(by_two[2], by_two[3], bits), __funnelshift_r(by_two[3], by_two[4], bits)};
    }
  };

  // Rows of A, or columns of B, that are contiguous along K. A thread requests a vector of every 32nd of them, and
  // shifts one.
  template <int kOperand, int kCount>
  struct Along {
    static constexpr int kBetween = kThreads / kVectors;  // all lie alike: a multiple of 16 bytes apart
    static constexpr int kFirstOwner = kOperand * 128;

    char const* next;  // of the thread's first vector, in the next step
    uint32_t to;  // where it goes in a stage
    int behind;  // elements from the step's beginning to the vector's
    int lines;  // of the thread, that are the matrix's
    uint4 low;  // of the thread's own line: the vector before the step's
    int shift;  // its elements before the line's beginning in the step; 0 if the line begins with the next vector

    CUTLASS_DEVICE Along(Params const& params, Place const& place, int of_tile, int first_step) {
      int const extent = min(params.extents[kOperand] - of_tile, kCount), vector = int(threadIdx.x) % kVectors;
      int const first = int(threadIdx.x) / kVectors, k = first_step * kStep;
      char const* const begin = line(params, place, int64_t(of_tile) + first, k);
      char const* const before = aligned(begin - 2);
      int const skipped = int(begin - before) / 2;  // 1 to 8
      next = before + (vector + 1) * kVectorBytes;
      to = kOperand * kOperandBytes + swizzled(first, vector);
      behind = (vector + 1) * kVector - skipped;
      lines = extent > first ? (extent - first + kBetween - 1) / kBetween : 0;
      // The owner's.
      int const own = int(threadIdx.x) - kFirstOwner;
      shift = 0;
      low = {};
      if (own >= 0 && own < extent) {
        char const* const of_own = line(params, place, of_tile + own, k);
        shift = int(of_own - aligned(of_own - 2)) / 2 % kVector;
      }
    }

    CUTLASS_DEVICE static char const* line(Params const& params, Place const& place, int64_t line, int k) {
      return reinterpret_cast<char const*>(params.operands[kOperand] + place.batch * params.batch_strides[kOperand] +
                                           line * params.leading[kOperand] + k);
    }

    CUTLASS_DEVICE uint32_t own_extra(uint32_t shared) const {
      return shared + kExtra + kOperand * kExtraBytes + (int(threadIdx.x) - kFirstOwner) * kVectorBytes;
    }

    // Once, before the first step.
    CUTLASS_DEVICE void request_low(Params const& params, Place const& place, int of_tile, int first_step,
                                    uint32_t shared) const {
      if (shift == 0) return;
      char const* const begin = line(params, place, of_tile + int(threadIdx.x) - kFirstOwner, first_step * kStep);
      copy_part(own_extra(shared), aligned(begin), params.k - first_step * kStep + shift);
    }
    CUTLASS_DEVICE void load_low(uint32_t shared) {
      if (shift != 0) low = load_vector(own_extra(shared));
    }

    // Lines beyond the matrix keep what was there: their products are not stored.
    CUTLASS_DEVICE void request(Stage const& stage, int64_t leading, int left_of_k) {
      int64_t const further = leading * (2 * kBetween);
      int const left = left_of_k - behind;
      if (left >= kVector) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kCount / kBetween; ++i) {
          copy(stage.lines + to + i * kBetween * kLineBytes, next + i * further, i < lines);
        }
      } else {
#pragma unroll 1
        for (int i = 0; i < lines; ++i) {
          copy_part(stage.lines + to + i * kBetween * kLineBytes, next + i * further, left);
        }
      }
      next += kLineBytes;
    }

    // Of the last step, the first half alone where it has all that is left of K.
    CUTLASS_DEVICE void realign(Stage const& stage, int left_of_k) {
      if (shift == 0) return;
      if (left_of_k > kStep / 2) {
        realign<kVectors>(stage.lines);
      } else {
        realign<kVectors / 2>(stage.lines);
      }
    }
    template <int kCountOfVectors>
    CUTLASS_DEVICE void realign(uint32_t lines_of_stage) {
      Shift const by(shift);
      int const own = int(threadIdx.x) - kFirstOwner;
      uint32_t const at = lines_of_stage + kOperand * kOperandBytes + swizzled(own, 0);
      // Several loads at once, since they and the stores stay in their order.
      CUTLASS_PRAGMA_UNROLL
      for (int begin = 0; begin < kCountOfVectors; begin += kAtOnce) {
        uint4 read[kAtOnce];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kAtOnce; ++i) read[i] = load_vector(at ^ uint32_t((begin + i) * kVectorBytes));
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kAtOnce; ++i) {
          store_vector(at ^ uint32_t((begin + i) * kVectorBytes), by(i == 0 ? low : read[i - 1], read[i]));
        }
        low = read[kAtOnce - 1];
      }
    }
  };

  // Elements of K of a row-major B, along columns of the tile, in boxes of 64 of them.
  template <int kCount>
  struct Across {
    static constexpr int kOfLine = kCount / kVector, kBetween = kThreads / kOfLine, kBoxes = kCount / 64;
    static constexpr int kFirstOwner = 128, kBoxBytes = kStep * kLineBytes;

    char const* next;  // of the thread's first vector, in the next step
    char const* next_extra;  // of the vector behind the thread's own line
    uint32_t to;
    int left, left_extra;  // elements of the line
    int shift;  // of the thread's own line

    CUTLASS_DEVICE Across(Params const& params, Place const& place, int of_tile, int first_step) {
      int const vector = int(threadIdx.x) % kOfLine, k = first_step * kStep;
      char const* const begin = line(params, place, of_tile, int64_t(k) + first());
      char const* const before = aligned(begin);
      next = before + vector * kVectorBytes;
      to = kOperandBytes + vector / kVectors * kBoxBytes + swizzled(first(), vector % kVectors);
      left = params.extents[1] - of_tile + int(begin - before) / 2 - vector * kVector;
      int const own = int(threadIdx.x) - kFirstOwner;
      shift = 0;
      next_extra = next;
      left_extra = 0;
      if (own >= 0 && own < kBoxes * kStep) {
        char const* const of_own = line(params, place, of_tile + own / kStep * 64, int64_t(k) + own % kStep);
        char const* const from = aligned(of_own);
        shift = int(of_own - from) / 2;
        next_extra = from + kLineBytes;
        left_extra = params.extents[1] - of_tile - own / kStep * 64 + shift - 64;
      }
    }

    CUTLASS_DEVICE static char const* line(Params const& params, Place const& place, int column, int64_t k) {
      return reinterpret_cast<char const*>(params.operands[1] + place.batch * params.batch_strides[1] +
                                           k * params.leading[1] + column);
    }

    CUTLASS_DEVICE void request_low(Params const&, Place const&, int, int, uint32_t) const {}
    CUTLASS_DEVICE void load_low(uint32_t) {}

    CUTLASS_DEVICE static int first() { return int(threadIdx.x) / kOfLine; }
    CUTLASS_DEVICE static uint32_t own_extra(Stage const& stage) {
      return stage.extra + (int(threadIdx.x) - kFirstOwner) * kVectorBytes;
    }

    CUTLASS_DEVICE void request(Stage const& stage, int64_t leading, int left_of_k) {
      int64_t const further = leading * (2 * kBetween);
      if (left >= kVector && left_of_k >= kStep) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kStep / kBetween; ++i) {
          copy(stage.lines + to + i * kBetween * kLineBytes, next + i * further, true);
        }
      } else {
#pragma unroll 1
        for (int i = 0; i < kStep / kBetween; ++i) {
          copy_part(stage.lines + to + i * kBetween * kLineBytes, next + i * further,
                    first() + i * kBetween < left_of_k ? left : 0);
        }
      }
      if (shift != 0) {
        int const own = (int(threadIdx.x) - kFirstOwner) % kStep;
        copy_part(own_extra(stage), next_extra, own < left_of_k ? left_extra : 0);
      }
      next += leading * (2 * kStep);
      next_extra += leading * (2 * kStep);
    }

    CUTLASS_DEVICE void realign(Stage const& stage, int left_of_k) {
      int const own = int(threadIdx.x) - kFirstOwner;
      if (shift == 0 || own % kStep >= left_of_k) return;
      Shift const by(shift);
      uint32_t const at = stage.lines + kOperandBytes + own / kStep * kBoxBytes + swizzled(own % kStep, 0);
      uint4 low = load_vector(at);
      CUTLASS_PRAGMA_UNROLL
      for (int begin = 0; begin < kVectors; begin += kAtOnce) {
        uint4 read[kAtOnce];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kAtOnce; ++i) {
          int const next = begin + i + 1;
          read[i] = load_vector(next < kVectors ? at ^ uint32_t(next * kVectorBytes) : own_extra(stage));
        }
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kAtOnce; ++i) {
          store_vector(at ^ uint32_t((begin + i) * kVectorBytes), by(i == 0 ? low : read[i - 1], read[i]));
        }
        low = read[kAtOnce - 1];
      }
    }
  };

  template <int kColumns>
  CUTLASS_DEVICE static void compute(Params const& params, char* shared) {
    using Multiply = Wgmma<Element, kColumns, false, !kAlongB>;
    using LinesA = Along<0, kRows>;
    using LinesB = cutlass::platform::conditional_t<kAlongB, Along<1, kColumns>, Across<kColumns>>;
    constexpr int kStages = stages(kColumns), kStageBytes = stage_bytes(kColumns);
    Place const place(params);
    int const first = place.split * params.split_steps;
    int const end = min(first + params.split_steps, params.steps);
    uint32_t const to = cute::cast_smem_ptr_to_uint(shared);
    auto const stage_of = [&](int i) { return Stage::template of<kColumns>(to, i); };
    LinesA a(params, place, place.row, first);
    LinesB b(params, place, place.column, first);

    // What no launch that may be running writes is requested before that has ended.
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
      if (pass == 1) wait_for_launch_before();
      bool const wants_a = params.settled[0] == (pass == 0), wants_b = params.settled[1] == (pass == 0);
      if (wants_a) a.request_low(params, place, place.row, first, to);
      if (wants_b) b.request_low(params, place, place.column, first, to);
#pragma unroll 1
      for (int i = 0; i < kStages - 1; ++i) {
        bool const wanted = first + i < end;
        int const left = params.k - (first + i) * kStep;
        if (wanted && wants_a) a.request(stage_of(i), params.leading[0], left);
        if (wanted && wants_b) b.request(stage_of(i), params.leading[1], left);
        if (pass == 1) commit();
      }
    }

    struct Registers {
      float (&values)[kColumns / 2];
      CUTLASS_DEVICE float& operator()(int i) const { return values[i]; }
    };
    float values[kColumns / 2];
    Registers const sums{values};
    int const group = int(threadIdx.x) / 128;
    char const* const tile_a = shared + group * 64 * kLineBytes;
    char const* const tile_b = shared + kOperandBytes;
    uint64_t const descriptor_a = wgmma_descriptor<false, 64>(tile_a);
    uint64_t const descriptor_b = wgmma_descriptor<!kAlongB, kAlongB ? kColumns : kStep>(tile_b);

    int of_stages = 0;
    bool add = false;
#pragma unroll 1
    for (int step = first; step < end; ++step) {
      wait_for_copies<kStages - 2>();
      __syncthreads();  // the step is there
      if (step == first) {
        a.load_low(to);
        b.load_low(to);
      }
      int const left = params.k - step * kStep;
      if (int(threadIdx.x) < LinesB::kFirstOwner) {
        a.realign(stage_of(of_stages), left);
      } else {
        b.realign(stage_of(of_stages), left);
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      wgmma_wait<0>();
      wgmma_fence(values);
      __syncthreads();  // it is aligned, and the step before has been multiplied
      int const before = of_stages == 0 ? kStages - 1 : of_stages - 1;
      if (step + kStages - 1 < end) {
        a.request(stage_of(before), params.leading[0], left - (kStages - 1) * kStep);
        b.request(stage_of(before), params.leading[1], left - (kStages - 1) * kStep);
      }
      commit();
      // All of the step, whatever is left of K: with a branch around products the loop took a tenth longer.
      wgmma_fence(values);
      wgmma_arrive();
      uint64_t const of_stage = uint64_t(of_stages * (kStageBytes / 16));
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kStep / 16; ++i) {
        Multiply::multiply(descriptor_a + of_stage + i * 2, descriptor_b + of_stage + i * (kAlongB ? 2 : 128), sums,
                           add || i > 0);
      }
      wgmma_commit();
      add = true;
      of_stages = of_stages + 1 == kStages ? 0 : of_stages + 1;
    }
    wgmma_wait<0>();
    wgmma_fence(values);
    wait_for_copies<0>();
    __syncthreads();
    // Floats from one row of sums in shared memory to the next: rows of a half warp's pairs meet all banks.
    constexpr int kPitch = kColumns + 8;
    static_assert(kRows * kPitch * 4 <= kExtra);
    int const lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
    auto* const all = reinterpret_cast<float*>(shared);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kColumns / 8; ++i) {
      float* const at = all + (warp * 16 + lane / 4) * kPitch + i * 8 + lane % 4 * 2;
      *reinterpret_cast<float2*>(at) = make_float2(values[4 * i], values[4 * i + 1]);
      *reinterpret_cast<float2*>(at + 8 * kPitch) = make_float2(values[4 * i + 2], values[4 * i + 3]);
    }
    __syncthreads();
    using AllSums = typename Product::template Sums<kRows, kColumns, kPitch, 1, kThreads>;
    AllSums{params, all}.finish(reinterpret_cast<uint32_t*>(shared + kExtra));
  }
};

}  // namespace atomr_cutlass
