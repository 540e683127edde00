// Epilogue trees: what the generated sources say of a tree, and how a thread evaluates it for a part of a tile. The
// visitors of CUTLASS 3.x (epilogue_visitor.h) and 2.x (gemm_sm80_tree.h) call this.
//
// A generated tree is a struct with
//   Value            float, or double where the accumulator is one
//   Inputs, Outputs  Operands<TreeInput<...>...> and Operands<TreeOutput<...>...>, in the order of the tree's program
//   evaluate(acc, in, out)  D's value from the accumulator's, and the values of the outputs from those of the inputs.
//
// A tree of epilogue_common.h is several: instead of `evaluate` it has
//   chosen(number, f)  f(a type that has `evaluate`), of the tree that the arguments ask for.
#pragma once

#include "atomr_cutlass/epilogue_ops.h"
#include "atomr_cutlass/kernel_abi.h"
#include "atomr_cutlass/scaled.h"
#include "cutlass/array.h"
#include "cutlass/cutlass.h"
#include "cutlass/numeric_conversion.h"
#include "cutlass/numeric_types.h"

namespace atomr_cutlass {

// An operand's layout over D, whose rows are along M. A mask is bits along N, the lowest of each byte first. The source
// is a matrix of D's type that comes by the way of C.
enum class OperandLayout : uint8_t { kScalar, kRow, kColumn, kMatrix, kMask, kSource };
enum class Reduction : uint8_t { kNone, kSum, kMax, kAmax };

template <OperandLayout layout, class Element_>
struct TreeInput {
  static constexpr OperandLayout kLayout = layout;
  using Element = Element_;
};

// In the place of a row's element type: the arguments say which it is, or that there is no row, which stands for zeros.
// They say it in the row's stride along M, which no address needs, below kToldBits; the tree's number is above.
struct Told {};
enum { kToldNothing = 0, kToldFloat = 1, kToldHalf = 2, kToldBfloat = 3, kToldBits = 2 };

template <class Tree>
inline constexpr bool kIsChosen = false;

template <OperandLayout layout, class Element_, Reduction reduction = Reduction::kNone>
struct TreeOutput {
  static constexpr OperandLayout kLayout = layout;
  static constexpr Reduction kReduction = reduction;
  using Element = Element_;
};

template <class... All>
struct Operands {
  static constexpr int kCount = int(sizeof...(All));
};

template <int kIndex, class List>
struct OperandAt;
template <int kIndex, class First, class... Rest>
struct OperandAt<kIndex, Operands<First, Rest...>> : OperandAt<kIndex - 1, Operands<Rest...>> {};
template <class First, class... Rest>
struct OperandAt<0, Operands<First, Rest...>> {
  using Type = First;
};

template <class Tree, int kIndex>
using InputOf = typename OperandAt<kIndex, typename Tree::Inputs>::Type;
template <class Tree, int kIndex>
using OutputOf = typename OperandAt<kIndex, typename Tree::Outputs>::Type;

// How many inputs before kIndex have a layout: the place of a vector among the staged ones.
template <class Tree, OperandLayout layout, int kIndex>
constexpr int staged_before() {
  if constexpr (kIndex == 0) {
    return 0;
  } else {
    return staged_before<Tree, layout, kIndex - 1>() + int(InputOf<Tree, kIndex - 1>::kLayout == layout);
  }
}

// Whether a tree has an input of a layout.
template <class Tree, OperandLayout layout, int kIndex = 0>
constexpr bool reads() {
  if constexpr (kIndex == Tree::Inputs::kCount) {
    return false;
  } else {
    return InputOf<Tree, kIndex>::kLayout == layout || reads<Tree, layout, kIndex + 1>();
  }
}

// f(Index<0>{}), f(Index<1>{}), ...
template <int kIndex>
struct Index {
  static constexpr int value = kIndex;
};
template <int kCount, int kFirst = 0, class Function>
CUTLASS_DEVICE void unrolled(Function&& f) {
  if constexpr (kFirst < kCount) {
    f(Index<kFirst>{});
    unrolled<kCount, kFirst + 1>(f);
  }
}

template <class To, class From>
CUTLASS_DEVICE To converted(From from) {
  if constexpr (cutlass::platform::is_same<To, From>::value) {
    return from;
  } else if constexpr (cutlass::platform::is_same<From, double>::value &&
                       !cutlass::platform::is_same<To, float>::value &&
                       !cutlass::platform::is_same<To, int32_t>::value) {
    // To odd first: what is rounded twice is then rounded as if once.
    float const cut = __double2float_rz(from);
    bool const inexact = from == from && double(cut) != from;
    return converted<To>(__uint_as_float(__float_as_uint(cut) | uint32_t(inexact)));
  } else if constexpr (cutlass::platform::is_same<To, int32_t>::value) {
    // The conversion of the hardware saturates, and makes 0 of NaN.
    if constexpr (cutlass::platform::is_same<From, double>::value) return __double2int_rn(from);
    return __float2int_rn(float(from));
  } else if constexpr (cutlass::platform::is_same<To, int8_t>::value) {
    int const whole = __float2int_rn(float(from));
    return int8_t(whole < -128 ? -128 : (whole > 127 ? 127 : whole));
  } else {
    cutlass::NumericConverter<To, From> convert;
    return convert(from);
  }
}

// What was read, in the type that values are computed in. Narrow types know no conversion to double.
template <class Value, class Element>
CUTLASS_DEVICE Value widened(Element const& element) {
  if constexpr (cutlass::sizeof_bits<Element>::value < 32) {
    return Value(float(element));
  } else {
    return Value(element);
  }
}

// As if stored and read again.
template <class Element, class Value>
CUTLASS_DEVICE Value rounded(Value value) {
  return widened<Value>(converted<Element>(value));
}

template <class Value>
CUTLASS_DEVICE Value reduced(Reduction reduction, Value x, Value y) {
  return reduction == Reduction::kSum ? x + y : ops::maximum(x, y);
}

template <class Value>
CUTLASS_DEVICE Value nothing(Reduction reduction) {
  return reduction == Reduction::kMax ? -Value(cutlass::platform::numeric_limits<float>::infinity()) : Value(0);
}

// Into memory whose bytes were 0 before the kernel; for a signed maximum 0xff: that is less than any float that is not
// negative, as they are compared here, and less than any negative one.
template <Reduction reduction>
CUTLASS_DEVICE void reduce_into(float* to, float value) {
  if constexpr (reduction == Reduction::kSum) {
    atomicAdd(to, value);
  } else {
    // Floats that are not negative are ordered as integers, with NaN above infinity; negative ones as unsigned ones,
    // the other way round and above all others.
    if (value != value) {
      atomicMax(reinterpret_cast<int*>(to), 0x7fc00000);
    } else if (__float_as_int(value) >= 0) {
      atomicMax(reinterpret_cast<int*>(to), __float_as_int(value));
    } else {
      atomicMin(reinterpret_cast<unsigned*>(to), __float_as_uint(value));
    }
  }
}
template <Reduction reduction>
CUTLASS_DEVICE void reduce_into(double* to, double value) {
  if constexpr (reduction == Reduction::kSum) {
    atomicAdd(to, value);
  } else if (value != value) {
    atomicMax(reinterpret_cast<long long*>(to), 0x7ff8000000000000ll);
  } else if (__double_as_longlong(value) >= 0) {
    atomicMax(reinterpret_cast<long long*>(to), __double_as_longlong(value));
  } else {
    atomicMin(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(__double_as_longlong(value)));
  }
}

template <class Tree>
struct TreeParams {
  static constexpr int kInputs = Tree::Inputs::kCount, kOutputs = Tree::Outputs::kCount;
  static constexpr int kOperands = kInputs + kOutputs;
  static_assert(kOperands <= ATOMR_CUTLASS_TREE_OPERANDS, "the arguments have no room for the tree's operands");

