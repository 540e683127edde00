"""Tensor maps and coordinates of sm90 convolutions, compared with those of CUTLASS's collective."""

from pathlib import Path

import pytest

from atomr_cutlass.jit.toolchain import CUTLASS
from cmake_build import compiled, said_by
from generator.toolchain import system_nvcc

ROOT = Path(__file__).resolve().parents[2]
HEADERS = ROOT / "cpp" / "include"

# For random problems, both mainloops' tensor maps of A and B, as lines of text, and where they load tiles from.
SOURCE = r"""
#include <cstdio>
#include <random>
#include <sstream>
#include <string>
#include <vector>
#include <cuda.h>
#include "cutlass/cuda_host_adapter.hpp"

std::vector<std::string> said;
template <class... Rest>
void say(Rest... rest) {
  std::ostringstream text;
  ((text << rest << ' '), ...);
  said.push_back(text.str());
}
namespace record {
std::string listed(int rank, uint64_t const* dims, uint64_t const* strides, uint32_t const* steps) {
  std::ostringstream text;
  // A dimension of one element has no place.
  for (int i = 0; i < rank; ++i) {
    if (i == 0 || dims[i] > 1) text << dims[i] << ':' << (i ? strides[i - 1] : 0) << ':' << steps[i] << ' ';
  }
  return text.str();
}
CUresult cuTensorMapEncodeTiled(void*, CUtensorMapDataType type, uint32_t rank, void* address, uint64_t const* dims,
                                uint64_t const* strides, uint32_t const* box, uint32_t const* steps,
                                CUtensorMapInterleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill) {
  say("tiled", type, address, listed(rank, dims, strides, steps), box[0], box[1], swizzle, promotion, fill);
  return CUDA_SUCCESS;
}
CUresult cuTensorMapEncodeIm2col(void*, CUtensorMapDataType type, uint32_t rank, void* address, uint64_t const* dims,
                                 uint64_t const* strides, int const* lower, int const* upper, uint32_t channels,
                                 uint32_t pixels, uint32_t const* steps, CUtensorMapInterleave,
                                 CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                 CUtensorMapFloatOOBfill fill) {
  say("im2col", type, address, listed(rank, dims, strides, steps), lower[0], lower[1], upper[0], upper[1], channels,
      pixels, swizzle, promotion, fill);
  return CUDA_SUCCESS;
}
}  // namespace record
#undef CUTLASS_CUDA_DRIVER_WRAPPER_CALL
#define CUTLASS_CUDA_DRIVER_WRAPPER_CALL(function) record::function

#include "atomr_cutlass/conv_sm90.h"
#include "cutlass/conv/collective/collective_builder.hpp"
#include "cutlass/conv/convnd_problem_shape.hpp"

using namespace cute;
using atomr_cutlass::tensor_w;
using atomr_cutlass::tensor_x;
using atomr_cutlass::tensor_y;
using Args = atomr_cutlass_conv_args;
using Operator = cutlass::conv::Operator;

std::mt19937 generator(5);
int pick(std::initializer_list<int> values) { return values.begin()[generator() % values.size()]; }

template <Operator kOperator, class Element, int kAlign, class D, int kAlignD, int kM, int kN, int kK, class Cluster>
int compared(char const* name) {
  static constexpr bool kWgrad = kOperator == Operator::kWgrad;
  using Ours = atomr_cutlass::ConvSm90<kOperator, Element, kAlign, Element, kAlign, D, kAlignD, float, float, kM, kN,
                                       kK, Cluster, 4, atomr_cutlass::BiasEpilogue<void>>;
  using Mainloop = typename Ours::CollectiveMainloop;
  using Tile = conditional_t<kWgrad, Shape<Int<kM>, Shape<Int<kN>>, Shape<Int<kK>>>,
                             Shape<Int<kM>, Int<kN>, Shape<Int<kK>>>>;
  using Theirs = typename cutlass::conv::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, kOperator, Element, cutlass::layout::TensorNHWC, kAlign,
      Element, cutlass::layout::TensorNHWC, kAlign, float, Tile, Cluster, cutlass::conv::collective::StageCount<4>,
      cutlass::conv::KernelImplicitTmaWarpSpecializedSm90>::CollectiveOp;
  using Problem = cutlass::conv::ConvProblemShape<kOperator, 2>;
  int problems = 0;
  for (int number = 0; number < 400; ++number) {
    Args a{};
    a.n = pick({1, 2, 5}), a.h = pick({1, 3, 7, 14, 33}), a.w = pick({1, 2, 8, 19, 40});
    a.c = kAlign * pick({1, 3, 8, 9, 20}), a.k = kAlign * pick({1, 2, 7, 16, 17});
    a.r = pick({1, 1, 3, 5, 7}), a.s = pick({1, 3, 3, 2, 7}), a.groups = 1, a.split_k = 1;
    a.stride_h = pick({1, 1, 2, 3}), a.stride_w = pick({1, 1, 2, 9});
    a.dilation_h = pick({1, 1, 2, 60}), a.dilation_w = pick({1, 1, 3, 127});
    a.pad_h = pick({0, 1, 3, 129}), a.pad_w = pick({0, 1, 2, 100});
    a.pad_h_end = pick({0, 1, 2, 200}), a.pad_w_end = pick({0, 1, 5, 130});
    int const p = a.h + a.pad_h + a.pad_h_end - (a.r - 1) * a.dilation_h - 1;
    int const q = a.w + a.pad_w + a.pad_w_end - (a.s - 1) * a.dilation_w - 1;
    if (p < 0 || q < 0) continue;
    a.p = p / a.stride_h + 1, a.q = q / a.stride_w + 1;
    int const gap = kWgrad ? 0 : pick({0, 0, 1, 2}) * kAlign;
    a.x_stride_w = a.c + gap, a.x_stride_h = a.x_stride_w * a.w + gap, a.x_stride_n = a.x_stride_h * a.h + gap;
    a.w_stride_s = a.c + gap, a.w_stride_r = a.w_stride_s * a.s + gap, a.w_stride_k = a.w_stride_r * a.r + gap;
    a.y_stride_q = a.k + gap, a.y_stride_p = a.y_stride_q * a.q + gap, a.y_stride_n = a.y_stride_p * a.p + gap;
    a.a = reinterpret_cast<void*>(0x100000000), a.b = reinterpret_cast<void*>(0x200000000);
    a.d = reinterpret_cast<void*>(0x300000000);
    auto const strides = [](atomr_cutlass::PixelTensor const& tensor) {
      return typename Problem::TensorStride{tensor.stride_outer, tensor.stride_row, tensor.stride_column, 1};
    };
    Problem const convolution(cutlass::conv::Mode::kCrossCorrelation, {a.n, a.h, a.w, a.c}, strides(tensor_x(a)),
                        {a.k, a.r, a.s, a.c}, strides(tensor_w(a)), strides(tensor_y(a)), {a.pad_h, a.pad_w},
                        {a.pad_h_end, a.pad_w_end}, {a.stride_h, a.stride_w}, {a.dilation_h, a.dilation_w}, 1);
    typename Theirs::Arguments const theirs{static_cast<Element const*>(a.a), static_cast<Element const*>(a.b)};
    bool const strided = kOperator == Operator::kDgrad && (a.stride_h > 1 || a.stride_w > 1);
    bool const admitted = Theirs::can_implement(convolution, theirs) && !strided && a.stride_w <= 8;
    if (Ours::can_implement(a) != admitted) {
      std::printf("%s %d: admitted %d\n", name, number, admitted);
      return 1;
    }
    if (!admitted) continue;
    ++problems;
    said.clear();
    auto const ours = Mainloop::to_underlying_arguments(Ours::problem(a), Ours::arguments(a).mainloop, nullptr);
    std::vector<std::string> const mine(said.begin(), said.begin() + 2);  // `arguments` encodes nothing
    said.clear();
    auto const params = Theirs::to_underlying_arguments(convolution, theirs, nullptr);
    if (mine != said) {
      std::printf("%s %d:\n%s\n%s\n%s\n%s\n", name, number, mine[0].c_str(), said[0].c_str(), mine[1].c_str(),
                  said[1].c_str());
      return 1;
    }
    auto const mnkl = cutlass::conv::detail::get_linearized_problem_shape_MNKL(convolution);
    using X = Underscore;
    auto const tiles_a = local_tile(params.tma_load_a.get_tma_tensor(make_shape(get<0>(mnkl), get<2>(mnkl))), Tile{},
                                    make_coord(_, _, _), Step<_1, X, _1>{});
    auto const tiles_b = local_tile(params.tma_load_b.get_tma_tensor(make_shape(get<1>(mnkl), get<2>(mnkl))), Tile{},
                                    make_coord(_, _, _), Step<X, _1, _1>{});
    int const along_k = size<3>(tiles_a), along_m = size<2>(tiles_a), along_n = size<2>(tiles_b);
    auto const [rows, columns, depth, batches] = Ours::problem(a);
    if (along_k != (depth + kK - 1) / kK || along_m != (rows + kM - 1) / kM ||
        along_n != (columns + kN - 1) / kN * batches) {
      std::printf("%s %d: tiles\n", name, number);
      return 1;
    }
    for (int turn = 0; turn < 40; ++turn) {
      int const m = generator() % along_m, n = generator() % along_n, k = generator() % along_k;
      auto const text = [](auto const& coordinates) {
        std::ostringstream text;
        for_each(flatten(coordinates), [&](auto one) { text << int(one) << ' '; });
        return text.str();
      };
      auto const at_k = idx2crd(k, shape<3>(tiles_a));
      std::string const from_a = text(tiles_a(_0{}, _0{}, m, at_k));
      std::string const from_b = text(tiles_b(_0{}, _0{}, idx2crd(n, shape<2>(tiles_b)), at_k));
      std::ostringstream at_a, at_b;
      if constexpr (kWgrad) {
        int const wide = (columns + kN - 1) / kN, place = n / wide, row = place / a.s, column = place - row * a.s;
        auto const at = ours.numbers.place(k * kK);
        at_a << m * kM << ' ' << k * kK << ' ';
        at_b << n % wide * kN << ' ' << at.column << ' ' << at.row << ' ' << at.image << ' '
             << Mainloop::beyond_column(ours, column) << ' ' << Mainloop::beyond_row(ours, row) << ' ';
      } else {
        typename Mainloop::Step step = Mainloop::step_of(ours, 0);
        for (int i = 0; i < k; ++i) Mainloop::advance(ours, step);
        typename Mainloop::Step const same = Mainloop::step_of(ours, k);
        if (same.along != step.along || same.column != step.column || same.row != step.row) return 1;
        auto const at = ours.numbers.place(m * kM);
        at_a << step.along * kK << ' ' << at.column << ' ' << at.row << ' ' << at.image << ' '
             << Mainloop::beyond_column(ours, step.column) << ' ' << Mainloop::beyond_row(ours, step.row) << ' ';
        int const channel = kOperator == Operator::kFprop ? step.along * kK : n * kN;
        int const line = kOperator == Operator::kFprop ? n * kN : step.along * kK;
        at_b << channel << ' ' << line << ' ' << step.column << ' ' << step.row << ' ';
      }
      if (at_a.str() != from_a || at_b.str() != from_b) {
        std::printf("%s %d, tile %d %d %d:\n%s\n%s\n%s\n%s\n", name, number, m, n, k, at_a.str().c_str(),
                    from_a.c_str(), at_b.str().c_str(), from_b.c_str());
        return 1;
      }
    }
  }
  std::printf("%s: %d problems\n", name, problems);
  return problems < 20;
}

int main() {
  using Bf16 = cutlass::bfloat16_t;
  using One = Shape<_1, _1, _1>;
  using Four = Shape<_2, _2, _1>;
  return compared<Operator::kFprop, Bf16, 8, Bf16, 8, 128, 128, 64, One>("fprop") |
         compared<Operator::kFprop, float, 4, float, 4, 128, 64, 32, Four>("fprop of tf32") |
         compared<Operator::kDgrad, Bf16, 8, Bf16, 8, 128, 128, 64, One>("dgrad") |
         compared<Operator::kDgrad, Bf16, 8, Bf16, 8, 64, 128, 64, Four>("dgrad by clusters") |
         compared<Operator::kWgrad, Bf16, 8, Bf16, 8, 128, 128, 64, One>("wgrad") |
         compared<Operator::kWgrad, Bf16, 8, Bf16, 8, 128, 64, 64, Four>("wgrad by clusters");
}
"""


@pytest.mark.slow
@pytest.mark.skipif(not system_nvcc(), reason="no nvcc")
def test_maps_and_coordinates_are_those_of_cutlass(tmp_path: Path) -> None:
    strides = HEADERS / "atomr_cutlass" / "shadows" / "cutlass_4" / "required"
    include = (f"-I{folder}" for folder in (HEADERS, strides, CUTLASS))
    said_by(compiled(SOURCE, tmp_path / "maps", "-arch=sm_90a", *include))
