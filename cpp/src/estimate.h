// The analytic model: the time of a kernel for a problem, estimated without launching it. The constants, with their
// meanings and the measurements that they were fitted to, are in estimate_constants.inc.
//
// Parts, for products of either generation:
// - quantization: a grid of ceil(m / tile_m) x ceil(n / tile_n) x batch tiles runs in waves over the multiprocessors,
//   and a part-filled tile costs as much as a full one; the persistent scheduler of sm90 rounds the grid up to whole
//   clusters and swizzles (tile_scheduler.h);
// - the time of a tile: multiplying (tile_m x tile_n x k at the generation's rate, less for tiles too small to feed the
//   tensor cores), reading A and B through L2, and the steps along K one after the other. The longest
//   hides the others, unless they take about equally long: for sm90 the root of the sum of their squares counts;
// - prologue and epilogue, which pingpong kernels overlap with the other consumer's mainloop except the first and last;
// - device-memory time of reading and writing every operand once, overlapped with the above; the longer dominates.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "correction.h"
#include "op_args.h"
#include "tile_scheduler.h"

namespace atomr_cutlass::estimate {

struct Constants {
#define CONSTANT(name, value) double name = value;
#define CONSTANT_BY(type, name, ...) std::map<type, double> name = {__VA_ARGS__};
#include "estimate_constants.inc"
#undef CONSTANT
#undef CONSTANT_BY
};

// A GPU; `target` is the capability of the compile target made for it, {0, 0} where there is none.
struct Gpu {
  std::pair<int, int> capability, target;
  int64_t multiprocessors, shared_memory, l2_bytes;
  double memory_bytes_per_second;
};

enum class Generation { kSm80, kSm90, kSm100, kSm120 };
enum class Mainloop { kOther, kFew, kRagged, kUnaligned, kRealigned, kSplit, kPingpong, kTwoSm, kTwoStage };
enum class Math { kDefault, kFast, kIeee, k3xTf32, kOther };

// The properties of a kernel that the model uses: fields of its key.
struct Kernel {
  std::string name;
  Op op;
  Generation generation;
  Mainloop mainloop;
  Math math;
  std::pair<int, int> capability;  // of its arch
  std::array<int64_t, 3> tile, cluster;
  int64_t bits_a, bits_b, bits_d;
  int64_t warps;  // of a thread block of the sm80 generation
  int64_t align_a, align_b;
  bool a_along_k, b_along_k;  // A row-major, B column-major
  bool d_columns;  // D column-major
  bool f64, i8, fp8;  // A's element type
  bool stream_k, nosmem, block_scaled;
  bool common;  // whether the launch chooses its epilogue's tree
  bool gated;  // whether D has one column for two of A B
  bool sliced;  // whether it adds up slices of K one after the other
  bool slices_in_d;  // whether slices of K may be added up in D
  bool depthwise;  // of a convolution
  std::string iterator, stride_support;
  int64_t shared_bytes;  // of kernels like it
  int64_t narrowest, width_step;  // columns of tiles that the launch may choose, up to those of `tile`; else 0

  // Kernels that swap their operands tile D^T (GemmSm90::kSwapped).
  bool swapped() const { return generation == Generation::kSm90 && bits_a != 16 && a_along_k && !b_along_k; }
  // Kernels that bring an operand to the tensor cores through registers.
  bool through_registers() const {
    return swapped() || (generation == Generation::kSm90 && bits_a != 16 && !a_along_k);
  }
  // Kernels that request settled operands before the launch before has ended, and whose estimates know it: those of
  // PersistentGemm.
  bool reads_ahead() const {
    return generation == Generation::kSm90 && op == Op::kGemm && !stream_k && !nosmem && !through_registers() &&
           !reads_unaligned();
  }
  // Kernels that serve few rows or columns of D alone.
  bool is_for_few() const { return mainloop == Mainloop::kFew || mainloop == Mainloop::kRagged; }
  // Kernels whose operands begin anywhere, and that launch with K divided among thread blocks.
  bool reads_unaligned() const {
    return mainloop == Mainloop::kRagged || mainloop == Mainloop::kUnaligned || mainloop == Mainloop::kRealigned;
  }
  // Kernels that multiply by FFMA and DMMA.
  bool multiplies_alone() const { return generation == Generation::kSm80 && (math == Math::kIeee || f64); }
};

// Extents of a problem as a kernel sees it. Products: m, n, k, batches (of a grouped one groups of expected extents),
// leading dimensions of A and B, whether K is divided into slices or into how many, bytes of operands that
// are copied before, the operands that launches before do not write (kernel_abi.h), copies, and elements to which the
// first rows of A and B are aligned, in all batches, where these are less than a vector (else 0). Convolutions: the
// implicit GEMM, groups of channels, slices of K, whether the result is cast, channels along K, channels, taps of the
// filter, pixels, and bytes read and written once.
struct Extents {
  int64_t m, n, k, batch;
  int64_t lda, ldb;
  int64_t divided;  // 1: into as many slices as are best, more: into so many
  int64_t copied, settled, copies;
  int64_t begins_a, begins_b;
  int64_t split_k, wide, channels, c, taps, pixels, moved;