  ScaledParams scaled;
  typename Tree::Value alpha, beta;
  atomr_cutlass_tree_operand operands[kOperands > 0 ? kOperands : 1];

  static TreeParams of(atomr_cutlass_gemm_args const& args) {
    TreeParams made = unscaled(args);
    made.scaled = ScaledParams::of(args);
    return made;
  }
  // Rows of D are pixels.
  static TreeParams of(atomr_cutlass_conv_args const& args) { return unscaled(args); }

  // Element (m, n) of an operand.
  template <class Element>
  CUTLASS_DEVICE Element* at(int index, int batch, int m, int n) const {
    atomr_cutlass_tree_operand const& operand = operands[index];
    return static_cast<Element*>(operand.pointer) + batch * operand.batch_stride + m * operand.stride_m +
           n * operand.stride_n;
  }

  // Of a tree that the arguments choose.
  CUTLASS_DEVICE int number() const { return int(operands[0].stride_m) >> kToldBits; }

  // The scales of a batch.
  CUTLASS_DEVICE ScaledParams const& scales(int) const { return scaled; }

 private:
  template <class Args>
  static TreeParams unscaled(Args const& args) {
    TreeParams made{};
    made.alpha = typename Tree::Value(args.alpha);
    made.beta = typename Tree::Value(args.beta);
    for (int i = 0; i < kOperands; ++i) made.operands[i] = args.operands[i];
    return made;
  }
};

// How a generation's accumulators lie over the lanes of a warp. kAlongM: the bits of the lane's number that tell apart
// lanes of the same columns; kAlongN: those of the same rows. kWholeBytes: the lanes of a row hold whole groups of
// eight columns between them. kKeptColumns: how many columns a thread handles in all, where it keeps their reductions
// to the end of the tile.
//
// The fragments of WGMMA and of mma.sync's 16 x 8: four lanes a row, two columns each.
struct QuadLanes {
  static constexpr int kAlongM = 28, kAlongN = 3, kKeptColumns = 0;
  static constexpr bool kWholeBytes = true;
};
// Nothing is known.
struct AnyLanes {
  static constexpr int kAlongM = 0, kAlongN = 0, kKeptColumns = 0;
  static constexpr bool kWholeBytes = false;
};

// values[i] of lane j becomes values[j] of lane i, within a quad of lanes. A Value is 2, 4 or 8 bytes.
template <class Value>
CUTLASS_DEVICE void exchange(Value (&values)[4]) {
  constexpr int kWords = sizeof(Value) > 4 ? int(sizeof(Value) / 4) : 1;
  using Word = cutlass::platform::conditional_t<sizeof(Value) == 2, uint16_t, uint32_t>;
  int const lane = int(threadIdx.x) % 4;
  CUTLASS_PRAGMA_UNROLL
  for (int step = 1; step < 4; step *= 2) {
    bool const upper = (lane & step) != 0;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) {
      if ((i & step) != 0) continue;
      CUTLASS_PRAGMA_UNROLL
      for (int word = 0; word < kWords; ++word) {
        Word& low = reinterpret_cast<Word*>(&values[i])[word];
        Word& high = reinterpret_cast<Word*>(&values[i + step])[word];
        Word const got = Word(__shfl_xor_sync(0xffffffffu, uint32_t(upper ? low : high), step));
        low = upper ? got : low;
        high = upper ? high : got;
      }
    }
  }
}

