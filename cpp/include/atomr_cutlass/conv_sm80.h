// Convolutions of the sm80 generation: CUTLASS 2.x implicit GEMM over mma.sync or FFMA.
//
// Functions without an annotation run on the host when nvcc compiles them, and on the device under NVRTC, whose
// -default-device makes them device functions.
#pragma once

#include "atomr_cutlass/activation.h"
#include "atomr_cutlass/conv_problem.h"
#include "atomr_cutlass/kernel_abi.h"
#include "atomr_cutlass/unpadded_swizzle.h"
#include "cutlass/conv/convolution.h"
#include "cutlass/conv/kernel/default_conv2d.h"
#include "cutlass/conv/kernel/default_conv2d_dgrad.h"
#include "cutlass/conv/kernel/default_conv2d_fprop.h"
#include "cutlass/conv/kernel/default_conv2d_wgrad.h"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/thread/linear_combination.h"
#include "cutlass/epilogue/thread/linear_combination_generic.h"

// Channels in groups: the grid's z dimension counts the groups, and each is a convolution of its own. CUTLASS's modes
// of groups exist for fprop alone, and multiply one group's pixels by zeros of another group's filter, so that an
// infinity in one group makes NaN in others. The kernels take z for a slice of K: these swizzles tell them that there
// is one.
namespace atomr_cutlass {
template <int kSwizzle>
struct GroupSwizzle : cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<kSwizzle> {
  using Base = cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<kSwizzle>;
  CUTLASS_DEVICE static cutlass::gemm::GemmCoord get_tile_offset(int log_tile) {
    cutlass::gemm::GemmCoord const tile = Base::get_tile_offset(log_tile);
    return {tile.m(), tile.n(), 0};
  }
};
}  // namespace atomr_cutlass

// The strided dgrad kernel accepts only CUTLASS's own swizzles, by name. Ours takes the place of the one with 4.
template <>
struct cutlass::conv::threadblock::StridedDgradIdentityThreadblockSwizzle<4> : atomr_cutlass::GroupSwizzle<4> {
  CUTLASS_HOST_DEVICE static cutlass::gemm::GemmCoord get_tiled_shape(cutlass::conv::Operator operation,
                                                                      cutlass::conv::Conv2dProblemSize const& problem,
                                                                      cutlass::gemm::GemmCoord tile, int slices) {
    return StridedDgradIdentityThreadblockSwizzle<1>::get_tiled_shape(operation, problem, tile, slices);
  }
};

namespace atomr_cutlass {

// The iterators for few channels read whole K tiles of pixels: beyond the filter's end they meet pixels that take no
// part in the result, and count on a zero of the filter, which an infinity turns into NaN. This one reads none of them.
template <class Base>
struct WithinFilter : Base {
  using Params = typename Base::Params;
  static constexpr int kVectors = Base::kAccessesPerVector;
  int position, end, step, vector;

  CUTLASS_DEVICE WithinFilter(Params const& params, cutlass::conv::Conv2dProblemSize const& problem,
                              typename Base::Element const* pointer, int thread,
                              cutlass::MatrixCoord const& offset = cutlass::MatrixCoord())
      : Base(params, problem, pointer, thread, offset),
        position(offset.column() + Base::ThreadMap::initial_offset(thread).contiguous()),
        end(problem.R * problem.S * problem.C),
        step(Base::Shape::kColumn * problem.split_k_slices),
        vector(0) {}

