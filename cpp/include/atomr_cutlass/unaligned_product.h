// A product of any extents whose operands begin anywhere: its parameters, its tiles, and the sums of thread blocks that
// divide K. A and D are row-major, B may be either.
#pragma once

#include "atomr_cutlass/kernel_abi.h"
#include "atomr_cutlass/rounding.h"
#include "atomr_cutlass/unaligned.h"
#include "cutlass/cutlass.h"
#include "cutlass/numeric_conversion.h"

namespace atomr_cutlass {

template <class Element, class ElementD>
struct UnalignedProduct {
  using Args = atomr_cutlass_gemm_args;

  static constexpr int64_t kMostTiles = (int64_t(1) << 31) - 1, kMostParts = 65535;  // the x and y extents of a grid
  static constexpr int64_t kMostK = int64_t(1) << 30;

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
    int32_t k, rows, columns;  // of a tile
    // Tiles lie one after the other along the side on which they are fewer, so many of them: they share what is longer.
    int32_t beside;
    bool beside_rows;  // along M
    int32_t splits, steps, split_steps;  // thread blocks that divide K; steps of all of it and of one of them
    int32_t batch;
    bool settled[2];  // no launch that may be running writes the operand
  };

  CUTLASS_HOST_DEVICE static constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

  // How a launch divides a product: rows and columns of a tile, and elements of K of a step.
  struct Tiling {
    int64_t rows, columns, step;

    int64_t tiles(Args const& args) const { return ceil_div(args.m, rows) * ceil_div(args.n, columns); }
    int64_t steps(Args const& args) const { return ceil_div(args.k, step); }
    int64_t split_steps(Args const& args) const { return ceil_div(steps(args), args.split_k); }
    int64_t splits(Args const& args) const { return ceil_div(steps(args), split_steps(args)); }
  };

  // Of `splits` thread blocks that divide K, so many leave their sums side by side for one of them to add up. Each of
  // such groups leaves its sums for the last one: nobody reads those of many.
  CUTLASS_HOST_DEVICE static constexpr int group(int splits) {
    if (splits <= 6) return splits;
    int most = 3;
    while (most * most < splits) ++most;
    return most;
  }
  CUTLASS_HOST_DEVICE static constexpr int groups(int splits) { return int(ceil_div(splits, group(splits))); }

  // Whether K may be divided among `split_k` thread blocks in this way.
  static bool can_launch(Args const& args, Tiling const& tiling) {
    auto const is_whole = [](void const* at) { return reinterpret_cast<uint64_t>(at) % sizeof(Element) == 0; };
    return args.m > 0 && args.n > 0 && args.k > 0 && args.k <= kMostK && args.batch > 0 && args.split_k > 0 &&
           tiling.tiles(args) <= kMostTiles && tiling.splits(args) * args.batch <= kMostParts && is_whole(args.a) &&
           is_whole(args.b);
  }

  static uint64_t counters(Args const& args, Tiling const& tiling) {
    return SumsWorkspace::counters(tiling.tiles(args) * args.batch * (1 + groups(int(tiling.splits(args)))));
  }

  static uint64_t workspace_size(Args const& args, Tiling const& tiling) {
    int64_t const splits = tiling.splits(args), sums = tiling.tiles(args) * args.batch * tiling.rows * tiling.columns;
    return splits == 1 ? 0 : counters(args, tiling) + uint64_t(splits * sums) * sizeof(float);
  }

