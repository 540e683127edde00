// A mainloop over the DMMA instructions of sm_90 whose operands come by 16 bytes, whichever way they lie.
//
// CUTLASS's loads single elements, and gives right results with 16x8x4 alone of the shapes that sm_90 added. Its shared
// memory would not do for 16x8x8 and 16x8x16: lane t of four holds elements t, t + 4, ... along K of a row. Which
// element of K takes which place does not matter as long as A and B agree, so here lane t holds 2 t and 2 t + 1 of each
// eight, which are one load of 16 bytes where an operand is contiguous along K.
#pragma once

#include "cutlass/arch/memory.h"
#include "cutlass/arch/memory_sm80.h"
#include "cutlass/array.h"
#include "cutlass/cutlass.h"
#include "cutlass/matrix_coord.h"
#include "cutlass/transform/pitch_linear_thread_map.h"
#include "cutlass/transform/threadblock/predicated_tile_access_iterator.h"

namespace atomr_cutlass {

// One operand in shared memory: kRows of M or N, kK of K; float64, in lines of neighbours along K or along M or N.
// The pieces of 16 bytes of a line are exchanged so that the lanes that load together find theirs in different banks:
// along K two lines of four pieces, otherwise four lines of two.
template <int kRows, int kK, bool kAlongK, int kThreads>
struct DmmaOperand {
  static constexpr int kVector = 2;
  static constexpr int kPieces = (kAlongK ? kK : kRows) / kVector;  // of a line
  static constexpr int kLines = kAlongK ? kRows : kK;
  static constexpr int kElements = kRows * kK;
  static constexpr int kApart = kThreads / kPieces;  // lines from one access of a thread to its next
  static_assert(kThreads % kPieces == 0 && kLines % kApart == 0 && kRows % 16 == 0 && kK % 16 == 0);

  using ThreadMap = cutlass::transform::PitchLinearStripminedThreadMap<
      cutlass::layout::PitchLinearShape<kAlongK ? kK : kRows, kLines>, kThreads, kVector>;
  static constexpr int kAccesses = ThreadMap::Iterations::kCount;

  // Piece p of a line lies where piece p ^ exchange(line) would.
  CUTLASS_DEVICE static int exchange(int line) { return kAlongK ? line % 2 * 4 : line / 2 % 4 * 2; }
  // Where access i of a thread goes, in elements; kApart is a power of two, and the thread's first line is below it.
  CUTLASS_DEVICE static int first(int thread) {
    int const piece = thread % kPieces, line = thread / kPieces;
    return (line * kPieces + (piece ^ exchange(line))) * kVector;
  }
  CUTLASS_DEVICE static int place(int first, int i) {
    int const exchanged = kAlongK && kApart % 2 == 0 ? 0 : exchange(i * kApart);
    return (first ^ exchanged * kVector) + i * kApart * kPieces * kVector;
  }
};

// Of one operand, what a lane holds of kOwn groups of eight rows (or columns) and kStep elements along K.
template <class Operand, int kRows, bool kAlongK, int kOwn, int kStep>
struct DmmaFragment {
  static constexpr int kEach = kStep / 4;
  static constexpr int kLine = Operand::kPieces * 16;  // bytes
  double values[kOwn][kEach];

  using Pair = double[2][kEach];  // sixteen rows of A
  CUTLASS_DEVICE Pair const& pair(int m) const { return reinterpret_cast<Pair const*>(values)[m]; }

  // `first` is the first of the warp's rows, a multiple of 16: bytes from the start of a stage.
  CUTLASS_DEVICE static uint32_t place(int first, int lane) {
    int const group = lane / 4, t = lane % 4;
    if (kAlongK) return (first + group) * kLine + (t ^ Operand::exchange(group)) * 16;
    return 2 * t * kLine + ((first + group) / 2 ^ Operand::exchange(2 * t)) * 16 + group % 2 * 8;
  }

