// The gated epilogue of CUTLASS 3.x kernels: two products in one, over weights whose columns are interleaved. Column 2j
// of A B is the gate's, column 2j + 1 the other's: D[m, j] = f(gate) * other, half as wide as A B, f being a tree
// without operands. Scales come before f.
#pragma once

#include "atomr_cutlass/epilogue_plain.h"
#include "atomr_cutlass/epilogue_tree.h"
#include "cute/tensor.hpp"
#include "cutlass/array.h"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/default_epilogue.hpp"

namespace atomr_cutlass {

template <class Tree_, bool kScaled_>
struct GatedEpilogue {
  using Tree = Tree_;
  static constexpr bool kScaled = kScaled_;
};

template <class Epilogue>
inline constexpr bool kIsGated = false;
template <class Tree, bool kScaled>
inline constexpr bool kIsGated<GatedEpilogue<Tree, kScaled>> = true;

// From registers straight to global memory. A quad of lanes holds eight neighbouring columns of a row of A B, two each;
// four such blocks are four elements of D for each lane, after the lanes have exchanged theirs: what one instruction
// stores is then whole sectors.
template <class Epilogue, class Element, class Stride>
struct GatedStore : DirectStore<ScaledParams, Element, Stride> {
  using Tree = typename Epilogue::Tree;
  using Base = DirectStore<ScaledParams, Element, Stride>;
  using typename Base::Arguments;
  using typename Base::ElementC;
  using typename Base::ElementD;
  using typename Base::Params;
  using typename Base::SharedStorage;

  static_assert(cute::is_static_v<cute::tuple_element_t<1, Stride>>, "D is row-major");

  template <class Problem>
  static bool can_implement(Problem const& problem, Arguments const& args) {
    return cute::get<1>(problem) % 2 == 0 && args.ptr_C == args.ptr_D && args.thread.amax == nullptr;
  }

  CUTLASS_HOST_DEVICE GatedStore(Params const& params, SharedStorage const& = SharedStorage()) : params(params) {}

  template <class Problem, class Tile, class TileCoordinates, class Engine, class Layout, class TiledMma, class Residue>
  CUTLASS_DEVICE void operator()(Problem problem, Tile tile, TileCoordinates where,
                                 cute::Tensor<Engine, Layout> const& accumulators, TiledMma tiled_mma, Residue,
                                 int thread, char*) {
    using namespace cute;
    int const count_m = get<0>(problem), count_n = get<1>(problem);
    Tensor const mine = tiled_mma.get_thread_slice(thread).partition_C(
        local_tile(make_identity_tensor(make_shape(count_m, count_n)), take<0, 2>(tile), take<0, 2>(where)));
    Tensor const steps = make_coord_tensor(mine.layout());
    int const first_m = get<0>(mine(_0{})), first_n = get<1>(mine(_0{}));
    int const lane = int(threadIdx.x) % 4;
    ScaledParams const& scaled = params.thread;
    float const scale_d = Epilogue::kScaled ? scaled.output() : 1.0f;
    ElementD* const d = params.ptr_D + int64_t(get<3>(where)) * int64_t(get<2>(params.dD));

    // Of a block of eight columns a thread has elements 4 i (its two columns in one row) and 4 i + 2 (eight rows
    // below).
    constexpr int kElements = decltype(size(accumulators))::value, kBlocks = 4;
    static_assert(kElements % (4 * kBlocks) == 0, "the accumulators of a thread are whole groups of blocks");
    CUTLASS_PRAGMA_UNROLL
    for (int first = 0; first < kElements; first += 4 * kBlocks) {
      CUTLASS_PRAGMA_UNROLL
      for (int below = 0; below < 2; ++below) {
        int const m = first_m + get<0>(steps(first + 2 * below));
        float const row = Epilogue::kScaled ? scaled.row(m, count_m) : scaled.alpha;
        float values[kBlocks];
        CUTLASS_PRAGMA_UNROLL
        for (int block = 0; block < kBlocks; ++block) {
          int const at = first + 4 * block + 2 * below;
          float gate = row * accumulators(at), other = row * accumulators(at + 1);
          if (Epilogue::kScaled) {
            int const n = first_n + get<1>(steps(at));
            gate *= scaled.column(n, count_n);
            other *= scaled.column(n + 1, count_n);
          }
          values[block] = Tree::evaluate(gate, nullptr, nullptr) * other * scale_d;
        }
        exchange(values);
        // The lane has now its quad's four elements of block `lane`, the quad beginning at column first_n - 2 lane.
        int const n = (first_n - 2 * lane + get<1>(steps(first)) + 8 * lane) / 2;
        store(d + int64_t(m) * int64_t(get<0>(params.dD)) + n, values, m < count_m ? count_n / 2 - n : 0);
      }
    }
  }

 private:
  CUTLASS_DEVICE static void store(ElementD* to, float const (&values)[4], int left) {
    using Vector = cutlass::AlignedArray<ElementD, 4>;
    Vector made;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) made[i] = converted<ElementD>(values[i]);
    if (left >= 4 && reinterpret_cast<uintptr_t>(to) % sizeof(Vector) == 0) {
      *reinterpret_cast<Vector*>(to) = made;
      return;
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (i < left) to[i] = made[i];
    }
  }

  Params params;
};

}  // namespace atomr_cutlass