  static Params params(Args const& args, Tiling const& tiling) {
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
    result.rows = int32_t(tiling.rows);
    result.columns = int32_t(tiling.columns);
    int64_t const tiles_m = ceil_div(args.m, tiling.rows), tiles_n = ceil_div(args.n, tiling.columns);
    result.beside_rows = tiles_m < tiles_n;
    result.beside = int32_t(result.beside_rows ? tiles_m : tiles_n);
    result.steps = int32_t(tiling.steps(args));
    result.split_steps = int32_t(tiling.split_steps(args));
    result.splits = int32_t(tiling.splits(args));
    result.batch = args.batch;
    if (result.splits > 1) {
      auto* const workspace = static_cast<char*>(args.workspace);
      result.arrived = reinterpret_cast<uint32_t*>(workspace);
      result.parts = reinterpret_cast<float*>(workspace + counters(args, tiling));
    }
    result.settled[0] = (args.settled & ATOMR_CUTLASS_A_SETTLED) != 0;
    result.settled[1] = (args.settled & ATOMR_CUTLASS_B_SETTLED) != 0;
    return result;
  }

  static dim3 grid(Params const& params) {
    int64_t const tiles = ceil_div(params.extents[0], params.rows) * ceil_div(params.extents[1], params.columns);
    return dim3(uint32_t(tiles), uint32_t(params.splits * params.batch));
  }

  // What a thread block computes: its batch and part of K, and the first row and column of its tile.
  struct Place {
    int batch, split, row, column;

    CUTLASS_DEVICE explicit Place(Params const& params) {
      batch = int(blockIdx.y);
      split = 0;
      if (params.splits > 1) {
        batch = int(blockIdx.y) / params.splits;
        split = int(blockIdx.y) - batch * params.splits;
      }
      int const far = int(blockIdx.x) / params.beside, near = int(blockIdx.x) - far * params.beside;
      row = (params.beside_rows ? near : far) * params.rows;
      column = (params.beside_rows ? far : near) * params.columns;
    }
  };

  // The sums of a tile in shared memory, rows of `kPitch` floats, where `kParts` groups of warps may have left some
  // each, one after the other. Called by all threads when they are there: adds up those of all that divide K, and
  // stores D.
  template <int kRows, int kColumns, int kPitch, int kParts, int kThreads>
  struct Sums {
    static constexpr int kQuads = kRows * kColumns / 4;  // four columns of a row each
    static constexpr int kMine = kQuads / kThreads, kAtOnce = kMine < 8 ? kMine : 8;
    static_assert(kQuads % kThreads == 0 && kMine % kAtOnce == 0);

    Params const& params;
    float* all;

    // `shared` is for one number, beside the sums.
    CUTLASS_DEVICE void finish(uint32_t* shared) const {
      Place const place(params);
      if (params.splits == 1) {
        store<kParts>(place);
      } else if (add_up(place, shared)) {
        store<1>(place);
      }
    }

   private:
    CUTLASS_DEVICE float4& quad(int i) const {
      return *reinterpret_cast<float4*>(all + i / (kColumns / 4) * kPitch + i % (kColumns / 4) * 4);
    }

    CUTLASS_DEVICE static void add(float4& sum, float4 const& next) {
      sum.x += next.x, sum.y += next.y, sum.z += next.z, sum.w += next.w;
    }

    // Sums of `kOf` groups of warps.
    template <int kOf>
    CUTLASS_DEVICE void leave(float4* part, int count) const {
#pragma unroll 4
      for (int i = int(threadIdx.x); i < count; i += kThreads) {
        float4 sum = quad(i);
        CUTLASS_PRAGMA_UNROLL
        for (int of = 1; of < kOf; ++of) add(sum, *(&quad(i) + of * kRows * kPitch / 4));
        __stcg(part + i, sum);
      }
    }

