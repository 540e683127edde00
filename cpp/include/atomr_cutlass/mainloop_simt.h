// A mainloop over FFMA whose operands come by 16 bytes, whichever way they lie.
//
// In shared memory, neighbours along M or N lie side by side. Operands that are contiguous along K get there through
// registers, turned: read two elements along K at a time instead, as they lie, all of a thread's elements of one K are
// in registers of one bank (even or odd), and every other FFMA waits for its second operand.
#pragma once

#include "cutlass/arch/cache_operation.h"
#include "cutlass/arch/memory.h"
#include "cutlass/arch/memory_sm80.h"
#include "cutlass/array.h"
#include "cutlass/cutlass.h"
#include "cutlass/matrix_coord.h"
#include "cutlass/transform/pitch_linear_thread_map.h"
#include "cutlass/transform/threadblock/predicated_tile_access_iterator.h"

namespace atomr_cutlass {

// One operand in shared memory: kRows of M or N, kK of K; float32. Element (row, k) of one that is contiguous along K
// is at (row ^ 8 * (k / 4), k), so that the lanes of a warp, of which four share a row, write to different banks.
template <int kRows, int kK, bool kAlongK, int kThreads>
struct SimtOperand {
  static constexpr int kVector = 4;
  static constexpr int kContiguous = (kAlongK ? kK : kRows) / kVector;  // vectors
  static constexpr int kStrided = kAlongK ? kRows : kK;
  static constexpr int kElements = kRows * kK;
  static constexpr int kApart = kThreads / kContiguous;  // rows from one access of a thread to its next
  static constexpr bool kGuarded = kApart > kStrided;
  static_assert(kThreads % kContiguous == 0 && (kGuarded || kStrided % kApart == 0));
  static_assert(!kAlongK || (kK == 16 && kRows % 32 == 0 && (kGuarded || kApart % 32 == 0)));

  using ThreadMap = cutlass::transform::PitchLinearStripminedThreadMap<
      cutlass::layout::PitchLinearShape<kAlongK ? kK : kRows, kStrided>, kThreads, kVector>;
  static constexpr int kAccesses = ThreadMap::Iterations::kCount;

  // Where a thread's first access goes, and how far on the next one.
  CUTLASS_DEVICE static int first(int thread) {
    int const vector = thread % kContiguous, strided = thread / kContiguous;
    return kAlongK ? vector * kVector * kRows + (strided ^ vector * 8) : strided * kRows + vector * kVector;
  }
  static constexpr int kNext = kAlongK ? kApart : kApart * kRows;
  CUTLASS_DEVICE static bool takes_part(int thread) { return !kGuarded || thread / kContiguous < kStrided; }
};

// The rows (or columns) of one thread, kOwn of them: groups of four neighbours, kLanes groups of other lanes between.
template <int kRows, int kK, bool kAlongK, int kOwn, int kLanes>
struct SimtFragment {
  static constexpr int kGroup = kOwn < 4 ? kOwn : 4;
  static_assert(!kAlongK || kLanes * kGroup % 8 == 0);
  float values[kOwn];

  // Bytes from the start of a stage to where a thread reads; `first` is its first row.
  struct Places {
    uint32_t at[kAlongK ? 4 : 1];
    CUTLASS_DEVICE explicit Places(int first) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < (kAlongK ? 4 : 1); ++i) at[i] = uint32_t(first ^ i * 8) * 4;
    }
  };

  // Elements k; `stage` is an address in shared memory.
  CUTLASS_DEVICE void read(uint32_t stage, Places const& places, int k) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kOwn; i += kGroup) {
      // The first row's bits below the lanes' are zero, so that what is added to them may be exchanged as well.
      int const on = i * kLanes, exchanged = kAlongK ? (k / 4) ^ (on / 8 % 4) : 0;
      float some[kGroup];
      load_shared(some, stage + places.at[exchanged] + (k * kRows + (kAlongK ? on / 32 * 32 : on)) * 4);
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < kGroup; ++x) values[i + x] = some[x];
    }
  }

 private:
  // Loads of a known width: the compiler would make one of two, and run out of registers.
  CUTLASS_DEVICE static void load_shared(float (&to)[1], uint32_t from) {
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(to[0]) : "r"(from));
  }
  CUTLASS_DEVICE static void load_shared(float (&to)[2], uint32_t from) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(to[0]), "=f"(to[1]) : "r"(from));
  }
  CUTLASS_DEVICE static void load_shared(float (&to)[4], uint32_t from) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
                 : "r"(from));
  }
};

// In place of `Default`, CUTLASS's mainloop for single elements, whose tile, warps and accumulators it has.
template <class Default, class LayoutA, class LayoutB, int kStages_>
struct MainloopSimt {
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
  static_assert(WarpCount::kK == 1);

