// The scaled epilogue (scaled.h) of the sm80 generation: a visitor for CUTLASS 2.x.
#pragma once

#include "atomr_cutlass/gemm_sm80.h"
#include "atomr_cutlass/scaled.h"
#include "cutlass/arch/memory.h"
#include "cutlass/array.h"
#include "cutlass/epilogue/threadblock/epilogue_with_visitor_callbacks.h"
#include "cutlass/gemm/kernel/gemm_universal_with_visitor.h"
#include "cutlass/gemm_coord.h"
#include "cutlass/numeric_conversion.h"

namespace atomr_cutlass {

// kAccess elements of a row, of which kAlign at a time are aligned in memory and the first `left` are inside the
// matrix.
template <class Element, int kAccess, int kAlign>
struct VectorsSm80 {
  using Values = cutlass::AlignedArray<Element, kAccess>;
  using Access = cutlass::AlignedArray<Element, kAlign>;

  CUTLASS_DEVICE static Values load(Element const* from, int left) {
    Values values;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kAccess; i += kAlign) {
      if (kAlign == kAccess || i < left) {
        reinterpret_cast<Access*>(&values)[i / kAlign] = *reinterpret_cast<Access const*>(from + i);
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < kAlign; ++j) values[i + j] = Element(0.0f);
      }
    }
    return values;
  }

  CUTLASS_DEVICE static void store(Element* to, int left, Values const& values) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kAccess; i += kAlign) {
      if (kAlign == kAccess || i < left) {
        *reinterpret_cast<Access*>(to + i) = reinterpret_cast<Access const*>(&values)[i / kAlign];
      }
    }
  }
};

// What the visitor reads and writes: C and D are row-major, and their batches are a stride apart.
template <class Element>
struct ScaledOutput {
  ScaledParams scaled;
  Element const* c;
  Element* d;
  int64_t ldc, ldd, batch_stride_c, batch_stride_d;
};

// A visitor for CUTLASS 2.x: all of the tree in one node, the loads of C and the stores of D included. ThreadMap is
// that of the epilogue's output iterator, kAccess the elements of D in a row that a thread handles at once, and kAlign
// how many of them are aligned in memory.
template <class ThreadMap, class Tile, class Element, int kAccess, int kAlign>
struct ScaledVisitorSm80 {
  static_assert(ThreadMap::Shape::kCluster == 1 && ThreadMap::Count::kCluster == 1 && ThreadMap::Count::kGroup == 1,
                "the epilogue's steps advance along rows alone");

  struct SharedStorage {};
  using Arguments = ScaledOutput<Element>;
  using Params = Arguments;
  using Vectors = VectorsSm80<Element, kAccess, kAlign>;
  using Values = typename Vectors::Values;

  template <class Problem>
  static constexpr Params to_underlying_arguments(Problem const&, Arguments const& args, void*) {
    return args;
  }

  CUTLASS_HOST_DEVICE ScaledVisitorSm80() {}
  CUTLASS_HOST_DEVICE ScaledVisitorSm80(Params const& params, SharedStorage const&) : params(&params) {}

  struct Callbacks {
    Params const& params;
    int first_row, first_column;  // of the thread
    int rows, columns;
    int64_t batch;
    float column_scales[ThreadMap::Iterations::kColumn][kAccess];
    float scale_d;
    LargestAbsolute largest;

    CUTLASS_DEVICE Callbacks(Params const& params) : params(params) {}

    CUTLASS_DEVICE void begin_epilogue() {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < ThreadMap::Iterations::kColumn; ++i) {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < kAccess; ++j) {
          column_scales[i][j] = params.scaled.column(first_column + i * ThreadMap::Delta::kColumn + j, columns);
        }
      }
      scale_d = params.scaled.output();
    }

    CUTLASS_DEVICE void begin_step(int) {}
    CUTLASS_DEVICE void begin_row(int) {}

    template <class Accumulator>
    CUTLASS_DEVICE void visit(int step, int row_index, int column_index, int,
                              cutlass::Array<Accumulator, kAccess> const& accumulators) {
      constexpr int kRows = ThreadMap::Iterations::kRow, kGroups = ThreadMap::Iterations::kGroup;
      int const row = first_row + step * ThreadMap::Shape::kRow + row_index % kRows * ThreadMap::Delta::kRow +
                      row_index / kRows % kGroups * ThreadMap::Delta::kGroup;
      int const column = first_column + column_index * ThreadMap::Delta::kColumn;
      if (row >= rows || column >= columns) return;
      ScaledParams const& scaled = params.scaled;
      float const scale = scaled.row(row, rows);
      cutlass::Array<float, kAccess> values;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kAccess; ++i) values[i] = scale * column_scales[column_index][i] * float(accumulators[i]);
      if (scaled.needs_c()) {
        Values const source =
            Vectors::load(params.c + batch * params.batch_stride_c + row * params.ldc + column, columns - column);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kAccess; ++i) values[i] += scaled.beta * float(source[i]);
      }
      if (scaled.amax != nullptr) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kAccess; ++i) largest.see(values[i]);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kAccess; ++i) values[i] *= scale_d;
      cutlass::NumericArrayConverter<Element, float, kAccess> convert;
      Values result;
      static_cast<cutlass::Array<Element, kAccess>&>(result) = convert(values);
      Vectors::store(params.d + batch * params.batch_stride_d + row * params.ldd + column, columns - column, result);
    }

    CUTLASS_DEVICE void end_row(int) {}
    CUTLASS_DEVICE void end_step(int) {}
    CUTLASS_DEVICE void end_epilogue() {
      if (params.scaled.amax != nullptr) largest.store(params.scaled.amax);
    }
  };

  template <class Problem>
  CUTLASS_DEVICE Callbacks get_callbacks(cutlass::gemm::GemmCoord const& tile, int thread, Problem const& problem) {
    Callbacks callbacks(*params);
    auto const offset = ThreadMap::initial_offset(thread);
    callbacks.first_row = tile.m() * Tile::kM + offset.row();
    callbacks.first_column = tile.n() * Tile::kN + offset.column();
    callbacks.rows = cute::get<0>(problem);
    callbacks.columns = cute::get<1>(problem);
    callbacks.batch = tile.k();
    return callbacks;
  }

  Params const* params;
};

template <class Linear, int kAlign>
struct EpilogueSm80<ScaledEpilogue, Linear, kAlign> {
  // A visitor does not add to what other slices of K have left.
  static constexpr bool kSplitK = false;

  using Base = typename Linear::Epilogue;
  using Element = typename Base::OutputTileIterator::Element;
  using Visitor = ScaledVisitorSm80<typename Base::OutputTileIterator::ThreadMap, typename Linear::Mma::Shape, Element,
                                    Base::kElementsPerAccess, kAlign>;
  using Kernel = cutlass::gemm::kernel::GemmWithEpilogueVisitor<
      typename Linear::Mma, cutlass::epilogue::threadblock::EpilogueWithVisitorCallbacks<Base, Visitor, 1>,
      typename Linear::ThreadblockSwizzle>;

  static ScaledOutput<Element> arguments(atomr_cutlass_gemm_args const& args) {
    return {ScaledParams::of(args),
            static_cast<Element const*>(args.c),
            static_cast<Element*>(args.d),
            args.ldc,
            args.ldd,
            args.batch_stride_c,
            args.batch_stride_d};
  }
};

}  // namespace atomr_cutlass