  CUTLASS_DEVICE void set_iteration_index(typename Base::Index index) {
    Base::set_iteration_index(index);
    vector = index % kVectors;
  }
  CUTLASS_DEVICE WithinFilter& operator++() {
    Base::operator++();
    vector = vector + 1 == kVectors ? 0 : vector + 1;
    return *this;
  }
  CUTLASS_DEVICE void advance() {
    Base::advance();
    position += step;
  }
  CUTLASS_DEVICE bool valid() const { return position + vector * Base::AccessType::kElements < end && Base::valid(); }
};

// A mainloop with its first iterator guarded.
template <class Mma>
struct Guarded;

template <class Shape, class IteratorA, class SmemA, cutlass::arch::CacheOperation::Kind kCacheA, class IteratorB,
          class SmemB, cutlass::arch::CacheOperation::Kind kCacheB, class Policy, int kStages>
struct Guarded<cutlass::conv::threadblock::ImplicitGemmMultistage<Shape, IteratorA, SmemA, kCacheA, IteratorB, SmemB,
                                                                  kCacheB, Policy, kStages>> {
  using Type = cutlass::conv::threadblock::ImplicitGemmMultistage<Shape, WithinFilter<IteratorA>, SmemA, kCacheA,
                                                                  IteratorB, SmemB, kCacheB, Policy, kStages>;
};

template <class Shape, class AccessA, class SmemA, class IteratorB, class SmemB, class Accumulator, class Layout,
          class Policy>
struct Guarded<cutlass::conv::threadblock::ImplicitGemmPipelined<
    Shape, cutlass::conv::threadblock::TileIterator<AccessA>, SmemA, IteratorB, SmemB, Accumulator, Layout, Policy>> {
  using Type =
      cutlass::conv::threadblock::ImplicitGemmPipelined<Shape,
                                                        cutlass::conv::threadblock::TileIterator<WithinFilter<AccessA>>,
                                                        SmemA, IteratorB, SmemB, Accumulator, Layout, Policy>;
};

// CUTLASS's tiles of a strided dgrad read one vector where a thread has several: the rest of them stays zero. These
// read all.
template <class Access>
class StridedTiles {
 public:
  using Shape = typename Access::Shape;
  using Element = typename Access::Element;
  using Layout = typename Access::Layout;
  using ThreadMap = typename Access::ThreadMap;
  using AccessType = typename Access::AccessType;
  using TensorRef = typename Access::TensorRef;
  using Index = typename Access::Index;
  using Params = typename Access::Params;
  using ConvProblemSize = typename Access::ConvProblemSize;
  using Fragment = cutlass::Array<Element, ThreadMap::Iterations::kCount * ThreadMap::kElementsPerAccess>;
  static constexpr auto kIteratorAlgorithm = Access::kIteratorAlgorithm;
  static constexpr auto kStrideSupport = Access::kStrideSupport;
  static constexpr int kConvDim = Access::kConvDim;
  static constexpr int kVectors = Access::kAccessesPerVector;

  template <class... Where>
  CUTLASS_HOST_DEVICE StridedTiles(Params const& params, ConvProblemSize const& problem, Element const* pointer,
                                   int thread, Where const&... where)
      : access(params, problem, pointer, thread, where...) {}

  CUTLASS_HOST_DEVICE static Params getParams(ConvProblemSize const& problem, Layout const& layout) {
    return Access::getParams(problem, layout);
  }
  CUTLASS_HOST_DEVICE static cutlass::Status can_implement(ConvProblemSize const& problem) {
    return Access::can_implement(problem);
  }

  CUTLASS_HOST_DEVICE StridedTiles& operator++() {
    access.advance();
    return *this;
  }

  CUTLASS_DEVICE void load(Fragment& fragment) {
    fragment.clear();
    access.set_iteration_index(0);
    auto* const vectors = reinterpret_cast<AccessType*>(&fragment);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < ThreadMap::Iterations::kCount * kVectors; ++i) {
      cutlass::arch::global_load<AccessType, sizeof(AccessType)>(vectors[i], access.get(), access.valid());
      ++access;
    }
  }

 private:
  Access access;
};

template <class Kernel>
struct ReadsAll {
  using Type = Kernel;
};

template <class Shape, class AccessA, class SmemA, class AccessB, class SmemB, class Accumulator, class Layout,
          class Policy, class Epilogue, class Swizzle>
struct ReadsAll<cutlass::conv::kernel::ImplicitGemmConvolutionStridedDgrad<
    cutlass::conv::threadblock::ImplicitGemmPipelined<
        Shape, cutlass::conv::threadblock::TileIteratorStridedDgrad<AccessA>, SmemA,
        cutlass::conv::threadblock::TileIteratorStridedDgrad<AccessB>, SmemB, Accumulator, Layout, Policy>,
    Epilogue, Swizzle, cutlass::conv::Operator::kDgrad>> {
  using Type = cutlass::conv::kernel::ImplicitGemmConvolutionStridedDgrad<
      cutlass::conv::threadblock::ImplicitGemmPipelined<Shape, StridedTiles<AccessA>, SmemA, StridedTiles<AccessB>,
                                                        SmemB, Accumulator, Layout, Policy>,
      Epilogue, Swizzle, cutlass::conv::Operator::kDgrad>;
};

template <class T>
struct Holder {
  using Type = T;
};

