// Copies a matrix with its rows as columns: what rewrites need to bring an operand into the layout that a kernel reads.
// The arguments are those of a GEMM: A is m x k, its rows contiguous; D is A^T, k x m, its rows contiguous. Rows of D
// are filled up with zeros to whole vectors of 16 bytes, where they have as much room.
#pragma once

#include "atomr_cutlass/dependent.h"
#include "atomr_cutlass/kernel_abi.h"
#include "cutlass/cutlass.h"
#include "cutlass/numeric_types.h"
#include "cutlass/platform/platform.h"

namespace atomr_cutlass {

// `Element` stands for any type of 1, 2 or 4 bytes. A thread takes squares of as many elements as four bytes hold; it
// reads those of 2 bytes one by one, since rows of odd length are what they are copied for.
template <class Element>
struct Transpose {
  using Args = atomr_cutlass_gemm_args;

  static constexpr int kSquare = 4 / int(sizeof(Element));
  static constexpr int kWords = 32 * (kSquare == 1 ? 2 : 1);  // of a tile, along either side
  static constexpr int kTile = kWords * kSquare;
  static constexpr int kPitch = kWords + 1;
  static constexpr int kThreads = 256;
  static constexpr int kMinBlocks = 4;
  static constexpr int kSharedBytes = kTile * kPitch * 4;
  static constexpr int kClusterM = 1, kClusterN = 1, kClusterK = 1;
  static constexpr bool kSingle = kSquare == 2;
  static constexpr int kRead = kSingle ? 1 : kSquare;  // elements of A at once
  using Read = typename cutlass::platform::conditional<kSingle, uint16_t, uint32_t>::type;
  static_assert(kSquare == 1 || kSquare == 2 || kSquare == 4);

  struct Params {
    Read const* a;
    uint32_t* d;
    int64_t a_row, d_row, a_batch, d_batch;  // of A in what is read at once, of D in words
    int32_t rows, columns, row_tiles, column_tiles, batch;
    int32_t stored;  // elements of a row of D
  };

  static bool can_implement(Args const& args) {
    auto const read = [](int64_t elements) { return elements % kRead == 0; };
    auto const whole = [](int64_t elements) { return elements % kSquare == 0; };
    return args.m > 0 && (args.m - 1) / kTile < 65535 && args.k > 0 && args.batch > 0 && args.batch <= 65535 &&
           reinterpret_cast<uint64_t>(args.a) % sizeof(Read) == 0 && reinterpret_cast<uint64_t>(args.d) % 4 == 0 &&
           read(args.k) && read(args.lda) && whole(args.ldd) && read(args.batch_stride_a) &&
           whole(args.batch_stride_d) && args.ldd >= (args.m + kSquare - 1) / kSquare * kSquare;
  }
  static uint64_t workspace_size(Args const&) { return 0; }
  static void clear_range(Args const&, uint64_t& offset, uint64_t& bytes) { offset = bytes = 0; }

  static Params params(Args const& args) {
    constexpr int kVector = 16 / int(sizeof(Element));
    int64_t const vectors = (int64_t(args.m) + kVector - 1) / kVector * kVector;
    return {static_cast<Read const*>(args.a),
            static_cast<uint32_t*>(args.d),
            args.lda / kRead,
            args.ldd / kSquare,
            args.batch_stride_a / kRead,
            args.batch_stride_d / kSquare,
            args.m,
            args.k,
            (args.m + kTile - 1) / kTile,
            (args.k + kTile - 1) / kTile,
            args.batch,
            int32_t(vectors < args.ldd ? vectors : args.ldd)};
  }
  static dim3 grid(Params const& params) {
    return dim3(uint32_t(params.column_tiles), uint32_t(params.row_tiles), uint32_t(params.batch));
  }

  CUTLASS_DEVICE static void run(Params const& params, char* shared) {
    let_next_start_beside_few_blocks();
    auto* const tile = reinterpret_cast<uint32_t*>(shared);
    int const row = int(blockIdx.y) * kTile, column = int(blockIdx.x) * kTile;
    Read const* const a = params.a + blockIdx.z * params.a_batch + column / kRead;
    uint32_t* const d = params.d + blockIdx.z * params.d_batch + row / kSquare;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kWords * kWords / kThreads; ++i) {
      int const at = i * kThreads + int(threadIdx.x), x = at % kWords, y = at / kWords;
      uint32_t words[kSquare];
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kSquare; ++j) {
        int const from = row + y * kSquare + j;
        words[j] = word(a + from * params.a_row, x, from < params.rows ? params.columns - column : 0);
      }
      turn(words);
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kSquare; ++j) tile[(x * kSquare + j) * kPitch + y] = words[j];
    }
    __syncthreads();
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kTile * kWords / kThreads; ++i) {
      int const at = i * kThreads + int(threadIdx.x), x = at % kWords, y = at / kWords;
      // Words beyond what A has are zeros.
      if (column + y < params.columns && row + x * kSquare < params.stored) {
        d[(column + y) * params.d_row + x] = tile[y * kPitch + x];
      }
    }
  }

 private:
  // The word `x` of a row of so many elements; zeros where there are none.
  CUTLASS_DEVICE static uint32_t word(uint32_t const* row, int x, int elements) {
    return x * kSquare < elements ? row[x] : 0;
  }
  CUTLASS_DEVICE static uint32_t word(uint16_t const* row, int x, int elements) {
    uint32_t const low = 2 * x < elements ? row[2 * x] : 0, high = 2 * x + 1 < elements ? row[2 * x + 1] : 0;
    return low | high << 16;
  }

  CUTLASS_DEVICE static void turn(uint32_t (&)[1]) {}
  CUTLASS_DEVICE static void turn(uint32_t (&words)[2]) {
    uint32_t const low = __byte_perm(words[0], words[1], 0x5410);
    words[1] = __byte_perm(words[0], words[1], 0x7632);
    words[0] = low;
  }
  // Byte j of word i becomes byte i of word j.
  CUTLASS_DEVICE static void turn(uint32_t (&words)[4]) {
    uint32_t const low01 = __byte_perm(words[0], words[1], 0x5140), high01 = __byte_perm(words[0], words[1], 0x7362);
    uint32_t const low23 = __byte_perm(words[2], words[3], 0x5140), high23 = __byte_perm(words[2], words[3], 0x7362);
    words[0] = __byte_perm(low01, low23, 0x5410);
    words[1] = __byte_perm(low01, low23, 0x7632);
    words[2] = __byte_perm(high01, high23, 0x5410);
    words[3] = __byte_perm(high01, high23, 0x7632);
  }
};

}  // namespace atomr_cutlass
