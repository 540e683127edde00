// What the groups of a grouped GEMM are, as tables with one entry for each: CUTLASS's grouped kernels read shapes,
// pointers and strides from device memory. The setup kernel of a cell fills them from the arguments, so that nothing
// about the groups needs to be known to the host.
//
// Extents that come from device memory cannot be refused. They are clamped, so that whatever they hold, no group
// reaches beyond the operands. Groups of a contiguous form whose ends do not rise are empty.
#pragma once

#include "atomr_cutlass/kernel_abi.h"
#include "cutlass/cutlass.h"

namespace atomr_cutlass {

// The tables, at the beginning of the workspace. `Shape` is made of M, N and K.
template <class Shape>
struct GroupTables {
  enum Column { kA, kB, kC, kD, kLda, kLdb, kLdc, kLdd, kScaleA, kScaleB, kColumns };

  CUTLASS_HOST_DEVICE GroupTables(void* workspace, int groups)
      : columns(static_cast<char*>(workspace)),
        height(column_bytes(groups)) {}

  // Tensor maps need aligned addresses before they are given their own: those of the columns are.
  CUTLASS_HOST_DEVICE static uint64_t column_bytes(int groups) { return (uint64_t(groups) * 8 + 15) / 16 * 16; }

  // A multiple of 256: the kernel's own workspace comes after.
  CUTLASS_HOST_DEVICE static uint64_t bytes(int groups) {
    return (kColumns * column_bytes(groups) + uint64_t(groups) * sizeof(Shape) + 255) / 256 * 256;
  }

  template <class Value>
  CUTLASS_HOST_DEVICE Value* column(Column which) const {
    static_assert(sizeof(Value) == 8, "an entry has 8 bytes");
    return reinterpret_cast<Value*>(columns + which * height);
  }

  CUTLASS_HOST_DEVICE Shape* shapes() const { return reinterpret_cast<Shape*>(columns + kColumns * height); }

  CUTLASS_DEVICE void write(int g, atomr_cutlass_group const& group) const {
    column<void const*>(kA)[g] = group.a;
    column<void const*>(kB)[g] = group.b;
    column<void const*>(kC)[g] = group.c;
    column<void*>(kD)[g] = group.d;
    column<int64_t>(kLda)[g] = group.lda;
    column<int64_t>(kLdb)[g] = group.ldb;
    column<int64_t>(kLdc)[g] = group.ldc;
    column<int64_t>(kLdd)[g] = group.ldd;
    column<void const*>(kScaleA)[g] = group.scale_a;
    column<void const*>(kScaleB)[g] = group.scale_b;
    shapes()[g] = Shape(group.m, group.n, group.k);
  }

  char* columns;
  uint64_t height;
};

// What it takes to find a group's part of the operands: bits of an element, whether rows are contiguous, and whether
// the scales are those of blocks.
template <int kBitsA, bool kRowMajorA, int kBitsB, bool kRowMajorB, int kBitsD, bool kBlockScales>
struct GroupFinder {
  using Args = atomr_cutlass_grouped_args;

  static constexpr int kThreads = 256;

  CUTLASS_HOST_DEVICE static bool ragged(Args const& args) {
    return args.form == ATOMR_CUTLASS_GROUPED_CONTIGUOUS || args.form == ATOMR_CUTLASS_GROUPED_K;
  }

  // Where a group begins is a sum over all before it when counts are given: that is one block's work.
  CUTLASS_HOST_DEVICE static unsigned blocks(Args const& args) {
    return ragged(args) && args.rows_are_counts ? 1u : unsigned((args.groups + kThreads - 1) / kThreads);
  }