// void: the linear combination alone.
template <class Function, class ElementD, int kAlignD, class Accumulator, class Compute>
struct ConvEpilogue {
  using Type = cutlass::epilogue::thread::LinearCombinationGeneric<Activation<Function>::template Of, ElementD, kAlignD,
                                                                   Accumulator, Compute>;
};
template <class ElementD, int kAlignD, class Accumulator, class Compute>
struct ConvEpilogue<void, ElementD, kAlignD, Accumulator, Compute> {
  using Type = cutlass::epilogue::thread::LinearCombination<ElementD, kAlignD, Accumulator, Compute>;
};

template <cutlass::conv::Operator kOperator, class ElementA, int kAlignA, class ElementB, int kAlignB, class ElementD,
          int kAlignD, class Accumulator, class Compute, class OperatorClass, class ArchTag, class Tile, class Warp,
          class Instruction, int kStages, class MathOperator, cutlass::conv::IteratorAlgorithm kIterator,
          cutlass::conv::StrideSupport kStrides, bool kGroups, class Function, int kSwizzle>
struct ConvSm80 {
  using Args = atomr_cutlass_conv_args;
  using Operator = cutlass::conv::Operator;
  using Algorithm = cutlass::conv::IteratorAlgorithm;
  using Layout = cutlass::layout::TensorNHWC;
  using Problem = cutlass::conv::Conv2dProblemSize;

  static constexpr bool kFprop = kOperator == Operator::kFprop;
  static constexpr bool kDgrad = kOperator == Operator::kDgrad;
  static constexpr bool kWgrad = kOperator == Operator::kWgrad;
  static constexpr bool kStridedDgrad = kDgrad && kStrides == cutlass::conv::StrideSupport::kStrided;
  static constexpr bool kFewChannels = kIterator == Algorithm::kFewChannels || kIterator == Algorithm::kFixedChannels;

  using Epilogue = typename ConvEpilogue<Function, ElementD, kAlignD, Accumulator, Compute>::Type;

  template <bool kStrided, bool kGrouped>
  static auto choose_swizzle() {
    if constexpr (kStrided) {
      return cutlass::conv::threadblock::StridedDgradIdentityThreadblockSwizzle<kGrouped ? 4 : kSwizzle>{};
    } else if constexpr (kGrouped) {
      return GroupSwizzle<kSwizzle>{};
    } else {
      return UnpaddedSwizzle<kSwizzle>{};
    }
  }
  using Swizzle = decltype(choose_swizzle<kStridedDgrad, kGroups>());

  template <Operator kWhich>
  static auto choose_kernel() {
    using namespace cutlass::conv::kernel;
    if constexpr (kWhich == Operator::kFprop) {
      using Default = typename DefaultConv2dFprop<ElementA, Layout, ElementB, Layout, ElementD, Layout, Accumulator,
                                                  OperatorClass, ArchTag, Tile, Warp, Instruction, Epilogue, Swizzle,
                                                  kStages, MathOperator, kIterator, kStrides, kAlignA, kAlignB>::Kernel;
      if constexpr (kFewChannels) {
        return Holder<ImplicitGemmConvolution<typename Guarded<typename Default::Mma>::Type, typename Default::Epilogue,
                                              Swizzle, kWhich>>{};
      } else {
        return Holder<Default>{};
      }
    } else if constexpr (kWhich == Operator::kDgrad) {
      return ReadsAll<typename DefaultConv2dDgrad<
          ElementA, Layout, ElementB, Layout, ElementD, Layout, Accumulator, OperatorClass, ArchTag, Tile, Warp,
          Instruction, Epilogue, Swizzle, kStages, MathOperator, kIterator, kStrides, kAlignA, kAlignB>::Kernel>{};
    } else {
      return Holder<typename DefaultConv2dWgrad<
          ElementA, Layout, ElementB, Layout, ElementD, Layout, Accumulator, OperatorClass, ArchTag, Tile, Warp,
          Instruction, Epilogue, Swizzle, kStages, MathOperator, kIterator, kStrides, kAlignA, kAlignB>::Kernel>{};
    }
  }
  using Kernel = typename decltype(choose_kernel<kOperator>())::Type;
  using KernelParams = typename Kernel::Params;

  // Bytes from one group to the next, and how many there are.
  struct Groups {
    int64_t a, b, c, d;
    int32_t count;
  };
  struct Params {
    KernelParams kernel;
    Groups groups;
  };

