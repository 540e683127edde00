// The mainloop of convolutions of the sm90 generation, in the place of CUTLASS's: that of GEMMs (mainloop_tma.h), with
// an operand whose rows, or whose K, are the pixels of images. TMA finds them by itself (im2col): it is told a pixel of
// the first place of the filter, and how far from there the place in question is.
//
// fprop and dgrad: rows of A are pixels; K is the channels, by steps, for each of the filter's places after one
// another. wgrad: K is the pixels; A is dy, B is x; the filter's places are what the kernel takes for batches.
#pragma once

#include "atomr_cutlass/conv_problem.h"
#include "atomr_cutlass/mainloop_tma.h"
#include "atomr_cutlass/tma_tile.h"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/fast_math.h"

namespace atomr_cutlass {

// The pixels of images by their number, columns first.
struct PixelNumbers {
  cutlass::FastDivmod columns, rows;
  int32_t first_column, first_row, step_column, step_row;  // where pixel 0 lies, and from one to the next

  struct Place {
    int column, row, image;
  };
  CUTLASS_HOST_DEVICE Place place(int number) const {
    int line, column, image, row;
    columns(line, column, number);
    rows(image, row, line);
    return {first_column + column * step_column, first_row + row * step_row, image};
  }
};

// A tile of pixels and their channels, or of C or D.
template <class Boxes>
struct PixelBoxes {
  // The tensor map of pixels from the lower corners on to the upper ones; `shares` as for TmaTile's.
  static cute::TmaDescriptor map(void const* address, PixelTensor const& images, PixelNumbers const& numbers,
                                 int32_t upper_column, int32_t upper_row, int shares = 1) {
    cute::TmaDescriptor result{};
#if !defined(__CUDACC_RTC__) || defined(ATOMR_CUTLASS_EVALUATE)
    constexpr int kBytes = Boxes::kElementBytes;
    uint64_t const dims[4] = {uint64_t(images.channels), uint64_t(images.columns), uint64_t(images.rows),
                              uint64_t(images.outer)};
    uint64_t const strides[3] = {uint64_t(images.stride_column) * kBytes, uint64_t(images.stride_row) * kBytes,
                                 uint64_t(images.stride_outer) * kBytes};
    int const lower[2] = {numbers.first_column, numbers.first_row}, upper[2] = {upper_column, upper_row};
    uint32_t const steps[4] = {1, uint32_t(numbers.step_column), uint32_t(numbers.step_row), 1};
    (void)CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeIm2col)(
        &result, cute::TMA::to_CUtensorMapDataType<typename Boxes::Element>(), 4, const_cast<void*>(address), dims,
        strides, lower, upper, uint32_t(Boxes::kWidth), uint32_t(Boxes::kLineCount / shares), steps,
        CU_TENSOR_MAP_INTERLEAVE_NONE, Boxes::kSwizzle, CU_TENSOR_MAP_L2_PROMOTION_NONE,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
#endif
    return result;
  }

