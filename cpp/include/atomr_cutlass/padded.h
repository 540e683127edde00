// Copies a matrix into rows of whole vectors, which TMA reads, however long its rows are and wherever they begin; they
// are filled up with zeros. The arguments are those of a GEMM: A is m x k, its rows contiguous, and so is D.
#pragma once

#include "atomr_cutlass/dependent.h"
#include "atomr_cutlass/kernel_abi.h"
#include "cutlass/cutlass.h"
#include "cutlass/numeric_types.h"

namespace atomr_cutlass {

// `Element` stands for any type of its size. A thread stores 16 bytes at a time; it reads the two aligned vectors that
// they lie in.
template <class Element>
struct Padded {
  using Args = atomr_cutlass_gemm_args;

  static constexpr int kBytes = 16, kVector = kBytes / int(sizeof(Element));
  static constexpr int kThreads = 256, kMinBlocks = 4;
  static constexpr int kEach = 4;  // vectors of a thread
  static constexpr int kSharedBytes = 0;
  static constexpr int kClusterM = 1, kClusterN = 1, kClusterK = 1;

  struct Params {
    Element const* a;
    uint4* d;
    int64_t a_row, d_row, a_batch, d_batch;  // of A in elements, of D in vectors
    int32_t rows, columns, vectors, batch;  // vectors: of a row of D
  };

  CUTLASS_HOST_DEVICE static constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

  static bool can_implement(Args const& args) {
    auto const whole = [](int64_t elements) { return elements % kVector == 0; };
    return args.m > 0 && args.k > 0 && args.batch > 0 && args.batch <= 65535 && args.lda >= args.k &&
           int64_t(args.m) * ceil_div(args.k, kVector) < (int64_t(1) << 31) - kThreads * kEach &&
           reinterpret_cast<uint64_t>(args.a) % sizeof(Element) == 0 &&
           reinterpret_cast<uint64_t>(args.d) % kBytes == 0 && whole(args.ldd) && whole(args.batch_stride_d) &&
           args.ldd >= ceil_div(args.k, kVector) * kVector;
  }
  static uint64_t workspace_size(Args const&) { return 0; }
  static void clear_range(Args const&, uint64_t& offset, uint64_t& bytes) { offset = bytes = 0; }

  static Params params(Args const& args) {
    return {static_cast<Element const*>(args.a),
            static_cast<uint4*>(args.d),
            args.lda,
            args.ldd / kVector,
            args.batch_stride_a,
            args.batch_stride_d / kVector,
            args.m,
            args.k,
            int32_t(ceil_div(args.k, kVector)),
            args.batch};
  }
  static dim3 grid(Params const& params) {
    return dim3(uint32_t(ceil_div(int64_t(params.rows) * params.vectors, kThreads * kEach)), 1, uint32_t(params.batch));
  }

  CUTLASS_DEVICE static void run(Params const& params, char*) {
    let_next_start_beside_few_blocks();
    Element const* const a = params.a + blockIdx.z * params.a_batch;
    Element const* const end = a + (params.rows - 1) * params.a_row + params.columns;
    uint4* const d = params.d + blockIdx.z * params.d_batch;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kEach; ++i) {
      int const at = (int(blockIdx.x) * kEach + i) * kThreads + int(threadIdx.x);
      int const row = at / params.vectors, x = at - row * params.vectors;
      if (row >= params.rows) return;
      d[row * params.d_row + x] = vector(a, a + row * params.a_row + x * kVector, end, params.columns - x * kVector);
    }
  }

 private:
  // The elements from `from` on, of which `left` are the row's; zeros follow.
  CUTLASS_DEVICE static uint4 vector(Element const* begin, Element const* from, Element const* end, int left) {
    uint64_t const place = reinterpret_cast<uint64_t>(from), aligned = place / kBytes * kBytes;
    int const shift = int(place - aligned);
    auto const* const vectors = reinterpret_cast<uint4 const*>(aligned);
    if (left < kVector || aligned < reinterpret_cast<uint64_t>(begin) ||
        aligned + 2 * kBytes > reinterpret_cast<uint64_t>(end)) {
      // Nothing beside the matrix is read.
      uint4 made{};
      auto* const elements = reinterpret_cast<Element*>(&made);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kVector; ++i) {
        if (i < left) elements[i] = from[i];
      }
      return made;
    }
    uint4 const low = vectors[0];
    if (shift == 0) return low;
    uint4 const high = vectors[1];
    uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    // By whole words first, without an index that the compiler does not know.
    CUTLASS_PRAGMA_UNROLL
    for (int step = 1; step < 4; step *= 2) {
      bool const by = (shift / 4 & step) != 0;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i + step < 8; ++i) words[i] = by ? words[i + step] : words[i];
    }
    int const bits = shift % 4 * 8;
    return {__funnelshift_r(words[0], words[1], bits), __funnelshift_r(words[1], words[2], bits),
            __funnelshift_r(words[2], words[3], bits), __funnelshift_r(words[3], words[4], bits)};
  }
};

}  // namespace atomr_cutlass