  static constexpr int kThreads = Kernel::kThreadCount;
  static constexpr int kMinBlocks = 1;
  static constexpr int kParamsOffset = (int(sizeof(typename Kernel::SharedStorage)) + 15) / 16 * 16;
  static constexpr int kSharedBytes =
      kGroups ? kParamsOffset + int(sizeof(KernelParams)) : int(sizeof(typename Kernel::SharedStorage));
  static constexpr int kClusterM = 1, kClusterN = 1, kClusterK = 1;

  // The convolution of one group.
  static Problem problem(Args const& args) {
    return Problem(args.n, args.h, args.w, args.c / args.groups, args.k / args.groups, args.r, args.s, args.p, args.q,
                   args.pad_h, args.pad_w, args.stride_h, args.stride_w, args.dilation_h, args.dilation_w,
                   cutlass::conv::Mode::kCrossCorrelation, args.split_k, 1);
  }

  static PixelTensor tensor_a(Args const& args) { return kFprop ? tensor_x(args) : tensor_y(args); }
  static PixelTensor tensor_b(Args const& args) { return kWgrad ? tensor_x(args) : tensor_w(args); }
  static PixelTensor tensor_d(Args const& args) {
    return kFprop ? tensor_y(args) : (kDgrad ? tensor_x(args) : tensor_w(args));
  }

  static Layout layout(PixelTensor const& tensor) {
    return Layout(int(tensor.stride_column), int(tensor.stride_row), int(tensor.stride_outer));
  }

  // The bias is a source of which every pixel is the same one.
  static bool has_bias(Args const& args) { return args.bias != nullptr; }

  static typename Kernel::Arguments arguments(Args const& args) {
    using Element = typename Kernel::TensorRefC::Element;
    bool const has_source = has_bias(args) || args.c_source != nullptr;
    void const* const source = has_bias(args) ? args.bias : args.c_source;
    Compute const beta = has_bias(args) ? Compute(1) : (has_source ? Compute(args.beta) : Compute(0));
    return typename Kernel::Arguments(
        problem(args), {const_cast<ElementA*>(static_cast<ElementA const*>(args.a)), layout(tensor_a(args))},
        {const_cast<ElementB*>(static_cast<ElementB const*>(args.b)), layout(tensor_b(args))},
        {const_cast<Element*>(static_cast<Element const*>(source)),
         has_bias(args) ? Layout(0, 0, 0) : layout(tensor_d(args))},
        {static_cast<Element*>(args.d), layout(tensor_d(args))}, typename Epilogue::Params(Compute(args.alpha), beta),
        args.split_parallel ? cutlass::conv::SplitKMode::kParallel : cutlass::conv::SplitKMode::kSerial);
  }

  static Params params(Args const& args) {
    int64_t const x = int64_t(args.c / args.groups), y = int64_t(args.k / args.groups);
    int64_t const w = y * args.w_stride_k;
    int64_t const d = (kFprop ? y : (kDgrad ? x : w)) * int64_t(sizeof(ElementD));
    return {KernelParams(arguments(args), static_cast<int*>(args.workspace)),
            {(kFprop ? x : y) * int64_t(sizeof(ElementA)), (kWgrad ? x : w) * int64_t(sizeof(ElementB)), d, d,
             args.groups}};
  }

