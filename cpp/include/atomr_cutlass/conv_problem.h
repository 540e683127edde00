// What convolutions of every generation know of their tensors.
#pragma once

#include "atomr_cutlass/kernel_abi.h"

namespace atomr_cutlass {

// A tensor of pixels, of which the channels are contiguous: x, y, or the filter with (k, r, s) for (n, h, w). Strides
// count elements.
struct PixelTensor {
  int64_t outer, rows, columns, channels;
  int64_t stride_outer, stride_row, stride_column;

  // Frameworks put anything into the stride of a dimension of one element. Here it becomes what makes the tensor
  // collapse, if it does, with the distance of neighbouring pixels in stride_column.
  PixelTensor normalized() const {
    PixelTensor result = *this;
    if (columns == 1) result.stride_column = rows > 1 ? stride_row : (outer > 1 ? stride_outer : channels);
    if (rows == 1) result.stride_row = columns * result.stride_column;
    if (outer == 1) result.stride_outer = rows * result.stride_row;
    return result;
  }

  // Whether the pixels of one outer index, or of all, are evenly spaced; of a normalized tensor.
  bool rows_collapse() const { return stride_row == columns * stride_column; }
  bool collapses() const { return rows_collapse() && stride_outer == rows * stride_row; }

  // Whether an outer index has no gaps: its pixels and channels are one row of a matrix.
  bool packed() const { return rows * columns == 1 || (stride_column == channels && rows_collapse()); }

  bool aligned(int elements) const {
    return channels % elements == 0 && stride_outer % elements == 0 && stride_row % elements == 0 &&
           stride_column % elements == 0;
  }

  // Whether every stride, and the offset of every element in units of `unit` bits, is a positive 32-bit number.
  bool fits_32_bits(int unit) const {
    int64_t const largest = (int64_t(1) << 31) - 1;
    if (stride_outer < 0 || stride_row < 0 || stride_column < 0) return false;
    if (stride_outer > largest || stride_row > largest || stride_column > largest) return false;
    int64_t const span =
        (outer - 1) * stride_outer + (rows - 1) * stride_row + (columns - 1) * stride_column + channels;
    return span <= largest / unit;
  }
};

inline PixelTensor tensor_x(atomr_cutlass_conv_args const& args) {
  PixelTensor const x = {args.n, args.h, args.w, args.c, args.x_stride_n, args.x_stride_h, args.x_stride_w};
  return x.normalized();
}

inline PixelTensor tensor_w(atomr_cutlass_conv_args const& args) {
  int64_t const channels = args.c / args.groups;
  PixelTensor const w = {args.k, args.r, args.s, channels, args.w_stride_k, args.w_stride_r, args.w_stride_s};
  return w.normalized();
}

inline PixelTensor tensor_y(atomr_cutlass_conv_args const& args) {
  PixelTensor const y = {args.n, args.p, args.q, args.k, args.y_stride_n, args.y_stride_p, args.y_stride_q};
  return y.normalized();
}

// Whether the extents are those of a convolution: at least one element of everything, groups that divide the channels,
// and as many results as the filter has places.
inline bool consistent(atomr_cutlass_conv_args const& args) {
  if (args.n < 1 || args.h < 1 || args.w < 1 || args.c < 1 || args.k < 1 || args.r < 1 || args.s < 1) return false;
  if (args.stride_h < 1 || args.stride_w < 1 || args.dilation_h < 1 || args.dilation_w < 1) return false;
  if (args.pad_h < 0 || args.pad_w < 0 || args.pad_h_end < 0 || args.pad_w_end < 0) return false;
  if (args.groups < 1 || args.c % args.groups != 0 || args.k % args.groups != 0 || args.split_k < 1) return false;
  int64_t const places_h = int64_t(args.h) + args.pad_h + args.pad_h_end - int64_t(args.r - 1) * args.dilation_h - 1;
  int64_t const places_w = int64_t(args.w) + args.pad_w + args.pad_w_end - int64_t(args.s - 1) * args.dilation_w - 1;
  return places_h >= 0 && places_w >= 0 && args.p == places_h / args.stride_h + 1 &&
         args.q == places_w / args.stride_w + 1;
}

}  // namespace atomr_cutlass
