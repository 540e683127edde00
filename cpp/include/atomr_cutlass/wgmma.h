// WGMMA with f32 sums of products of operands in shared memory: of f16, bf16 and fp8 the widths that CuTe has only in
// headers that take several times as long to compile as all the rest of a kernel (wgmma_widths.h), and of all types
// those that kernels without CuTe's tables of instructions use.
#pragma once

#include "cute/arch/config.hpp"
#include "cute/arch/util.hpp"
#include "cute/numeric/numeric_types.hpp"
#include "cutlass/cutlass.h"

namespace atomr_cutlass {

// kRows: the operand is contiguous along rows of A, columns of B, and not along K.
template <class Element, int kWidth, bool kRowsA, bool kRowsB>
struct Wgmma {
  static constexpr bool kDefined = false;
};

// The registers of sixteen columns in the instruction's text, and those of the first so many times sixteen.
#define ATOMR_CUTLASS_TEXT0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define ATOMR_CUTLASS_TEXT1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define ATOMR_CUTLASS_TEXT2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define ATOMR_CUTLASS_TEXT3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define ATOMR_CUTLASS_TEXT4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define ATOMR_CUTLASS_TEXT5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define ATOMR_CUTLASS_TEXT6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define ATOMR_CUTLASS_TEXT7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define ATOMR_CUTLASS_TEXT8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define ATOMR_CUTLASS_TEXT9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define ATOMR_CUTLASS_TEXT10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define ATOMR_CUTLASS_TEXT11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define ATOMR_CUTLASS_TEXT12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define ATOMR_CUTLASS_TEXT13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define ATOMR_CUTLASS_TEXT14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define ATOMR_CUTLASS_TEXTS1 ATOMR_CUTLASS_TEXT0
#define ATOMR_CUTLASS_TEXTS2 ATOMR_CUTLASS_TEXTS1 ", " ATOMR_CUTLASS_TEXT1
#define ATOMR_CUTLASS_TEXTS3 ATOMR_CUTLASS_TEXTS2 ", " ATOMR_CUTLASS_TEXT2
#define ATOMR_CUTLASS_TEXTS4 ATOMR_CUTLASS_TEXTS3 ", " ATOMR_CUTLASS_TEXT3
#define ATOMR_CUTLASS_TEXTS5 ATOMR_CUTLASS_TEXTS4 ", " ATOMR_CUTLASS_TEXT4
#define ATOMR_CUTLASS_TEXTS6 ATOMR_CUTLASS_TEXTS5 ", " ATOMR_CUTLASS_TEXT5
#define ATOMR_CUTLASS_TEXTS7 ATOMR_CUTLASS_TEXTS6 ", " ATOMR_CUTLASS_TEXT6
#define ATOMR_CUTLASS_TEXTS8 ATOMR_CUTLASS_TEXTS7 ", " ATOMR_CUTLASS_TEXT7
#define ATOMR_CUTLASS_TEXTS9 ATOMR_CUTLASS_TEXTS8 ", " ATOMR_CUTLASS_TEXT8
#define ATOMR_CUTLASS_TEXTS10 ATOMR_CUTLASS_TEXTS9 ", " ATOMR_CUTLASS_TEXT9
#define ATOMR_CUTLASS_TEXTS11 ATOMR_CUTLASS_TEXTS10 ", " ATOMR_CUTLASS_TEXT10
#define ATOMR_CUTLASS_TEXTS12 ATOMR_CUTLASS_TEXTS11 ", " ATOMR_CUTLASS_TEXT11
#define ATOMR_CUTLASS_TEXTS13 ATOMR_CUTLASS_TEXTS12 ", " ATOMR_CUTLASS_TEXT12
#define ATOMR_CUTLASS_TEXTS14 ATOMR_CUTLASS_TEXTS13 ", " ATOMR_CUTLASS_TEXT13
#define ATOMR_CUTLASS_TEXTS15 ATOMR_CUTLASS_TEXTS14 ", " ATOMR_CUTLASS_TEXT14
// The same as operands.
#define ATOMR_CUTLASS_SUMS(first)                                                                             \
  "+f"(sums(8 * first + 0)), "+f"(sums(8 * first + 1)), "+f"(sums(8 * first + 2)), "+f"(sums(8 * first + 3)), \
      "+f"(sums(8 * first + 4)), "+f"(sums(8 * first + 5)), "+f"(sums(8 * first + 6)), "+f"(sums(8 * first + 7))
#define ATOMR_CUTLASS_SUMS1 ATOMR_CUTLASS_SUMS(0)
#define ATOMR_CUTLASS_SUMS2 ATOMR_CUTLASS_SUMS1, ATOMR_CUTLASS_SUMS(1)
#define ATOMR_CUTLASS_SUMS3 ATOMR_CUTLASS_SUMS2, ATOMR_CUTLASS_SUMS(2)
#define ATOMR_CUTLASS_SUMS4 ATOMR_CUTLASS_SUMS3, ATOMR_CUTLASS_SUMS(3)
#define ATOMR_CUTLASS_SUMS5 ATOMR_CUTLASS_SUMS4, ATOMR_CUTLASS_SUMS(4)
#define ATOMR_CUTLASS_SUMS6 ATOMR_CUTLASS_SUMS5, ATOMR_CUTLASS_SUMS(5)
#define ATOMR_CUTLASS_SUMS7 ATOMR_CUTLASS_SUMS6, ATOMR_CUTLASS_SUMS(6)
#define ATOMR_CUTLASS_SUMS8 ATOMR_CUTLASS_SUMS7, ATOMR_CUTLASS_SUMS(7)
#define ATOMR_CUTLASS_SUMS9 ATOMR_CUTLASS_SUMS8, ATOMR_CUTLASS_SUMS(8)
#define ATOMR_CUTLASS_SUMS10 ATOMR_CUTLASS_SUMS9, ATOMR_CUTLASS_SUMS(9)
#define ATOMR_CUTLASS_SUMS11 ATOMR_CUTLASS_SUMS10, ATOMR_CUTLASS_SUMS(10)
#define ATOMR_CUTLASS_SUMS12 ATOMR_CUTLASS_SUMS11, ATOMR_CUTLASS_SUMS(11)
#define ATOMR_CUTLASS_SUMS13 ATOMR_CUTLASS_SUMS12, ATOMR_CUTLASS_SUMS(12)
#define ATOMR_CUTLASS_SUMS14 ATOMR_CUTLASS_SUMS13, ATOMR_CUTLASS_SUMS(13)
#define ATOMR_CUTLASS_SUMS15 ATOMR_CUTLASS_SUMS14, ATOMR_CUTLASS_SUMS(14)

// Of 16-bit elements either operand may lie along its rows, which the last two numbers say; of others neither.
#ifdef CUTE_ARCH_MMA_SM90A_ENABLED
#define ATOMR_CUTLASS_WGMMA_ASM(shape, types, texts, a, b, scale, majors, numbers, ...)                         \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " scale                                                        \
               ", 0;\n"                                                                                         \
               "wgmma.mma_async.sync.aligned." shape ".f32." types " {" texts "}, " a ", " b ", p, 1, 1" majors \
               ";\n}\n"                                                                                         \
               : __VA_ARGS__                                                                                    \
               : "l"(descriptor_a), "l"(descriptor_b), "r"(int(add))numbers)