  template <class Shape>
  CUTLASS_DEVICE static void fill(Args const& args) {
    GroupTables<Shape> const tables(args.workspace, args.groups);
    int64_t before = 0;
    for (int first = blockIdx.x * kThreads; first < args.groups; first += gridDim.x * kThreads) {
      int const g = first + threadIdx.x;
      bool const mine = g < args.groups;
      int64_t start = 0, count = 0;
      if (!ragged(args)) {
        if (mine && args.form == ATOMR_CUTLASS_GROUPED_MASKED) count = clamp(args.offsets[g], args.m);
      } else {
        int const limit = args.form == ATOMR_CUTLASS_GROUPED_K ? args.k : args.m;
        if (args.rows_are_counts) {
          count = mine ? clamp(args.offsets[g], limit) : 0;
          int64_t total = 0;
          start = clamp(before + sum_before(count, total), limit);
          before += total;
          count = clamp(count, limit - start);
        } else if (mine) {
          start = g == 0 ? 0 : clamp(args.offsets[g - 1], limit);
          count = clamp(args.offsets[g] - start, limit - start);
        }
      }
      if (mine) tables.write(g, find(args, g, start, int(count)));
    }
  }

 private:
  CUTLASS_DEVICE static int64_t clamp(int64_t value, int64_t limit) {
    return value < 0 ? 0 : (value > limit ? limit : value);
  }

  // The sum of the values of the threads before this one, and of all. Called by all threads of the block.
  CUTLASS_DEVICE static int64_t sum_before(int64_t value, int64_t& total) {
    __shared__ long long sums[kThreads / 32];
    int const lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    long long inclusive = value;
    for (int step = 1; step < 32; step *= 2) {
      long long const other = __shfl_up_sync(0xffffffffu, inclusive, step);
      if (lane >= step) inclusive += other;
    }
    if (lane == 31) sums[warp] = inclusive;
    __syncthreads();
    long long before = 0;
    total = 0;
    for (int i = 0; i < kThreads / 32; ++i) {
      if (i < warp) before += sums[i];
      total += sums[i];
    }
    __syncthreads();
    return before + inclusive - value;
  }

  CUTLASS_DEVICE static void const* at(void const* base, int64_t elements, int bits) {
    return base == nullptr ? nullptr : static_cast<char const*>(base) + elements * bits / 8;
  }

  CUTLASS_DEVICE static atomr_cutlass_group find(Args const& args, int g, int64_t start, int count) {
    atomr_cutlass_group group;
    if (args.form == ATOMR_CUTLASS_GROUPED_LIST) {
      group = args.table[g];
      group.m = max(group.m, 0);
      group.n = max(group.n, 0);
      group.k = max(group.k, 0);
    } else {
      bool const along_k = args.form == ATOMR_CUTLASS_GROUPED_K;
      bool const contiguous = args.form == ATOMR_CUTLASS_GROUPED_CONTIGUOUS;
      group.m = along_k ? args.m : count;
      group.n = args.n;
      group.k = along_k ? count : args.k;
      group.lda = args.lda, group.ldb = args.ldb, group.ldc = args.ldc, group.ldd = args.ldd;

      int64_t a = g * args.group_stride_a, b = g * args.group_stride_b;
      int64_t c = g * args.group_stride_c, d = g * args.group_stride_d;
      if (along_k) {
        a = kRowMajorA ? start : start * args.lda;
        b = kRowMajorB ? start * args.ldb : start;
      } else if (contiguous) {
        a = kRowMajorA ? start * args.lda : start;
        c += start * args.ldc;  // of a bias in the place of C, each group's: ldc is then 0
        d = start * args.ldd;
      }
      group.a = at(args.a, a, kBitsA);
      group.b = at(args.b, b, kBitsB);
      group.c = at(args.c, c, kBitsD);
      group.d = const_cast<void*>(at(args.d, d, kBitsD));

      int64_t scale_a = g * args.scale_group_stride_a, scale_b = g * args.scale_group_stride_b;
      if (kBlockScales) {
        if (contiguous) scale_a = start * args.scale_stride_a;
      } else {
        if (args.scale_form_a == 1 && contiguous) scale_a = start;
        if (args.scale_form_a != 1) scale_a = args.scale_form_a == 2 ? g : 0;
        if (args.scale_form_b != 1) scale_b = args.scale_form_b == 2 ? g : 0;
      }
      group.scale_a = at(args.scale_a, scale_a, 32);
      group.scale_b = at(args.scale_b, scale_b, 32);
    }
    // Kernels hold a tensor map of C whether or not they read it.
    if (group.c == nullptr) {
      group.c = group.d;
      group.ldc = group.ldd;
    }
    return group;
  }
};

}  // namespace atomr_cutlass
