// What the cells of grouped GEMMs of CUTLASS 3.x share: the epilogues of groups, the arguments of the pointer-array
// kernels, and the kernel that fills the tables that they read.
//
// Functions without an annotation run on the host when nvcc compiles them, and on the device under NVRTC, whose
// -default-device makes them device functions.
#pragma once

#include "atomr_cutlass/cell_3x.h"
#include "atomr_cutlass/epilogue_scaled.h"
#include "atomr_cutlass/epilogue_tree.h"
#include "atomr_cutlass/grouped_setup.h"
#include "atomr_cutlass/kernel_abi.h"
#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/gemm/group_array_problem_shape.hpp"

namespace atomr_cutlass {

// The scaled epilogue (epilogue_scaled.h) with scales that each group has of its own.
struct GroupedScaledParams {
  ScaledParams common;  // without scales
  float const* const* scale_a;
  float const* const* scale_b;

  // The scales are columns of the groups' tables.
  static GroupedScaledParams of(atomr_cutlass_grouped_args const& args, float const* const* scale_a,
                                float const* const* scale_b) {
    GroupedScaledParams made{};
    made.common.alpha = float(args.alpha);
    made.common.beta = float(args.beta);
    // One float for each group is one for all, of the group.
    made.common.form_a = args.scale_form_a == 1;
    made.common.form_b = args.scale_form_b == 1;
    made.scale_a = scale_a;
    made.scale_b = scale_b;
    return made;
  }
};

template <int kTileM, int kTileN>
struct GroupedScaledVisitor : ScaledVisitor<kTileM, kTileN> {
  using Base = ScaledVisitor<kTileM, kTileN>;
  using typename Base::SharedStorage;
  using Arguments = GroupedScaledParams;
  using Params = GroupedScaledParams;

  template <class Problem>
  static constexpr Params to_underlying_arguments(Problem const&, Arguments const& args, void*) {
    return args;
  }
  template <class Problem>
  static bool can_implement(Problem const&, Arguments const&) {
    return true;
  }
  template <class Problem>
  static size_t get_workspace_size(Problem const&, Arguments const&) {
    return 0;
  }

  CUTLASS_HOST_DEVICE GroupedScaledVisitor() {}
  CUTLASS_HOST_DEVICE GroupedScaledVisitor(Params const& params, SharedStorage const& shared)
      : Base(params.common, shared),
        groups(&params) {}

  template <class Common>
  struct Callbacks : Common {
    float const* scale_a;
    float const* scale_b;

    CUTLASS_DEVICE Callbacks(Common const& common, float const* scale_a, float const* scale_b)
        : Common(common),
          scale_a(scale_a),
          scale_b(scale_b) {}

    CUTLASS_DEVICE void begin() {
      ScaledParams group = this->params;
      group.scale_a = scale_a;
      group.scale_b = scale_b;
      Common::begin(group);
    }
  };

  template <bool kReferenceSource, class... A>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(
      cutlass::epilogue::fusion::detail::ConsumerStoreArgs<A...> const& args) {
    auto const common = Base::template get_consumer_store_callbacks<kReferenceSource>(args);
    int const g = cute::get<3>(args.tile_coord_mnkl);
    return Callbacks<cute::remove_cvref_t<decltype(common)>>(common, groups->scale_a[g], groups->scale_b[g]);
  }

  Params const* groups;
};

// What an epilogue tree is given for each group: its operands, which are rows and scalars, and the scales.
template <class Tree>
struct GroupedTreeParams : TreeParams<Tree> {
  GroupedScaledParams groups;
  bool listed;  // operands are tables of addresses

  static GroupedTreeParams of(atomr_cutlass_grouped_args const& args, float const* const* scale_a,
                              float const* const* scale_b) {
    GroupedTreeParams made{};
    made.alpha = typename Tree::Value(args.alpha);
    made.beta = typename Tree::Value(args.beta);
    for (int i = 0; i < TreeParams<Tree>::kOperands; ++i) made.operands[i] = args.operands[i];
    made.groups = GroupedScaledParams::of(args, scale_a, scale_b);
    made.listed = args.form == ATOMR_CUTLASS_GROUPED_LIST;
    return made;
  }

