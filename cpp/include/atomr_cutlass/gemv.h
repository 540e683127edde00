// A matrix times a vector, bound by memory: every element of the matrix is read once, in 16 bytes at a time where its
// rows allow it. A problem is a GEMM of one row, D = alpha x B + beta C with D and C 1 x n, the vector x 1 x k and the
// matrix B k x n, so that its epilogues are those of GEMM; vectors have any stride, `lda`, `ldc` and `ldd`.
//
// A thread block computes kTile columns of D, or some of them, for one of `split_k` slices of K. Slices leave their
// sums in the workspace; the last one to do so adds them up, in their order, so that results do not depend on which
// that is.
#pragma once

#include "atomr_cutlass/epilogue_tree.h"
#include "atomr_cutlass/kernel_abi.h"
#include "cutlass/array.h"
#include "cutlass/cutlass.h"
#include "cutlass/layout/matrix.h"
#include "cutlass/numeric_types.h"

namespace atomr_cutlass {

// What follows the products: alpha and beta, or a tree.
template <class Epilogue, class ElementD>
struct GemvEpilogue {
  static constexpr bool kSource = false;

  struct Params {
    float alpha, beta;

    static Params of(atomr_cutlass_gemm_args const& args) { return {float(args.alpha), float(args.beta)}; }
  };

  // Called by whole warps; `column` is n for threads without one. `load_c` and `store` read C and write D there.
  template <class LoadC, class Store>
  CUTLASS_DEVICE static void apply(Params const& params, int column, int n, int, float sum, LoadC const& load_c,
                                   Store const& store) {
    if (column >= n) return;
    float value = params.alpha * sum;
    if (params.beta != 0.0f) value += params.beta * widened<float>(load_c());
    store(converted<ElementD>(value));
  }
};

template <class Tree, bool kScaled, class Lanes, class ElementD>
struct GemvEpilogue<TreeEpilogue<Tree, kScaled, Lanes>, ElementD> {
  using Value = typename Tree::Value;
  static_assert(!kScaled, "the operands have no scales");
  static constexpr bool kSource = TreeEpilogue<Tree, kScaled, Lanes>::kSource;

  using Params = TreeParams<Tree>;

  template <class LoadC, class Store>
  CUTLASS_DEVICE static void apply(Params const& params, int column, int n, int batch, float sum, LoadC const& load_c,
                                   Store const& store) {
    struct Here {
      int m = 0, n = 0;
    };
    TreeThread<Tree, Lanes> tree(params);
    tree.count_m = 1;
    tree.count_n = n;
    tree.batch = batch;
    tree.tile_m = tree.tile_n = tree.first_m = 0;
    tree.first_n = column;
    tree.begin();
    ElementD source(0.0f);
    bool const inside = column < n;
    if (inside && (kSource || params.beta != Value(0))) source = load_c();
    cutlass::Array<Value, 1> values;
    values[0] = params.alpha * Value(sum);
    if (!kSource && params.beta != Value(0)) values[0] += params.beta * widened<Value>(source);
    tree.template apply<1>(values, [](int) { return Here{}; }, [&](int) { return source; });
    if (inside) store(converted<ElementD>(values[0]));
    tree.end();
  }
};

template <class Element, class LayoutB, class ElementD, int kAlign, class Epilogue_>
struct Gemv {
  using Args = atomr_cutlass_gemm_args;
  using Epilogue = GemvEpilogue<Epilogue_, ElementD>;

  static constexpr int kThreads = 256;
  // As many as registers allow: on sm_120 converting f16 takes one too many.
  static constexpr int kMostBlocks = kAlign == 8 ? 4 : 3;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
  static constexpr int kMinBlocks = cutlass::platform::is_same<Element, cutlass::half_t>::value ? 3 : kMostBlocks;
#else
  static constexpr int kMinBlocks = kMostBlocks;
#endif
  static constexpr int kSharedBytes = 0;
  static constexpr int kClusterM = 1, kClusterN = 1, kClusterK = 1;