  // One group's elements kStep * i and on; `stage` is an address in shared memory.
  CUTLASS_DEVICE void read(uint32_t stage, uint32_t place, int i, int own) {
    CUTLASS_PRAGMA_UNROLL
    for (int eight = 0; eight < kStep / 8; ++eight) {
      int const k = kStep * i + 8 * eight;
      double* to = values[own] + 2 * eight;
      if constexpr (kAlongK) {
        // The piece's third bit is that of the second eight of sixteen elements, exchanged or not.
        uint32_t const at = stage + (k / 8 % 2 ? place ^ 64 : place) + own * 8 * kLine + k / 16 * 128;
        asm volatile("ld.shared.v2.f64 {%0, %1}, [%2];" : "=d"(to[0]), "=d"(to[1]) : "r"(at));
      } else {
        // Here it is that of the second eight of sixteen rows.
        uint32_t const at = stage + (own % 2 ? place ^ 64 : place) + own / 2 * 128 + k * kLine;
        asm volatile("ld.shared.f64 %0, [%1];" : "=d"(to[0]) : "r"(at));
        asm volatile("ld.shared.f64 %0, [%1];" : "=d"(to[1]) : "r"(at + kLine));
      }
    }
  }
};

// A tile of 16x8 sums += a b, 8 or 16 elements along K. (cutlass::arch::Mma passes one register of A twice to 16x8x16.)
CUTLASS_DEVICE void multiply_add(double (&sums)[4], double const (&a)[2][2], double const (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+d"(sums[0]), "+d"(sums[1]), "+d"(sums[2]), "+d"(sums[3])
      : "d"(a[0][0]), "d"(a[1][0]), "d"(a[0][1]), "d"(a[1][1]), "d"(b[0]), "d"(b[1]));
}
CUTLASS_DEVICE void multiply_add(double (&sums)[4], double const (&a)[2][4], double const (&b)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7, %8, %9, %10, %11}, "
      "{%12, %13, %14, %15}, {%0, %1, %2, %3};"
      : "+d"(sums[0]), "+d"(sums[1]), "+d"(sums[2]), "+d"(sums[3])
      : "d"(a[0][0]), "d"(a[1][0]), "d"(a[0][1]), "d"(a[1][1]), "d"(a[0][2]), "d"(a[1][2]), "d"(a[0][3]), "d"(a[1][3]),
        "d"(b[0]), "d"(b[1]), "d"(b[2]), "d"(b[3]));
}

// In place of `Default`, CUTLASS's mainloop for single elements, whose tile, warps and accumulators it has.
template <class Default, class LayoutA, class LayoutB, int kStep, int kStages_>
struct MainloopDmma {
  using Shape = typename Default::Shape;
  using Policy = typename Default::Policy;
  using Operator = typename Default::Operator;
  using FragmentC = typename Default::FragmentC;
  using ElementC = typename Default::ElementC;
  using LayoutC = typename Default::LayoutC;
  using ArchTag = typename Default::ArchTag;
  using WarpCount = typename Default::WarpCount;
  static constexpr auto kTransformA = Default::kTransformA;
  static constexpr auto kTransformB = Default::kTransformB;
  static constexpr int kStages = kStages_;

  static constexpr bool kAlongKA = cutlass::platform::is_same<LayoutA, cutlass::layout::RowMajor>::value;
  static constexpr bool kAlongKB = cutlass::platform::is_same<LayoutB, cutlass::layout::ColumnMajor>::value;
  static constexpr int kM = Shape::kM, kN = Shape::kN, kK = Shape::kK;
  static constexpr int kThreads = WarpCount::kCount * 32;
  static constexpr int kSteps = kK / kStep;
  static_assert(WarpCount::kK == 1 && kSteps >= 2 && kSteps % 2 == 0);

  using A = DmmaOperand<kM, kK, kAlongKA, kThreads>;
  using B = DmmaOperand<kN, kK, kAlongKB, kThreads>;
  using IteratorA = cutlass::transform::threadblock::PredicatedTileAccessIterator<
      cutlass::MatrixShape<kM, kK>, double, LayoutA, 1, typename A::ThreadMap, cutlass::AlignedArray<double, 2>>;
  using IteratorB = cutlass::transform::threadblock::PredicatedTileAccessIterator<
      cutlass::MatrixShape<kK, kN>, double, LayoutB, 0, typename B::ThreadMap, cutlass::AlignedArray<double, 2>>;

  static constexpr int kWarpM = Operator::Shape::kM, kWarpN = Operator::Shape::kN;
  static constexpr int kTilesM = kWarpM / 16, kTilesN = kWarpN / 8;
  static_assert(kWarpM % 16 == 0 && kWarpN % 16 == 0);
  using FragmentA = DmmaFragment<A, kM, kAlongKA, 2 * kTilesM, kStep>;
  using FragmentB = DmmaFragment<B, kN, kAlongKB, kTilesN, kStep>;

