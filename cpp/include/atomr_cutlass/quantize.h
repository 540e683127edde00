// Quantization: scales from the largest magnitudes that share them, values in a narrow type; and back.
//
// The rules are those of quantization.py. Everything is computed in float: a value may so be one step off from one that
// was rounded from double, since a quotient is rounded twice.
#pragma once

#include "atomr_cutlass/kernel_abi.h"
#include "cutlass/array.h"
#include "cutlass/cutlass.h"
#include "cutlass/float8.h"
#include "cutlass/float_subbyte.h"
#include "cutlass/numeric_conversion.h"
#include "cutlass/numeric_types.h"

namespace atomr_cutlass {

enum class QuantizeForm {
  kAmax,  // the largest magnitude of all, to `amax`: what kTensor needs
  kTensor,  // one scale, from `amax`
  kRow,
  kBlock,
};

// Elements that one thread reads and writes at once.
constexpr int kQuantizeVector = 8;

constexpr float kFloatLargest = 3.40282347e+38f, kFloatLeastNormal = 1.17549435e-38f;

// Infinity and NaN take no part in a scale.
CUTLASS_DEVICE float scale_magnitude(float x) {
  float const magnitude = x < 0.0f ? -x : x;
  return magnitude <= kFloatLargest ? magnitude : 0.0f;
}

// The scale of a group whose largest magnitude is `amax`, as the narrow type's largest value is to meet it.
template <class Scale>
struct ScaleOf;

template <>
struct ScaleOf<float> {
  CUTLASS_DEVICE static float make(float amax, float largest, float) {
    if (!(amax > 0.0f)) return 1.0f;
    float const scale = __fdiv_rn(amax, largest);
    return scale < kFloatLeastNormal ? kFloatLeastNormal : scale;
  }
};

template <>
struct ScaleOf<cutlass::float_ue4m3_t> {
  CUTLASS_DEVICE static float make(float amax, float largest, float second) {
    if (!(amax > 0.0f)) return 1.0f;
    float const wanted = __fdiv_rn(__fdiv_rn(amax, largest), second);
    float const smallest = 0.001953125f;  // 2^-9
    return float(cutlass::float_e4m3_t(wanted < smallest ? smallest : (wanted > 448.0f ? 448.0f : wanted)));
  }
};

template <>
struct ScaleOf<cutlass::float_ue8m0_t> {
  CUTLASS_DEVICE static float make(float amax, float, float) {
    if (!(amax > 0.0f)) return 1.0f;
    int const exponent = ilogbf(amax) - 2;  // 4 is e2m1's largest power of two
    return ldexpf(1.0f, exponent < -127 ? -127 : exponent);
  }
};

// Where scales lie: row-major, or in tiles of 128 x 4 (quantization.swizzle_scales gives the source).
template <class Scale>
struct ScaleStore {
  CUTLASS_HOST_DEVICE static int64_t swizzled(int64_t row, int64_t column, int64_t columns) {
    int64_t const tile = row / 128 * ((columns + 3) / 4) + column / 4;
    return tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + column % 4;
  }
  CUTLASS_DEVICE static void write(void* scales, int64_t row, int64_t column, int64_t columns, float scale) {
    uint8_t byte;
    if constexpr (cutlass::platform::is_same<Scale, cutlass::float_ue8m0_t>::value) {
      byte = uint8_t((__float_as_uint(scale) >> 23) & 0xff);  // 2^-127 is a denormal float: exponent field 0
    } else {
      byte = cutlass::float_e4m3_t(scale).raw();
    }
    static_cast<uint8_t*>(scales)[swizzled(row, column, columns)] = byte;
  }
  CUTLASS_DEVICE static float read(void const* scales, int64_t row, int64_t column, int64_t columns) {
    uint8_t const byte = static_cast<uint8_t const*>(scales)[swizzled(row, column, columns)];
    if constexpr (cutlass::platform::is_same<Scale, cutlass::float_ue8m0_t>::value) {
      return byte == 255 ? __uint_as_float(0x7fffffffu) : ldexpf(1.0f, int(byte) - 127);
    } else {
      return float(cutlass::float_e4m3_t::bitcast(byte));
    }
  }
};

template <>
struct ScaleStore<float> {
  CUTLASS_DEVICE static void write(void* scales, int64_t row, int64_t column, int64_t columns, float scale) {
    static_cast<float*>(scales)[row * columns + column] = scale;
  }
  CUTLASS_DEVICE static float read(void const* scales, int64_t row, int64_t column, int64_t columns) {
    return static_cast<float const*>(scales)[row * columns + column];
  }
};

template <class Narrow>
constexpr float largest_of() {
  return cutlass::platform::is_same<Narrow, cutlass::float_e4m3_t>::value
             ? 448.0f
             : (cutlass::platform::is_same<Narrow, cutlass::float_e5m2_t>::value ? 57344.0f : 6.0f);
}

// kRows x kColumns elements share a scale (kBlock); a row is read by as many lanes as its blocks have vectors.
template <class ElementA, class ElementD, class Scale, QuantizeForm kForm, int kRows, int kColumns>
struct Quantize {
  using Args = atomr_cutlass_quantize_args;