  using A = SimtOperand<kM, kK, kAlongKA, kThreads>;
  using B = SimtOperand<kN, kK, kAlongKB, kThreads>;
  using IteratorA = cutlass::transform::threadblock::PredicatedTileAccessIterator<
      cutlass::MatrixShape<kM, kK>, float, LayoutA, 1, typename A::ThreadMap, cutlass::AlignedArray<float, 4>>;
  using IteratorB = cutlass::transform::threadblock::PredicatedTileAccessIterator<
      cutlass::MatrixShape<kK, kN>, float, LayoutB, 0, typename B::ThreadMap, cutlass::AlignedArray<float, 4>>;

  using Lanes = typename Policy::Operator::Policy;
  static constexpr int kLanesM = Lanes::WarpShape::kRow, kLanesN = Lanes::WarpShape::kColumn;
  static constexpr int kOwnM = Operator::Shape::kM / kLanesM, kOwnN = Operator::Shape::kN / kLanesN;
  using FragmentA = SimtFragment<kM, kK, kAlongKA, kOwnM, kLanesM>;
  using FragmentB = SimtFragment<kN, kK, kAlongKB, kOwnN, kLanesN>;
  static_assert(kK % 2 == 0 && kOwnM % 2 == 0);

  struct SharedStorage {
    alignas(16) float a[kStages][A::kElements];
    alignas(16) float b[kStages][B::kElements];
  };

  CUTLASS_DEVICE MainloopSimt(SharedStorage& shared, int thread, int warp, int lane)
      : shared_(shared),
        places_a_(first_row(warp, lane)),
        places_b_(first_column(warp, lane)) {
    to_a_ = A::first(thread), to_b_ = B::first(thread);
    takes_a_ = A::takes_part(thread), takes_b_ = B::takes_part(thread);
  }

