// Depthwise convolutions, where every channel is a group of its own. An implicit GEMM would have one column for each
// group: these kernels compute them directly, for any stride and dilation, in fp32, and are bound by memory.
//
// A thread block has 256 threads. Each has kVector channels of kTileM / (256 kVector / kTileN) pixels.
//
// Functions without an annotation run on the host when nvcc compiles them, and on the device under NVRTC, whose
// -default-device makes them device functions.
#pragma once

#include "atomr_cutlass/activation.h"
#include "atomr_cutlass/conv_problem.h"
#include "atomr_cutlass/kernel_abi.h"
#include "cutlass/array.h"
#include "cutlass/conv/convolution.h"
#include "cutlass/cutlass.h"
#include "cutlass/fast_math.h"
#include "cutlass/numeric_conversion.h"
#include "cutlass/numeric_types.h"

namespace atomr_cutlass {

template <cutlass::conv::Operator kOperator, class Element, class ElementD, int kVector, int kTileM, int kTileN,
          class Function>
struct ConvDepthwise {
  using Args = atomr_cutlass_conv_args;
  using Operator = cutlass::conv::Operator;
  static constexpr bool kFprop = kOperator == Operator::kFprop;
  static constexpr bool kDgrad = kOperator == Operator::kDgrad;
  static constexpr bool kWgrad = kOperator == Operator::kWgrad;

  static constexpr int kThreads = 256;
  static constexpr int kMinBlocks = 1;
  static constexpr int kChannelThreads = kTileN / kVector;
  static constexpr int kPixelThreads = kThreads / kChannelThreads;
  static constexpr int kPixels = kTileM / kPixelThreads;
  static constexpr int kMaxTaps = 128;  // 11 x 11, say
  static_assert(kThreads % kChannelThreads == 0 && kTileM % kPixelThreads == 0,
                "threads have whole vectors and pixels");
  static_assert(kTileN <= kThreads, "wgrad has a thread for each channel of a tile");
  static_assert(kWgrad || sizeof(ElementD) == sizeof(Element), "results are stored in vectors like the operand's");
  // The filter of the block's channels, or what its threads have summed.
  static constexpr int kSharedBytes = int(sizeof(float)) * kTileN * (kWgrad ? kPixelThreads : kMaxTaps);
  static constexpr int kClusterM = 1, kClusterN = 1, kClusterK = 1;

  using Vector = cutlass::AlignedArray<Element, kVector>;
  using Sums = cutlass::Array<float, kVector>;

  struct Strides {
    int64_t n, h, w;
  };
  struct Params {
    void const* a;
    void const* b;
    void const* c;
    void* d;
    void const* bias;
    int32_t* arrived; /* wgrad: blocks that have left their sums, for each tile */
    float* partial;   /* wgrad: their sums */
    Strides x, w, y;  /* in elements; those of w by k, r and s */
    int32_t channels, height, width, r, s, p, q;
    int32_t pad_h, pad_w, stride_h, stride_w, dilation_h, dilation_w;
    int32_t pixels; /* of the result; of y in wgrad */
    int32_t split, tiles;
    cutlass::FastDivmod image, row; /* pixels of an image, and of one of its rows */
    float alpha, beta;
  };

  static int tiles(Args const& args) { return (args.c + kTileN - 1) / kTileN; }

  // The counters come first; the sums are aligned like the workspace itself.
  static uint64_t counter_bytes(Args const& args) {
    if (!kWgrad || args.split_k == 1) return 0;
    return (uint64_t(args.r) * args.s * tiles(args) * sizeof(int32_t) + 255) / 256 * 256;
  }

  static Params params(Args const& args) {
    Params result{};
    result.a = args.a;
    result.b = args.b;
    result.c = args.c_source;
    result.d = args.d;
    result.bias = args.bias;
    if (counter_bytes(args) > 0) {
      result.arrived = static_cast<int32_t*>(args.workspace);
      result.partial = reinterpret_cast<float*>(static_cast<char*>(args.workspace) + counter_bytes(args));
    }
    result.x = {args.x_stride_n, args.x_stride_h, args.x_stride_w};
    result.w = {args.w_stride_k, args.w_stride_r, args.w_stride_s};
    result.y = {args.y_stride_n, args.y_stride_p, args.y_stride_q};
    result.channels = args.c;
    result.height = args.h;
    result.width = args.w;
    result.r = args.r;
    result.s = args.s;
    result.p = args.p;
    result.q = args.q;
    result.pad_h = args.pad_h;
    result.pad_w = args.pad_w;
    result.stride_h = args.stride_h;
    result.stride_w = args.stride_w;
    result.dilation_h = args.dilation_h;
    result.dilation_w = args.dilation_w;
    int32_t const rows = kDgrad ? args.h : args.p, columns = kDgrad ? args.w : args.q;
    result.pixels = args.n * rows * columns;
    result.image = cutlass::FastDivmod(rows * columns);
    result.row = cutlass::FastDivmod(columns);
    result.split = kWgrad ? args.split_k : 1;
    result.tiles = tiles(args);
    result.alpha = float(args.alpha);
    result.beta = float(args.beta);
    return result;
  }