  CUTLASS_DEVICE static void load(cute::TmaDescriptor const& map, uint64_t* full, char* tile, int channel,
                                  PixelNumbers::Place const& at, int beyond_column = 0, int beyond_row = 0) {
    CUTLASS_PRAGMA_UNROLL
    for (int box = 0; box < Boxes::kBoxes; ++box) {
      cute::SM90_TMA_LOAD_IM2COL_4D::copy(&map, full, tile + box * Boxes::kBoxBytes, channel + box * Boxes::kWidth,
                                          at.column, at.row, at.image, uint16_t(beyond_column), uint16_t(beyond_row));
    }
  }
  CUTLASS_DEVICE static void load_shared(cute::TmaDescriptor const& map, uint64_t* full, uint16_t blocks, char* tile,
                                         int channel, PixelNumbers::Place const& at, int beyond_column,
                                         int beyond_row) {
    CUTLASS_PRAGMA_UNROLL
    for (int box = 0; box < Boxes::kBoxes; ++box) {
      cute::SM90_TMA_LOAD_IM2COL_MULTICAST_4D::copy(&map, full, blocks, tile + box * Boxes::kBoxBytes,
                                                    channel + box * Boxes::kWidth, at.column, at.row, at.image,
                                                    uint16_t(beyond_column), uint16_t(beyond_row));
    }
  }
  CUTLASS_DEVICE static void store(cute::TmaDescriptor const& map, char const* tile, int channel,
                                   PixelNumbers::Place const& at) {
    CUTLASS_PRAGMA_UNROLL
    for (int box = 0; box < Boxes::kBoxes; ++box) {
      cute::SM90_TMA_STORE_IM2COL_4D::copy(&map, tile + box * Boxes::kBoxBytes, channel + box * Boxes::kWidth,
                                           at.column, at.row, at.image);
    }
  }
};

// A tile of one place of filters: their input channels, by output channels as lines.
template <class Boxes>
struct FilterBoxes {
  static cute::TmaDescriptor map(void const* address, PixelTensor const& filter, int shares) {
    cute::TmaDescriptor result{};
#if !defined(__CUDACC_RTC__) || defined(ATOMR_CUTLASS_EVALUATE)
    constexpr int kBytes = Boxes::kElementBytes;
    uint64_t const dims[4] = {uint64_t(filter.channels), uint64_t(filter.outer), uint64_t(filter.columns),
                              uint64_t(filter.rows)};
    uint64_t const strides[3] = {uint64_t(filter.stride_outer) * kBytes, uint64_t(filter.stride_column) * kBytes,
                                 uint64_t(filter.stride_row) * kBytes};
    uint32_t const box[4] = {Boxes::kWidth, uint32_t(Boxes::kLineCount / shares), 1, 1}, steps[4] = {1, 1, 1, 1};
    (void)CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeTiled)(
        &result, cute::TMA::to_CUtensorMapDataType<typename Boxes::Element>(), 4, const_cast<void*>(address), dims,
        strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, Boxes::kSwizzle, Boxes::kPromotion,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
#endif
    return result;
  }

  // `blocks`: those of the cluster that get it, or 0 for this one alone.
  template <bool kShared>
  CUTLASS_DEVICE static void load(cute::TmaDescriptor const& map, uint64_t* full, uint16_t blocks, char* tile,
                                  int channel, int line, int column, int row) {
    constexpr auto kHint = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    CUTLASS_PRAGMA_UNROLL
    for (int box = 0; box < Boxes::kBoxes; ++box) {
      char* const to = tile + box * Boxes::kBoxBytes;
      if constexpr (kShared) {
        cute::SM90_TMA_LOAD_MULTICAST_4D::copy(&map, full, blocks, kHint, to, channel + box * Boxes::kWidth, line,
                                               column, row);
      } else {
        cute::SM90_TMA_LOAD_4D::copy(&map, full, kHint, to, channel + box * Boxes::kWidth, line, column, row);
      }
    }
  }
};

// What convolutions of every kind are given.
struct ConvGeometry {
  PixelTensor images;  // the operand whose pixels are looked for
  PixelTensor other;  // the filter; of wgrad dy
  PixelNumbers numbers;
  int32_t upper_column, upper_row;
  int32_t beyond_column, beyond_row;  // from a pixel of the first corner to that of the filter's first place
  int32_t dilation_column, dilation_row;  // from there to the next place
  int32_t places_column, places_row;  // of the filter
};

// Base: TmaMainloop. kWgrad: whether K is the pixels, else the rows of A are.
template <class Base, bool kWgrad>
struct ConvMainloop : Base {
  using Base::kClusterM;
  using Base::kClusterN;
  using Base::kK;
  using Base::kM;
  using Base::kN;
  using typename Base::MainloopPipeline;
  using typename Base::PipelineState;
  using typename Base::TensorStorage;
  using typename Base::TileA;
  using typename Base::TileB;

