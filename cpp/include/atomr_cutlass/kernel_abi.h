/* The C ABI between compiled kernels and whoever launches them.
 *
 * Every kernel, prebuilt or compiled at run time, is one `atomr_cutlass_row`: plain data and C function pointers, so
 * that a pack built by another compiler, or for another Python, can be loaded. Change any struct here and
 * ATOMR_CUTLASS_ABI_VERSION goes up: a pack of another version, or with another layout of the structs, is refused by
 * name. abi_layout.h lists every field, and no struct has bytes that are not a field's: it stops the compiler else. */
#pragma once

#include <stdint.h>

#define ATOMR_CUTLASS_ABI_VERSION 6

#ifdef __cplusplus
extern "C" {
#endif

/* Status of a row's functions: 0 is success, a positive value is a cudaError_t, a negative one is listed here. */
enum { ATOMR_CUTLASS_OK = 0, ATOMR_CUTLASS_CANNOT_IMPLEMENT = -1 };

enum {
  ATOMR_CUTLASS_FLAG_PTX = 1u,  /* the image carries PTX as well, which newer GPUs translate */
};

/* Bits of atomr_cutlass_gemm_args.settled: an operand that no launch writes that may still be running, so that a kernel
 * which starts before the launch before it has ended may read it at once. */
enum { ATOMR_CUTLASS_A_SETTLED = 1, ATOMR_CUTLASS_B_SETTLED = 2 };

/* Bits of atomr_cutlass_launch.padding and atomr_cutlass_jit_evaluation.padding. `prepare` says DEPENDENT of a kernel
 * that waits for the launch before it (griddepcontrol.wait) ahead of all that it reads and writes, but for settled
 * operands; whoever launches clears the bit where the kernel is to start after that one all the same. */
enum { ATOMR_CUTLASS_LAUNCH_DEPENDENT = 1 };

/* What an epilogue tree reads or writes beside C and D: element (m, n) of a batch is `m * stride_m + n * stride_n +
 * batch * batch_stride` elements from the pointer, m and n being those of the kernel's D. Strides along which an
 * operand does not vary are 0; of a mask, stride_n is 1 and counts bytes. */
typedef struct atomr_cutlass_tree_operand {
  void* pointer;
  int64_t stride_m, stride_n, batch_stride;
} atomr_cutlass_tree_operand;

#define ATOMR_CUTLASS_TREE_OPERANDS 16

/* D[b] = scale_d * (alpha * scale_a * scale_b * A[b] * B[b] + beta * C[b]), b < batch. Leading dimensions and batch
 * strides count elements; a batch stride of 0 broadcasts. `c` may be null when beta is 0. Scales that are null are 1;
 * which of them a kernel reads is a matter of its epilogue and of its block scales. */
typedef struct atomr_cutlass_gemm_args {
  int32_t m, n, k, batch;
  const void* a;
  const void* b;
  const void* c;
  void* d;
  int64_t lda, ldb, ldc, ldd;
  int64_t batch_stride_a, batch_stride_b, batch_stride_c, batch_stride_d;
  double alpha, beta;
  int32_t split_k; /* slices of K: serial split-K (sm80 generation) or stream-K scheduler splits; 1 is none */
  int32_t swizzle; /* upper bound of the persistent tile scheduler's swizzle (sm90 generation on) */
  int32_t raster; /* 0 heuristic, 1 along M, 2 along N (sm90 generation on) */
  int32_t sm_count; /* multiprocessors of the device */
  int32_t max_active_clusters; /* clusters of the kernel that fit on the device at once; 0 lets CUTLASS estimate */
  int32_t scale_form_a, scale_form_b; /* 0: one float for all; 1: one for each row of A (column of B) */
  int32_t settled;
  int32_t width; /* columns of a thread block's tile, of kernels whose launch chooses it; 0 is the widest */
  int32_t padding;
  void* workspace; /* at least workspace_size bytes, 256-byte aligned, or null when that is 0 */
  const void* scale_a;
  const void* scale_b;
  const void* scale_d; /* one float */
  void* amax; /* one float, at least 0 when the kernel starts: becomes the largest |D / scale_d| seen */
  /* Block scales in floats: elements from one row of A (column block of B) to the next, and from one block of K to the
   * next; block-scaled fp4 has the swizzled layout instead. */
  int64_t scale_stride_a, scale_stride_b;
  int64_t scale_k_stride_a, scale_k_stride_b;
  /* Of a kernel with an epilogue tree: its inputs, then its outputs. When it starts, the bytes of sums, amax and masks
   * are 0 and those of maxima 0xff. */
  atomr_cutlass_tree_operand operands[ATOMR_CUTLASS_TREE_OPERANDS];
} atomr_cutlass_gemm_args;

/* How the matrices of a grouped GEMM are given. */
enum {
  ATOMR_CUTLASS_GROUPED_CONTIGUOUS = 0, /* rows of A and D one group after the other; group g ends at row offsets[g] */
  ATOMR_CUTLASS_GROUPED_MASKED = 1, /* group g has the first counts[g] of m rows of its own A and D */
  ATOMR_CUTLASS_GROUPED_K = 2, /* K of A and B one group after the other, ending at offsets[g]; a D for each */
  ATOMR_CUTLASS_GROUPED_LIST = 3, /* a table of matrices */
};

/* One entry of the table of a list; device memory, 64 bytes aligned. */
typedef struct atomr_cutlass_group {
  const void* a;
  const void* b;
  const void* c;
  void* d;
  const void* scale_a;
  const void* scale_b;
  int64_t lda, ldb, ldc, ldd;
  int32_t m, n, k, padding;
} atomr_cutlass_group;

/* D[g] = alpha * scale_a[g] * scale_b[g] * A[g] * B[g] + beta * C[g] for groups of which the host need not know the
 * extents.
 *
 * Contiguous and masked: A is (rows, k), B (groups, k, n), D (rows, n), where rows are `m` in all, or `m` in each
 * group. Along K: A is (m, k), B (k, n), D (groups, m, n), with `k` in all. Strides between groups are those of the
 * operands that have a dimension of groups. `rows_are_counts` says that `offsets` holds counts for the contiguous form
 * as well. */
typedef struct atomr_cutlass_grouped_args {
  int32_t groups, form;
  int32_t m, n, k;
  int32_t rows_are_counts;
  const void* a;
  const void* b;
  const void* c;
  void* d;
  const int32_t* offsets; /* device memory: ends, or counts */
  const atomr_cutlass_group* table; /* of a list */
  int64_t lda, ldb, ldc, ldd;
  int64_t group_stride_a, group_stride_b, group_stride_c, group_stride_d;
  double alpha, beta;
  int32_t sm_count, max_active_clusters;
  int32_t scale_form_a,
      scale_form_b; /* 0: one float for all groups; 1: for each row of A (column of B); 2: for each group */
  void* workspace;
  const void* scale_a;
  const void* scale_b;
  int64_t scale_stride_a, scale_stride_b; /* block scales, as in atomr_cutlass_gemm_args */
  int64_t scale_k_stride_a, scale_k_stride_b;
  int64_t scale_group_stride_a, scale_group_stride_b;
  /* Of a kernel with an epilogue tree: its inputs, rows and scalars, whose batches are the groups. Of a list each
   * pointer is that of a table with an address for each group, and the batch stride is 0. */
  atomr_cutlass_tree_operand operands[ATOMR_CUTLASS_TREE_OPERANDS];
} atomr_cutlass_grouped_args;

/* Implicit-GEMM convolution (cross-correlation). fprop: D is y from A = x, B = w; dgrad: D is dx from A = dy, B = w;
 * wgrad: D is dw from A = dy, B = x. D = act(alpha * conv(A, B) + beta * C + bias). x is (n, h, w, c), w (k, r, s, c /
 * groups), y (n, p, q, k), channels contiguous; strides count elements. */
typedef struct atomr_cutlass_conv_args {
  int32_t n, h, w, c;
  int32_t k, r, s;
  int32_t p, q;
  int32_t pad_h, pad_w; /* above and to the left */
  int32_t pad_h_end, pad_w_end; /* below and to the right */
  int32_t stride_h, stride_w, dilation_h, dilation_w;
  int32_t groups, split_k;
  int32_t sm_count, max_active_clusters;
  int32_t swizzle, raster;
  int32_t split_parallel; /* of a wgrad: each slice of K writes a dense D of its own, one after the other from `d` */
  const void* a;
  const void* b;
  const void* c_source; /* like D; null when beta is 0 */
  void* d;
  const void* bias; /* one element of D's type for each channel of D, or null */
  int64_t x_stride_w, x_stride_h, x_stride_n;
  int64_t w_stride_s, w_stride_r, w_stride_k;
  int64_t y_stride_q, y_stride_p, y_stride_n;
  double alpha, beta;
  void* workspace;
  /* Of a kernel with an epilogue tree, which has no bias: its inputs, then its outputs, over D as a matrix with a row
   * for each pixel. When it starts, their bytes are as in atomr_cutlass_gemm_args. */
  atomr_cutlass_tree_operand operands[ATOMR_CUTLASS_TREE_OPERANDS];
} atomr_cutlass_conv_args;

/* Element by element: D = saturating_cast(alpha * scale * (A[0] + A[1] + ...) + beta * C), over `slices` arrays A that
 * lie `slice_stride` elements apart. */
typedef struct atomr_cutlass_cast_args {
  int64_t count, slice_stride;
  const void* a;
  const void* c; /* like D; null when beta is 0 */
  void* d;
  const void* scale; /* one float, or null */
  double alpha, beta;
  int32_t slices, padding;
  int32_t sm_count, max_active_clusters;
  void* workspace;
} atomr_cutlass_cast_args;

/* Values in a narrow type and the scales that they are to be multiplied by: A is about D * scales * alpha. Row-major
 * matrices, D and the narrow operand of a dequantization dense; `lda` counts elements. A scale belongs to `block_rows`
 * x `block_columns` elements. Scales in float lie row-major, others in the swizzled layout of block-scaled fp4. */
typedef struct atomr_cutlass_quantize_args {
  int64_t rows, columns, lda;
  const void* a;
  void* d;
  void* scales;
  void* amax; /* the largest magnitude of all, of kernels that find or use it: a float, at least 0 when they start */
  double alpha;
  int32_t block_rows, block_columns;
  int32_t sm_count, max_active_clusters;
  void* workspace;
} atomr_cutlass_quantize_args;

typedef struct atomr_cutlass_launch {
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t cluster[3];
  uint32_t shared_bytes;
  /* Blocks of the kernel that the row's `launch` launches first, to fill the workspace; zeros without one. */
  uint32_t setup_grid[3];
  uint32_t padding;
  /* Bytes of the workspace that must be zero when the kernel starts: cleared on the stream before every launch. */
  uint64_t clear_offset, clear_bytes;
  /* The row's own: what its `launch` hands to the driver on the device that was current. */
  const void* functions[2];
} atomr_cutlass_launch;

typedef struct atomr_cutlass_row atomr_cutlass_row;

/* A workspace is zeros before the first launch that uses it; later launches of the row find what those before left, and
 * no other row's kernels write to it.
 *
 * `args` is the struct of the row's op (atomr_cutlass_gemm_args for gemm, and so on). All functions expect the target
 * device to be current on the calling thread, and none of them synchronizes. */
struct atomr_cutlass_row {
  const char* name;
  const char* key; /* the KernelKey as JSON */
  /* What it was compiled from and by, separated by blanks: the digest of its source and headers, that of CUTLASS's, and
   * the compiler with its version. Equal for equal code; empty for kernels compiled at run time. */
  const char* content;
  uint32_t params_bytes;
  uint32_t params_align;
  uint32_t shared_bytes;
  uint32_t threads;
  uint32_t flags;
  uint32_t cuda_version; /* CUDART_VERSION of the toolkit that compiled it, such as 13000 */
  const void* context; /* the row's own */
  int (*supports)(const atomr_cutlass_row*, const void* args);
  int (*workspace_size)(const atomr_cutlass_row*, const void* args, uint64_t* bytes);
  int (*prepare)(const atomr_cutlass_row*, const void* args, void* params, atomr_cutlass_launch*);
  int (*launch)(const atomr_cutlass_row*, const void* params, const atomr_cutlass_launch*, void* stream);
};

/* Where a field lies in its struct. `kind` is that of its values: 'i' signed, 'u' unsigned, 'f' floating point, 'p' an
 * address, 's' a struct. */
typedef struct atomr_cutlass_field_layout {
  const char* name;
  uint32_t offset, bytes;
  uint32_t kind, padding;
} atomr_cutlass_field_layout;

typedef struct atomr_cutlass_struct_layout {
  const char* name;
  const atomr_cutlass_field_layout* fields;
  uint32_t field_count, bytes;
} atomr_cutlass_struct_layout;

typedef struct atomr_cutlass_pack {
  /* How the pack's compiler laid out the structs of kernel_abi.h and jit_abi.h. These four, and the two structs above,
   * never change: they are read of packs whose other structs differ. */
  uint32_t abi_version;
  uint32_t struct_count;
  uint64_t layout_digest; /* equal for equal layouts; the structs are read to say what differs */
  const atomr_cutlass_struct_layout* structs;
  const char* name;
  const atomr_cutlass_row* const* rows;
  uint32_t count, padding;
} atomr_cutlass_pack;

/* The one symbol that a pack exports. */
#define ATOMR_CUTLASS_PACK_SYMBOL "atomr_cutlass_pack_v1"
typedef const atomr_cutlass_pack* (*atomr_cutlass_pack_fn)(void);

#ifdef __cplusplus
}
#endif
