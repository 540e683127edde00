/* The C ABI between compiled kernels and whoever launches them.
 *
 * Every kernel, prebuilt or compiled at run time, is one `atomr_cutlass_row`: plain data and C function pointers, so
 * that a pack built by another compiler, or for another Python, can be loaded. Change any struct here and
 * ATOMR_CUTLASS_ABI_VERSION goes up: a pack of another version, or with another layout of the structs, is refused by
 * name. No struct has bytes that are not a field's: abi_layout.h stops the compiler else. */
#pragma once

#include <stdint.h>

#define ATOMR_CUTLASS_ABI_VERSION 7

// clang-format off: it takes lists of fields for expressions
/* A struct is declared by the list of its fields, NAME_fields, which abi_layout.h reads as well: FIELD(type, name) is
 * `type name;`, and ARRAY(type, name, count) is `type name[count];`. */
#define ATOMR_CUTLASS_FIELD(Type, name) Type name;
#define ATOMR_CUTLASS_ARRAY(Type, name, count) Type name[count];
#define ATOMR_CUTLASS_STRUCT(Name) \
  typedef struct Name { Name##_fields(ATOMR_CUTLASS_FIELD, ATOMR_CUTLASS_ARRAY) } Name;

#ifdef __cplusplus
extern "C" {
#endif

/* Status of a row's functions: 0 is success, a positive value is a cudaError_t, a negative one is listed here. */
enum { ATOMR_CUTLASS_OK = 0, ATOMR_CUTLASS_CANNOT_IMPLEMENT = -1 };

enum {
  ATOMR_CUTLASS_FLAG_PTX = 1u,  /* the image carries PTX as well, which newer GPUs translate */
};

/* Bits of atomr_cutlass_gemm_args.settled: the operands that no launch writes that may still be running, so that a
 * kernel which starts before the launch before it has ended may read them at once. */
enum { ATOMR_CUTLASS_A_SETTLED = 1, ATOMR_CUTLASS_B_SETTLED = 2 };

/* Bits of atomr_cutlass_launch.padding and atomr_cutlass_jit_evaluation.padding. `prepare` says DEPENDENT of a kernel
 * that waits for the launch before it (griddepcontrol.wait) ahead of all that it reads and writes, but for settled
 * operands; whoever launches clears the bit where the kernel is to start after that one all the same. */
enum { ATOMR_CUTLASS_LAUNCH_DEPENDENT = 1 };

/* What an epilogue tree reads or writes beside C and D: element (m, n) of a batch is `m * stride_m + n * stride_n +
 * batch * batch_stride` elements from the pointer, m and n being those of the kernel's D. Strides along which an
 * operand does not vary are 0; of a mask, stride_n is 1 and counts bytes. */
#define atomr_cutlass_tree_operand_fields(FIELD, ARRAY) \
  FIELD(void*, pointer) \
  FIELD(int64_t, stride_m) FIELD(int64_t, stride_n) FIELD(int64_t, batch_stride)
ATOMR_CUTLASS_STRUCT(atomr_cutlass_tree_operand)

#define ATOMR_CUTLASS_TREE_OPERANDS 16

/* D[b] = scale_d * (alpha * scale_a * scale_b * A[b] * B[b] + beta * C[b]), b < batch. Leading dimensions and batch
 * strides count elements; a batch stride of 0 broadcasts. `c` may be null when beta is 0. Scales that are null are 1;
 * which of them a kernel reads is a matter of its epilogue and of its block scales. */
#define atomr_cutlass_gemm_args_fields(FIELD, ARRAY) \
  FIELD(int32_t, m) FIELD(int32_t, n) FIELD(int32_t, k) FIELD(int32_t, batch) \
  FIELD(const void*, a) \
  FIELD(const void*, b) \
  FIELD(const void*, c) \
  FIELD(void*, d) \
  FIELD(int64_t, lda) FIELD(int64_t, ldb) FIELD(int64_t, ldc) FIELD(int64_t, ldd) \
  FIELD(int64_t, batch_stride_a) FIELD(int64_t, batch_stride_b) FIELD(int64_t, batch_stride_c) \
  FIELD(int64_t, batch_stride_d) \
  FIELD(double, alpha) FIELD(double, beta) \
  FIELD(int32_t, split_k) /* slices of K, one after the other or side by side, or stream-K's splits; 1 is none */ \
  /* Upper bound of the persistent tile scheduler's swizzle (sm90 generation on). Few rows: thread blocks of a cluster \
   * that share them; 0 is all of them, and sums in the order of K. */ \
  FIELD(int32_t, swizzle) \
  FIELD(int32_t, raster) /* 0 heuristic, 1 along M, 2 along N (sm90 generation on) */ \
  FIELD(int32_t, sm_count) /* multiprocessors of the device */ \
  /* clusters of the kernel that fit on the device at once; 0 lets CUTLASS estimate */ \
  FIELD(int32_t, max_active_clusters) \
  /* 0: one float for all; 1: one for each row of A (column of B) */ \
  FIELD(int32_t, scale_form_a) FIELD(int32_t, scale_form_b) \
  FIELD(int32_t, settled) \
  FIELD(int32_t, width) /* columns of a thread block's tile (few rows: rows of weights), if chosen at launch; else 0 */ \
  FIELD(int32_t, padding) \
  FIELD(void*, workspace) /* at least workspace_size bytes, 256-byte aligned, or null when that is 0 */ \
  FIELD(const void*, scale_a) \
  FIELD(const void*, scale_b) \
  FIELD(const void*, scale_d) /* one float */ \
  FIELD(void*, amax) /* one float, at least 0 when the kernel starts: becomes the largest |D / scale_d| seen */ \
  /* Block scales in floats: elements from one row of A (column block of B) to the next, and from one block of K to \
   * the next; block-scaled fp4 has the swizzled layout instead. */ \
  FIELD(int64_t, scale_stride_a) FIELD(int64_t, scale_stride_b) \
  FIELD(int64_t, scale_k_stride_a) FIELD(int64_t, scale_k_stride_b) \
  /* Of a kernel with an epilogue tree: its inputs, then its outputs. When it starts, the bytes of sums, amax and \
   * masks are 0 and those of maxima 0xff. */ \
  ARRAY(atomr_cutlass_tree_operand, operands, ATOMR_CUTLASS_TREE_OPERANDS)
ATOMR_CUTLASS_STRUCT(atomr_cutlass_gemm_args)

/* How the matrices of a grouped GEMM are given. */
enum {
  ATOMR_CUTLASS_GROUPED_CONTIGUOUS = 0, /* rows of A and D one group after the other; group g ends at row offsets[g] */
  ATOMR_CUTLASS_GROUPED_MASKED = 1, /* group g has the first counts[g] of m rows of its own A and D */
  ATOMR_CUTLASS_GROUPED_K = 2, /* K of A and B one group after the other, ending at offsets[g]; a D for each */
  ATOMR_CUTLASS_GROUPED_LIST = 3, /* a table of matrices */
};

/* One entry of the table of a list; device memory, 64 bytes aligned. */
#define atomr_cutlass_group_fields(FIELD, ARRAY) \
  FIELD(const void*, a) \
  FIELD(const void*, b) \
  FIELD(const void*, c) \
  FIELD(void*, d) \
  FIELD(const void*, scale_a) \
  FIELD(const void*, scale_b) \
  FIELD(int64_t, lda) FIELD(int64_t, ldb) FIELD(int64_t, ldc) FIELD(int64_t, ldd) \
  FIELD(int32_t, m) FIELD(int32_t, n) FIELD(int32_t, k) FIELD(int32_t, padding)
ATOMR_CUTLASS_STRUCT(atomr_cutlass_group)

/* D[g] = alpha * scale_a[g] * scale_b[g] * A[g] * B[g] + beta * C[g] for groups of which the host need not know the
 * extents.
 *
 * Contiguous and masked: A is (rows, k), B (groups, k, n), D (rows, n), where rows are `m` in all, or `m` in each
 * group. Along K: A is (m, k), B (k, n), D (groups, m, n), with `k` in all. Strides between groups are those of the
 * operands that have a dimension of groups. `rows_are_counts` says that `offsets` holds counts for the contiguous form
 * as well. */
#define atomr_cutlass_grouped_args_fields(FIELD, ARRAY) \
  FIELD(int32_t, groups) FIELD(int32_t, form) \
  FIELD(int32_t, m) FIELD(int32_t, n) FIELD(int32_t, k) \
  FIELD(int32_t, rows_are_counts) \
  FIELD(const void*, a) \
  FIELD(const void*, b) \
  FIELD(const void*, c) \
  FIELD(void*, d) \
  FIELD(const int32_t*, offsets) /* device memory: ends, or counts */ \
  FIELD(const atomr_cutlass_group*, table) /* of a list */ \
  FIELD(int64_t, lda) FIELD(int64_t, ldb) FIELD(int64_t, ldc) FIELD(int64_t, ldd) \
  FIELD(int64_t, group_stride_a) FIELD(int64_t, group_stride_b) FIELD(int64_t, group_stride_c) \
  FIELD(int64_t, group_stride_d) \
  FIELD(double, alpha) FIELD(double, beta) \
  FIELD(int32_t, sm_count) FIELD(int32_t, max_active_clusters) \
  /* 0: one float for all groups; 1: for each row of A (column of B); 2: for each group */ \
  FIELD(int32_t, scale_form_a) FIELD(int32_t, scale_form_b) \
  FIELD(void*, workspace) \
  FIELD(const void*, scale_a) \
  FIELD(const void*, scale_b) \
  FIELD(int64_t, scale_stride_a) FIELD(int64_t, scale_stride_b) /* block scales, as in atomr_cutlass_gemm_args */ \
  FIELD(int64_t, scale_k_stride_a) FIELD(int64_t, scale_k_stride_b) \
  FIELD(int64_t, scale_group_stride_a) FIELD(int64_t, scale_group_stride_b) \
  /* Of a kernel with an epilogue tree: its inputs, rows and scalars, whose batches are the groups. Of a list each \
   * pointer is that of a table with an address for each group, and the batch stride is 0. */ \
  ARRAY(atomr_cutlass_tree_operand, operands, ATOMR_CUTLASS_TREE_OPERANDS)
ATOMR_CUTLASS_STRUCT(atomr_cutlass_grouped_args)

/* Implicit-GEMM convolution (cross-correlation). fprop: D is y from A = x, B = w; dgrad: D is dx from A = dy, B = w;
 * wgrad: D is dw from A = dy, B = x. D = act(alpha * conv(A, B) + beta * C + bias). x is (n, h, w, c), w (k, r, s, c /
 * groups), y (n, p, q, k), channels contiguous; strides count elements. */
#define atomr_cutlass_conv_args_fields(FIELD, ARRAY) \
  FIELD(int32_t, n) FIELD(int32_t, h) FIELD(int32_t, w) FIELD(int32_t, c) \
  FIELD(int32_t, k) FIELD(int32_t, r) FIELD(int32_t, s) \
  FIELD(int32_t, p) FIELD(int32_t, q) \
  FIELD(int32_t, pad_h) FIELD(int32_t, pad_w) /* above and to the left */ \
  FIELD(int32_t, pad_h_end) FIELD(int32_t, pad_w_end) /* below and to the right */ \
  FIELD(int32_t, stride_h) FIELD(int32_t, stride_w) FIELD(int32_t, dilation_h) FIELD(int32_t, dilation_w) \
  FIELD(int32_t, groups) FIELD(int32_t, split_k) \
  FIELD(int32_t, sm_count) FIELD(int32_t, max_active_clusters) \
  FIELD(int32_t, swizzle) FIELD(int32_t, raster) \
  /* of a wgrad: each slice of K writes a dense D of its own, one after the other from `d` */ \
  FIELD(int32_t, split_parallel) \
  FIELD(const void*, a) \
  FIELD(const void*, b) \
  FIELD(const void*, c_source) /* like D; null when beta is 0 */ \
  FIELD(void*, d) \
  FIELD(const void*, bias) /* one element of D's type for each channel of D, or null */ \
  FIELD(int64_t, x_stride_w) FIELD(int64_t, x_stride_h) FIELD(int64_t, x_stride_n) \
  FIELD(int64_t, w_stride_s) FIELD(int64_t, w_stride_r) FIELD(int64_t, w_stride_k) \
  FIELD(int64_t, y_stride_q) FIELD(int64_t, y_stride_p) FIELD(int64_t, y_stride_n) \
  FIELD(double, alpha) FIELD(double, beta) \
  FIELD(void*, workspace) \
  /* Of a kernel with an epilogue tree, which has no bias: its inputs, then its outputs, over D as a matrix with a row \
   * for each pixel. When it starts, their bytes are as in atomr_cutlass_gemm_args. */ \
  ARRAY(atomr_cutlass_tree_operand, operands, ATOMR_CUTLASS_TREE_OPERANDS)
ATOMR_CUTLASS_STRUCT(atomr_cutlass_conv_args)

/* Element by element: D = saturating_cast(alpha * scale * (A[0] + A[1] + ...) + beta * C), over `slices` arrays A that
 * lie `slice_stride` elements apart. */
#define atomr_cutlass_cast_args_fields(FIELD, ARRAY) \
  FIELD(int64_t, count) FIELD(int64_t, slice_stride) \
  FIELD(const void*, a) \
  FIELD(const void*, c) /* like D; null when beta is 0 */ \
  FIELD(void*, d) \
  FIELD(const void*, scale) /* one float, or null */ \
  FIELD(double, alpha) FIELD(double, beta) \
  FIELD(int32_t, slices) FIELD(int32_t, padding) \
  FIELD(int32_t, sm_count) FIELD(int32_t, max_active_clusters) \
  FIELD(void*, workspace)
ATOMR_CUTLASS_STRUCT(atomr_cutlass_cast_args)

/* Values in a narrow type and the scales that they are to be multiplied by: A is about D * scales * alpha. Row-major
 * matrices, D and the narrow operand of a dequantization dense; `lda` counts elements. A scale belongs to `block_rows`
 * x `block_columns` elements. Scales in float lie row-major, others in the swizzled layout of block-scaled fp4. */
#define atomr_cutlass_quantize_args_fields(FIELD, ARRAY) \
  FIELD(int64_t, rows) FIELD(int64_t, columns) FIELD(int64_t, lda) \
  FIELD(const void*, a) \
  FIELD(void*, d) \
  FIELD(void*, scales) \
  /* the largest magnitude of all, of kernels that find or use it: a float, at least 0 when they start */ \
  FIELD(void*, amax) \
  FIELD(double, alpha) \
  FIELD(int32_t, block_rows) FIELD(int32_t, block_columns) \
  FIELD(int32_t, sm_count) FIELD(int32_t, max_active_clusters) \
  FIELD(void*, workspace)
ATOMR_CUTLASS_STRUCT(atomr_cutlass_quantize_args)

#define atomr_cutlass_launch_fields(FIELD, ARRAY) \
  ARRAY(uint32_t, grid, 3) \
  ARRAY(uint32_t, block, 3) \
  ARRAY(uint32_t, cluster, 3) \
  FIELD(uint32_t, shared_bytes) \
  /* Blocks of the kernel that the row's `launch` launches first, to fill the workspace; zeros without one. */ \
  ARRAY(uint32_t, setup_grid, 3) \
  FIELD(uint32_t, padding) \
  /* Bytes of the workspace that must be zero when the kernel starts: cleared on the stream before every launch. */ \
  FIELD(uint64_t, clear_offset) FIELD(uint64_t, clear_bytes) \
  /* The row's own: what its `launch` hands to the driver on the device that was current. */ \
  ARRAY(const void*, functions, 2)
ATOMR_CUTLASS_STRUCT(atomr_cutlass_launch)

/* The functions of a row. `args` is the struct of the row's op (atomr_cutlass_gemm_args for gemm, and so on). All
 * functions expect the target device to be current on the calling thread, and none of them synchronizes. */
typedef struct atomr_cutlass_row atomr_cutlass_row;
typedef int (*atomr_cutlass_supports_fn)(const atomr_cutlass_row*, const void* args);
typedef int (*atomr_cutlass_workspace_size_fn)(const atomr_cutlass_row*, const void* args, uint64_t* bytes);
typedef int (*atomr_cutlass_prepare_fn)(const atomr_cutlass_row*, const void* args, void* params,
                                        atomr_cutlass_launch*);
typedef int (*atomr_cutlass_launch_fn)(const atomr_cutlass_row*, const void* params, const atomr_cutlass_launch*,
                                       void* stream);

/* A workspace is zeros before the first launch that uses it; later launches of the row find what those before left, and
 * no other row's kernels write to it. */
#define atomr_cutlass_row_fields(FIELD, ARRAY) \
  FIELD(const char*, name) \
  FIELD(const char*, key) /* the KernelKey as JSON */ \
  /* What it was compiled from and by, separated by blanks: the digest of its source and headers, that of CUTLASS's, \
   * and the compiler with its version. Equal for equal code; empty for kernels compiled at run time. */ \
  FIELD(const char*, content) \
  FIELD(uint32_t, params_bytes) \
  FIELD(uint32_t, params_align) \
  FIELD(uint32_t, shared_bytes) \
  FIELD(uint32_t, threads) \
  FIELD(uint32_t, flags) \
  FIELD(uint32_t, cuda_version) /* CUDART_VERSION of the toolkit that compiled it, such as 13000 */ \
  FIELD(const void*, context) /* the row's own */ \
  FIELD(atomr_cutlass_supports_fn, supports) \
  FIELD(atomr_cutlass_workspace_size_fn, workspace_size) \
  FIELD(atomr_cutlass_prepare_fn, prepare) \
  FIELD(atomr_cutlass_launch_fn, launch)
ATOMR_CUTLASS_STRUCT(atomr_cutlass_row)

/* Where a field lies in its struct. `kind` is that of its values: 'i' signed, 'u' unsigned, 'f' floating point, 'p' an
 * address, 's' a struct. */
#define atomr_cutlass_field_layout_fields(FIELD, ARRAY) \
  FIELD(const char*, name) \
  FIELD(uint32_t, offset) FIELD(uint32_t, bytes) \
  FIELD(uint32_t, kind) FIELD(uint32_t, padding)
ATOMR_CUTLASS_STRUCT(atomr_cutlass_field_layout)

#define atomr_cutlass_struct_layout_fields(FIELD, ARRAY) \
  FIELD(const char*, name) \
  FIELD(const atomr_cutlass_field_layout*, fields) \
  FIELD(uint32_t, field_count) FIELD(uint32_t, bytes)
ATOMR_CUTLASS_STRUCT(atomr_cutlass_struct_layout)

#define atomr_cutlass_pack_fields(FIELD, ARRAY) \
  /* How the pack's compiler laid out the structs of kernel_abi.h and jit_abi.h. These four, and the two structs \
   * above, never change: they are read of packs whose other structs differ. */ \
  FIELD(uint32_t, abi_version) \
  FIELD(uint32_t, struct_count) \
  FIELD(uint64_t, layout_digest) /* equal for equal layouts; the structs are read to say what differs */ \
  FIELD(const atomr_cutlass_struct_layout*, structs) \
  FIELD(const char*, name) \
  FIELD(const atomr_cutlass_row* const*, rows) \
  FIELD(uint32_t, count) FIELD(uint32_t, padding)
ATOMR_CUTLASS_STRUCT(atomr_cutlass_pack)

// clang-format on

/* The one symbol that a pack exports. */
#define ATOMR_CUTLASS_PACK_SYMBOL "atomr_cutlass_pack_v1"
typedef const atomr_cutlass_pack* (*atomr_cutlass_pack_fn)(void);

#ifdef __cplusplus
}
#endif