  template <class Element>
  CUTLASS_DEVICE Element* at(int index, int group, int m, int n) const {
    if (!listed) return TreeParams<Tree>::template at<Element>(index, group, m, n);
    atomr_cutlass_tree_operand const& operand = this->operands[index];
    return static_cast<Element* const*>(operand.pointer)[group] + m * operand.stride_m + n * operand.stride_n;
  }

  CUTLASS_DEVICE ScaledParams scales(int group) const {
    ScaledParams found = groups.common;
    found.scale_a = groups.scale_a[group];
    found.scale_b = groups.scale_b[group];
    return found;
  }
};

// Whether an epilogue reads the scales of groups.
template <class Epilogue>
inline constexpr bool kReadsScales = cute::is_same_v<Epilogue, ScaledEpilogue>;
template <class Tree, bool kScaled, class Lanes>
inline constexpr bool kReadsScales<TreeEpilogue<Tree, kScaled, Lanes>> = kScaled;

// An epilogue's arguments; the scales are columns of the groups' tables.
template <class Tree>
void fill_epilogue(GroupedTreeParams<Tree>& thread, atomr_cutlass_grouped_args const& args, float const* const* scale_a,
                   float const* const* scale_b) {
  thread = GroupedTreeParams<Tree>::of(args, scale_a, scale_b);
}
inline void fill_epilogue(GroupedScaledParams& thread, atomr_cutlass_grouped_args const& args,
                          float const* const* scale_a, float const* const* scale_b) {
  thread = GroupedScaledParams::of(args, scale_a, scale_b);
}
template <class Linear>
void fill_epilogue(Linear& thread, atomr_cutlass_grouped_args const& args, float const* const*, float const* const*) {
  thread.alpha = decltype(thread.alpha)(args.alpha);
  thread.beta = decltype(thread.beta)(args.beta);
}

// What a kernel can be given, and how. kBlockScales: whether it multiplies with scales of blocks.
template <class ElementA, class LayoutA, int kAlignA, class ElementB, class LayoutB, int kAlignB, class ElementD,
          int kAlignD, class Epilogue, bool kBlockScales>
struct GroupedProblem {
  using Args = atomr_cutlass_grouped_args;

  static constexpr bool kRowMajorA = cute::is_same_v<LayoutA, cutlass::layout::RowMajor>;
  static constexpr bool kRowMajorB = cute::is_same_v<LayoutB, cutlass::layout::RowMajor>;

  using Shape = cute::Shape<int, int, int>;
  using Groups = cutlass::gemm::GroupProblemShape<Shape>;
  using Tables = GroupTables<Shape>;
  using Finder = GroupFinder<cutlass::sizeof_bits<ElementA>::value, kRowMajorA, cutlass::sizeof_bits<ElementB>::value,
                             kRowMajorB, cutlass::sizeof_bits<ElementD>::value, kBlockScales>;

  static bool listed(Args const& args) { return args.form == ATOMR_CUTLASS_GROUPED_LIST; }

  // The extents of the groups are not known, but leading dimensions and strides are, other than a list's.
  static bool admits(Args const& args) {
    if (args.groups < 1) return false;
    bool const scales = args.scale_a != nullptr || args.scale_b != nullptr;
    if (scales && !kReadsScales<Epilogue> && !kBlockScales) return false;
    bool const along_k = args.form == ATOMR_CUTLASS_GROUPED_K;
    if (kBlockScales && (along_k || (!listed(args) && (args.scale_a == nullptr || args.scale_b == nullptr)))) {
      return false;
    }
    if (listed(args)) return true;
    // The rows of a column-major A begin anywhere.
    if (!kRowMajorA && args.form == ATOMR_CUTLASS_GROUPED_CONTIGUOUS) return false;
    bool const strided = args.lda % kAlignA == 0 && args.ldb % kAlignB == 0 && args.ldd % kAlignD == 0 &&
                         args.group_stride_a % kAlignA == 0 && args.group_stride_b % kAlignB == 0 &&
                         args.group_stride_d % kAlignD == 0;
    return strided && (args.c == nullptr || (args.ldc % kAlignD == 0 && args.group_stride_c % kAlignD == 0));
  }

