// Times how kernels for few rows (bf16) divide problems, by the kernels' headers alone: few_divisions.py says which.
//
// A line of the input is a problem and its divisions: 1 for row-major B, m, n, k, their number, and of each the thread
// blocks of a cluster, how many of them share the few rows, and rows of weights in a tile. A line of the output is a
// problem and the divisions that were timed, each followed by microseconds of a launch in a chain, of weights that may
// be written and of bound ones. Those that take kFar times as long as the fastest one so far are left out.
//
// A timing is that of a CUDA graph of dependent launches over at least three sets of operands, and as many as exceed
// L2 four times over, between events of the graph after a first launch: the median of three.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define ATOMR_CUTLASS_HEADERS_DIGEST ""  // nothing is recorded of these kernels
#include "atomr_cutlass/gemm_few_sm90.h"
#include "atomr_cutlass/row.h"
#include "cutlass/bfloat16.h"

namespace {

using Args = atomr_cutlass_gemm_args;
using Element = cutlass::bfloat16_t;

constexpr double kFar = 1.75;
constexpr double kBurstMicroseconds = 250;
constexpr int kLaunchesAtLeast = 24;  // unless there are fewer sets
constexpr size_t kOperands = size_t(1) << 31, kResults = size_t(1) << 29;  // elements

void check(cudaError_t error, int line) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "few_divisions.cu:%d: %s\n", line, cudaGetErrorString(error));
  std::exit(1);
}
#define CHECK(call) check((call), __LINE__)

template <class Cell>
__global__ void __launch_bounds__(Cell::kThreads, Cell::kMinBlocks)
    kernel(__grid_constant__ typename Cell::Params const params) {
  extern __shared__ __align__(1024) char shared[];
  Cell::run(params, shared);
}

// Of both signs and magnitudes from 0.5 to 2: what random bits are to the power that a GPU draws.
__global__ void fill(uint16_t* values, size_t count) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x) {
    uint32_t bits = uint32_t(i) * 2654435761u;
    bits = (bits ^ bits >> 15) * 0x85ebca6bu;
    bits = (bits ^ bits >> 13) * 0xc2b2ae35u;
    values[i] = uint16_t(0x3f00 | ((bits ^ bits >> 16) & 0x80ff));
  }
}

struct Problem {
  int row_major_b, m, n, k;
};

struct Division {
  int ranks, share, height;
};

class Bench {
 public:
  Bench() {
    cudaDeviceProp properties{};
    CHECK(cudaGetDeviceProperties(&properties, 0));
    multiprocessors_ = properties.multiProcessorCount;
    cold_bytes_ = 4.0 * properties.l2CacheSize;
    CHECK(cudaStreamCreate(&stream_));
    CHECK(cudaEventCreate(&begin_));
    CHECK(cudaEventCreate(&end_));
    CHECK(cudaMalloc(&operands_, kOperands * sizeof(Element)));
    CHECK(cudaMalloc(&results_, kResults * sizeof(Element)));
    fill<<<1024, 256>>>(reinterpret_cast<uint16_t*>(operands_), kOperands);
    CHECK(cudaDeviceSynchronize());
  }

  static bool fits(Problem const& of) {
    return 3 * (padded(of.m, of.k) + padded(of.n, of.k)) <= kOperands && 3 * padded(of.m, of.n) <= kResults;
  }

  // Microseconds of a launch, with weights that may be written and with bound ones: false if it takes too long.
  bool time(Problem const& of, Division const& as, double most, double (&found)[2]) const {
    return of.row_major_b ? time_cluster<cutlass::layout::RowMajor>(of, as, most, found)
                          : time_cluster<cutlass::layout::ColumnMajor>(of, as, most, found);
  }

 private:
  static size_t padded(int rows, int columns) { return (size_t(rows) * columns + 127) / 128 * 128; }

  template <class LayoutB>
  bool time_cluster(Problem const& of, Division const& as, double most, double (&found)[2]) const {
    switch (as.ranks) {
      case 1: return time_cell<LayoutB, 1>(of, as, most, found);
      case 2: return time_cell<LayoutB, 2>(of, as, most, found);
      case 4: return time_cell<LayoutB, 4>(of, as, most, found);
      case 8: return time_cell<LayoutB, 8>(of, as, most, found);
      default: return false;
    }
  }