  struct Arguments {
    typename Base::ElementA const* ptr_A;
    typename Base::ElementB const* ptr_B;
    ConvGeometry geometry;
  };
  struct Params {
    cute::TmaDescriptor a, b;
    uint32_t tma_transaction_bytes = TileA::kBytes + TileB::kBytes;
    PixelNumbers numbers;
    int32_t beyond_column, beyond_row, dilation_column, dilation_row;
    int32_t places_column, steps;  // the latter along the channels of one place
  };

  template <class Problem>
  static Params to_underlying_arguments(Problem const&, Arguments const& args, void*) {
    ConvGeometry const& geometry = args.geometry;
    auto const pixels = [&](auto boxes, void const* address, int shares) {
      return PixelBoxes<decltype(boxes)>::map(address, geometry.images, geometry.numbers, geometry.upper_column,
                                              geometry.upper_row, shares);
    };
    Params result{};
    if constexpr (kWgrad) {
      PixelTensor const& dy = geometry.other;
      int const count = int(dy.outer * dy.rows * dy.columns);
      result.a = TileA::Boxes::map(args.ptr_A, int(dy.channels), count, 1, dy.channels, dy.channels * count, kClusterN);
      result.b = pixels(typename TileB::Boxes{}, args.ptr_B, kClusterM);
    } else {
      result.a = pixels(typename TileA::Boxes{}, args.ptr_A, kClusterN);
      result.b = FilterBoxes<typename TileB::Boxes>::map(args.ptr_B, geometry.other, kClusterM);
      result.steps = int32_t((geometry.images.channels + kK - 1) / kK);
    }
    result.numbers = geometry.numbers;
    result.beyond_column = geometry.beyond_column;
    result.beyond_row = geometry.beyond_row;
    result.dilation_column = geometry.dilation_column;
    result.dilation_row = geometry.dilation_row;
    result.places_column = geometry.places_column;
    return result;
  }

  CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& params) {
    cute::prefetch_tma_descriptor(&params.a);
    cute::prefetch_tma_descriptor(&params.b);
  }

  template <class Problem>
  CUTLASS_DEVICE auto load_init(Problem const& problem, Params const&) const {
    return Base::load_init(problem, typename Base::Params{});
  }

  // A step of K of fprop and dgrad: which along the channels, at which place of the filter.
  struct Step {
    int along, column, row;
  };
  CUTLASS_HOST_DEVICE static Step step_of(Params const& params, int number) {
    int const place = number / params.steps, row = place / params.places_column;
    return {number - place * params.steps, place - row * params.places_column, row};
  }
  CUTLASS_HOST_DEVICE static void advance(Params const& params, Step& step) {
    if (++step.along < params.steps) return;
    step.along = 0;
    if (++step.column < params.places_column) return;
    step.column = 0;
    ++step.row;
  }
  // How far a place of the filter is from what TMA is told for pixels.
  CUTLASS_HOST_DEVICE static int beyond_column(Params const& params, int column) {
    return params.beyond_column + column * params.dilation_column;
  }
  CUTLASS_HOST_DEVICE static int beyond_row(Params const& params, int row) {
    return params.beyond_row + row * params.dilation_row;
  }