  static constexpr int kThreads = 256;
  static constexpr int kMinBlocks = 1;
  static constexpr int kSharedBytes = 0;
  static constexpr int kClusterM = 1, kClusterN = 1, kClusterK = 1;
  static constexpr bool kSmallBlock = kForm == QuantizeForm::kBlock && kRows == 1;
  static constexpr int kLanes = kSmallBlock ? kColumns / kQuantizeVector : 1;

  struct Params {
    int64_t rows, columns, lda;
    ElementA const* a;
    void* d;
    void* scales;
    float* amax;
    float second;
    int32_t blocks;
  };

  static bool can_implement(Args const& args) {
    // Two elements of fp4 share a byte.
    bool const whole = cutlass::sizeof_bits<ElementD>::value == 8 || args.columns % 2 == 0;
    return args.rows > 0 && args.columns > 0 && args.lda >= args.columns && whole;
  }
  static uint64_t workspace_size(Args const&) { return 0; }
  static void clear_range(Args const&, uint64_t& offset, uint64_t& bytes) { offset = bytes = 0; }

  // Pieces of work, each of one thread block.
  static int64_t pieces(Args const& args) {
    if (kForm == QuantizeForm::kRow) return args.rows;
    if (kSmallBlock) {
      int64_t const groups = args.rows * ((args.columns + kColumns - 1) / kColumns);
      return (groups * kLanes + kThreads - 1) / kThreads;
    }
    if (kForm == QuantizeForm::kBlock) {
      return ((args.rows + kRows - 1) / kRows) * ((args.columns + kColumns - 1) / kColumns);
    }
    int64_t const vectors = args.rows * ((args.columns + kQuantizeVector - 1) / kQuantizeVector);
    return (vectors + kThreads - 1) / kThreads;
  }

  static Params params(Args const& args) {
    int64_t const wanted = pieces(args), most = int64_t(args.sm_count) * 32;
    return {args.rows,
            args.columns,
            args.lda,
            static_cast<ElementA const*>(args.a),
            args.d,
            args.scales,
            static_cast<float*>(args.amax),
            float(args.alpha),
            int32_t(wanted < most ? wanted : most)};
  }
  static dim3 grid(Params const& params) { return dim3(uint32_t(params.blocks)); }

  using Values = cutlass::Array<float, kQuantizeVector>;

  CUTLASS_DEVICE static Values load(Params const& params, int64_t row, int64_t column) {
    Values values;
    ElementA const* from = params.a + row * params.lda + column;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kQuantizeVector; ++i) {
      values[i] = column + i < params.columns ? float(from[i]) : 0.0f;
    }
    return values;
  }