  struct SharedStorage {
    alignas(128) double a[kStages][A::kElements];
    alignas(128) double b[kStages][B::kElements];
  };

  CUTLASS_DEVICE MainloopDmma(SharedStorage& shared, int thread, int warp, int lane)
      : shared_(shared),
        to_a_(A::first(thread)),
        to_b_(B::first(thread)),
        place_a_(FragmentA::place(warp % WarpCount::kM * kWarpM, lane)),
        place_b_(FragmentB::place(warp / WarpCount::kM * kWarpN, lane)) {}

  CUTLASS_DEVICE void operator()(int steps, FragmentC& sums, IteratorA a, IteratorB b, FragmentC const& before) {
    sums = before;
    int loaded = 0;  // steps
    CUTLASS_PRAGMA_UNROLL
    for (int stage = 0; stage < kStages - 1; ++stage) load(a, b, stage, loaded++ < steps);
    cutlass::arch::cp_async_wait<kStages - 2>();
    __syncthreads();

    FragmentA own_a[2];
    FragmentB own_b;
    int stage = 0, next = kStages - 1;
    uint32_t from_a = uint32_t(__cvta_generic_to_shared(shared_.a[0]));
    uint32_t from_b = uint32_t(__cvta_generic_to_shared(shared_.b[0]));
    CUTLASS_PRAGMA_UNROLL
    for (int own = 0; own < 2 * kTilesM; ++own) own_a[0].read(from_a, place_a_, 0, own);
    CUTLASS_PRAGMA_UNROLL
    for (int own = 0; own < kTilesN; ++own) own_b.read(from_b, place_b_, 0, own);
    CUTLASS_GEMM_LOOP
    for (int step = 0; step < steps; ++step) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSteps; ++i) {
        if (i == kSteps - 1) {
          cutlass::arch::cp_async_wait<kStages - 2>();
          __syncthreads();
          bool const wraps = ++stage == kStages;
          from_a += (wraps ? 1 - kStages : 1) * int(A::kElements * 8);
          from_b += (wraps ? 1 - kStages : 1) * int(B::kElements * 8);
          if (wraps) stage = 0;
        }
        int const following = (i + 1) % kSteps;
        CUTLASS_PRAGMA_UNROLL
        for (int own = 0; own < 2 * kTilesM; ++own) own_a[(i + 1) % 2].read(from_a, place_a_, following, own);
        if (i == 0) {
          load(a, b, next, loaded++ < steps);
          next = next + 1 == kStages ? 0 : next + 1;
        }
        // Elements of B are replaced by the following ones as soon as they were used.
        CUTLASS_PRAGMA_UNROLL
        for (int m = 0; m < kTilesM; ++m) {
          CUTLASS_PRAGMA_UNROLL
          for (int n = 0; n < kTilesN; ++n) {
            multiply_add(sums_of(sums, m, n), own_a[i % 2].pair(m), own_b.values[n]);
            if (m == kTilesM - 1) own_b.read(from_b, place_b_, following, n);
          }
        }
      }
    }
    cutlass::arch::cp_async_wait<0>();
    __syncthreads();
  }

 private:
  template <class Operand, class Iterator>
  CUTLASS_DEVICE static void load_one(Iterator& iterator, double* stage, int first, bool some) {
    iterator.set_iteration_index(0);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Operand::kAccesses; ++i) {
      cutlass::arch::cp_async_zfill<16, cutlass::arch::CacheOperation::Global>(
          stage + Operand::place(first, i), iterator.get(), some && iterator.valid());
      ++iterator;
    }
  }
  CUTLASS_DEVICE void load(IteratorA& a, IteratorB& b, int stage, bool some) {
    load_one<A>(a, shared_.a[stage], to_a_, some);
    load_one<B>(b, shared_.b[stage], to_b_, some);
    a.add_tile_offset({0, 1});
    b.add_tile_offset({1, 0});
    cutlass::arch::cp_async_fence();
  }

  using Sums = double[4];
  CUTLASS_DEVICE static Sums& sums_of(FragmentC& sums, int m, int n) {
    return reinterpret_cast<Sums*>(&sums)[m + n * kTilesM];
  }

  SharedStorage& shared_;
  int to_a_, to_b_;
  uint32_t place_a_, place_b_;
};

}  // namespace atomr_cutlass