template <class Tree, int kTileM, int kTileN>
struct StagedVectors {
  using Value = typename Tree::Value;
  static constexpr int kRows = staged_before<Tree, OperandLayout::kRow, Tree::Inputs::kCount>();
  static constexpr int kColumns = staged_before<Tree, OperandLayout::kColumn, Tree::Inputs::kCount>();
  Value rows[kRows > 0 ? kRows : 1][kRows > 0 ? kTileN : 1];
  Value columns[kColumns > 0 ? kColumns : 1][kColumns > 0 ? kTileM : 1];
};

// A thread's view of the tree for one tile. `Staged` is StagedVectors in shared memory, or void where rows and columns
// are read from global memory. `Params` is TreeParams, or what finds operands in another way.
template <class Tree, class Lanes, class Staged = void, class Params = TreeParams<Tree>>
struct TreeThread {
  using Value = typename Tree::Value;
  static constexpr int kInputs = Tree::Inputs::kCount, kOutputs = Tree::Outputs::kCount;
  static constexpr bool kIsStaged = !cutlass::platform::is_same<Staged, void>::value;

  Params const& params;
  Staged* staged = nullptr;
  int count_m, count_n;  // of the problem
  int batch;
  int tile_m, tile_n;  // where the tile begins
  int first_m, first_n;  // the thread's first element in the tile
  Value scalars[kInputs + 1];
  Value totals[kOutputs + 1];
  Value kept[kOutputs + 1][Lanes::kKeptColumns > 0 ? Lanes::kKeptColumns : 1];
  unsigned paired;  // bit i: operand i is contiguous along N, two elements are aligned
  unsigned wide;  // likewise, eight elements, or 16 bytes

  CUTLASS_DEVICE TreeThread(Params const& params) : params(params) {}

  template <class Element>
  CUTLASS_DEVICE Element* at(int operand, int m, int n) const {
    return params.template at<Element>(operand, batch, m, n);
  }