  static bool can_implement(Args const& args) {
    if (!consistent(args) || args.groups != args.c || args.groups != args.k) return false;
    if (args.r > kMaxTaps || args.s > kMaxTaps || args.r * args.s > kMaxTaps) return false;
    if (kWgrad ? args.bias != nullptr : args.split_k != 1) return false;
    if (!tensor_x(args).aligned(kVector) || !tensor_y(args).aligned(kVector)) return false;
    int64_t const largest = (int64_t(1) << 31) - 1 - int64_t(kTileM) * 65535;
    if (int64_t(args.n) * args.h * args.w > largest || int64_t(args.n) * args.p * args.q > largest) return false;
    return tiles(args) <= 65535 && args.split_k <= 65535;
  }

  static uint64_t workspace_size(Args const& args) {
    uint64_t const counters = counter_bytes(args);
    if (counters == 0) return 0;
    return counters + uint64_t(args.split_k) * args.r * args.s * tiles(args) * kTileN * sizeof(float);
  }

  static void clear_range(Args const& args, uint64_t& offset, uint64_t& bytes) {
    offset = 0;
    bytes = counter_bytes(args);
  }

  static dim3 grid(Params const& params) {
    if (kWgrad) return dim3(uint32_t(params.r * params.s), uint32_t(params.tiles), uint32_t(params.split));
    return dim3(uint32_t((params.pixels + kTileM - 1) / kTileM), uint32_t(params.tiles), 1);
  }

  CUTLASS_DEVICE static Vector load(void const* tensor, int64_t offset) {
    return *reinterpret_cast<Vector const*>(static_cast<Element const*>(tensor) + offset);
  }

  CUTLASS_DEVICE static float widen(Element value) { return cutlass::NumericConverter<float, Element>{}(value); }

  CUTLASS_DEVICE static float activated(float value) {
    if constexpr (cutlass::platform::is_same<Function, void>::value) {
      return value;
    } else {
      return Function::apply(value);
    }
  }

  // Where a filter's tap meets the other tensor of an fprop or a dgrad; whether it does.
  CUTLASS_DEVICE static bool meets(Params const& params, int row, int column, int r, int s, int& other_row,
                                   int& other_column) {
    if constexpr (kDgrad) {
      int const from_row = row + params.pad_h - r * params.dilation_h;
      int const from_column = column + params.pad_w - s * params.dilation_w;
      other_row = from_row / params.stride_h;
      other_column = from_column / params.stride_w;
      return from_row >= 0 && from_column >= 0 && other_row * params.stride_h == from_row &&
             other_column * params.stride_w == from_column && other_row < params.p && other_column < params.q;
    } else {
      other_row = row * params.stride_h - params.pad_h + r * params.dilation_h;
      other_column = column * params.stride_w - params.pad_w + s * params.dilation_w;
      return other_row >= 0 && other_column >= 0 && other_row < params.height && other_column < params.width;
    }
  }

  CUTLASS_DEVICE static void locate(Params const& params, int pixel, int& n, int& row, int& column) {
    int rest;
    params.image(n, rest, pixel);
    params.row(row, column, rest);
  }

  CUTLASS_DEVICE static void run(Params const& params, char* shared) {
    if constexpr (kWgrad) {
      sum_filter(params, reinterpret_cast<float*>(shared));
    } else {
      convolve(params, reinterpret_cast<float*>(shared));
    }
  }