  static constexpr int kWarps = kThreads / 32;
  // Whether the matrix is contiguous along K: some threads then share a column of D, else a thread has kAlign columns.
  static constexpr bool kAlongK = cutlass::platform::is_same<LayoutB, cutlass::layout::ColumnMajor>::value;
  static constexpr int kUnroll = kAlign > 1 ? 4 : (kAlongK ? 8 : 16);
  // Lanes side by side along the columns of D: 128 bytes of 2-byte types, or a lane for each single element.
  static constexpr int kLanesN = kAlongK ? 1 : (kAlign > 1 ? 8 : 32);
  static constexpr int kLanesK = 32 / kLanesN;
  // The most columns of D that a thread block has.
  static constexpr int kTile = kAlongK ? 64 : kLanesN * kAlign;
  static constexpr int kMaxBatches = 65535;  // the z extent of a grid
  static constexpr int kMost = 0x7fff0000;  // columns, and elements of K: what is beyond the last is counted too

  using Vector = cutlass::AlignedArray<Element, kAlign>;

  struct Params {
    Element const* x;
    Element const* matrix;
    ElementD const* c;
    ElementD* d;
    int64_t stride_x, leading, stride_c, stride_d;
    int64_t batch_stride_x, batch_stride_matrix, batch_stride_c, batch_stride_d;
    float* parts;  // of the slices
    uint32_t* arrived;  // slices of each tile that have left theirs
    typename Epilogue::Params epilogue;
    int32_t n, k, batch;
    int32_t tiles, slices;
    int32_t columns;  // of D that a thread block has
  };

  static bool can_implement(Args const& args) {
    return args.m == 1 && args.n > 0 && args.k >= 0 && args.batch > 0 && args.split_k > 0 && args.split_k <= 65535 &&
           args.n <= kMost && args.k <= kMost && args.ldb % kAlign == 0 && args.batch_stride_b % kAlign == 0 &&
           (kAlongK ? args.k : args.n) % kAlign == 0;
  }

  // As few threads for each column as have something to read all at once, up to a warp; more where the thread blocks
  // would not fill the GPU.
  static int32_t columns_of(Args const& args) {
    if (!kAlongK) return kTile;
    int32_t columns = kTile;
    int64_t const k = args.k / args.split_k, all = int64_t(args.n) * args.batch * args.split_k;
    int64_t const wanted = int64_t(args.sm_count) * kMostBlocks;
    while (columns > 1 && k * columns >= 2 * kUnroll * kAlign * kThreads &&
           (columns > kWarps || all < wanted * columns)) {
      columns /= 2;
    }
    return columns;
  }

  // Bytes of the counters, before the slices' sums.
  static uint64_t counters(Args const& args) {
    int32_t const columns = columns_of(args);
    uint64_t const tiles = uint64_t(args.n + columns - 1) / columns * args.batch;
    return (tiles * sizeof(uint32_t) + 255) / 256 * 256;
  }
  static uint64_t workspace_size(Args const& args) {
    if (args.split_k <= 1) return 0;
    return counters(args) + sizeof(float) * uint64_t(args.split_k) * args.batch * args.n;
  }
  // The counters are 0 before the first launch, and again after each.
  static void clear_range(Args const&, uint64_t& offset, uint64_t& bytes) { offset = bytes = 0; }

  static Params params(Args const& args) {
    int32_t const columns = columns_of(args);
    auto* const workspace = static_cast<char*>(args.workspace);
    return {static_cast<Element const*>(args.a),
            static_cast<Element const*>(args.b),
            static_cast<ElementD const*>(args.c),
            static_cast<ElementD*>(args.d),
            args.lda,
            args.ldb,
            args.ldc,
            args.ldd,
            args.batch_stride_a,
            args.batch_stride_b,
            args.batch_stride_c,
            args.batch_stride_d,
            args.split_k > 1 ? reinterpret_cast<float*>(workspace + counters(args)) : nullptr,
            args.split_k > 1 ? reinterpret_cast<uint32_t*>(workspace) : nullptr,
            Epilogue::Params::of(args),
            args.n,
            args.k,
            args.batch,
            (args.n + columns - 1) / columns,
            args.split_k,
            columns};
  }
  static dim3 grid(Params const& params) {
    return dim3(uint32_t(params.tiles), uint32_t(params.slices),
                uint32_t(params.batch < kMaxBatches ? params.batch : kMaxBatches));
  }