  // Reads the tile's parts of rows and columns into shared memory; the caller synchronizes.
  CUTLASS_DEVICE void stage(int thread, int threads) {
    if constexpr (kIsStaged) {
      unrolled<kInputs>([&](auto index) {
        constexpr int kIndex = decltype(index)::value;
        using Input = InputOf<Tree, kIndex>;
        using Element = typename Input::Element;
        constexpr int kPlace = staged_before<Tree, Input::kLayout, kIndex>();
        if constexpr (Input::kLayout == OperandLayout::kRow) {
          constexpr int kTileN = int(sizeof(staged->rows[0]) / sizeof(Value));
          for (int i = thread; i < kTileN; i += threads) {
            staged->rows[kPlace][i] = tile_n + i < count_n ? of_row<kIndex>(tile_n + i) : Value(0);
          }
        } else if constexpr (Input::kLayout == OperandLayout::kColumn) {
          constexpr int kTileM = int(sizeof(staged->columns[0]) / sizeof(Value));
          for (int i = thread; i < kTileM; i += threads) {
            staged->columns[kPlace][i] =
                tile_m + i < count_m ? widened<Value>(*at<Element const>(kIndex, tile_m + i, 0)) : Value(0);
          }
        }
      });
    }
  }

  CUTLASS_DEVICE void begin() {
    wide = 0;
    unrolled<kInputs>([&](auto index) {
      constexpr int kIndex = decltype(index)::value;
      using Input = InputOf<Tree, kIndex>;
      using Element = typename Input::Element;
      if constexpr (Input::kLayout == OperandLayout::kScalar)
        scalars[kIndex] = widened<Value>(*at<Element const>(kIndex, 0, 0));
      if constexpr (Input::kLayout == OperandLayout::kMatrix) look_at<Element>(kIndex);
    });
    unrolled<kOutputs>([&](auto index) {
      constexpr int kIndex = decltype(index)::value;
      using Output = OutputOf<Tree, kIndex>;
      using Element = typename Output::Element;
      totals[kIndex] = nothing<Value>(Output::kReduction);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Lanes::kKeptColumns; ++i) kept[kIndex][i] = totals[kIndex];
      if constexpr (Output::kLayout == OperandLayout::kMatrix) look_at<Element>(kInputs + kIndex);
      // Words of bits.
      if constexpr (Output::kLayout == OperandLayout::kMask) look_at<uint32_t, 1>(kInputs + kIndex);
    });
  }

  // values: the accumulators, alpha, scales and C included; they become D's. places(j): where element j lies from the
  // thread's first one, known when compiling once the loops are unrolled. source(j): the element of the source. kept:
  // the number among the thread's columns of the first element's.
  template <int kCount, class Places, class Source>
  CUTLASS_DEVICE void apply(cutlass::Array<Value, kCount>& values, Places const& places, Source const& source,
                            int first_kept = 0) {
    Value in[kInputs + 1][kCount];
    unrolled<kInputs>([&](auto index) {
      constexpr int kIndex = decltype(index)::value;
      read<kIndex, kCount>(in[kIndex], places, source);
    });
    Value out[kOutputs + 1][kCount];
    if constexpr (kIsChosen<Tree>) {
      // The same for all threads: one branch for all the elements.
      Tree::chosen(params.number(), [&](auto tree) { evaluate<decltype(tree), kCount>(values, in, out); });
    } else {
      evaluate<Tree, kCount>(values, in, out);
    }
    unrolled<kOutputs>([&](auto index) {
      constexpr int kIndex = decltype(index)::value;
      write<kIndex, kCount>(out[kIndex], places, first_kept);
    });
  }

  // Called by all threads of a warp.
  CUTLASS_DEVICE void end() {
    unrolled<kOutputs>([&](auto index) {
      constexpr int kIndex = decltype(index)::value;
      using Output = OutputOf<Tree, kIndex>;
      if constexpr (Output::kReduction != Reduction::kNone && Output::kLayout == OperandLayout::kScalar) {
        Value const total = over_lanes<Output::kReduction, 31>(totals[kIndex]);
        if (threadIdx.x % 32 == 0) reduce_into<Output::kReduction>(at<Value>(kInputs + kIndex, 0, 0), total);
      }
    });
  }

  // The reductions of columns that the thread has kept, column(i) being the i-th of them.
  template <class Column>
  CUTLASS_DEVICE void end_columns(Column const& column) {
    unrolled<kOutputs>([&](auto index) {
      constexpr int kIndex = decltype(index)::value;
      using Output = OutputOf<Tree, kIndex>;
      if constexpr (Output::kReduction != Reduction::kNone && Output::kLayout == OperandLayout::kRow) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < Lanes::kKeptColumns; ++i) {
          int const n = column(i);
          if (n < count_n) reduce_into<Output::kReduction>(at<Value>(kInputs + kIndex, 0, n), kept[kIndex][i]);
        }
      }
    });
  }

 private:
  struct Place {
    int m, n;
    bool inside;
  };

  template <class Evaluated, int kCount>
  CUTLASS_DEVICE static void evaluate(cutlass::Array<Value, kCount>& values, Value const (&in)[kInputs + 1][kCount],
                                      Value (&out)[kOutputs + 1][kCount]) {
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kCount; ++j) {
      Value x[kInputs + 1], y[kOutputs + 1];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kInputs; ++i) x[i] = in[i][j];
      values[j] = Evaluated::evaluate(values[j], x, y);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kOutputs; ++i) out[i][j] = y[i];
    }
  }

  // Element n of a row.
  template <int kIndex>
  CUTLASS_DEVICE Value of_row(int n) const {
    using Element = typename InputOf<Tree, kIndex>::Element;
    if constexpr (cutlass::platform::is_same<Element, Told>::value) {
      switch (params.operands[kIndex].stride_m & ((1 << kToldBits) - 1)) {
        case kToldFloat: return widened<Value>(*at<float const>(kIndex, 0, n));
        case kToldHalf: return widened<Value>(*at<cutlass::half_t const>(kIndex, 0, n));
        case kToldBfloat: return widened<Value>(*at<cutlass::bfloat16_t const>(kIndex, 0, n));
        default: return Value(0);
      }
    } else {
      return widened<Value>(*at<Element const>(kIndex, 0, n));
    }
  }

  template <class Places>
  CUTLASS_DEVICE Place place(Places const& places, int j) const {
    auto const relative = places(j);
    int const m = tile_m + first_m + relative.m, n = tile_n + first_n + relative.n;
    return {m, n, m < count_m && n < count_n};
  }

  template <class Element, int kSize = sizeof(Element)>
  CUTLASS_DEVICE void look_at(int index) {
    atomr_cutlass_tree_operand const& operand = params.operands[index];
    constexpr int kBytes = vector_bytes<Element>();
    bool const rows = (operand.stride_m | operand.batch_stride) * kSize % kBytes == 0;
    bool const start = reinterpret_cast<uintptr_t>(operand.pointer) % kBytes == 0;
    if (operand.stride_n == 1 && rows && start) wide |= 1u << index;
  }

  // Of eight elements, as much as one instruction moves.
  template <class Element>
  static constexpr int vector_bytes() {
    return sizeof(Element) * 8 < 16 ? int(sizeof(Element) * 8) : 16;
  }

  template <class Element, int kRun>
  static constexpr int vector_elements() {
    return kRun * int(sizeof(Element)) <= 16 ? kRun : 16 / int(sizeof(Element));
  }

  // Whether the sixteen elements from `first` on are four blocks of eight columns, of which the thread has two in two
  // rows each: element 4 block + 2 below + i. A quad of lanes can then exchange them, and each has a block in a row.
  template <int kCount, class Places>
  CUTLASS_DEVICE static bool are_blocks(Places const& places, int first) {
    if constexpr (Lanes::kAlongN != QuadLanes::kAlongN || kCount % 16 != 0) return false;
    auto const origin = places(first);
    bool same = origin.n % 8 == 0;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 16; ++j) {
      if (first + j >= kCount) return false;
      auto const relative = places(first + j);
      same = same && relative.m - origin.m == (j / 2 % 2) * (places((first + 2) % kCount).m - origin.m);
      same = same && relative.n - origin.n == j / 4 * 8 + j % 2;
    }
    return same;
  }

  // The place of the block that is the lane's after an exchange, `below` being 0 or 1.
  template <class Places>
  CUTLASS_DEVICE Place block_of(Places const& places, int first, int below) const {
    Place here = place(places, first + 2 * below);
    int const lane = int(threadIdx.x) % 4;
    here.n += 8 * lane - 2 * lane;
    here.inside = here.m < count_m && here.n < count_n;
    return here;
  }

  template <int kOperand, class Element, int kCount, class Places>
  CUTLASS_DEVICE void read_blocks(Value (&to)[kCount], Places const& places, int first) const {
    using Pair = cutlass::AlignedArray<Element, 2>;
    CUTLASS_PRAGMA_UNROLL
    for (int below = 0; below < 2; ++below) {
      Place const here = block_of(places, first, below);
      cutlass::AlignedArray<Element, 8> run;
      load_run(run, at<Element const>(kOperand, here.m, here.n), here.inside ? count_n - here.n : 0);
      Pair(&pairs)[4] = reinterpret_cast<Pair(&)[4]>(run);
      exchange(pairs);
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < 4; ++block) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 2; ++i) to[first + 4 * block + 2 * below + i] = widened<Value>(Element(pairs[block][i]));
      }
    }
  }

  template <int kOperand, class Element, int kCount, class Places>
  CUTLASS_DEVICE void write_blocks(Value const (&from)[kCount], Places const& places, int first) const {
    using Pair = cutlass::AlignedArray<Element, 2>;
    CUTLASS_PRAGMA_UNROLL
    for (int below = 0; below < 2; ++below) {
      cutlass::AlignedArray<Element, 8> run;
      Pair(&pairs)[4] = reinterpret_cast<Pair(&)[4]>(run);
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < 4; ++block) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 2; ++i) pairs[block][i] = converted<Element>(from[first + 4 * block + 2 * below + i]);
      }
      exchange(pairs);
      Place const here = block_of(places, first, below);
      store_run(at<Element>(kOperand, here.m, here.n), run, here.inside ? count_n - here.n : 0);
    }
  }

  // The bits of four blocks as one word.
  template <int kOperand, int kCount, class Places>
  CUTLASS_DEVICE void write_mask_blocks(Value const (&from)[kCount], Places const& places, int first) const {
    int const lane = int(threadIdx.x) % 4;
    CUTLASS_PRAGMA_UNROLL
    for (int below = 0; below < 2; ++below) {
      Place const here = place(places, first + 2 * below);
      int const start = here.n - 2 * lane;  // of the quad
      uint32_t bits = 0;
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < 4; ++block) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 2; ++i) {
          bool const inside = here.n + 8 * block + i < count_n;
          if (inside && from[first + 4 * block + 2 * below + i] != Value(0)) bits |= 1u << (8 * block + i);
        }
      }
      bits <<= 2 * lane;
      bits |= __shfl_xor_sync(0xffffffffu, bits, 1);
      bits |= __shfl_xor_sync(0xffffffffu, bits, 2);
      if (here.m >= count_m || lane != 0) continue;
      uint8_t* const to = at<uint8_t>(kOperand, here.m, start / 8);
      if (start % 32 == 0 && start + 32 <= count_n) {
        *reinterpret_cast<uint32_t*>(to) = bits;
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int block = 0; block < 4; ++block) {
          if (start + 8 * block < count_n) to[block] = uint8_t(bits >> (8 * block));
        }
      }
    }
  }

  // A run of neighbours, of which `left` are inside.
  template <class Element, int kRun>
  CUTLASS_DEVICE static void load_run(cutlass::AlignedArray<Element, kRun>& run, Element const* from, int left) {
    constexpr int kVector = vector_elements<Element, kRun>();
    using Vector = cutlass::AlignedArray<Element, kVector>;
    if (left >= kRun) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRun / kVector; ++i) {
        reinterpret_cast<Vector*>(&run)[i] = reinterpret_cast<Vector const*>(from)[i];
      }
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRun; ++i) run[i] = i < left ? from[i] : Element(0.0f);
    }
  }
  template <class Element, int kRun>
  CUTLASS_DEVICE static void store_run(Element* to, cutlass::AlignedArray<Element, kRun> const& run, int left) {
    constexpr int kVector = vector_elements<Element, kRun>();
    using Vector = cutlass::AlignedArray<Element, kVector>;
    if (left >= kRun) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRun / kVector; ++i) {
        reinterpret_cast<Vector*>(to)[i] = reinterpret_cast<Vector const*>(&run)[i];
      }
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRun; ++i) {
        if (i < left) to[i] = run[i];
      }
    }
  }

  // Whether the elements are runs of kRun neighbours in a row, whose first is aligned like a vector of as many.
  template <int kCount, int kRun, class Places>
  CUTLASS_DEVICE static bool are_runs(Places const& places) {
    if constexpr (kRun == 1 || kCount % kRun != 0) return false;
    bool same = true;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kCount; ++j) {
      auto const first = places(j / kRun * kRun), relative = places(j);
      same = same && first.n % kRun == 0 && relative.m == first.m && relative.n == first.n + j % kRun;
    }
    return same;
  }

  // Moves the elements of a matrix as vectors, where they lie so: f(j, vector's address, whether it is inside) for each
  // run, and nothing else. Returns whether they do.
  template <int kOperand, class Element, int kCount, int kRun, class Places, class Function>
  CUTLASS_DEVICE bool for_runs(Places const& places, Function const& f) const {
    if ((wide >> kOperand & 1) == 0 || first_n % kRun != 0 || !are_runs<kCount, kRun>(places)) return false;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kCount; j += kRun) {
      Place const here = place(places, j);
      int const left = here.m < count_m ? count_n - here.n : 0;
      f(j, at<Element>(kOperand, here.m, here.n), left);
    }
    return true;
  }

  template <int kIndex, int kCount, class Places, class Source>
  CUTLASS_DEVICE void read(Value (&to)[kCount], Places const& places, Source const& source) const {
    using Input = InputOf<Tree, kIndex>;
    using Element = typename Input::Element;
    if constexpr (Input::kLayout == OperandLayout::kMatrix) {
      if ((wide >> kIndex & 1) != 0 && are_blocks<kCount>(places, 0) && are_blocks<kCount>(places, kCount - 16)) {
        CUTLASS_PRAGMA_UNROLL
        for (int first = 0; first < kCount; first += 16) read_blocks<kIndex, Element, kCount>(to, places, first);
        return;
      }
      constexpr int kRun = kCount < 8 ? kCount : 8;
      bool const done =
          for_runs<kIndex, Element const, kCount, kRun>(places, [&](int j, Element const* from, int left) {
            cutlass::AlignedArray<Element, kRun> run;
            load_run(run, from, left);
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < kRun; ++i) to[j + i] = widened<Value>(Element(run[i]));
          });
      if (done) return;
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kCount; ++j) {
        Place const here = place(places, j);
        to[j] = here.inside ? widened<Value>(*at<Element const>(kIndex, here.m, here.n)) : Value(0);
      }
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kCount; ++j) {
        auto const relative = places(j);
        if constexpr (Input::kLayout == OperandLayout::kScalar) {
          to[j] = scalars[kIndex];
        } else if constexpr (Input::kLayout == OperandLayout::kSource) {
          to[j] = widened<Value>(Element(source(j)));
        } else if constexpr (Input::kLayout == OperandLayout::kMask) {
          Place const here = place(places, j);
          unsigned const byte = here.inside ? *at<uint8_t const>(kIndex, here.m, here.n / 8) : 0;
          to[j] = Value(byte >> here.n % 8 & 1);
        } else if constexpr (Input::kLayout == OperandLayout::kRow) {
          if constexpr (kIsStaged) {
            to[j] = staged->rows[staged_before<Tree, OperandLayout::kRow, kIndex>()][first_n + relative.n];
          } else {
            Place const here = place(places, j);
            to[j] = here.n < count_n ? of_row<kIndex>(here.n) : Value(0);
          }
        } else {
          if constexpr (kIsStaged) {
            to[j] = staged->columns[staged_before<Tree, OperandLayout::kColumn, kIndex>()][first_m + relative.m];
          } else {
            Place const here = place(places, j);
            to[j] = here.m < count_m ? widened<Value>(*at<Element const>(kIndex, here.m, 0)) : Value(0);
          }
        }
      }
    }
  }

  template <int kIndex, int kCount, class Places>
  CUTLASS_DEVICE void write(Value const (&from)[kCount], Places const& places, int first_kept) {
    using Output = OutputOf<Tree, kIndex>;
    constexpr int kOperand = kInputs + kIndex;
    if constexpr (Output::kLayout == OperandLayout::kMask) {
      write_mask<kOperand, kCount>(from, places);
    } else if constexpr (Output::kReduction == Reduction::kNone) {
      write_matrix<kOperand, typename Output::Element, kCount>(from, places);
    } else if constexpr (Output::kLayout == OperandLayout::kScalar) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kCount; ++j) {
        Value const value = reducible<Output::kReduction>(from[j], place(places, j).inside);
        totals[kIndex] = reduced(Output::kReduction, totals[kIndex], value);
      }
    } else if constexpr (Output::kLayout == OperandLayout::kRow && Lanes::kKeptColumns > 0) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kCount; ++j) {
        Value const value = reducible<Output::kReduction>(from[j], place(places, j).inside);
        Value& to = kept[kIndex][first_kept + j];
        to = reduced(Output::kReduction, to, value);
      }
    } else {
      reduce_lines<kOperand, Output::kReduction, Output::kLayout == OperandLayout::kRow, kCount>(from, places);
    }
  }

  template <int kOperand, class Element, int kCount, class Places>
  CUTLASS_DEVICE void write_matrix(Value const (&from)[kCount], Places const& places) const {
    if ((wide >> kOperand & 1) != 0 && are_blocks<kCount>(places, 0) && are_blocks<kCount>(places, kCount - 16)) {
      CUTLASS_PRAGMA_UNROLL
      for (int first = 0; first < kCount; first += 16) write_blocks<kOperand, Element, kCount>(from, places, first);
      return;
    }
    constexpr int kRun = kCount < 8 ? kCount : 8;
    bool const done = for_runs<kOperand, Element, kCount, kRun>(places, [&](int j, Element* to, int left) {
      cutlass::AlignedArray<Element, kRun> run;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRun; ++i) run[i] = converted<Element>(from[j + i]);
      store_run(to, run, left);
    });
    if (done) return;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kCount; ++j) {
      Place const here = place(places, j);
      if (here.inside) *at<Element>(kOperand, here.m, here.n) = converted<Element>(from[j]);
    }
  }

  template <int kOperand, int kCount, class Places>
  CUTLASS_DEVICE void write_mask(Value const (&from)[kCount], Places const& places) const {
    if ((wide >> kOperand & 1) != 0 && are_blocks<kCount>(places, 0) && are_blocks<kCount>(places, kCount - 16)) {
      CUTLASS_PRAGMA_UNROLL
      for (int first = 0; first < kCount; first += 16) write_mask_blocks<kOperand, kCount>(from, places, first);
      return;
    }
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kCount; ++j) {
      // The elements of one byte at its first one.
      auto const group = places(j);
      bool first = true;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < j; ++i) first = first && !(places(i).m == group.m && places(i).n / 8 == group.n / 8);
      if (Lanes::kWholeBytes && !first) continue;
      Place const here = place(places, j);
      unsigned bits = 0;
      if constexpr (Lanes::kWholeBytes) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = j; i < kCount; ++i) {
          if (places(i).m != group.m || places(i).n / 8 != group.n / 8) continue;
          Place const there = place(places, i);
          if (there.inside && from[i] != Value(0)) bits |= 1u << there.n % 8;
        }
        CUTLASS_PRAGMA_UNROLL
        for (int lanes = 1; lanes < 32; lanes *= 2) {
          if ((Lanes::kAlongN & lanes) != 0) bits |= __shfl_xor_sync(0xffffffffu, bits, lanes);
        }
        if (here.m < count_m && (here.n & ~7) < count_n && (threadIdx.x & Lanes::kAlongN) == 0) {
          *at<uint8_t>(kOperand, here.m, here.n / 8) = uint8_t(bits);
        }
      } else if (here.inside && from[j] != Value(0)) {
        // Into bytes that were 0. Bytes of the word beside the mask's own keep their values.
        auto const address = reinterpret_cast<uintptr_t>(at<uint8_t>(kOperand, here.m, here.n / 8));
        atomicOr(reinterpret_cast<unsigned*>(address & ~uintptr_t(3)), 1u << (address % 4 * 8 + here.n % 8));
      }
    }
  }

  // Elements of one column (or of one row) are reduced in the thread, then over the lanes that share it.
  template <int kOperand, Reduction reduction, bool kColumns, int kCount, class Places>
  CUTLASS_DEVICE void reduce_lines(Value const (&from)[kCount], Places const& places) const {
    constexpr int kLanes = kColumns ? Lanes::kAlongM : Lanes::kAlongN;
    auto const line = [&](int j) { return kColumns ? places(j).n : places(j).m; };
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kCount; ++j) {
      bool first = true;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < j; ++i) first = first && line(i) != line(j);
      if (!first) continue;
      Value total = nothing<Value>(reduction);
      CUTLASS_PRAGMA_UNROLL
      for (int i = j; i < kCount; ++i) {
        if (line(i) != line(j)) continue;
        total = reduced(reduction, total, reducible<reduction>(from[i], place(places, i).inside));
      }
      total = over_lanes<reduction, kLanes>(total);
      Place const here = place(places, j);
      bool const counts = kColumns ? here.n < count_n : here.m < count_m;
      if (counts && (threadIdx.x & kLanes) == 0) {
        reduce_into<reduction>(at<Value>(kOperand, kColumns ? 0 : here.m, kColumns ? here.n : 0), total);
      }
    }
  }

  template <Reduction reduction>
  CUTLASS_DEVICE static Value reducible(Value value, bool inside) {
    if (!inside) return nothing<Value>(reduction);
    return reduction == Reduction::kAmax ? ops::absolute(value) : value;
  }

  template <Reduction reduction, int kLanes>
  CUTLASS_DEVICE static Value over_lanes(Value value) {
    CUTLASS_PRAGMA_UNROLL
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      if ((kLanes & lanes) != 0) value = reduced(reduction, value, __shfl_xor_sync(0xffffffffu, value, lanes));
    }
    return value;
  }
};

// What the generated sources choose: kScaled kernels have the scales, scale_d and amax of scaled.h, others alpha alone.
// A tree that reads the source has no C.
template <class Tree_, bool kScaled_, class Lanes_>
struct TreeEpilogue {
  using Tree = Tree_;
  using Lanes = Lanes_;
  static constexpr bool kScaled = kScaled_;
  static constexpr bool kSource = reads<Tree, OperandLayout::kSource>();
};

template <class Epilogue>
inline constexpr bool kIsTree = false;
template <class Tree, bool kScaled, class Lanes>
inline constexpr bool kIsTree<TreeEpilogue<Tree, kScaled, Lanes>> = true;

}  // namespace atomr_cutlass