  // Raises std::out_of_range where there are fewer than a problem of a kernel of this operation has.
  static Extents of(Op op, std::vector<int64_t> const& values);
};

// How a kernel is launched, and the estimated time of it.
struct Launch {
  double seconds;
  int64_t split_k = 1, swizzle = 1;
  int raster = kHeuristic;
  int64_t width = 0;  // columns of a tile, if the launch chooses them
};

// A division of a problem for few rows: how many thread blocks share the few rows, the rows of weights in a tile, the
// seconds by the formula alone, and what the correction of these depends on.
struct FewSample {
  int64_t share, height;
  double seconds;
  FewCorrection::Inputs inputs;
};

// A launch before the correction by kernel_correction.inc, and what that depends on.
struct KernelSample {
  Launch launch;
  KernelCorrection::Inputs inputs;
};

// Bytes of A and B that are read from device memory, by the order of tiles: in panels, `swizzle` clusters wide across
// the raster order, and as long as the grid along it. A panel keeps its part of one operand and reads all of the other,
// from device memory if L2 cannot hold that until the next panel. `widths` are bytes of A that a row of tiles reads and
// of B that a column does, `held` bytes that L2 holds.
double l2_misses(TileList const& tiles, std::pair<double, double> widths, double held);

class Model {
 public:
  // Not `corrected`: estimates are those of the formulas alone, as they are while constants are fitted.
  explicit Model(Constants constants, bool corrected = true) : c_(std::move(constants)), corrected_(corrected) {}
  Constants const& constants() const { return c_; }

  // Instead of slices of K, for kernels for few rows: sums in the order of K, which is not divided inside a kernel.
  static constexpr int64_t kInOrder = 0;

  // The launch options that are best for a kernel and a problem, with `slices` of K.
  Launch launch(Kernel const& kernel, Extents const& extents, Gpu const& gpu, int64_t shared_bytes,
                int64_t slices) const;
  // The same with as many slices as are best; `whole`: K must not be divided further, nor inside a kernel.
  Launch best(Kernel const& kernel, Extents const& extents, Gpu const& gpu, int64_t shared_bytes, bool whole) const;
  // A lower bound of the seconds of `best`: without padding to swizzles and misses of L2, and with the least
  // correction.
  double bound(Kernel const& kernel, Extents const& extents, Gpu const& gpu) const;
  // The numbers of slices of K that a kernel may run with; may be empty for problems that are divided.
  std::vector<int64_t> slices(Kernel const& kernel, Extents const& extents, Gpu const& gpu) const;
  // A lower bound of the estimates of all kernels of these types but 16-bit ones for few rows, whatever their tiles and
  // generations.
  double least(Kernel const& kernel, Extents const& extents, Gpu const& gpu) const;

  // Whether estimates of its launches are corrected by kernel_correction.inc.
  bool is_corrected(Kernel const& kernel, Extents const& extents) const;
  // The launch with `slices` of K before this correction, for fitting it.
  KernelSample kernel_sample(Kernel const& kernel, Extents const& extents, Gpu const& gpu, int64_t shared_bytes,
                             int64_t slices) const;
  // Every division of a problem that a kernel for few rows may be launched with, for fitting the correction.
  std::vector<FewSample> few_samples(Kernel const& kernel, Extents const& extents, Gpu const& gpu) const;

  // The factor of a kernel's time over the estimate for a kernel of a single tree.
  double part(Kernel const& kernel) const { return kernel.common ? c_.COMMON_PART : 1.0; }