  CUTLASS_DEVICE static float largest(Values const& values) {
    float result = 0.0f;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kQuantizeVector; ++i) {
      float const magnitude = scale_magnitude(values[i]);
      result = magnitude > result ? magnitude : result;
    }
    return result;
  }

  CUTLASS_DEVICE static void store(Params const& params, int64_t row, int64_t column, Values values, float scale) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kQuantizeVector; ++i) values[i] = __fdiv_rn(values[i], scale);
    cutlass::NumericArrayConverter<ElementD, float, kQuantizeVector> narrow;
    cutlass::Array<ElementD, kQuantizeVector> const converted = narrow(values);
    constexpr int kBits = cutlass::sizeof_bits<ElementD>::value;
    auto const* const bytes = reinterpret_cast<uint8_t const*>(&converted);
    auto* const to = static_cast<uint8_t*>(params.d) + (row * params.columns + column) * kBits / 8;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kQuantizeVector * kBits / 8; ++i) {
      if (column + i * 8 / kBits < params.columns) to[i] = bytes[i];
    }
  }

  // The largest value of all threads of the block.
  CUTLASS_DEVICE static float block_largest(float value) {
    __shared__ float parts[kThreads / 32];
    for (int step = 16; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, step));
    __syncthreads();  // of the piece before this
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    float result = parts[0];
    for (int i = 1; i < kThreads / 32; ++i) result = fmaxf(result, parts[i]);
    return result;
  }

  CUTLASS_DEVICE static float make_scale(float amax, float second) {
    return ScaleOf<Scale>::make(amax, largest_of<ElementD>(), second);
  }

  CUTLASS_DEVICE static void run(Params const& params, char*) {
    if constexpr (kForm == QuantizeForm::kAmax || kForm == QuantizeForm::kTensor) {
      whole(params);
    } else if constexpr (kSmallBlock) {
      small_blocks(params);
    } else {
      large_blocks(params);
    }
  }

  CUTLASS_DEVICE static void whole(Params const& params) {
    int64_t const across = (params.columns + kQuantizeVector - 1) / kQuantizeVector;
    int64_t const vectors = params.rows * across;
    float scale = 1.0f, amax = 0.0f;
    if constexpr (kForm == QuantizeForm::kTensor) {
      scale = make_scale(*params.amax, 1.0f);
      if (blockIdx.x == 0 && threadIdx.x == 0) static_cast<float*>(params.scales)[0] = scale;
    }
    for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < vectors; i += int64_t(gridDim.x) * kThreads) {
      int64_t const row = i / across, column = i % across * kQuantizeVector;
      Values const values = load(params, row, column);
      if constexpr (kForm == QuantizeForm::kTensor) {
        store(params, row, column, values, scale);
      } else {
        amax = fmaxf(amax, largest(values));
      }
    }
    if constexpr (kForm == QuantizeForm::kAmax) {
      amax = block_largest(amax);
      // Floats that are not negative are ordered as their bits are.
      if (threadIdx.x == 0) atomicMax(reinterpret_cast<unsigned*>(params.amax), __float_as_uint(amax));
    }
  }

  CUTLASS_DEVICE static void small_blocks(Params const& params) {
    int64_t const across = (params.columns + kColumns - 1) / kColumns;
    int64_t const threads = params.rows * across * kLanes;
    int64_t const rounded = (threads + 31) / 32 * 32;  // whole warps take part in the shuffles
    for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < rounded; i += int64_t(gridDim.x) * kThreads) {
      int64_t const group = i / kLanes;
      bool const mine = i < threads;
      int64_t const row = mine ? group / across : 0, block = mine ? group % across : 0;
      int64_t const column = mine ? block * kColumns + i % kLanes * kQuantizeVector : params.columns;
      Values const values = load(params, row, column);
      float amax = largest(values);
      for (int step = kLanes / 2; step > 0; step /= 2) amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, step));
      float const scale = make_scale(amax, params.second);
      if (mine && i % kLanes == 0) ScaleStore<Scale>::write(params.scales, row, block, across, scale);
      store(params, row, column, values, scale * params.second);
    }
  }

  // A thread block for each: a row, or a tile of rows and columns.
  CUTLASS_DEVICE static void large_blocks(Params const& params) {
    constexpr bool kWholeRow = kForm == QuantizeForm::kRow;
    int64_t const width = kWholeRow ? params.columns : int64_t(kColumns);
    int64_t const height = kWholeRow ? 1 : int64_t(kRows);
    int64_t const across = (params.columns + width - 1) / width;
    int64_t const count = across * ((params.rows + height - 1) / height);
    int64_t const vectors = (width + kQuantizeVector - 1) / kQuantizeVector;
    for (int64_t piece = blockIdx.x; piece < count; piece += gridDim.x) {
      int64_t const top = piece / across * height, left = piece % across * width;
      float amax = 0.0f;
      for (int64_t i = threadIdx.x; i < height * vectors; i += kThreads) {
        int64_t const row = top + i / vectors, column = left + i % vectors * kQuantizeVector;
        if (row < params.rows) amax = fmaxf(amax, largest(load(params, row, column)));
      }
      float const scale = make_scale(block_largest(amax), 1.0f);
      if (threadIdx.x == 0) {
        ScaleStore<Scale>::write(params.scales, piece / across, piece % across, across, scale);
      }
      for (int64_t i = threadIdx.x; i < height * vectors; i += kThreads) {
        int64_t const row = top + i / vectors, column = left + i % vectors * kQuantizeVector;
        if (row < params.rows && column < params.columns) {
          store(params, row, column, load(params, row, column), scale);
        }
      }
    }
  }
};