#else
#define ATOMR_CUTLASS_WGMMA_ASM(...) CUTE_INVALID_CONTROL_PATH("WGMMA is an instruction of sm_90a")
#endif
#define ATOMR_CUTLASS_MAJORS , "n"(int(kRowsA)), "n"(int(kRowsB))

// `sums(i)` is the i-th of a thread's kWidth / 2 registers; without `add` they are overwritten.
#define ATOMR_CUTLASS_WGMMA(width, texts, operands, a, b, scale, rows_a, rows_b)                                    \
  template <class Element, bool kRowsA, bool kRowsB>                                                                \
  struct Wgmma<Element, width, kRowsA, kRowsB> {                                                                    \
    static constexpr bool kDefined = true;                                                                          \
    template <class Sums>                                                                                           \
    CUTLASS_DEVICE static void multiply(uint64_t descriptor_a, uint64_t descriptor_b, Sums const& sums, bool add) { \
      if constexpr (cute::is_same_v<Element, cutlass::bfloat16_t>) {                                                \
        ATOMR_CUTLASS_WGMMA_ASM("m64n" #width "k16", "bf16.bf16", texts, a, b, scale, ", " rows_a ", " rows_b,      \
                                ATOMR_CUTLASS_MAJORS, operands);                                                    \
      } else if constexpr (cute::is_same_v<Element, cutlass::half_t>) {                                             \
        ATOMR_CUTLASS_WGMMA_ASM("m64n" #width "k16", "f16.f16", texts, a, b, scale, ", " rows_a ", " rows_b,        \
                                ATOMR_CUTLASS_MAJORS, operands);                                                    \
      } else {                                                                                                      \
        static_assert(!kRowsA && !kRowsB, "WGMMA reads elements of other widths contiguous along K only");          \
        if constexpr (cute::is_same_v<Element, cutlass::tfloat32_t>) {                                              \
          ATOMR_CUTLASS_WGMMA_ASM("m64n" #width "k8", "tf32.tf32", texts, a, b, scale, "", , operands);             \
        } else if constexpr (cute::is_same_v<Element, cutlass::float_e4m3_t>) {                                     \
          ATOMR_CUTLASS_WGMMA_ASM("m64n" #width "k32", "e4m3.e4m3", texts, a, b, scale, "", , operands);            \
        } else {                                                                                                    \
          static_assert(cute::is_same_v<Element, cutlass::float_e5m2_t>);                                           \
          ATOMR_CUTLASS_WGMMA_ASM("m64n" #width "k32", "e5m2.e5m2", texts, a, b, scale, "", , operands);            \
        }                                                                                                           \
      }                                                                                                             \
    }                                                                                                               \
  };

ATOMR_CUTLASS_WGMMA(16, ATOMR_CUTLASS_TEXTS1, ATOMR_CUTLASS_SUMS1, "%8", "%9", "%10", "%11", "%12")
ATOMR_CUTLASS_WGMMA(32, ATOMR_CUTLASS_TEXTS2, ATOMR_CUTLASS_SUMS2, "%16", "%17", "%18", "%19", "%20")
ATOMR_CUTLASS_WGMMA(48, ATOMR_CUTLASS_TEXTS3, ATOMR_CUTLASS_SUMS3, "%24", "%25", "%26", "%27", "%28")
ATOMR_CUTLASS_WGMMA(64, ATOMR_CUTLASS_TEXTS4, ATOMR_CUTLASS_SUMS4, "%32", "%33", "%34", "%35", "%36")
ATOMR_CUTLASS_WGMMA(80, ATOMR_CUTLASS_TEXTS5, ATOMR_CUTLASS_SUMS5, "%40", "%41", "%42", "%43", "%44")
ATOMR_CUTLASS_WGMMA(96, ATOMR_CUTLASS_TEXTS6, ATOMR_CUTLASS_SUMS6, "%48", "%49", "%50", "%51", "%52")
ATOMR_CUTLASS_WGMMA(112, ATOMR_CUTLASS_TEXTS7, ATOMR_CUTLASS_SUMS7, "%56", "%57", "%58", "%59", "%60")
ATOMR_CUTLASS_WGMMA(128, ATOMR_CUTLASS_TEXTS8, ATOMR_CUTLASS_SUMS8, "%64", "%65", "%66", "%67", "%68")
ATOMR_CUTLASS_WGMMA(144, ATOMR_CUTLASS_TEXTS9, ATOMR_CUTLASS_SUMS9, "%72", "%73", "%74", "%75", "%76")
ATOMR_CUTLASS_WGMMA(160, ATOMR_CUTLASS_TEXTS10, ATOMR_CUTLASS_SUMS10, "%80", "%81", "%82", "%83", "%84")
ATOMR_CUTLASS_WGMMA(176, ATOMR_CUTLASS_TEXTS11, ATOMR_CUTLASS_SUMS11, "%88", "%89", "%90", "%91", "%92")
ATOMR_CUTLASS_WGMMA(208, ATOMR_CUTLASS_TEXTS13, ATOMR_CUTLASS_SUMS13, "%104", "%105", "%106", "%107", "%108")
ATOMR_CUTLASS_WGMMA(224, ATOMR_CUTLASS_TEXTS14, ATOMR_CUTLASS_SUMS14, "%112", "%113", "%114", "%115", "%116")
ATOMR_CUTLASS_WGMMA(240, ATOMR_CUTLASS_TEXTS15, ATOMR_CUTLASS_SUMS15, "%120", "%121", "%122", "%123", "%124")

#undef ATOMR_CUTLASS_WGMMA
#undef ATOMR_CUTLASS_WGMMA_ASM
#undef ATOMR_CUTLASS_MAJORS
#undef ATOMR_CUTLASS_SUMS

// The same of a tile that lies in shared memory as boxes of 128 swizzled bytes: of K if the operand is contiguous along
// K, of its rows (or columns) otherwise. `kLines`: of a box. An instruction further along K begins 32 bytes later in
// the lines, or as many lines later as it takes of K.
template <bool kRows, int kLines>
CUTLASS_DEVICE uint64_t wgmma_descriptor(char const* tile) {
  constexpr uint64_t kEightLines = 8 * 128 / 16, kBox = kRows ? kLines * 128 / 16 : 1, kSwizzle = 1;
  return (cute::cast_smem_ptr_to_uint(tile) >> 4 & 0x3FFF) | kBox << 16 | kEightLines << 32 | kSwizzle << 62;
}

#ifdef CUTE_ARCH_MMA_SM90A_ENABLED
#define ATOMR_CUTLASS_WGMMA_ORDER(...) asm volatile(__VA_ARGS__ : "memory")
#else
#define ATOMR_CUTLASS_WGMMA_ORDER(...) CUTE_INVALID_CONTROL_PATH("WGMMA is an instruction of sm_90a")
#endif

// Before the first product that reads registers or shared memory written before it.
CUTLASS_DEVICE void wgmma_arrive() { ATOMR_CUTLASS_WGMMA_ORDER("wgmma.fence.sync.aligned;\n" ::); }

// Ends a batch of products.
CUTLASS_DEVICE void wgmma_commit() { ATOMR_CUTLASS_WGMMA_ORDER("wgmma.commit_group.sync.aligned;\n" ::); }

// Until at most so many batches are under way.
template <int kUnderWay>
CUTLASS_DEVICE void wgmma_wait() {
  ATOMR_CUTLASS_WGMMA_ORDER("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kUnderWay));
}

// What the compiler does with sums comes wholly before it, or after it.
template <int kCount>
CUTLASS_DEVICE void wgmma_fence(float (&sums)[kCount]) {
#ifdef __CUDA_ARCH__
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(sums[i])::"memory");
#endif
}

#undef ATOMR_CUTLASS_WGMMA_ORDER

}  // namespace atomr_cutlass