  // The matrix is read once: it would only drive the vector out of the L1 cache.
  CUTLASS_DEVICE static Vector load(Element const* from) {
    Vector vector;
    if constexpr (sizeof(Vector) == 16) {
      auto* const words = reinterpret_cast<uint32_t*>(&vector);
      asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                   : "l"(from));
    } else {
      vector = *reinterpret_cast<Vector const*>(from);
    }
    return vector;
  }

  // kAlign elements of x; `kWide` says that they lie together, aligned.
  template <bool kWide>
  CUTLASS_DEVICE static Vector load_x(Element const* x, int64_t stride) {
    if constexpr (kWide) return *reinterpret_cast<Vector const*>(x);
    Vector vector;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kAlign; ++i) vector[i] = x[i * stride];
    return vector;
  }

  CUTLASS_DEVICE static void add(float& sum, Vector const& a, Vector const& b) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kAlign; ++i) sum = fmaf(widened<float>(Element(a[i])), widened<float>(Element(b[i])), sum);
  }

  // A thread's share of the products of one column, which is contiguous: a vector every `step` elements, of `count`.
  template <bool kWide>
  CUTLASS_DEVICE static float along_k(Element const* column, Element const* x, int64_t stride, int count, int step) {
    constexpr int kAtOnce = kWide ? kUnroll : 1;
    float sum = 0.0f;
    for (; count > 0; count -= kAtOnce * step) {
      Vector vectors[kAtOnce];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kAtOnce; ++i, column += step) {
        if (i * step < count) vectors[i] = load(column);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kAtOnce; ++i, x += step * stride) {
        if (i * step < count) add(sum, vectors[i], load_x<kWide>(x, stride));
      }
    }
    return sum;
  }

  // The thread's share of the products of kAlign neighbouring columns; `columns` and `x` are where it begins.
  CUTLASS_DEVICE static void along_n(float (&sums)[kAlign], Element const* columns, int64_t leading, Element const* x,
                                     int64_t stride, int count) {
    constexpr int kStep = kWarps * kLanesK;
    leading *= kStep;
    stride *= kStep;
    auto const add_row = [&](Vector const& row, Element const& factor) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kAlign; ++i) {
        sums[i] = fmaf(widened<float>(factor), widened<float>(Element(row[i])), sums[i]);
      }
    };
    for (; count > 0; count -= kUnroll * kStep) {
      Vector rows[kUnroll];
      Element factors[kUnroll];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kUnroll; ++i, columns += leading) {
        if (i * kStep < count) rows[i] = load(columns);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kUnroll; ++i, x += stride) {
        if (i * kStep < count) factors[i] = *x;
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kUnroll; ++i) {
        if (i * kStep < count) add_row(rows[i], factors[i]);
      }
    }
  }

  CUTLASS_DEVICE static void run(Params const& params, char*) {
    for (int batch = int(blockIdx.z); batch < params.batch; batch += int(gridDim.z)) {
      if (batch != int(blockIdx.z)) __syncthreads();  // shared memory is written anew
      tile(params, batch);
    }
  }

 private:
  CUTLASS_DEVICE static float summed(float const (&shared)[kWarps][kTile], int parts, int column) {
    float sum = 0.0f;
    for (int part = 0; part < parts; ++part) sum += shared[part][column];
    return sum;
  }

  CUTLASS_DEVICE static void tile(Params const& params, int batch) {
    __shared__ float shared[kWarps][kTile];
    __shared__ bool last;
    int const thread = int(threadIdx.x), lane = thread % 32, warp = thread / 32;
    int const begin = int(blockIdx.x) * params.columns;
    Element const* x = params.x + batch * params.batch_stride_x;
    Element const* matrix = params.matrix + batch * params.batch_stride_matrix;
    // BLAS: where alpha is 0, nothing is read. Slices end where vectors do.
    int const k = !kIsTree<Epilogue_> && params.epilogue.alpha == 0 ? 0 : params.k;
    int const slice = ((k + kAlign - 1) / kAlign + params.slices - 1) / params.slices * kAlign;
    int const first = int(int64_t(blockIdx.y) * slice < k ? int64_t(blockIdx.y) * slice : k);
    int const end = slice < k - first ? first + slice : k;

    int parts;  // of a column's sum, in `shared`
    if constexpr (kAlongK) {
      int const threads = kThreads / params.columns;  // for each column
      int const column = thread / threads, within = thread % threads;
      parts = threads > 32 ? threads / 32 : 1;
      float sum = 0.0f;
      if (begin + column < params.n) {
        bool const wide = params.stride_x == 1 && reinterpret_cast<uint64_t>(x) % sizeof(Vector) == 0;
        int const start = first + within * kAlign, step = threads * kAlign;
        matrix += (begin + column) * params.leading + start;
        x += start * params.stride_x;
        sum = wide ? along_k<true>(matrix, x, 1, end - start, step)
                   : along_k<false>(matrix, x, params.stride_x, end - start, step);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int lanes = 16; lanes > 0; lanes /= 2) {
        float const other = __shfl_xor_sync(0xffffffffu, sum, lanes);
        if (lanes < threads) sum += other;
      }
      if (within % 32 == 0) shared[within / 32][column] = sum;
    } else {
      parts = kWarps;
      float sums[kAlign] = {};
      int const column = lane % kLanesN * kAlign;
      if (begin + column < params.n) {
        int const start = first + warp * kLanesK + lane / kLanesN;
        along_n(sums, matrix + begin + column + start * params.leading, params.leading, x + start * params.stride_x,
                params.stride_x, end - start);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kAlign; ++i) {
        CUTLASS_PRAGMA_UNROLL
        for (int lanes = 16; lanes >= kLanesN; lanes /= 2) sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], lanes);
        if (lane < kLanesN) shared[warp][column + i] = sums[i];
      }
    }
    __syncthreads();

    int const column = begin + thread;
    bool const inside = thread < params.columns && column < params.n;
    float sum = inside ? summed(shared, parts, thread) : 0.0f;
    if (params.slices > 1) {
      float* const sums = params.parts + int64_t(batch) * params.n + begin;
      int64_t const apart = int64_t(params.batch) * params.n;
      if (inside) sums[blockIdx.y * apart + thread] = sum;
      __threadfence();
      __syncthreads();
      if (thread == 0) {
        uint32_t* const arrived = params.arrived + int64_t(batch) * params.tiles + blockIdx.x;
        last = atomicAdd(arrived, 1u) == uint32_t(params.slices - 1);
        if (last) *arrived = 0;
      }
      __syncthreads();
      if (!last) return;
      __threadfence();
      // Some threads for each column, so that reading them takes no longer than it must.
      int const mine = thread % params.columns, group = thread / params.columns;
      int const groups = kThreads / params.columns < kWarps ? kThreads / params.columns : kWarps;
      if (group < groups && begin + mine < params.n) {
        float part = 0.0f;
#pragma unroll 4
        for (int i = group; i < params.slices; i += groups) part += __ldcg(sums + i * apart + mine);
        shared[group][mine] = part;
      }
      __syncthreads();
      sum = inside ? summed(shared, groups, thread) : 0.0f;
    }
    // Whole warps finish, with a thread for each column.
    constexpr int kFinishing = (kTile + 31) / 32 * 32;
    if (thread >= kFinishing) return;
    Epilogue::apply(
        params.epilogue, inside ? column : params.n, params.n, batch, sum,
        [&] { return params.c[batch * params.batch_stride_c + column * params.stride_c]; },
        [&](ElementD value) { params.d[batch * params.batch_stride_d + column * params.stride_d] = value; });
  }
};

}  // namespace atomr_cutlass