    // Parts `first`, `first + every`, and so on before `end`, in their order, into shared memory.
    CUTLASS_DEVICE void collect(float4 const* parts, int count, int first, int every, int end) const {
#pragma unroll 1
      for (int begin = int(threadIdx.x); begin < count; begin += kThreads * kAtOnce) {
        float4 sums[kAtOnce] = {};
#pragma unroll(kAtOnce < 4 ? 8 : 2)
        for (int split = first; split < end; split += every) {
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < kAtOnce; ++i) {
            if (begin + i * kThreads < count) add(sums[i], __ldcg(parts + split * kQuads + begin + i * kThreads));
          }
        }
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kAtOnce; ++i) {
          if (begin + i * kThreads < count) quad(begin + i * kThreads) = sums[i];
        }
      }
      __syncthreads();
    }

    // Whether shared memory has the sums of all thread blocks now.
    CUTLASS_DEVICE bool add_up(Place const& place, uint32_t* shared) const {
      int const splits = params.splits, of_group = group(splits), all_groups = groups(splits);
      int const count = min(params.extents[0] - place.row, kRows) * (kColumns / 4);
      int64_t const tile = int64_t(place.batch) * gridDim.x + blockIdx.x;
      auto* const parts = reinterpret_cast<float4*>(params.parts) + tile * splits * kQuads;
      uint32_t* const arrived = params.arrived + tile * (1 + all_groups);
      leave<kParts>(parts + place.split * kQuads, count);
      int const in_group = place.split / of_group, first = in_group * of_group, end = min(first + of_group, splits);
      if (!SumsWorkspace::is_last(arrived + 1 + in_group, end - first, shared)) return false;
      collect(parts, count, first, 1, end);
      if (all_groups == 1) return true;
      leave<1>(parts + first * kQuads, count);
      if (!SumsWorkspace::is_last(arrived, all_groups, shared)) return false;
      collect(parts, count, 0, of_group, splits);
      return true;
    }

    template <int kOf>
    CUTLASS_DEVICE float sum_at(int row, int column) const {
      float const* const from = all + row * kPitch + column;
      float sum = *from;
      CUTLASS_PRAGMA_UNROLL
      for (int of = 1; of < kOf; ++of) sum += from[of * kRows * kPitch];
      return times(params.alpha, sum);
    }

    // Threads side by side store a row, by pairs from the first address on at which a pair may begin.
    template <int kOf>
    CUTLASS_DEVICE void store(Place const& place) const {
      constexpr int kAcross = kColumns < 64 ? kColumns / 2 : 32, kBetween = kThreads / kAcross;
      using Convert = cutlass::NumericConverter<ElementD, float>;
      struct alignas(2 * sizeof(ElementD)) Pair {
        ElementD elements[2];
      };
      int const rows = min(params.extents[0] - place.row, kRows);
      int const columns = min(params.extents[1] - place.column, kColumns);
      int const lane = int(threadIdx.x) % kAcross, first = int(threadIdx.x) / kAcross;
      ElementD* d = params.d + place.batch * params.d_batch + (place.row + first) * params.ldd + place.column;
      if (params.beta != 0.0f) {
        ElementD const* c = params.c + place.batch * params.c_batch + (place.row + first) * params.ldc + place.column;
#pragma unroll 1
        for (int i = first; i < rows; i += kBetween, d += kBetween * params.ldd, c += kBetween * params.ldc) {
#pragma unroll 1
          for (int j = lane; j < columns; j += kAcross) {
            d[j] = Convert::convert(plus_source(sum_at<kOf>(i, j), params.beta, float(c[j])));
          }
        }
        return;
      }
#pragma unroll 2
      for (int i = first; i < rows; i += kBetween, d += kBetween * params.ldd) {
        int const odd = int(reinterpret_cast<uint64_t>(d) / sizeof(ElementD) % 2);
        if (odd > lane) d[0] = Convert::convert(sum_at<kOf>(i, 0));
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < kColumns / 2 / kAcross; ++j) {
          int const at = 2 * (j * kAcross + lane) + odd;  // the pitch has room for one more
          Pair const pair{{Convert::convert(sum_at<kOf>(i, at)), Convert::convert(sum_at<kOf>(i, at + 1))}};
          if (at + 1 < columns) {
            *reinterpret_cast<Pair*>(d + at) = pair;
          } else if (at < columns) {
            d[at] = pair.elements[0];
          }
        }
      }
    }
  };
};

}  // namespace atomr_cutlass