  template <class Inputs, class Where, class Steps>
  CUTLASS_DEVICE void load(Params const& params, MainloopPipeline pipeline, PipelineState state, Inputs const&,
                           Where const& where, Steps first, int count, int, uint32_t rank, TensorStorage& shared) {
    if (!cute::elect_one_sync()) return;
    int const in_m = int(rank) % kClusterM, in_n = int(rank) / kClusterM;
    uint16_t shared_a = 0, shared_b = 0;
    for (int n = 0; n < kClusterN; ++n) shared_a |= uint16_t(1) << (in_m + n * kClusterM);
    for (int m = 0; m < kClusterM; ++m) shared_b |= uint16_t(1) << (m + in_n * kClusterM);
    int const m = int(cute::get<0>(where)) * kM, n = int(cute::get<1>(where)) * kN;
    auto const pixels = [&](auto tile, cute::TmaDescriptor const& map, uint64_t* full, uint16_t blocks, char* to,
                            int share, int channel, PixelNumbers::Place const& at, int column, int row) {
      using Tile = decltype(tile);
      using Boxes = PixelBoxes<typename Tile::Boxes>;
      char* const there = to + share * Tile::kLines * Tile::Boxes::kWidthBytes;
      int const right = beyond_column(params, column), below = beyond_row(params, row);
      if constexpr (Tile::kLines < Tile::Boxes::kLineCount) {
        Boxes::load_shared(map, full, blocks, there, channel, at, right, below);
      } else {
        Boxes::load(map, full, there, channel, at, right, below);
      }
    };

    if constexpr (kWgrad) {
      int const place = int(cute::get<3>(where));
      int const row = place / params.places_column, column = place - row * params.places_column;
      int k = int(*first) * kK;
      CUTLASS_PRAGMA_NO_UNROLL
      for (; count > 0; --count) {
        pipeline.producer_acquire(state);
        uint64_t* const full = pipeline.producer_get_barrier(state);
        int const stage = state.index();
        TileA::load(params.a, full, shared_a, shared.a + stage * TileA::kBytes, in_n, m, k, 0);
        pixels(TileB{}, params.b, full, shared_b, shared.b + stage * TileB::kBytes, in_m, n,
               params.numbers.place(k + in_m * TileB::kLines), column, row);
        k += kK;
        ++state;
      }
    } else {
      PixelNumbers::Place const at = params.numbers.place(m + in_n * TileA::kLines);
      Step step = step_of(params, int(*first));
      CUTLASS_PRAGMA_NO_UNROLL
      for (; count > 0; --count) {
        pipeline.producer_acquire(state);
        uint64_t* const full = pipeline.producer_get_barrier(state);
        int const k = step.along * kK, stage = state.index();
        pixels(TileA{}, params.a, full, shared_a, shared.a + stage * TileA::kBytes, in_n, k, at, step.column, step.row);
        int const along = TileB::kAlongRows ? n : k, line = (TileB::kAlongRows ? k : n) + in_m * TileB::kLines;
        char* const b = shared.b + stage * TileB::kBytes + in_m * TileB::kLines * TileB::Boxes::kWidthBytes;
        FilterBoxes<typename TileB::Boxes>::template load<(kClusterM > 1)>(params.b, full, shared_b, b, along, line,
                                                                           step.column, step.row);
        advance(params, step);
        ++state;
      }
    }
  }

  template <class Sums>
  CUTLASS_DEVICE void mma(MainloopPipeline pipeline, PipelineState state, Sums& sums, int count, int thread,
                          TensorStorage& shared, Params const&) {
    Base::mma(pipeline, state, sums, count, thread, shared, typename Base::Params{});
  }
};

// C and D whose rows are the pixels of images, for TmaEpilogue.
struct InImages {
  struct Arguments {
    PixelTensor images;
  };
  using Params = PixelNumbers;

  static Params params(Arguments const& args) {
    return {cutlass::FastDivmod(int(args.images.columns)), cutlass::FastDivmod(int(args.images.rows)), 0, 0, 1, 1};
  }

  template <class Boxes, bool kColumnMajor, class Problem, class Stride>
  static cute::TmaDescriptor map(Problem const&, Arguments const& args, void const* address, Stride const&) {
    static_assert(!kColumnMajor, "the channels of pixels are contiguous");
    return PixelBoxes<Boxes>::map(address, args.images, params(args), 0, 0);
  }

  template <class Boxes, bool kColumnMajor>
  CUTLASS_DEVICE static void load(Params const& params, cute::TmaDescriptor const& map, uint64_t* full, char* to, int m,
                                  int n, int) {
    PixelBoxes<Boxes>::load(map, full, to, n, params.place(m));
  }
  template <class Boxes, bool kColumnMajor>
  CUTLASS_DEVICE static void store(Params const& params, cute::TmaDescriptor const& map, char const* from, int m, int n,
                                   int) {
    PixelBoxes<Boxes>::store(map, from, n, params.place(m));
  }
};

}  // namespace atomr_cutlass