 private:
  double memory(Gpu const& gpu) const;
  double dram(Gpu const& gpu) const;
  double width_efficiency(int64_t tile_n) const;
  double waves(double waves) const;
  double floor(Kernel const& kernel, Extents const& extents, double bytes_per_second) const;
  Launch product(Kernel const& kernel, Extents const& extents, Gpu const& gpu, int64_t shared_bytes,
                 int64_t slices) const;
  Launch by_formula(Kernel const& kernel, Extents const& extents, Gpu const& gpu, int64_t shared_bytes,
                    int64_t slices) const;
  double formula_bound(Kernel const& kernel, Extents const& extents, Gpu const& gpu) const;
  KernelCorrection::Inputs kernel_inputs(Kernel const& kernel, Extents const& extents, Gpu const& gpu,
                                         Launch const& made) const;
  Launch divided(Kernel const& kernel, Extents const& extents, Gpu const& gpu, int64_t shared_bytes,
                 int64_t slices) const;
  double sums(Extents const& extents, int64_t slices, int64_t bits) const;
  std::vector<int64_t> divisions(Kernel const& kernel, Extents const& extents, Gpu const& gpu) const;
  Launch warp_specialized(Kernel const& kernel, Extents const& extents, Gpu const& gpu) const;
  struct Rows;
  Launch scheduled(Kernel const& kernel, Extents const& extents, Gpu const& gpu, Rows const& rows, int64_t width) const;
  double stream_k(TileList const& tiles, int64_t steps, double tile, double whole) const;
  double vectors(Kernel const& kernel, Extents const& extents, Gpu const& gpu, int64_t shared_bytes,
                 int64_t slices) const;
  double alone(Kernel const& kernel, Extents const& extents, Gpu const& gpu, int64_t slices) const;
  double multistage(Kernel const& kernel, Extents const& extents, Gpu const& gpu, int64_t shared_bytes,
                    int64_t slices) const;
  Launch few(Kernel const& kernel, Extents const& extents, Gpu const& gpu, bool in_order) const;
  struct FewDivision;
  FewDivision few_division(Kernel const& kernel, Extents const& extents, Gpu const& gpu, int64_t share,
                           int64_t height) const;
  std::vector<FewDivision> few_divisions(Kernel const& kernel, Extents const& extents, Gpu const& gpu,
                                         int64_t least_share) const;
  FewCorrection::Inputs few_inputs(Kernel const& kernel, Extents const& extents, Gpu const& gpu,
                                   FewDivision const& made) const;
  Launch ragged(Kernel const& kernel, Extents const& extents, Gpu const& gpu, int64_t slices) const;
  Launch unaligned(Kernel const& kernel, Extents const& extents, Gpu const& gpu, int64_t slices) const;
  Launch realigned(Kernel const& kernel, Extents const& extents, Gpu const& gpu, int64_t slices) const;
  double split(Kernel const& kernel, Extents const& extents, Gpu const& gpu) const;
  double grouped(Kernel const& kernel, Extents const& extents, Gpu const& gpu, int64_t shared_bytes) const;
  Launch gemv(Kernel const& kernel, Extents const& extents, Gpu const& gpu, int64_t slices) const;
  Launch convolution(Kernel const& kernel, Extents const& extents, Gpu const& gpu) const;
  double tma_convolution(Kernel const& kernel, Extents const& extents, Gpu const& gpu) const;
  double depthwise_convolution(Kernel const& kernel, Extents const& extents, Gpu const& gpu) const;

  template <class Use>
  void each_width(Kernel const& kernel, Extents const& extents, Gpu const& gpu, Use&& use) const;

  struct Tile;
  Rows rows_of(Kernel const& kernel, Extents const& extents) const;
  Tile tile_of(Kernel const& kernel, Extents const& extents, Rows const& rows, int64_t width) const;
  std::pair<double, double> reading(Tile const& tile, int64_t tiles, Gpu const& gpu, int64_t at_once) const;
  double saved(Kernel const& kernel, Extents const& extents) const;
  double streaming(Kernel const& kernel, Extents const& extents, Gpu const& gpu) const;

  Constants c_;
  bool corrected_;
};

// Whether a kernel is for products of these extents. Of one for few rows D has to be short: in its rows or, with a
// column-major B, its columns.
bool is_for(Kernel const& kernel, int64_t m, int64_t n, int64_t k);

}  // namespace atomr_cutlass::estimate