  CUTLASS_DEVICE static void convolve(Params const& params, float* filter) {
    int const first = int(blockIdx.y) * kTileN;
    auto const* const w = static_cast<Element const*>(params.b);
    for (int i = int(threadIdx.x); i < params.r * params.s * kTileN; i += kThreads) {
      int const channel = first + i % kTileN, tap = i / kTileN;
      filter[i] = channel < params.channels
                      ? widen(w[channel * params.w.n + tap / params.s * params.w.h + tap % params.s * params.w.w])
                      : 0.0f;
    }
    __syncthreads();
    int const lane = int(threadIdx.x) % kChannelThreads;
    int const channel = first + lane * kVector;
    if (channel >= params.channels) return;
    int const pixel = (int(blockIdx.x) * kPixelThreads + int(threadIdx.x) / kChannelThreads) * kPixels;

    int n[kPixels], row[kPixels], column[kPixels];
    Sums sums[kPixels];
    CUTLASS_PRAGMA_UNROLL
    for (int t = 0; t < kPixels; ++t) {
      locate(params, pixel + t, n[t], row[t], column[t]);
      sums[t].clear();
    }
    Strides const& from = kFprop ? params.x : params.y;
    Strides const& to = kFprop ? params.y : params.x;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int r = 0; r < params.r; ++r) {
      CUTLASS_PRAGMA_NO_UNROLL
      for (int s = 0; s < params.s; ++s) {
        float const* const taps = filter + (r * params.s + s) * kTileN + lane * kVector;
        float weights[kVector];
        CUTLASS_PRAGMA_UNROLL
        for (int v = 0; v < kVector; ++v) weights[v] = taps[v];
        CUTLASS_PRAGMA_UNROLL
        for (int t = 0; t < kPixels; ++t) {
          int other_row, other_column;
          bool const met = meets(params, row[t], column[t], r, s, other_row, other_column);
          if (!met || pixel + t >= params.pixels) continue;
          Vector const values = load(params.a, n[t] * from.n + other_row * from.h + other_column * from.w + channel);
          CUTLASS_PRAGMA_UNROLL
          for (int v = 0; v < kVector; ++v) sums[t][v] = fmaf(widen(values[v]), weights[v], sums[t][v]);
        }
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int t = 0; t < kPixels; ++t) {
      if (pixel + t >= params.pixels) continue;
      int64_t const offset = n[t] * to.n + row[t] * to.h + column[t] * to.w + channel;
      Vector result, source;
      if (params.c != nullptr) source = load(params.c, offset);
      CUTLASS_PRAGMA_UNROLL
      for (int v = 0; v < kVector; ++v) {
        float value = params.alpha * sums[t][v];
        if (params.c != nullptr) value += params.beta * widen(source[v]);
        if (params.bias != nullptr) value += widen(static_cast<Element const*>(params.bias)[channel + v]);
        result[v] = cutlass::NumericConverter<Element, float>{}(activated(value));
      }
      *reinterpret_cast<Vector*>(static_cast<Element*>(params.d) + offset) = result;
    }
  }

  // One tap of a tile's channels, summed over one slice of the pixels of y.
  CUTLASS_DEVICE static void sum_filter(Params const& params, float* shared) {
    int const first = int(blockIdx.y) * kTileN;
    int const r = int(blockIdx.x) / params.s, s = int(blockIdx.x) % params.s;
    int const lane = int(threadIdx.x) % kChannelThreads, group = int(threadIdx.x) / kChannelThreads;
    int const channel = first + lane * kVector;
    Sums sums;
    sums.clear();
    if (channel < params.channels) {
      int const step = kTileM * params.split;
      CUTLASS_PRAGMA_NO_UNROLL
      for (int base = int(blockIdx.z) * kTileM; base < params.pixels; base += step) {
        CUTLASS_PRAGMA_UNROLL
        for (int t = 0; t < kPixels; ++t) {
          int const pixel = base + t * kPixelThreads + group;
          int n, row, column, other_row, other_column;
          locate(params, pixel, n, row, column);
          bool const met = meets(params, row, column, r, s, other_row, other_column);
          if (!met || pixel >= params.pixels) continue;
          Vector const y = load(params.a, n * params.y.n + row * params.y.h + column * params.y.w + channel);
          Vector const x =
              load(params.b, n * params.x.n + other_row * params.x.h + other_column * params.x.w + channel);
          CUTLASS_PRAGMA_UNROLL
          for (int v = 0; v < kVector; ++v) sums[v] = fmaf(widen(y[v]), widen(x[v]), sums[v]);
        }
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int v = 0; v < kVector; ++v) shared[group * kTileN + lane * kVector + v] = sums[v];
    __syncthreads();

    int const mine = int(threadIdx.x);
    float total = 0.0f;
    if (mine < kTileN) {
      for (int i = 0; i < kPixelThreads; ++i) total += shared[i * kTileN + mine];
    }
    if (params.split > 1) {
      // The block that comes last adds the slices in their order, so that the result is the same every time.
      int64_t const tile = int64_t(blockIdx.x) * gridDim.y + blockIdx.y;
      float* const place = params.partial + tile * params.split * kTileN;
      if (mine < kTileN) place[blockIdx.z * kTileN + mine] = total;
      __threadfence();
      __syncthreads();
      auto& last = *reinterpret_cast<int*>(shared);
      if (mine == 0) last = atomicAdd(params.arrived + tile, 1) == params.split - 1;
      __syncthreads();
      if (!last) return;
      __threadfence();
      if (mine < kTileN) {
        total = 0.0f;
        for (int i = 0; i < params.split; ++i) total += __ldcg(place + i * kTileN + mine);
      }
    }
    if (mine >= kTileN || first + mine >= params.channels) return;
    int64_t const offset = (first + mine) * params.w.n + r * params.w.h + s * params.w.w;
    float value = params.alpha * total;
    if (params.c != nullptr) {
      value +=
          params.beta * cutlass::NumericConverter<float, ElementD>{}(static_cast<ElementD const*>(params.c)[offset]);
    }
    static_cast<ElementD*>(params.d)[offset] = cutlass::NumericConverter<ElementD, float>{}(value);
  }
};

}  // namespace atomr_cutlass