// D = A * scales * alpha, one rounding in float and one in D's type.
template <class ElementA, class ElementD, class Scale>
struct Dequantize {
  using Args = atomr_cutlass_quantize_args;

  static constexpr int kThreads = 256;
  static constexpr int kMinBlocks = 1;
  static constexpr int kSharedBytes = 0;
  static constexpr int kClusterM = 1, kClusterN = 1, kClusterK = 1;

  struct Params {
    int64_t rows, columns;
    uint8_t const* a;
    ElementD* d;
    void const* scales;
    float second;
    int32_t block_rows, block_columns, blocks;
  };

  static bool can_implement(Args const& args) {
    bool const whole = cutlass::sizeof_bits<ElementA>::value == 8 || args.columns % 2 == 0;
    return args.rows > 0 && args.columns > 0 && args.block_rows > 0 && args.block_columns > 0 && whole;
  }
  static uint64_t workspace_size(Args const&) { return 0; }
  static void clear_range(Args const&, uint64_t& offset, uint64_t& bytes) { offset = bytes = 0; }

  static Params params(Args const& args) {
    int64_t const pairs = args.rows * ((args.columns + 1) / 2);
    int64_t const wanted = (pairs + kThreads - 1) / kThreads, most = int64_t(args.sm_count) * 32;
    return {args.rows,
            args.columns,
            static_cast<uint8_t const*>(args.a),
            static_cast<ElementD*>(args.d),
            args.scales,
            float(args.alpha),
            args.block_rows,
            args.block_columns,
            int32_t(wanted < most ? wanted : most)};
  }
  static dim3 grid(Params const& params) { return dim3(uint32_t(params.blocks)); }

  CUTLASS_DEVICE static float element(Params const& params, int64_t row, int64_t column) {
    int64_t const index = row * params.columns + column;
    if constexpr (cutlass::sizeof_bits<ElementA>::value == 8) {
      return float(ElementA::bitcast(params.a[index]));
    } else {
      return float(ElementA::bitcast(uint8_t(params.a[index / 2] >> (index % 2 * 4) & 0xf)));
    }
  }

  CUTLASS_DEVICE static void run(Params const& params, char*) {
    int64_t const across = (params.columns + 1) / 2;
    int64_t const scales = (params.columns + params.block_columns - 1) / params.block_columns;
    for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < params.rows * across;
         i += int64_t(gridDim.x) * kThreads) {
      int64_t const row = i / across;
      for (int64_t column = i % across * 2; column < i % across * 2 + 2 && column < params.columns; ++column) {
        float const scale =
            ScaleStore<Scale>::read(params.scales, row / params.block_rows, column / params.block_columns, scales);
        params.d[row * params.columns + column] = ElementD(element(params, row, column) * (scale * params.second));
      }
    }
  }
};

}  // namespace atomr_cutlass