  static bool can_implement(Args const& args) {
    if (!consistent(args)) return false;
    if (args.groups > 1 && !kGroups) return false;
    if (has_bias(args) && (kWgrad || args.c_source != nullptr)) return false;
    // Slices that are added up later lie behind one another.
    if (args.split_parallel &&
        (!kWgrad || kGroups || args.c_source != nullptr || !tensor_d(args).collapses() || !tensor_d(args).packed())) {
      return false;
    }
    // Partial sums pass through D.
    if (args.split_k > 1 && (kGroups || kFewChannels || kStridedDgrad || sizeof(ElementD) < sizeof(Accumulator))) {
      return false;
    }
    PixelTensor const a = tensor_a(args), b = tensor_b(args), d = tensor_d(args);
    int64_t const channels_x = args.c / args.groups, channels_y = args.k / args.groups;
    if ((kFprop ? channels_x : channels_y) % kAlignA != 0 || channels_x % kAlignB != 0) return false;
    if ((kFprop ? channels_y : channels_x) % kAlignD != 0) return false;
    if (!a.aligned(kAlignA) || !b.aligned(kAlignB) || !d.aligned(kAlignD)) return false;
    // Offsets are 32-bit numbers: of elements in most iterators, of bits in those for few channels.
    if (!a.fits_32_bits(kFewChannels ? 8 * int(sizeof(ElementA)) : int(sizeof(ElementA)))) return false;
    if (!b.fits_32_bits(kFewChannels ? 8 * int(sizeof(ElementB)) : int(sizeof(ElementB)))) return false;
    if (!d.fits_32_bits(int(sizeof(ElementD)))) return false;
    // What the iterators and the epilogue walk as one row of pixels has to be one.
    if (kWgrad ? !d.packed() : !d.collapses()) return false;
    if (kIterator == Algorithm::kOptimized) {
      if (kWgrad ? !a.collapses() : !b.rows_collapse()) return false;
      // They start at an offset that is computed in bits.
      int64_t const start = (kWgrad ? a.stride_column : b.stride_outer) * Tile::kK * args.split_k;
      if (!kFprop && start > ((int64_t(1) << 31) - 1) / (8 * int64_t(sizeof(ElementA)))) return false;
    }
    if (kStridedDgrad && (args.dilation_h != 1 || args.dilation_w != 1)) return false;
    int64_t const largest = (int64_t(1) << 31) - 1 - Tile::kM - Tile::kN;
    int64_t const pixels_x = int64_t(args.n) * (args.h + args.stride_h) * (args.w + args.stride_w);
    int64_t const pixels_y = int64_t(args.n) * args.p * args.q;
    if (pixels_x > largest || pixels_y > largest - int64_t(Tile::kK) * args.split_k) return false;
    if (int64_t(args.r) * args.s * args.c > largest || int64_t(args.r) * args.s * args.k > largest) return false;
    Problem const of_group = problem(args);
    if (Kernel::Mma::IteratorA::can_implement(of_group) != cutlass::Status::kSuccess) return false;
    if (Kernel::Mma::IteratorB::can_implement(of_group) != cutlass::Status::kSuccess) return false;
    dim3 const blocks = grid(params(args));
    return blocks.y <= 65535u && blocks.z <= 65535u;
  }

  // The semaphores of serial split-K.
  static uint64_t workspace_size(Args const& args) {
    if (args.split_k <= 1 || args.split_parallel) return 0;
    cutlass::gemm::GemmCoord const tiles = params(args).kernel.grid_tiled_shape;
    return sizeof(int) * uint64_t(tiles.m()) * uint64_t(tiles.n());
  }

  static void clear_range(Args const& args, uint64_t& offset, uint64_t& bytes) {
    offset = 0;
    bytes = workspace_size(args);
  }

  static dim3 grid(Params const& params) {
    dim3 blocks = Swizzle::get_grid_shape(params.kernel.grid_tiled_shape);
    if constexpr (kGroups) blocks.z = uint32_t(params.groups.count);
    return blocks;
  }

  template <class T>
  CUTLASS_DEVICE static void move(T*& pointer, int64_t bytes) {
    if (pointer != nullptr) pointer = reinterpret_cast<T*>(reinterpret_cast<uint64_t>(pointer) + uint64_t(bytes));
  }

  CUTLASS_DEVICE static void run(Params const& params, char* shared) {
    Kernel kernel;
    auto& storage = *reinterpret_cast<typename Kernel::SharedStorage*>(shared);
    if constexpr (kGroups) {
      // The parameters of one group, in shared memory: the iterators index into them, which a copy in registers would
      // not survive.
      static_assert(sizeof(KernelParams) % sizeof(uint32_t) == 0, "copied by words");
      auto& group = *reinterpret_cast<KernelParams*>(shared + kParamsOffset);
      auto const* const words = reinterpret_cast<uint32_t const*>(&params.kernel);
      for (int i = int(threadIdx.x); i < int(sizeof(KernelParams) / sizeof(uint32_t)); i += kThreads) {
        reinterpret_cast<uint32_t*>(&group)[i] = words[i];
      }
      __syncthreads();
      if (threadIdx.x == 0) {
        int64_t const index = blockIdx.z;
        move(group.ptr_A, index * params.groups.a);
        move(group.ptr_B, index * params.groups.b);
        move(group.ptr_C, index * params.groups.c);
        move(group.ptr_D, index * params.groups.d);
      }
      __syncthreads();
      kernel(group, storage);
    } else {
      kernel(params.kernel, storage);
    }
  }
};

}  // namespace atomr_cutlass
