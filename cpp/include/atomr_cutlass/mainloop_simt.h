// A mainloop over FFMA whose operands come by 16 bytes, whichever way they lie.
//
// CUTLASS's brings operands that are contiguous along K into shared memory one element at a time, turned, so that each
// step along K finds neighbours along M or N side by side. Here they stay as they are: a thread reads two elements
// along K of each of its rows at once, which is as many bytes for as many products.
#pragma once

#include "cutlass/arch/cache_operation.h"
#include "cutlass/arch/memory_sm80.h"
#include "cutlass/array.h"
#include "cutlass/cutlass.h"
#include "cutlass/matrix_coord.h"
#include "cutlass/transform/pitch_linear_thread_map.h"
#include "cutlass/transform/threadblock/predicated_tile_access_iterator.h"

namespace atomr_cutlass {

// One operand in shared memory: kRows of M or N, kK of K; float32.
//
// Along K: a row is kK elements, in vectors of four. Rows that the lanes of a warp read at once are four apart, and
// lie side by side here; vectors of neighbouring rows are exchanged, so that eight rows lie in different banks.
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

  CUTLASS_DEVICE static int swizzle(int place) { return (place >> 1) & 3; }
  CUTLASS_DEVICE static int place(int row) { return row % 4 * (kRows / 4) + row / 4; }

  // Where a thread's first access goes, and how far on the next one.
  CUTLASS_DEVICE static int first(int thread) {
    int const vector = thread % kContiguous, strided = thread / kContiguous;
    if constexpr (kAlongK) {
      int const at = place(strided);
      return at * kK + (vector ^ swizzle(at)) * kVector;
    } else {
      return strided * kRows + vector * kVector;
    }
  }
  static constexpr int kNext = kAlongK ? kApart / 4 * kK : kApart * kRows;
  CUTLASS_DEVICE static bool takes_part(int thread) { return !kGuarded || thread / kContiguous < kStrided; }
};

// The rows (or columns) of one thread, kOwn of them: groups of four neighbours, kLanes groups of other lanes between.
template <class Operand, int kRows, int kK, bool kAlongK, int kOwn, int kLanes, int kDeep>
struct SimtFragment {
  static constexpr int kGroup = kOwn < 4 ? kOwn : 4;
  float values[kOwn][kDeep];

  // Bytes from the start of a stage to where a thread reads; `first` is its first row.
  struct Places {
    uint32_t at[kAlongK ? 4 : 1];
    CUTLASS_DEVICE explicit Places(int first) {
      if constexpr (kAlongK) {
        int const place = Operand::place(first);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 4; ++i) at[i] = uint32_t(place * kK + (i ^ Operand::swizzle(place)) * 4) * 4;
      } else {
        at[0] = uint32_t(first) * 4;
      }
    }
  };

  // Elements k to k + kDeep - 1; `stage` is an address in shared memory.
  CUTLASS_DEVICE void read(uint32_t stage, Places const& places, int k) {
    if constexpr (kAlongK) {
      static_assert(kGroup == 4);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kOwn; ++i) {
        // Rows kLanes places on: their swizzle differs by an exchange that is known.
        int const on = i / 4 * kLanes, exchanged = (on >> 1) & 3;
        uint32_t const from = stage + places.at[(k / 4) ^ exchanged];
        load_shared(values[i], from + ((i % 4 * (kRows / 4) + on) * kK + k % 4) * 4);
      }
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kDeep; ++j) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kOwn; i += kGroup) {
          float some[kGroup];
          load_shared(some, stage + places.at[0] + ((k + j) * kRows + i * kLanes) * 4);
          CUTLASS_PRAGMA_UNROLL
          for (int x = 0; x < kGroup; ++x) values[i + x][j] = some[x];
        }
      }
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
  static constexpr int kDeep = 2;  // elements along K that a thread reads at once
  using FragmentA = SimtFragment<A, kM, kK, kAlongKA, kOwnM, kLanesM, kDeep>;
  using FragmentB = SimtFragment<B, kN, kK, kAlongKB, kOwnN, kLanesN, kDeep>;
  static constexpr int kSteps = kK / kDeep;
  static_assert(kSteps % 2 == 0);

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
    sums = before;
    int loaded = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int stage = 0; stage < kStages - 1; ++stage) {
      load(a, b, stage, loaded++ < steps);
      cutlass::arch::cp_async_fence();
    }
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
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSteps; ++i) {
        if (i == kSteps - 1) {
          cutlass::arch::cp_async_wait<kStages - 2>();
          __syncthreads();
          stage = stage + 1 == kStages ? 0 : stage + 1;
        }
        own_a[(i + 1) % 2].read(stages_a + stage * (A::kElements * 4), places_a_, (i + 1) % kSteps * kDeep);
        own_b[(i + 1) % 2].read(stages_b + stage * (B::kElements * 4), places_b_, (i + 1) % kSteps * kDeep);
        if (i == 0) {
          load(a, b, next, loaded++ < steps);
          cutlass::arch::cp_async_fence();
          next = next + 1 == kStages ? 0 : next + 1;
        }
        multiply(sums, own_a[i % 2], own_b[i % 2]);
      }
    }
    cutlass::arch::cp_async_fence();
    cutlass::arch::cp_async_wait<0>();
    __syncthreads();
  }

 private:
  CUTLASS_DEVICE static cutlass::MatrixCoord of_lane(int lane) { return Lanes::get_lane_layout().inverse(lane); }
  CUTLASS_DEVICE static int first_row(int warp, int lane) {
    return warp % WarpCount::kM * Operator::Shape::kM + of_lane(lane).row() * FragmentA::kGroup;
  }
  CUTLASS_DEVICE static int first_column(int warp, int lane) {
    return warp / WarpCount::kM * Operator::Shape::kN + of_lane(lane).column() * FragmentB::kGroup;
  }

  template <class Operand, class Iterator>
  CUTLASS_DEVICE static void load(Iterator& iterator, float* to, bool some) {
    iterator.set_iteration_index(0);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Iterator::ThreadMap::Iterations::kCount; ++i) {
      cutlass::arch::cp_async_zfill<16, cutlass::arch::CacheOperation::Global>(to + i * Operand::kNext, iterator.get(),
                                                                               some && iterator.valid());
      ++iterator;
    }
  }
  CUTLASS_DEVICE void load(IteratorA& a, IteratorB& b, int stage, bool some) {
    if (!A::kGuarded || takes_a_) load<A>(a, shared_.a[stage] + to_a_, some);
    if (!B::kGuarded || takes_b_) load<B>(b, shared_.b[stage] + to_b_, some);
    a.add_tile_offset({0, 1});
    b.add_tile_offset({1, 0});
  }

  CUTLASS_DEVICE static void multiply(FragmentC& sums, FragmentA const& a, FragmentB const& b) {
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < kDeep; ++k) {
      CUTLASS_PRAGMA_UNROLL
      for (int n = 0; n < kOwnN; ++n) {
        CUTLASS_PRAGMA_UNROLL
        for (int x = 0; x < kOwnM; ++x) {
          int const m = n % 2 == 0 ? x : kOwnM - 1 - x;  // serpentine: operands stay in the reuse cache
          sums[m * kOwnN + n] = fmaf(a.values[m][k], b.values[n][k], sums[m * kOwnN + n]);
        }
      }
    }
  }

  SharedStorage& shared_;
  typename FragmentA::Places places_a_;
  typename FragmentB::Places places_b_;
  int to_a_, to_b_;
  bool takes_a_, takes_b_;
};

}  // namespace atomr_cutlass
