/* The C ABI between compiled kernels and whoever launches them.
 *
 * Every kernel, prebuilt or compiled at run time, is one `atomr_cutlass_row`: plain data and C function pointers, so
 * that a pack built by another compiler, or for another Python, can be loaded. Change any struct here and
 * ATOMR_CUTLASS_ABI_VERSION goes up: a pack of another version is refused by name. */
#pragma once

#include <stdint.h>

#define ATOMR_CUTLASS_ABI_VERSION 1

#ifdef __cplusplus
extern "C" {
#endif

/* Status of a row's functions: 0 is success, a positive value is a cudaError_t, a negative one is listed here. */
enum { ATOMR_CUTLASS_OK = 0, ATOMR_CUTLASS_CANNOT_IMPLEMENT = -1 };

enum {
  ATOMR_CUTLASS_FLAG_PTX = 1u,  /* the image carries PTX as well, which newer GPUs translate */
};

/* D[b] = alpha * A[b] * B[b] + beta * C[b], b < batch. Leading dimensions and batch strides count elements; a batch
 * stride of 0 broadcasts. `c` may be null when beta is 0. */
typedef struct atomr_cutlass_gemm_args {
  int32_t m, n, k, batch;
  const void* a;
  const void* b;
  const void* c;
  void* d;
  int64_t lda, ldb, ldc, ldd;
  int64_t batch_stride_a, batch_stride_b, batch_stride_c, batch_stride_d;
  double alpha, beta;
  int32_t split_k;   /* slices of K: serial split-K (sm80 generation) or stream-K scheduler splits; 1 is none */
  int32_t swizzle;   /* upper bound of the persistent tile scheduler's swizzle (sm90 generation on) */
  int32_t raster;    /* 0 heuristic, 1 along M, 2 along N (sm90 generation on) */
  int32_t sm_count;  /* multiprocessors of the device */
  int32_t max_active_clusters; /* clusters of the kernel that fit on the device at once; 0 lets CUTLASS estimate */
  void* workspace;   /* at least workspace_size bytes, 256-byte aligned, or null when that is 0 */
} atomr_cutlass_gemm_args;

typedef struct atomr_cutlass_launch {
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t cluster[3];
  uint32_t shared_bytes;
  /* Bytes of the workspace that must be zero when the kernel starts: cleared on the stream before every launch. */
  uint64_t clear_offset, clear_bytes;
} atomr_cutlass_launch;

typedef struct atomr_cutlass_row atomr_cutlass_row;

/* `args` is the struct of the row's op (atomr_cutlass_gemm_args for gemm). All functions expect the target device to be
 * current on the calling thread, and none of them synchronizes. */
struct atomr_cutlass_row {
  const char* name;
  const char* key; /* the KernelKey as JSON */
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

typedef struct atomr_cutlass_pack {
  uint32_t abi_version;
  const char* name;
  uint32_t count;
  const atomr_cutlass_row* const* rows;
} atomr_cutlass_pack;

/* The one symbol that a pack exports. */
#define ATOMR_CUTLASS_PACK_SYMBOL "atomr_cutlass_pack_v1"
typedef const atomr_cutlass_pack* (*atomr_cutlass_pack_fn)(void);

#ifdef __cplusplus
}
#endif