  CUTLASS_DEVICE void operator()(int steps, FragmentC& sums, IteratorA a, IteratorB b, FragmentC const& before) {
    Pair pairs[kOwnM / 2][kOwnN];
    CUTLASS_PRAGMA_UNROLL
    for (int m = 0; m < kOwnM / 2; ++m) {
      CUTLASS_PRAGMA_UNROLL
      for (int n = 0; n < kOwnN; ++n) {
        asm("mov.b64 %0, {%1, %2};"
            : "=l"(pairs[m][n])
            : "f"(before[(2 * m + 1) * kOwnN + n]), "f"(before[2 * m * kOwnN + n]));
      }
    }
    int loaded_a = 0, loaded_b = 0;  // steps
    CUTLASS_PRAGMA_UNROLL
    for (int stage = 0; stage < kStages - 1; ++stage) {
      if (!kAlongKA) load_a(a, stage, loaded_a++ < steps);
      if (!kAlongKB) load_b(b, stage, loaded_b++ < steps);
      cutlass::arch::cp_async_fence();
    }
    if (kAlongKA) load_a(a, 0, loaded_a++ < steps), store_a(0), load_a(a, 0, loaded_a++ < steps);
    if (kAlongKB) load_b(b, 0, loaded_b++ < steps), store_b(0), load_b(b, 0, loaded_b++ < steps);
    cutlass::arch::cp_async_wait<kStages - 2>();
    __syncthreads();

    FragmentA own_a[2];
    FragmentB own_b[2];
    int stage = 0, next = kStages - 1;
    uint32_t const stages_a = uint32_t(__cvta_generic_to_shared(shared_.a[0]));
    uint32_t const stages_b = uint32_t(__cvta_generic_to_shared(shared_.b[0]));
    own_a[0].read(stages_a, places_a_, 0);
    own_b[0].read(stages_b, places_b_, 0);
    CUTLASS_GEMM_LOOP
    for (int step = 0; step < steps; ++step) {
      int const following = stage + 1 == kStages ? 0 : stage + 1;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kK; ++i) {
        if (i == kK - 1) {
          cutlass::arch::cp_async_wait<kStages - 2>();
          __syncthreads();
          stage = following;
        }
        own_a[(i + 1) % 2].read(stages_a + stage * (A::kElements * 4), places_a_, (i + 1) % kK);
        own_b[(i + 1) % 2].read(stages_b + stage * (B::kElements * 4), places_b_, (i + 1) % kK);
        if (i == 0) {
          // What registers hold is of the step that follows; they then take the one after it.
          if (kAlongKA) store_a(following);
          if (kAlongKB) store_b(following);
          load_a(a, next, loaded_a++ < steps);
          load_b(b, next, loaded_b++ < steps);
          cutlass::arch::cp_async_fence();
          next = next + 1 == kStages ? 0 : next + 1;
        }
        multiply(pairs, own_a[i % 2], own_b[i % 2]);
      }
    }
    cutlass::arch::cp_async_fence();
    cutlass::arch::cp_async_wait<0>();
    __syncthreads();
    CUTLASS_PRAGMA_UNROLL
    for (int m = 0; m < kOwnM / 2; ++m) {
      CUTLASS_PRAGMA_UNROLL
      for (int n = 0; n < kOwnN; ++n) {
        asm("mov.b64 {%0, %1}, %2;"
            : "=f"(sums[(2 * m + 1) * kOwnN + n]), "=f"(sums[2 * m * kOwnN + n])
            : "l"(pairs[m][n]));
      }
    }
  }

 private:
  CUTLASS_DEVICE static cutlass::MatrixCoord of_lane(int lane) { return Lanes::get_lane_layout().inverse(lane); }
  CUTLASS_DEVICE static int first_row(int warp, int lane) {
    return warp % WarpCount::kM * Operator::Shape::kM + of_lane(lane).row() * FragmentA::kGroup;
  }
  CUTLASS_DEVICE static int first_column(int warp, int lane) {
    return warp / WarpCount::kM * Operator::Shape::kN + of_lane(lane).column() * FragmentB::kGroup;
  }

  // Into shared memory, or of operands along K into registers.
  template <class Operand, bool kAlongK, class Iterator, class Held>
  CUTLASS_DEVICE static void load(Iterator& iterator, float* to, Held& held, bool some) {
    iterator.set_iteration_index(0);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Operand::kAccesses; ++i) {
      if constexpr (kAlongK) {
        held[i].clear();
        cutlass::arch::global_load<Vector, 16>(held[i], iterator.get(), some && iterator.valid());
      } else {
        cutlass::arch::cp_async_zfill<16, cutlass::arch::CacheOperation::Global>(
            to + i * Operand::kNext, iterator.get(), some && iterator.valid());
      }
      ++iterator;
    }
  }
  template <class Operand, int kRows, class Held>
  CUTLASS_DEVICE static void store(float* to, Held const& held) {
    uint32_t const at = uint32_t(__cvta_generic_to_shared(to));
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Operand::kAccesses; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < 4; ++x) {
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(at + (x * kRows + i * Operand::kNext) * 4), "f"(held[i][x]));
      }
    }
  }
  CUTLASS_DEVICE void load_a(IteratorA& a, int stage, bool some) {
    if (!A::kGuarded || takes_a_) load<A, kAlongKA>(a, shared_.a[stage] + to_a_, held_a_, some);
    a.add_tile_offset({0, 1});
  }
  CUTLASS_DEVICE void load_b(IteratorB& b, int stage, bool some) {
    if (!B::kGuarded || takes_b_) load<B, kAlongKB>(b, shared_.b[stage] + to_b_, held_b_, some);
    b.add_tile_offset({1, 0});
  }
  CUTLASS_DEVICE void store_a(int stage) {
    if (!A::kGuarded || takes_a_) store<A, kM>(shared_.a[stage] + to_a_, held_a_);
  }
  CUTLASS_DEVICE void store_b(int stage) {
    if (!B::kGuarded || takes_b_) store<B, kN>(shared_.b[stage] + to_b_, held_b_);
  }

  // Two sums of a column, those of an odd row and of the even one before it. A multiprocessor's registers lie in two
  // banks, even and odd ones, and a product of which two operands come out of one bank takes two cycles; an operand
  // that the instruction before had in the same place is kept. Loads of vectors leave even rows of A and columns of B
  // in even registers. Sums as pairs of registers, the odd row first, are always in the other bank than their element
  // of A.
  using Pair = uint64_t;
  CUTLASS_DEVICE static void multiply_add(Pair& sums, float even, float odd, float b, bool even_first) {
    if (even_first) {
      asm("{\n.reg .f32 x, y;\nmov.b64 {x, y}, %0;\nfma.rn.f32 y, %1, %3, y;\nfma.rn.f32 x, %2, %3, x;\n"
          "mov.b64 %0, {x, y};\n}"
          : "+l"(sums)
          : "f"(even), "f"(odd), "f"(b));
    } else {
      asm("{\n.reg .f32 x, y;\nmov.b64 {x, y}, %0;\nfma.rn.f32 x, %2, %3, x;\nfma.rn.f32 y, %1, %3, y;\n"
          "mov.b64 %0, {x, y};\n}"
          : "+l"(sums)
          : "f"(even), "f"(odd), "f"(b));
    }
  }
  // Back and forth: where the column changes, the element of A stays.
  CUTLASS_DEVICE static void multiply(Pair (&sums)[kOwnM / 2][kOwnN], FragmentA const& a, FragmentB const& b) {
    CUTLASS_PRAGMA_UNROLL
    for (int n = 0; n < kOwnN; ++n) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kOwnM / 2; ++i) {
        int const m = n % 2 ? kOwnM / 2 - 1 - i : i;
        multiply_add(sums[m][n], a.values[2 * m], a.values[2 * m + 1], b.values[n], n % 2 == 0);
      }
    }
  }

  using Vector = cutlass::AlignedArray<float, 4>;
  SharedStorage& shared_;
  Vector held_a_[kAlongKA ? A::kAccesses : 1];
  Vector held_b_[kAlongKB ? B::kAccesses : 1];
  typename FragmentA::Places places_a_;
  typename FragmentB::Places places_b_;
  int to_a_, to_b_;
  bool takes_a_, takes_b_;
};

}  // namespace atomr_cutlass