  // Without the layouts of scales of blocks.
  template <class Kernel>
  static typename Kernel::Arguments arguments(Args const& args) {
    Tables const tables(args.workspace, args.groups);
    auto* const scale_a = tables.template column<float const*>(Tables::kScaleA);
    auto* const scale_b = tables.template column<float const*>(Tables::kScaleB);
    typename Kernel::Arguments result{};
    result.mode = cutlass::gemm::GemmUniversalMode::kGrouped;
    result.problem_shape = {args.groups, tables.shapes(), nullptr};
    // A stride table holds the one dynamic mode of each stride: its leading dimension.
    result.mainloop.ptr_A = tables.template column<ElementA const*>(Tables::kA);
    result.mainloop.dA = tables.template column<typename Kernel::InternalStrideA>(Tables::kLda);
    result.mainloop.ptr_B = tables.template column<ElementB const*>(Tables::kB);
    result.mainloop.dB = tables.template column<typename Kernel::InternalStrideB>(Tables::kLdb);
    if constexpr (kBlockScales) {
      result.mainloop.ptr_SFA = scale_a;
      result.mainloop.ptr_SFB = scale_b;
    }
    fill_epilogue(result.epilogue.thread, args, scale_a, scale_b);
    result.epilogue.ptr_C = tables.template column<ElementD const*>(Tables::kC);
    result.epilogue.dC = tables.template column<typename Kernel::InternalStrideC>(Tables::kLdc);
    result.epilogue.ptr_D = tables.template column<ElementD*>(Tables::kD);
    result.epilogue.dD = tables.template column<typename Kernel::InternalStrideD>(Tables::kLdd);
    result.hw_info.sm_count = args.sm_count;
    // There are tensor maps for as many thread blocks as there are multiprocessors.
    int const clusters = args.sm_count / int(cute::size(typename Kernel::ClusterShape{}));
    result.hw_info.max_active_clusters = args.max_active_clusters < clusters ? args.max_active_clusters : clusters;
    return result;
  }
};

// The cell of an adaptor, which has, beyond what Cell3x wants, Problem, tables_bytes(args) and fill_tables(args), which
// all threads of the setup kernel call.
template <class Adaptor>
struct GroupedCell : Cell3x<Adaptor> {
  using typename Cell3x<Adaptor>::Args;
  using typename Cell3x<Adaptor>::Kernel;
  using Finder = typename Adaptor::Problem::Finder;

  // The arguments are for the setup kernel.
  struct Params {
    typename Kernel::Params kernel;
    Args args;
  };

  static constexpr int kSetupThreads = Finder::kThreads;

  static uint64_t workspace_size(Args const& args) {
    return Adaptor::tables_bytes(args) + Kernel::get_workspace_size(Adaptor::arguments(args));
  }

  static void clear_range(Args const&, uint64_t& offset, uint64_t& bytes) { offset = bytes = 0; }

  static Params params(Args const& args) {
    void* const workspace = static_cast<char*>(args.workspace) + Adaptor::tables_bytes(args);
    return {Kernel::to_underlying_arguments(Adaptor::arguments(args), workspace), args};
  }

  static dim3 grid(Params const& params) { return Kernel::get_grid_shape(params.kernel); }

  static dim3 setup_grid(Params const& params) { return dim3(Finder::blocks(params.args)); }

  CUTLASS_DEVICE static void setup(Params const& params) { Adaptor::fill_tables(params.args); }

  CUTLASS_DEVICE static void run(Params const& params, char* shared) {
    Kernel kernel;
    kernel(params.kernel, shared);
  }
};

}  // namespace atomr_cutlass