  template <class LayoutB, int kRanks>
  bool time_cell(Problem const& of, Division const& as, double most, double (&found)[2]) const {
    using Cell =
        atomr_cutlass::GemmFewSm90<Element, LayoutB, Element, 128, kRanks, false, false, atomr_cutlass::LinearEpilogue>;
    using Row = atomr_cutlass::Row<Cell, kernel<Cell>, nullptr>;
    size_t const a = padded(of.m, of.k), set = a + padded(of.n, of.k), d = padded(of.m, of.n);
    double const set_bytes = double(set) * sizeof(Element);
    size_t const sets =
        std::min({std::max(size_t(3), size_t(std::ceil(cold_bytes_ / set_bytes))), kOperands / set, kResults / d});
    double const about = set_bytes / 2.9e6 + 2;  // microseconds
    int const launches = std::max(std::min(int(sets), kLaunchesAtLeast), int(kBurstMicroseconds / about) + 1);
    for (bool const bound : {false, true}) {
      std::vector<typename Cell::Params> params(std::min(sets, size_t(launches) + 1));
      atomr_cutlass_launch launch{};  // the same for all sets
      for (size_t i = 0; i < params.size(); ++i) {
        Args args{};
        args.m = of.m, args.n = of.n, args.k = of.k, args.batch = 1;
        args.a = operands_ + i * set, args.b = operands_ + i * set + a, args.d = results_ + i * d;
        args.lda = of.k, args.ldb = of.row_major_b ? of.n : of.k, args.ldc = args.ldd = of.n;
        args.alpha = 1, args.split_k = 1, args.swizzle = as.share, args.width = as.height;
        args.sm_count = multiprocessors_;
        args.settled = bound ? ATOMR_CUTLASS_B_SETTLED : 0;
        if (Row::supports(nullptr, &args) != ATOMR_CUTLASS_OK) return false;
        CHECK(cudaError_t(Row::prepare(nullptr, &args, &params[i], &launch)));
      }
      cudaGraph_t graph{};
      cudaGraphExec_t replayed{};
      CHECK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
      for (int i = 0; i <= launches; ++i) {
        if (i == 1) CHECK(cudaEventRecordWithFlags(begin_, stream_, cudaEventRecordExternal));
        CHECK(cudaError_t(Row::launch(nullptr, &params[size_t(i) % params.size()], &launch, stream_)));
      }
      CHECK(cudaEventRecordWithFlags(end_, stream_, cudaEventRecordExternal));
      CHECK(cudaStreamEndCapture(stream_, &graph));
      CHECK(cudaGraphInstantiate(&replayed, graph, 0));
      CHECK(cudaGraphDestroy(graph));
      double times[3] = {};
      bool near = true;
      for (double& time : times) {
        float milliseconds = 0;
        CHECK(cudaGraphLaunch(replayed, stream_));
        CHECK(cudaStreamSynchronize(stream_));
        CHECK(cudaEventElapsedTime(&milliseconds, begin_, end_));
        time = milliseconds * 1000 / launches;
        near = time <= most;
        if (!near) break;
      }
      CHECK(cudaGraphExecDestroy(replayed));
      if (!near) return false;
      std::sort(times, times + 3);
      found[bound] = times[1];
    }
    return true;
  }

  cudaStream_t stream_{};
  cudaEvent_t begin_{}, end_{};
  Element *operands_ = nullptr, *results_ = nullptr;
  int multiprocessors_ = 0;
  double cold_bytes_ = 0;
};

}  // namespace

int main(int count, char** arguments) {
  double const seconds = count > 1 ? std::atof(arguments[1]) : HUGE_VAL;
  auto const start = std::chrono::steady_clock::now();
  Bench const bench;
  Problem problem{};
  int divisions = 0;
  while (std::scanf("%d %d %d %d %d", &problem.row_major_b, &problem.m, &problem.n, &problem.k, &divisions) == 5) {
    if (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() > seconds) break;
    std::printf("%d %d %d %d", problem.row_major_b, problem.m, problem.n, problem.k);
    bool const fits = Bench::fits(problem);
    double best = HUGE_VAL;
    for (int i = 0; i < divisions; ++i) {
      Division as{};
      if (std::scanf("%d %d %d", &as.ranks, &as.share, &as.height) != 3) return 1;
      double found[2] = {};
      if (!fits || !bench.time(problem, as, kFar * best, found)) continue;
      best = std::min(best, found[0]);
      std::printf(" %d %d %d %.2f %.2f", as.ranks, as.share, as.height, found[0], found[1]);
    }
    std::printf("\n");
    std::fflush(stdout);
  }
  return 0;
}
