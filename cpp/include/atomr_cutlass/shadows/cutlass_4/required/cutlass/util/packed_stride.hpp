// The collectives of convolutions turn a problem's strides, outermost first, into those of their own modes with
// functions that CUTLASS keeps among its utilities, which its wheel of headers lacks. These take their place, for two
// dimensions of pixels.
#pragma once

#include <cutlass/version.h>
#if CUTLASS_MAJOR != 4
#error "This header shadows that of CUTLASS 4, and another CUTLASS is there: generator/headers.py chooses the folders"
#endif

#include "cute/container/array.hpp"
#include "cute/layout.hpp"
#include "cutlass/conv/convolution.h"

namespace cutlass::conv {

using PixelStrides = cute::array<int64_t, 4>;

// ((w, h, n), c)
inline cute::Stride<cute::Stride<int64_t, int64_t, int64_t>, cute::Int<1>> make_cute_packed_stride(
    cute::Stride<cute::Stride<int64_t, int64_t, int64_t>, cute::Int<1>>, PixelStrides const& strides, Operator) {
  return {cute::make_stride(strides[2], strides[1], strides[0]), {}};
}

// (k, (c, s, r))
inline cute::Stride<int64_t, cute::Stride<cute::Int<1>, int64_t, int64_t>> make_cute_packed_stride(
    cute::Stride<int64_t, cute::Stride<cute::Int<1>, int64_t, int64_t>>, PixelStrides const& strides, Operator) {
  return {strides[0], cute::make_stride(cute::Int<1>{}, strides[2], strides[1])};
}

// (c, (w, h, n)) of wgrad's x; (c, (k, s, r)) of dgrad's w
inline cute::Stride<cute::Int<1>, cute::Stride<int64_t, int64_t, int64_t>> make_cute_packed_stride(
    cute::Stride<cute::Int<1>, cute::Stride<int64_t, int64_t, int64_t>>, PixelStrides const& strides,
    Operator operation) {
  return operation == Operator::kWgrad
             ? cute::make_stride(cute::Int<1>{}, cute::make_stride(strides[2], strides[1], strides[0]))
             : cute::make_stride(cute::Int<1>{}, cute::make_stride(strides[0], strides[2], strides[1]));
}

// (k, n p q), which have to be evenly spaced
inline cute::Stride<cute::Int<1>, int64_t> make_cute_packed_stride(cute::Stride<cute::Int<1>, int64_t>,
                                                                   PixelStrides const& strides, Operator) {
  return {{}, strides[2]};
}

}  // namespace cutlass::conv
