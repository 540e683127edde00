#include "estimate.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>

#include "atomr_cutlass/kernel_abi.h"
#include "split_division.h"

namespace atomr_cutlass::estimate {
namespace {

constexpr std::pair<int, int> kHopper{9, 0};
constexpr double kRounded = 1 - 1e-9;  // margin for rounding in the sums of a bound
constexpr int64_t kLongest = int64_t(1) << 40;
constexpr double kLineBytes = 128.0;  // of a cache line
constexpr int64_t kWideCluster = 8;
constexpr int64_t kSectorBytes = 32;  // of a cache line's four
// Of kernels for few rows: GemmFewSm90's kUnit of column-major and of row-major weights, and its kPiece.
constexpr int64_t kUnitAlongK = 8, kUnitRows = 16, kPieceRows = 64;
// GemmFewSm90's kRows, kTallest of row-major weights and kFewOfTall, and the step above kRows (TALL_STEP in Python).
constexpr int64_t kUsualRows = 128, kTallestRows = 256, kTallStep = 32, kFewOfTall = 64;
constexpr int64_t kNarrowRows = 48;  // contiguous rows that a TMA request has for less time than 64
constexpr int64_t kFewBeside = 32;  // few rows that are requested beside row-major weights in no time
constexpr double kWideRows = 512;  // contiguous rows of a cluster's tiles that device memory delivers at its best
constexpr int64_t kManyRows = 96;  // of GemmFewSm90's: more take FEW_MANY times as long
constexpr int64_t kMostRagged = 512;  // few rows that kernels for ragged operands are considered for
// GemmRaggedSm80's kVector, kWindow, and the least rows of a tile and the most that all warps have.
constexpr int64_t kRaggedVector = 8, kRaggedWindow = 64, kRaggedLeast = 16, kRaggedMost = 128;
constexpr double kRaggedBlocks = 2;  // thread blocks of a multiprocessor at once
// kMaxBlocks, kMostElements and kMostLeading there
constexpr int64_t kRaggedGrid = 65535, kRaggedElements = int64_t(1) << 34, kRaggedLeading = int64_t(1) << 27;
constexpr int64_t kGroup = 6;  // thread blocks that divide K, whose sums are added up at once
constexpr int64_t kUnalignedVector = 8;  // elements
// Elements of a row are counted by 32 bits, some in bytes (GemmUnalignedSm80::Behind).
constexpr int64_t kMostUnalignedK = int64_t(1) << 30;
constexpr int64_t kRaggedSplits = 64;  // thread blocks that divide K, at most
constexpr double kFewNear = 1.6;  // times the fastest division: slower ones are not corrected
constexpr double kFewRing = 200 * 1024.0;  // about the bytes of a thread block's stages
constexpr int64_t kWidthWaves = 4;  // numbers of waves for which widths are tried

// Cache lines that TMA touches for each 128 bytes of an operand: rows that do not begin on one straddle two.
double lines(int64_t leading, int64_t bits) {
  uint64_t const bytes = uint64_t(leading * bits / 8) | uint64_t(kLineBytes);
  return 2.0 - double(bytes & -bytes) / kLineBytes;
}

// Combines compute and memory time.
double beside(double busy, double memory) { return std::cbrt(busy * busy * busy + memory * memory * memory); }

// Multiply-adds per clock and multiprocessor of this kind of kernel.
// Source: the vendor's peak rates per compute capability; on sm_90 mma.sync reaches about 0.6 of WGMMA's (measured).
double peak(Kernel const& kernel, Generation generation, bool hopper) {
  if (kernel.math == Math::kIeee) return hopper ? 128.0 : 64.0;
  if (kernel.math == Math::k3xTf32) return hopper ? 200.0 : 160.0;
  if (kernel.f64) return hopper ? 128.0 : 64.0;
  bool const sm80 = generation == Generation::kSm80;
  // mma.sync of fp8 becomes conversions and HMMA there.
  if (kernel.bits_a == 8 && !kernel.i8 && hopper && sm80) return 1000.0;
  double const base = 32768.0 / double(kernel.bits_a);
  switch (generation) {
    case Generation::kSm90: return base;
    case Generation::kSm120: return base / 4;  // not measured: mma.sync of fp4 by the vendor's figures
    case Generation::kSm100: return 2 * base;  // not measured: UMMA's rate by the vendor's figures
    case Generation::kSm80: break;
  }
  return hopper ? base * 0.6 : base / 2;
}

double peak(Kernel const& kernel) { return peak(kernel, kernel.generation, kernel.capability == kHopper); }

// The share of the peak rate that an sm80-generation tile sustains if its operands are in shared memory.
double multistage_efficiency(Kernel const& kernel) {
  int64_t const area = kernel.tile[0] * kernel.tile[1];
  // FMAs of larger tiles wait for shared memory less often (measured from 64x64 to 128x256).
  if (kernel.math == Math::kIeee && kernel.capability == kHopper) {
    return std::min(1.25, 0.75 + 0.25 * double(area) / (128 * 128));
  }
  return std::min(1.0, 0.55 + 0.45 * double(area) / (128 * 128)) * (kernel.mainloop == Mainloop::kTwoStage ? 0.5 : 1.0);
}

// Loads of less than 16 bytes issue more instructions for the same data.
double narrow_load_penalty(Kernel const& kernel) {
  switch (std::min(kernel.align_a * kernel.bits_a, kernel.align_b * kernel.bits_b) / 8) {
    case 16: return 1.0;
    case 8: return 1.3;
    case 4: return 2.0;
    default: return 4.0;
  }
}

// Bits of A, B and D.
double moved_bits(Kernel const& kernel, Extents const& e) {
  double const m = double(e.m), n = double(e.n), k = double(e.k);
  return (m * k + k * n) * double(kernel.bits_a) + m * n * double(kernel.bits_d);
}

// Whether D is short along its columns, so that A is the operand that takes the time (GemmFewSm90::turned).
bool turned(Kernel const& kernel, int64_t m, int64_t n) { return kernel.b_along_k && !kernel.gated && n < m; }

// Steps of K of a kernel for operands that begin anywhere; of ragged few rows K does, too, in a vector
// (GemmRaggedSm80::Division).
int64_t ragged_steps(Kernel const& kernel, int64_t k) {
  bool const shifted = kernel.mainloop == Mainloop::kRagged && kernel.b_along_k;
  return ceil_div(std::max<int64_t>(1, shifted ? k + kRaggedVector - 1 : k), kernel.tile[2]);
}

// One of so many slices of K, which a kernel treats as batches.
Extents slice(Kernel const& kernel, Extents const& extents, int64_t slices) {
  Extents made = extents;
  made.divided = 0;
  made.k = ceil_div(ceil_div(extents.k, kernel.tile[2]), slices) * kernel.tile[2];
  made.batch = slices;
  return made;
}

template <size_t kCount>
std::array<float, kCount> as_floats(std::array<double, kCount> const& values) {
  std::array<float, kCount> made;
  std::transform(values.begin(), values.end(), made.begin(), [](double value) { return float(value); });
  return made;
}

int64_t extent(std::vector<int64_t> const& values, size_t place, int64_t least) {
  return std::clamp(values.at(place), least, kLongest);
}

}  // namespace

Extents Extents::of(Op op, std::vector<int64_t> const& values) {
  Extents made{};
  if (op == Op::kCast || op == Op::kOther) return made;
  made.m = extent(values, 0, 1), made.n = extent(values, 1, 1), made.k = extent(values, 2, 0);
  made.batch = extent(values, 3, 1);
  if (op == Op::kFprop || op == Op::kDgrad || op == Op::kWgrad) {
    made.split_k = extent(values, 4, 1), made.wide = extent(values, 5, 0), made.channels = extent(values, 6, 1);
    made.c = extent(values, 7, 1), made.taps = extent(values, 8, 1), made.pixels = extent(values, 9, 0);
    made.moved = values.at(10);
  } else {
    made.lda = extent(values, 4, 0), made.ldb = extent(values, 5, 0);
    made.divided = values.size() > 6 ? values[6] : 0;
    made.copied = values.size() > 7 ? extent(values, 7, 0) : 0;
    made.settled = values.size() > 8 ? values[8] : 0;
    made.copies = values.size() > 9 ? values[9] : int64_t(made.copied > 0);
    made.begins_a = values.size() > 10 ? values[10] : 0, made.begins_b = values.size() > 11 ? values[11] : 0;
  }
  return made;
}

bool is_for(Kernel const& kernel, int64_t m, int64_t n, int64_t k) {
  if (kernel.mainloop == Mainloop::kUnaligned || kernel.mainloop == Mainloop::kRealigned) return k <= kMostUnalignedK;
  if (!kernel.is_for_few()) return true;
  int64_t const few = turned(kernel, m, n) ? n : m;
  if (kernel.mainloop != Mainloop::kRagged) return few <= kernel.tile[1];
  // Its rows of weights are whole vectors long (GemmRaggedSm80::can_implement).
  return few <= kMostRagged && k >= kRaggedVector && (kernel.b_along_k || n >= kRaggedVector);
}

double l2_misses(TileList const& tiles, std::pair<double, double> widths, double held) {
  int64_t across = tiles.rows, length = tiles.columns, cluster = tiles.cluster_m;
  auto [of_across, of_along] = widths;
  if (tiles.raster == kAlongM) {
    std::swap(across, length);
    cluster = tiles.cluster_n;
    std::swap(of_across, of_along);
  }
  double const panel = double(tiles.swizzle * cluster), panels = double(across) / panel;
  // Panels that are shorter than a wave are read concurrently.
  double passes = std::max(1.0, std::min(panels, double(tiles.tiles()) / double(tiles.batch) / double(tiles.blocks)));
  double const through = of_along * double(length);
  if (through + of_across * panel <= held) passes = 1.0;
  double const window = std::min(double(length), double(tiles.blocks) / panel);
  // A panel that does not fit into L2 together with the other operand's part is read again in each wave.
  double const waves = of_across * panel + of_along * window > held ? std::max(1.0, double(length) / window) : 1.0;
  return double(tiles.batch) * (of_across * double(across) * waves + through * passes);
}

// ---------------------------------------------------------------------------------------------------------------------
// Shared by several families
// ---------------------------------------------------------------------------------------------------------------------

Launch Model::launch(Kernel const& kernel, Extents const& extents, Gpu const& gpu, int64_t shared_bytes,
                     int64_t slices) const {
  switch (kernel.op) {
    case Op::kGrouped: return {grouped(kernel, extents, gpu, shared_bytes)};
    case Op::kGemv: return gemv(kernel, extents, gpu, slices);
    case Op::kFprop:
    case Op::kDgrad:
    case Op::kWgrad: return convolution(kernel, extents, gpu);
    case Op::kCast: return {c_.CAST_SECONDS};
    case Op::kOther: return {0.0};
    case Op::kGemm: break;
  }
  Launch made = by_formula(kernel, extents, gpu, shared_bytes, slices);
  if (made.seconds > 0 && is_corrected(kernel, extents)) {  // extents that no memory holds may have no estimate
    KernelCorrection::Inputs const inputs = kernel_inputs(kernel, extents, gpu, made);
    double const correction = kernel.fp8 ? kKernels.fp8(inputs, 0) : kKernels.half(inputs, 0);
    made.seconds *= std::exp(std::clamp(correction, KernelCorrection::least(kernel.fp8), KernelCorrection::kMost));
    made.seconds = std::max(made.seconds, least(kernel, extents, gpu));
  }
  if (extents.copied > 0) {
    // A second copy takes another launch and, of small products, as long again (measured, an H100).
    double const launches = 2 * double(extents.copies) - 1;
    made.seconds += 2 * double(extents.copied) / (c_.COPIED * dram(gpu)) + launches * c_.LAUNCH_SECONDS;
  }
  return made;
}

// Of a product, without copies.
Launch Model::by_formula(Kernel const& kernel, Extents const& extents, Gpu const& gpu, int64_t shared_bytes,
                         int64_t slices) const {
  bool const side_by_side = extents.divided != 0 && !kernel.sliced;
  return side_by_side ? divided(kernel, extents, gpu, shared_bytes, slices)
                      : product(kernel, extents, gpu, shared_bytes, slices);
}

// Whether kernels like it were timed with problems like this one, in bf16, or in e4m3 with scales of tensors: other
// types, and scales but those of blocks, are taken to be alike. 16-bit kernels for few rows have a correction of their
// own; kernels that share out K are hardly ever the fastest, and so hardly in the fit. One that adds up slices one
// after the other is taken for the kernel that does not.
bool Model::is_corrected(Kernel const& kernel, Extents const& extents) const {
  bool const half = kernel.bits_a == 16 && kernel.mainloop != Mainloop::kFew;
  bool const split = kernel.mainloop == Mainloop::kSplit;
  return corrected_ && kernel.op == Op::kGemm && kernel.generation == Generation::kSm90 && (half || kernel.fp8) &&
         !split && !kernel.reads_unaligned() && !kernel.block_scaled && !kernel.stream_k && !kernel.nosmem &&
         extents.batch == 1 && extents.copied == 0;
}

// What the correction of a launch depends on; kernel_correction.inc has the numbers for these in this order.
KernelCorrection::Inputs Model::kernel_inputs(Kernel const& kernel, Extents const& e, Gpu const& gpu,
                                              Launch const& made) const {
  int64_t const depth = std::max<int64_t>(1, e.k);
  double const m = double(e.m), n = double(e.n), k = double(depth);
  int64_t const wide = made.width == 0 ? kernel.tile[1] : made.width;
  double const height = double(kernel.tile[0]), width = double(wide);
  double const rows = double(round_up(ceil_div(e.m, kernel.tile[0]), kernel.cluster[0]));
  double const columns = double(round_up(ceil_div(e.n, wide), kernel.cluster[1]));
  double const slices = kernel.sliced ? 1.0 : double(made.split_k);
  double const at_once = double(blocks_at_once(gpu.multiprocessors, kernel.cluster[0] * kernel.cluster[1]));
  double const waves = rows * columns * slices / at_once, whole = std::ceil(waves);
  bool const single = whole == 1;
  // D as if it were 16-bit.
  double const moving = ((m * k + k * n) * double(kernel.bits_a) / 8 + m * n * 2) / gpu.memory_bytes_per_second;
  double const multiplying = m * n * k / (double(gpu.multiprocessors) * peak(kernel) * c_.CLOCK_HZ);
  auto const beyond = [&](int64_t leading, int64_t bytes) { return double(leading * kernel.bits_a / 8 % bytes != 0); };
  std::array<double, KernelCorrection::kInputs> const inputs{
      std::log(made.seconds / moving),
      std::log(made.seconds / multiplying),
      std::log(made.seconds * 1e6),
      std::log2(height / 64),
      width / 64,
      std::log2(double(kernel.cluster[0])),
      std::log2(double(kernel.cluster[1])),
      double(kernel.mainloop == Mainloop::kPingpong),
      double(kernel.tile[0] == 192),
      double(e.divided != 0 && !kernel.sliced),
      std::log2(slices),
      double(kernel.width_step != 0),
      std::min(waves, 8.0),
      whole - waves,
      double(single),
      single ? waves : 0.0,
      std::min(whole, 8.0),
      1 / whole,
      std::min(rows * height / m - 1, 2.0),
      std::min(columns * width / n - 1, 2.0),
      std::log(double(ceil_div(depth, kernel.tile[2])) / slices),
      beyond(e.lda, int64_t(kLineBytes)),
      beyond(e.lda, kSectorBytes),
      beyond(e.ldb, int64_t(kLineBytes)),
      beyond(e.ldb, kSectorBytes),
      std::log2(double(made.swizzle == 0 ? kernel.cluster[2] : made.swizzle)),  // 0: all share the few rows
      double(made.raster == kAlongM),
      std::log(m),
      std::log(n),
      std::log(k),
      double(kernel.a_along_k),
      double(kernel.b_along_k),
      double(kernel.d_columns),
      double(kernel.bits_d == 32),
      std::log2(memory(gpu)),
      double(kernel.mainloop == Mainloop::kFew),
      std::log2(double(kernel.cluster[2])),
      double(kernel.math == Math::kFast),
  };
  return as_floats(inputs);
}

KernelSample Model::kernel_sample(Kernel const& kernel, Extents const& extents, Gpu const& gpu, int64_t shared_bytes,
                                  int64_t slices) const {
  Launch const made = by_formula(kernel, extents, gpu, shared_bytes, slices);
  return {made, kernel_inputs(kernel, extents, gpu, made)};
}

Launch Model::best(Kernel const& kernel, Extents const& extents, Gpu const& gpu, int64_t shared_bytes,
                   bool whole) const {
  if (whole && extents.divided == 0)
    return launch(kernel, extents, gpu, shared_bytes, kernel.mainloop == Mainloop::kFew ? kInOrder : 1);
  Launch best{std::numeric_limits<double>::infinity()};
  for (int64_t const count : slices(kernel, extents, gpu)) {
    Launch const tried = launch(kernel, extents, gpu, shared_bytes, count);
    if (tried.seconds < best.seconds) best = tried;
  }
  return best;
}

std::vector<int64_t> Model::slices(Kernel const& kernel, Extents const& extents, Gpu const& gpu) const {
  if (extents.divided != 0) return divisions(kernel, extents, gpu);
  std::vector<int64_t> found{1};
  if (kernel.reads_unaligned()) {  // as many as have equal shares of its steps
    int64_t const steps = ragged_steps(kernel, extents.k);
    int64_t const most = std::min({steps, kRaggedSplits, kRaggedGrid / extents.batch});
    for (int64_t count = 2; count <= most; ++count) {
      if (ceil_div(steps, ceil_div(steps, count)) == count) found.push_back(count);
    }
  } else if (kernel.op == Op::kGemv) {  // powers of two that leave each thread at least two loads
    int64_t const step = int64_t(kernel.b_along_k ? c_.GEMV_THREADS * 128 / double(kernel.bits_b) : c_.GEMV_ROWS);
    for (int bits = 1; bits < 7; ++bits) {
      if (extents.k >= (2 * int64_t(c_.GEMV_AT_ONCE) * step) << bits) found.push_back(int64_t(1) << bits);
    }
  } else if (kernel.op == Op::kGemm && kernel.slices_in_d && extents.batch == 1) {
    for (int64_t const count : {2, 4, 8, 16}) {
      if (extents.k >= count * 8 * kernel.tile[2]) found.push_back(count);
    }
  }
  return found;
}

double Model::least(Kernel const& kernel, Extents const& e, Gpu const& gpu) const {
  std::pair<int, int> const target = gpu.target.first != 0 ? gpu.target : kernel.capability;
  double rate = peak(kernel, Generation::kSm80, target == kHopper);
  if (target >= kHopper) rate = std::max(rate, peak(kernel, Generation::kSm90, target == kHopper));
  if (target > kHopper) rate = std::max(rate, peak(kernel, Generation::kSm100, false));
  double const products =
      double(e.batch) * double(e.m) * double(e.n) * double(e.k) / rate / double(gpu.multiprocessors);
  double most = 1.0;  // multiple of the rate: clocks may be higher than CLOCK_HZ
  for (auto const& [width, efficiency] : c_.TILE_N_EFFICIENCY) most = std::max(most, efficiency);
  double const started = c_.LAUNCH_SECONDS - (e.settled != 0 ? c_.SETTLED_SECONDS : 0.0);
  return std::max(products / most / c_.CLOCK_HZ, streaming(kernel, e, gpu)) + started;
}

// The rate of device memory, relative to that of the GPU for which the constants were fitted.
double Model::memory(Gpu const& gpu) const { return gpu.memory_bytes_per_second / c_.FITTED_MEMORY_BYTES_PER_SECOND; }

double Model::dram(Gpu const& gpu) const { return c_.DRAM_BYTES_PER_SECOND * memory(gpu); }

// Seconds of reading and writing every operand once.
double Model::floor(Kernel const& kernel, Extents const& e, double bytes_per_second) const {
  return double(e.batch) * moved_bits(kernel, e) / 8 / bytes_per_second;
}

// Waves of whole tiles; the last one, if not the only one, is faster the fewer multiprocessors it keeps busy.
double Model::waves(double waves) const {
  double const full = std::ceil(waves);
  return waves > 1 ? full - c_.LAST_WAVE * (full - waves) : full;
}

Launch Model::product(Kernel const& kernel, Extents const& extents, Gpu const& gpu, int64_t shared_bytes,
                      int64_t slices) const {
  if (kernel.mainloop == Mainloop::kFew) return few(kernel, extents, gpu, slices == kInOrder);
  if (kernel.mainloop == Mainloop::kRagged) return ragged(kernel, extents, gpu, slices);
  if (kernel.mainloop == Mainloop::kUnaligned) return unaligned(kernel, extents, gpu, slices);
  if (kernel.mainloop == Mainloop::kRealigned) return realigned(kernel, extents, gpu, slices);
  if (kernel.mainloop == Mainloop::kSplit) return {split(kernel, extents, gpu)};
  Launch made{0.0, slices};
  if (kernel.generation == Generation::kSm80) {
    if (gpu.capability == kHopper && kernel.op == Op::kGemm && kernel.multiplies_alone()) {
      bool const single = kernel.align_a == 1;
      double const busy =
          single ? alone(kernel, extents, gpu, slices) : vectors(kernel, extents, gpu, shared_bytes, slices);
      double const rate = !single ? c_.VECTOR_DRAM : kernel.f64 ? 1.0 : c_.FMA_NARROW_DRAM;
      made.seconds = beside(busy, floor(kernel, extents, rate * dram(gpu)));
    } else {
      made.seconds = multistage(kernel, extents, gpu, shared_bytes, slices);
      if (gpu.capability == kHopper) made.seconds *= c_.MMA_SYNC_ON_HOPPER;
      made.seconds = std::max(made.seconds, floor(kernel, extents, dram(gpu)));
    }
  } else {
    made = warp_specialized(kernel, extents, gpu);
    made.split_k = slices;
    made.seconds = beside(made.seconds, streaming(kernel, extents, gpu));
    made.seconds -= saved(kernel, extents);
  }
  made.seconds += c_.LAUNCH_SECONDS;
  return made;
}

// ---------------------------------------------------------------------------------------------------------------------
// Products whose K is divided into slices side by side, which another kernel adds up
// ---------------------------------------------------------------------------------------------------------------------

// The number that is settled, or those whose tiles fill half a wave or whole ones, the fewest first. Slices are whole
// steps of the kernel, and all as long.
std::vector<int64_t> Model::divisions(Kernel const& kernel, Extents const& e, Gpu const& gpu) const {
  int64_t const steps = ceil_div(e.k, kernel.tile[2]);
  if (e.divided > 1) return {ceil_div(steps, ceil_div(steps, e.divided))};
  int64_t const blocks = kernel.cluster[0] * kernel.cluster[1], at_once = blocks_at_once(gpu.multiprocessors, blocks);
  int64_t const tiles = saturated(
      saturated(ceil_div(e.m, kernel.tile[0] * kernel.cluster[0]), ceil_div(e.n, kernel.tile[1] * kernel.cluster[1])),
      blocks);
  int64_t const most =
      std::min(steps / int64_t(c_.DIVIDED_STEPS), int64_t(c_.DIVIDED_MOST_BYTES / (4.0 * double(e.m) * double(e.n))));
  std::vector<int64_t> found;
  if (most <= 1) return found;
  for (int64_t wave = 0; wave <= int64_t(c_.DIVIDED_WAVES); ++wave) {
    int64_t const filled = wave == 0 ? at_once / 2 : wave * at_once;
    int64_t const wanted = std::min(filled / tiles, most);
    if (wanted <= 1) continue;
    int64_t const count = ceil_div(steps, ceil_div(steps, wanted));
    if (found.empty() || found.back() < count) found.push_back(count);
  }
  return found;
}

Launch Model::divided(Kernel const& kernel, Extents const& extents, Gpu const& gpu, int64_t shared_bytes,
                      int64_t slices) const {
  Launch made = product(kernel, slice(kernel, extents, slices), gpu, shared_bytes, 1);
  made.seconds += sums(extents, slices, kernel.bits_d);
  made.split_k = slices;
  return made;
}

// `bits` of each sum. D is counted as half as many, as bf16 has beside sums in f32.
double Model::sums(Extents const& extents, int64_t slices, int64_t bits) const {
  double const bytes = double(bits) / 8 * (double(slices) + 0.5);
  return c_.DIVIDED_SECONDS + c_.DIVIDED_ROUND_SECONDS * std::ceil(double(slices) / c_.DIVIDED_AT_ONCE) +
         double(extents.m) * double(extents.n) * bytes / c_.DIVIDED_BYTES_PER_SECOND;
}

// ---------------------------------------------------------------------------------------------------------------------
// Products of the 3.x generations
// ---------------------------------------------------------------------------------------------------------------------

// TILE_N_EFFICIENCY of a width, interpolated linearly.
double Model::width_efficiency(int64_t tile_n) const {
  auto const& known = c_.TILE_N_EFFICIENCY;
  auto const above = known.lower_bound(tile_n);
  if (above == known.end()) return known.rbegin()->second;
  if (above->first == tile_n || above == known.begin()) return above->second;
  auto const below = std::prev(above);
  double const part = double(tile_n - below->first) / double(above->first - below->first);
  return below->second * (1 - part) + above->second * part;
}

// Properties that tiles of all widths share.
struct Model::Rows {
  int64_t height, m, n, rows, steps;  // of a tile, of D or D^T, tiles along M, steps along K
  double peak, row_bytes, rows_a, touched_a, lines_b, step, beyond, extra;
};

// The work of a thread block's tile, in clocks but for `store` and `extra`, which are seconds.
struct Model::Tile {
  int64_t m, n, cluster_m, cluster_n;
  Grid grid;
  int64_t steps;
  double multiply, stepping, loaded, touched, store, extra;  // bytes loaded, and of the cache lines that hold them
  int64_t blocks() const { return cluster_m * cluster_n; }
};

// Calls `use` with the columns that a launch may choose: for each number of waves the fewest that keep to it, and where
// all tiles run at once for each number of tiles along N, since wider tiles read less through L2. The widest first.
template <class Use>
void Model::each_width(Kernel const& kernel, Extents const& e, Gpu const& gpu, Use&& use) const {
  int64_t const widest = kernel.tile[1], across = kernel.cluster[0], along = kernel.cluster[1];
  use(widest);
  if (kernel.width_step == 0) return;
  int64_t const n = kernel.swapped() ? e.m : e.n;
  int64_t const rows = saturated(round_up(ceil_div(kernel.swapped() ? e.n : e.m, kernel.tile[0]), across), e.batch);
  int64_t const at_once = blocks_at_once(gpu.multiprocessors, across * along);
  int64_t const fewest = round_up(ceil_div(n, widest), along);
  int64_t const waves = ceil_div(saturated(rows, fewest), at_once);
  int64_t latest = widest;
  auto const add = [&](int64_t columns) {
    int64_t const wanted = round_up(ceil_div(n, std::max<int64_t>(1, columns)), kernel.width_step);
    int64_t const width = std::clamp(wanted, kernel.narrowest, widest);
    if (width < latest) use(latest = width);
  };
  for (int64_t count = waves; count < waves + kWidthWaves; ++count) {
    int64_t const most = round_down(saturated(count, at_once) / rows, along);
    if (count == 1) {
      for (int64_t columns = fewest; columns < most; columns += along) add(columns);
    }
    add(most);
  }
}

Model::Rows Model::rows_of(Kernel const& kernel, Extents const& e) const {
  Rows made{};
  made.height = kernel.tile[0];
  if (kernel.mainloop == Mainloop::kTwoSm) made.height /= 2;  // two thread blocks of a cluster share a tile of sm100
  made.m = kernel.swapped() ? e.n : e.m, made.n = kernel.swapped() ? e.m : e.n;
  made.rows = ceil_div(made.m, made.height);
  made.steps = std::max<int64_t>(1, ceil_div(e.k, kernel.tile[2]));
  made.peak = peak(kernel);
  made.row_bytes = double(kernel.tile[2]) * double(made.steps) * double(kernel.bits_a) / 8;
  // A cluster loads what its thread blocks share once.
  made.rows_a = double(made.height) / double(kernel.cluster[1]);
  made.touched_a = made.rows_a * lines(e.lda, kernel.bits_a);
  made.lines_b = lines(e.ldb, kernel.bits_b);
  int64_t const blocks = kernel.cluster[0] * kernel.cluster[1];
  made.step = blocks == kWideCluster ? c_.WIDE_CLUSTER_STEP_CLOCKS : c_.STEP_CLOCKS;
  if (kernel.through_registers()) made.step = c_.THROUGH_REGISTERS_STEP_CLOCKS * double(made.height) / 64;
  made.beyond = c_.BEYOND_CLOCKS * double(std::max<int64_t>(0, made.height - made.m));
  made.extra = c_.CLUSTER_SECONDS * std::log2(double(blocks));
  return made;
}

Model::Tile Model::tile_of(Kernel const& kernel, Extents const& e, Rows const& of, int64_t width) const {
  Tile made{};
  made.m = of.height, made.n = width;
  made.cluster_m = kernel.cluster[0], made.cluster_n = kernel.cluster[1];
  double efficiency = width_efficiency(made.n);
  if (made.m < 128) efficiency *= c_.ONE_WARPGROUP_EFFICIENCY;
  if (made.m > 128) efficiency *= c_.TALL_EFFICIENCY;
  if (kernel.fp8 && kernel.math == Math::kDefault) {
    efficiency *= kernel.block_scaled ? c_.BLOCK_SCALED_EFFICIENCY : c_.FULL_ACCUMULATION_EFFICIENCY;
    if (kernel.mainloop == Mainloop::kPingpong && (kernel.block_scaled || kernel.op == Op::kGemm)) {
      efficiency *= kernel.block_scaled ? c_.BLOCK_SCALED_ALONE : c_.FULL_ACCUMULATION_ALONE;
    }
  }
  if (kernel.through_registers()) efficiency *= c_.THROUGH_REGISTERS_EFFICIENCY;
  made.grid = {of.rows, ceil_div(of.n, made.n), e.batch};
  made.steps = of.steps;
  made.multiply = double(made.m * made.n * kernel.tile[2] * made.steps) / (of.peak * efficiency);
  double const rows_b = double(made.n) / double(made.cluster_m);
  made.loaded = (of.rows_a + rows_b) * of.row_bytes;
  made.touched = (of.touched_a + rows_b * of.lines_b) * of.row_bytes;
  double const beyond = of.beyond + c_.BEYOND_N_CLOCKS * double(std::max<int64_t>(0, made.n - of.n));
  made.stepping = double(made.steps) * (of.step + beyond);
  made.store = double(made.m * made.n * kernel.bits_d) / 8 / c_.STORE_BYTES_PER_SECOND;
  made.extra = of.extra;
  return made;
}

// Clocks of L2 and of a port while a tile's operands are read: the root of the sum of their squares counts.
std::pair<double, double> Model::reading(Tile const& tile, int64_t tiles, Gpu const& gpu, int64_t at_once) const {
  // Two multiprocessors share a port: thread blocks of a launch that leaves half of them idle have one each.
  double const port = 2 * tiles <= at_once ? c_.PORT_BYTES_PER_CLOCK : c_.PAIR_BYTES_PER_CLOCK;
  double const busy = std::min(1.0, double(tiles) / double(gpu.multiprocessors));
  return {tile.touched * busy / c_.L2_BYTES_PER_CLOCK, tile.loaded / port};
}

// Seconds in which kernels over TMA read and write every operand once.
double Model::streaming(Kernel const& kernel, Extents const& e, Gpu const& gpu) const {
  return floor(kernel, e, c_.STREAMED * dram(gpu));
}

// Seconds that a settled operand saves.
double Model::saved(Kernel const& kernel, Extents const& e) const {
  return e.settled != 0 && kernel.reads_ahead() ? c_.SETTLED_SECONDS : 0.0;
}

double Model::bound(Kernel const& kernel, Extents const& extents, Gpu const& gpu) const {
  double const seconds = formula_bound(kernel, extents, gpu);
  return is_corrected(kernel, extents) ? seconds * std::exp(KernelCorrection::least(kernel.fp8)) : seconds;
}

double Model::formula_bound(Kernel const& kernel, Extents const& extents, Gpu const& gpu) const {
  bool const of_its_own =
      kernel.mainloop == Mainloop::kFew || kernel.mainloop == Mainloop::kSplit || kernel.reads_unaligned();
  if (kernel.op != Op::kGemm || kernel.generation == Generation::kSm80 || of_its_own) return 0.0;
  if (extents.divided != 0 && !kernel.sliced) {
    double least = std::numeric_limits<double>::infinity();
    for (int64_t const count : divisions(kernel, extents, gpu)) {
      double const added = sums(extents, count, kernel.bits_d) * kRounded;
      least = std::min(least, formula_bound(kernel, slice(kernel, extents, count), gpu) + added);
    }
    return least;
  }
  Rows const rows = rows_of(kernel, extents);
  int64_t const at_once = blocks_at_once(gpu.multiprocessors, kernel.cluster[0] * kernel.cluster[1]);
  double const shown = std::min(c_.SHOWN, c_.SHOWN_ALONE);
  bool const pingpong = kernel.mainloop == Mainloop::kPingpong;
  double least = std::numeric_limits<double>::infinity();
  each_width(kernel, extents, gpu, [&](int64_t width) {
    Tile const tile = tile_of(kernel, extents, rows, width);
    int64_t const tiles =
        saturated(saturated(round_up(tile.grid.rows, tile.cluster_m), round_up(tile.grid.columns, tile.cluster_n)),
                  tile.grid.batch);
    // Overflow is impossible here, and std::hypot would take longer than all of the rest.
    auto const [l2, port] = reading(tile, tiles, gpu, at_once);
    double const read = std::sqrt(l2 * l2 + port * port);
    double const clocks = std::sqrt(tile.multiply * tile.multiply + read * read + tile.stepping * tile.stepping);
    double const seconds = (clocks + shown * read) / c_.CLOCK_HZ;
    double busy = tile.extra;
    if (kernel.stream_k) {
      busy += double(tiles) / double(at_once) * seconds + c_.STREAM_K_SECONDS;
    } else {
      double const after = pingpong ? c_.PINGPONG_TILE_SECONDS : c_.COOPERATIVE_TILE_SECONDS + tile.store;
      busy += waves(double(tiles) / double(std::min(at_once, tiles))) * (seconds + after);
      if (pingpong) busy += c_.PROLOGUE_SECONDS + tile.store;
    }
    least = std::min(least, busy);
  });
  double const seconds = beside(least, streaming(kernel, extents, gpu)) + c_.LAUNCH_SECONDS - saved(kernel, extents);
  return seconds * kRounded;
}

// Busy seconds with the best width, swizzle and raster order, and those.
Launch Model::warp_specialized(Kernel const& kernel, Extents const& extents, Gpu const& gpu) const {
  Launch best{INFINITY};
  Rows const rows = rows_of(kernel, extents);
  each_width(kernel, extents, gpu, [&](int64_t width) {
    Launch const tried = scheduled(kernel, extents, gpu, rows, width);
    if (tried.seconds < best.seconds) best = tried;
  });
  return best;
}

// The same for one width.
Launch Model::scheduled(Kernel const& kernel, Extents const& extents, Gpu const& gpu, Rows const& rows,
                        int64_t width) const {
  Tile const own = tile_of(kernel, extents, rows, width);
  int64_t const at_once = blocks_at_once(gpu.multiprocessors, own.blocks());
  double const k = double(extents.k);
  std::pair<double, double> const widths{double(own.m) * k * double(kernel.bits_a) / 8,
                                         double(own.n) * k * double(kernel.bits_b) / 8};
  double const held = double(gpu.l2_bytes) * c_.L2_SHARE, memory = dram(gpu);
  double const whole = c_.COOPERATIVE_TILE_SECONDS + own.store;

  // Clocks of reading a tile, and of all that a tile takes: the same for all orders of as many tiles.
  int64_t counted = 0;
  double read = 0, multiplied = 0;
  auto const busy = [&](TileList const& tiles) {
    double const in_waves = double(tiles.tiles()) / double(tiles.blocks);
    if (tiles.tiles() != counted) {
      counted = tiles.tiles();
      auto const [l2, port] = reading(own, counted, gpu, at_once);
      read = std::hypot(l2, port);
      multiplied = std::hypot(own.multiply, read, own.stepping);
    }
    int64_t const across = tiles.swizzle * (tiles.raster == kAlongM ? own.cluster_n : own.cluster_m);
    double const shown = (across > 1 ? c_.SHOWN : c_.SHOWN_ALONE) * read;
    double tile = (multiplied + shown) / c_.CLOCK_HZ;
    // Measured; a thread block that finishes its tile late keeps its cluster from loading the next one.
    bool const wide = own.blocks() == kWideCluster;
    double const late = wide ? c_.LATE_IN_WIDE_CLUSTER : c_.LATE_IN_CLUSTER;
    if (own.blocks() > 2 && in_waves > 1) tile *= 1 + late * (1 - 1 / in_waves);
    if (wide && in_waves <= 1 && tiles.tiles() == at_once) tile *= 1 + c_.WIDE_CLUSTERS_FULL;
    double after = c_.MISSED * l2_misses(tiles, widths, held) / memory + own.extra;
    if (kernel.nosmem) after += c_.NOSMEM_SECONDS + in_waves * c_.NOSMEM_TILE_SECONDS;
    if (kernel.stream_k) return stream_k(tiles, own.steps, tile, whole) + after;
    if (kernel.mainloop == Mainloop::kPingpong) {
      return waves(in_waves) * (tile + c_.PINGPONG_TILE_SECONDS) + c_.PROLOGUE_SECONDS + own.store + after;
    }
    return waves(in_waves) * (tile + whole) + after;
  };

  std::vector<std::pair<int64_t, int>> schedules{{1, kHeuristic}};
  if (kernel.generation == Generation::kSm90 && kernel.op == Op::kGemm) {
    schedules = orders(own.grid, own.cluster_m, own.cluster_n, kernel.stream_k);
  }
  Launch best{INFINITY};
  for (auto const& [swizzle, raster] : schedules) {
    double const taken =
        busy(tile_list(own.grid, own.cluster_m, own.cluster_n, gpu.multiprocessors, swizzle, raster, kernel.stream_k));
    if (taken < best.seconds) best = {taken, 1, swizzle, raster, kernel.width_step != 0 ? width : 0};
  }
  return best;
}

// Busy seconds of a stream-K launch: whole tiles in waves, then parts of the others, which are added up.
double Model::stream_k(TileList const& tiles, int64_t steps, double tile, double whole) const {
  Decomposition const made = decompose(tiles, steps);
  double const blocks = double(tiles.blocks), cut = double(made.cut), units = double(made.units);
  if (made.units == 0) return waves(double(tiles.tiles()) / blocks) * (tile + whole) + c_.STREAM_K_SECONDS;
  double const longer = made.whole != 0 ? 1.0 : c_.STREAM_K_SPLIT;
  double const parts = std::ceil(units / blocks) * (longer * tile * cut / units + whole);
  double const added = c_.FIXUP_SECONDS + std::max(0.0, units / cut - 1.0) * c_.PEER_SECONDS;
  return std::ceil(double(made.whole) / blocks) * (tile + whole) + parts + added + c_.STREAM_K_SECONDS;
}

// ---------------------------------------------------------------------------------------------------------------------
// Kernels for few rows, those that share out K, and the sm80 generation
// ---------------------------------------------------------------------------------------------------------------------

// One way to divide a problem among thread blocks: how many of a cluster share the few rows (the swizzle), and the rows
// of weights in a tile of each (the width).
struct Model::FewDivision {
  int64_t share, height;
  double seconds;  // of a launch
  double waves, blocks, full;  // waves of tiles, thread blocks of the last one, and of the others
  double working;  // of the last wave, whose last tile may be partial
  double boxes, bytes;  // boxes of K of a thread block's tile, and its bytes of weights
  bool astray, between;  // see FEW_ASTRAY and FEW_BETWEEN
};

std::vector<Model::FewDivision> Model::few_divisions(Kernel const& kernel, Extents const& e, Gpu const& gpu,
                                                     int64_t least_share) const {
  std::vector<FewDivision> found;
  int64_t const unit = kernel.b_along_k ? kUnitAlongK : kUnitRows;
  int64_t const tallest = kernel.b_along_k || e.m > kFewOfTall ? kUsualRows : kTallestRows;
  for (int64_t share = least_share; share <= kernel.cluster[2]; share *= 2) {
    for (int64_t height = tallest; height > 0; height -= height > kUsualRows ? kTallStep : unit) {
      found.push_back(few_division(kernel, e, gpu, share, height));
    }
  }
  return found;
}

// For a kernel for few rows, with the fastest division; with `in_order`, of those that do not divide K. What was timed
// is corrected.
Launch Model::few(Kernel const& kernel, Extents const& e, Gpu const& gpu, bool in_order) const {
  bool const along_m = turned(kernel, e.m, e.n);
  bool const bound = (e.settled & (along_m ? ATOMR_CUTLASS_A_SETTLED : ATOMR_CUTLASS_B_SETTLED)) != 0;
  FewCorrection const& correction = kernel.b_along_k ? kFewAlongK : kFewRows;
  bool const timed = corrected_ && double(e.batch) * double(along_m ? e.m : e.n) >= FewCorrection::kLeastRows &&
                     double(e.k) * double(kernel.bits_a) / 8 >= FewCorrection::kLeastRowBytes &&
                     (correction.clusters & kernel.cluster[2]) != 0 && e.copied == 0;
  std::vector<FewDivision> const divisions = few_divisions(kernel, e, gpu, in_order ? kernel.cluster[2] : 1);
  double least = INFINITY;
  for (FewDivision const& made : divisions) least = std::min(least, made.seconds);
  Launch best{INFINITY};
  for (FewDivision const& made : divisions) {
    if (made.seconds > kFewNear * least) continue;
    double seconds = made.seconds;
    if (timed) seconds *= std::exp(double(correction.network(few_inputs(kernel, e, gpu, made), bound ? 1 : 0)));
    if (seconds < best.seconds) best = {seconds, 1, in_order ? 0 : made.share, kHeuristic, made.height};
  }
  if (kernel.block_scaled) best.seconds *= c_.FEW_BLOCK_SCALED;
  return best;
}

// What the correction of a division depends on; few_correction.inc has the numbers for these in this order.
FewCorrection::Inputs Model::few_inputs(Kernel const& kernel, Extents const& e, Gpu const& gpu,
                                        FewDivision const& made) const {
  bool const along_m = turned(kernel, e.m, e.n), single = made.waves == 1;
  double const rows = double(e.batch) * double(along_m ? e.m : e.n), few = double(along_m ? e.n : e.m);
  double const read = std::max(1.0, (rows + few) * double(e.k) * double(kernel.bits_a) / 8);
  double const ideal = read / gpu.memory_bytes_per_second, height = double(made.height), share = double(made.share);
  double const blocks = made.blocks / double(gpu.multiprocessors), full = made.full / double(gpu.multiprocessors);
  std::array<double, std::tuple_size_v<FewCorrection::Inputs>> const inputs{
      std::log(made.seconds / ideal),
      std::log(ideal * 1e6),
      std::log2(double(kernel.cluster[2])),
      std::log2(share),
      height / 64,
      std::ceil(height / 64) - height / 64,
      std::min(made.waves, 6.0),
      double(single),
      blocks,
      full,
      single ? blocks : 0.0,
      double(full <= 0.5),  // GemmFewSm90's `late`
      std::log(made.waves * made.bytes / kFewRing + 0.1),
      std::log2(double(round_up(int64_t(few), 8))),
      std::log(rows),
      double(made.astray),
      double(made.between),
      std::log(std::max(0.5, made.boxes)),
      lines(along_m ? e.lda : e.ldb, kernel.bits_a) - 1,
      std::log2(height * share),
      made.working / double(gpu.multiprocessors),
      std::log2(memory(gpu)),
  };
  return as_floats(inputs);
}

std::vector<FewSample> Model::few_samples(Kernel const& kernel, Extents const& e, Gpu const& gpu) const {
  std::vector<FewSample> found;
  for (FewDivision const& made : few_divisions(kernel, e, gpu, 1)) {
    found.push_back({made.share, made.height, made.seconds, few_inputs(kernel, e, gpu, made)});
  }
  return found;
}

// A division of a problem, and its seconds without what was learned.
Model::FewDivision Model::few_division(Kernel const& kernel, Extents const& e, Gpu const& gpu, int64_t share,
                                       int64_t height) const {
  bool const along_k = kernel.b_along_k, along_m = turned(kernel, e.m, e.n);
  auto const of = [&](double constant_along_k, double constant_rows) {
    return along_k ? constant_along_k : constant_rows;
  };
  int64_t const few = round_up(along_m ? e.n : e.m, 8), ranks = kernel.cluster[2], split = ranks / share;
  int64_t const leading = (along_m ? e.lda : e.ldb) * kernel.bits_a / 8;
  int64_t const few_leading = (along_m ? e.ldb : e.lda) * kernel.bits_a / 8;
  double const clusters = double(std::max<int64_t>(1, blocks_at_once(gpu.multiprocessors, ranks) / ranks));
  double const tiles = double(saturated(e.batch, ceil_div(along_m ? e.m : e.n, height * share)));
  double const waves = std::ceil(tiles / clusters), boxes = double(ceil_div(e.k, kernel.tile[2])) / double(split);
  double const bytes = double(height) * boxes * kLineBytes;  // of weights that a thread block reads for a tile

  // Disturbances of device memory: parts of K that are read at the same time, lines and sectors that are read in part.
  double disturbed = 1 + of(c_.FEW_DIVIDED, c_.FEW_DIVIDED_ROWS) * std::log2(double(split));
  bool const astray = height % kPieceRows != 0 || leading % int64_t(kLineBytes) != 0;
  bool const between = leading % kSectorBytes != 0;
  if (along_k) {
    disturbed += c_.FEW_STRADDLED * (lines(along_m ? e.lda : e.ldb, kernel.bits_a) - 1);
  } else {
    if (astray) disturbed += c_.FEW_ASTRAY;
    if (between) disturbed += c_.FEW_BETWEEN;
    disturbed += c_.FEW_NARROW * std::max(0.0, std::log2(kWideRows / double(height * share)));
  }
  double const memory = gpu.memory_bytes_per_second * of(c_.FEW_DRAM, c_.FEW_DRAM_ROWS) / disturbed;
  // All thread blocks ask L2 for the few rows at once, which takes longer where they begin between sectors or lines.
  double again = 1;
  if (few_leading % kSectorBytes != 0) {
    again = of(c_.FEW_BETWEEN_SECTORS, c_.FEW_BETWEEN_SECTORS_ROWS);
  } else if (few_leading % (2 * kSectorBytes) != 0) {
    again = of(c_.FEW_BETWEEN_LINES, c_.FEW_BETWEEN_LINES_ROWS);
  }
  double const counted = double(few) * again;
  // TMA's requests take their time by rows along K, and by pieces of 64 contiguous rows whatever their bytes.
  double request = 0;
  if (along_k) {
    request = c_.FEW_ROW_SECONDS * std::max(double(height) + c_.FEW_ROW_OF_FEW * counted, c_.FEW_LEAST_ROWS);
  } else {
    request = height <= kNarrowRows  ? c_.FEW_NARROW_BOX_SECONDS
              : height <= kPieceRows ? c_.FEW_PIECE_BOX_SECONDS
                                     : c_.FEW_TWO_PIECE_BOX_SECONDS * double(ceil_div(height, kUsualRows));
    request += c_.FEW_ROW_BESIDE_SECONDS * std::max(0.0, double(few) - double(kFewBeside));
  }
  double const port = of(c_.FEW_PORT, c_.FEW_PORT_ROWS), l2 = of(c_.FEW_L2, c_.FEW_L2_ROWS);
  double const box = of(c_.FEW_BOX_SECONDS, c_.FEW_BOX_ROWS_SECONDS);
  double const wide = of(c_.FEW_WIDE_SECONDS, c_.FEW_WIDE_ROWS_SECONDS) * double(few <= 16 ? 16 : round_up(few, 32)) *
                      double(ceil_div(height, 64));
  double const exposed = of(c_.FEW_EXPOSED, c_.FEW_EXPOSED_ROWS);

  // Two multiprocessors share a port: thread blocks have one alone where they are few, fewer in wide clusters.
  double const gpu_blocks = double(gpu.multiprocessors);
  double const alone = gpu_blocks * (ranks <= 2   ? c_.FEW_ALONE
                                     : ranks == 4 ? c_.FEW_ALONE_IN_FOURS
                                                  : c_.FEW_ALONE_IN_EIGHTS);
  // The time of so many concurrent thread blocks, each with a tile.
  auto const wave = [&](double blocks, bool shares_port) {
    double const parts[] = {blocks * bytes / memory, boxes * request, bytes / port * (shares_port ? 2 : 1),
                            blocks / double(share) * (double(height * share) + counted) * boxes * kLineBytes / l2,
                            boxes * (box + wide)};
    double const longest = *std::max_element(std::begin(parts), std::end(parts));
    return longest + exposed * (std::accumulate(std::begin(parts), std::end(parts), 0.0) - longest);
  };
  double const full = std::min(clusters, tiles) * double(ranks), before = (waves - 1) * clusters;
  double const blocks = (tiles - before) * double(ranks);
  double const working =  // of the last wave, whose last tile may be partial
      (double(e.batch) * double(along_m ? e.m : e.n) / double(height * share) - before) * double(ranks);
  double last = wave(blocks, working > alone);
  if (waves > 1) {  // its first boxes are loaded ahead
    last *= 1 - of(c_.FEW_AHEAD, c_.FEW_AHEAD_ROWS) * std::max(0.0, 1 - blocks / (c_.FEW_AHEAD_BLOCKS * gpu_blocks));
  } else if (working <= alone) {
    last *= 1 - of(c_.FEW_ALONE_LESS, c_.FEW_ALONE_LESS_ROWS);
  } else {
    double const uneven = ranks <= 2 ? of(c_.FEW_UNEVEN, c_.FEW_UNEVEN_ROWS)
                                     : of(c_.FEW_UNEVEN_IN_CLUSTERS, c_.FEW_UNEVEN_IN_CLUSTERS_ROWS);
    last *= 1 + uneven * std::min(1.0, (gpu_blocks - blocks) / (c_.FEW_UNEVEN_BLOCKS * gpu_blocks));
  }
  double const area = double(height * few);
  double const stored = area * of(c_.FEW_STORED_SECONDS, c_.FEW_STORED_ROWS_SECONDS) / double(split);
  double const added = area * of(c_.FEW_GATHERED_SECONDS, c_.FEW_GATHERED_ROWS_SECONDS) +
                       of(c_.FEW_ADDED_SECONDS, c_.FEW_ADDED_ROWS_SECONDS);
  double seconds = (waves - 1) * wave(full, full > alone) + last + waves * (stored + (split > 1 ? added : 0.0));
  if ((along_m ? e.n : e.m) > kManyRows) seconds *= of(c_.FEW_MANY, c_.FEW_MANY_ROWS);
  seconds += of(c_.FEW_LAUNCH_SECONDS, c_.FEW_LAUNCH_ROWS_SECONDS);
  if (ranks > 1) seconds += of(c_.FEW_CLUSTER_SECONDS, c_.FEW_CLUSTER_ROWS_SECONDS);
  return {share, height, seconds, waves, blocks, full, working, boxes, bytes, astray, between};
}

// For few rows whose operands begin anywhere, with K divided among so many thread blocks, and the best width.
Launch Model::ragged(Kernel const& kernel, Extents const& e, Gpu const& gpu, int64_t slices) const {
  bool const along_m = turned(kernel, e.m, e.n), along_k = kernel.b_along_k;
  auto const of = [&](double of_k, double of_rows) { return along_k ? of_k : of_rows; };
  int64_t const rows = along_m ? e.m : e.n, few = along_m ? e.n : e.m, leading = along_m ? e.lda : e.ldb;
  int64_t const shift = std::gcd(leading, kRaggedVector);  // by which rows shift against vectors
  double const depth = double(ceil_div(ragged_steps(kernel, e.k), slices) * kernel.tile[2]),
               multiprocessors = double(gpu.multiprocessors);
  double const read = floor(kernel, e, of(c_.RAGGED_DRAM, c_.RAGGED_DRAM_ROWS) * dram(gpu));
  double const stored = double(e.m) * double(e.n) * double(e.batch);
  Launch best{INFINITY};
  // What GemmRaggedSm80::can_implement refuses.
  int64_t const most = std::max(saturated(e.m, e.lda), saturated(along_k ? e.n : e.k, e.ldb));
  if (most >= kRaggedElements || std::max(e.lda, e.ldb) >= kRaggedLeading) return best;
  // Seconds with tiles of so many few rows at most, and, where K is contiguous, rows of weights.
  auto const estimated = [&](int64_t most_few, int64_t width) {
    int64_t const few_tiles = ceil_div(few, most_few), few_tile = std::min(few, most_few);
    // GemmRaggedSm80::width
    double const wide = few_tile <= 8 ? 8 : !along_k ? 16 : few_tile <= 32 ? 32 : 64;
    int64_t const classes = along_k ? kRaggedVector / shift : 1;
    int64_t const tile = along_k ? width : kRaggedWindow - kRaggedVector + shift;
    double const height = double(along_k ? width : kRaggedWindow);
    int64_t const tiles = ceil_div(ceil_div(rows, classes), tile) * classes;
    // Batches that begin at odd elements have the smallest tiles.
    int64_t const most_tiles = along_k ? tiles : ceil_div(rows, kRaggedWindow - kRaggedVector + 1);
    if (most_tiles >= kRaggedGrid) return double(INFINITY);
    double const blocks = double(tiles * few_tiles) * double(e.batch) * double(slices);
    double const waves = std::max(1.0, blocks / (kRaggedBlocks * multiprocessors));
    // Bytes of weights, and what else takes as long as so many.
    double const work = depth * 2 *
                        (height + of(c_.RAGGED_FEW, c_.RAGGED_FEW_ROWS) * double(few_tile) +
                         of(c_.RAGGED_PRODUCTS, c_.RAGGED_PRODUCTS_ROWS) * height * wide / 8);
    double const beside_it = std::clamp(blocks / multiprocessors, 1.0, kRaggedBlocks);
    double const each = work * std::max(1 / of(c_.RAGGED_BLOCK_RATE, c_.RAGGED_BLOCK_ROWS_RATE),
                                        beside_it / of(c_.RAGGED_RATE, c_.RAGGED_ROWS_RATE));
    // Where K is contiguous warps divide it, too, and each of the few tiles reads the weights: from L2 where others
    // have.
    double const added = along_k ? double(kRaggedMost) / double(width) * c_.RAGGED_WARP_SECONDS : 0.0;
    double const again = along_k ? double(rows) * double(e.k) * 2 * double(e.batch) * double(few_tiles) : 0.0;
    double const busy =
        (waves + std::ceil(waves)) / 2 * (each + added + of(c_.RAGGED_TILE_SECONDS, c_.RAGGED_TILE_ROWS_SECONDS));
    double seconds = of(c_.RAGGED_LAUNCH_SECONDS, c_.RAGGED_LAUNCH_ROWS_SECONDS) +
                     beside(busy, std::max(read, again / c_.RAGGED_L2_BYTES_PER_SECOND)) +
                     stored * of(c_.RAGGED_STORED_SECONDS, c_.RAGGED_STORED_ROWS_SECONDS);
    if (slices > 1) {
      double const sums = double(tile * few_tile) * 4 * double(slices);
      seconds += of(c_.RAGGED_SPLIT_SECONDS, c_.RAGGED_SPLIT_ROWS_SECONDS) +
                 sums / of(c_.RAGGED_SUMS_BYTES_PER_SECOND, c_.RAGGED_SUMS_ROWS_BYTES_PER_SECOND);
    }
    return seconds;
  };
  if (!along_k) return {estimated(kernel.tile[1], 0), slices};
  for (int64_t const most_few : {kernel.tile[1], int64_t(32), int64_t(8)}) {
    if (most_few != kernel.tile[1] && most_few >= few) continue;
    // Tiles have twice as many rows as there are few, at least: K is divided among warps elsewhere.
    int64_t const least = std::max(kRaggedLeast, std::min(2 * std::min(few, most_few), kRaggedMost));
    for (int64_t width = kRaggedMost; width >= least; width /= 2) {
      double const seconds = estimated(most_few, width);
      if (seconds >= best.seconds) continue;
      best = {seconds, slices, most_few == kernel.tile[1] ? 1 : most_few, kHeuristic, width};
    }
  }
  return best;
}

// For operands that begin anywhere, with K divided among so many thread blocks.
Launch Model::unaligned(Kernel const& kernel, Extents const& e, Gpu const& gpu, int64_t slices) const {
  double const multiprocessors = double(gpu.multiprocessors);
  double const read = floor(kernel, e, c_.UNALIGNED_DRAM * dram(gpu));
  // Seconds of loading an operand's lines of a step, by what loads them: vectors, words, or words that are shifted.
  auto const loading = [&](int64_t leading) {
    if (leading % kUnalignedVector == 0) return c_.UNALIGNED_VECTORS_SECONDS;
    return leading % 2 == 0 ? c_.UNALIGNED_WORDS_SECONDS : c_.UNALIGNED_SHIFTED_SECONDS;
  };
  Launch best{INFINITY};
  for (int64_t const tile : {kernel.tile[0], kernel.tile[0] / 2}) {  // GemmUnalignedSm80::kMostTile and kLeastTile
    int64_t const step_k = kernel.tile[0] * kernel.tile[2] / tile;
    double const tiles = double(ceil_div(e.m, tile)) * double(ceil_div(e.n, tile)) * double(e.batch);
    double const blocks = tiles * double(slices), steps = double(ceil_div(ceil_div(e.k, step_k), slices));
    if (double(ceil_div(e.n, tile)) > kRaggedGrid || double(e.batch) * double(slices) > kRaggedGrid) continue;
    auto const share = [&](int64_t extent) { return double(std::min(extent, tile)) / double(tile); };
    double const work = c_.UNALIGNED_SHARED_SECONDS * (tile == kernel.tile[0] ? 1.0 : 0.5) +
                        share(e.m) * loading(std::gcd(e.lda, e.begins_a)) +
                        share(e.n) * loading(std::gcd(e.ldb, e.begins_b));
    double const beside_it = std::clamp(blocks / multiprocessors, 1.0, kRaggedBlocks);
    double const waves = std::max(1.0, blocks / (kRaggedBlocks * multiprocessors));
    double const area = double(tile * tile) / double(kernel.tile[0] * kernel.tile[1]);
    double const each = steps * std::max(c_.UNALIGNED_STEP_SECONDS, beside_it * work) + c_.UNALIGNED_TILE_SECONDS +
                        beside_it * area * c_.UNALIGNED_STORED_SECONDS;
    double const loaded = blocks * steps * double(tile * step_k) * 2 * (share(e.m) + share(e.n));
    double const busy = (waves + std::ceil(waves)) / 2 * each;
    double seconds =
        c_.UNALIGNED_LAUNCH_SECONDS + beside(busy, std::max(read, loaded / c_.UNALIGNED_L2_BYTES_PER_SECOND));
    if (slices > 1) {
      double const sums = double(tile * tile) * 4 * share(e.m) * double(slices);
      seconds += c_.UNALIGNED_SPLIT_SECONDS + sums / c_.UNALIGNED_SUMS_BYTES_PER_SECOND;
    }
    if (seconds < best.seconds) best = {seconds, slices, 1, kHeuristic, tile};
  }
  return best;
}

// The same of a kernel that shifts operands in shared memory.
Launch Model::realigned(Kernel const& kernel, Extents const& e, Gpu const& gpu, int64_t slices) const {
  double const multiprocessors = double(gpu.multiprocessors), rows = double(kernel.tile[0]);
  double const read = floor(kernel, e, c_.REALIGNED_DRAM * dram(gpu));
  auto const shifting = [&](int64_t leading, bool along_k) {
    if (leading % kUnalignedVector == 0) return 0.0;
    return along_k ? c_.REALIGNED_SHIFTED_SECONDS : c_.REALIGNED_SHIFTED_ROWS_SECONDS;
  };
  double const share = std::min(double(e.m) / rows, 1.0);
  double const steps = double(ceil_div(ceil_div(e.k, kernel.tile[2]), slices));
  Launch best{INFINITY};
  // More batches than a grid has take several launches.
  if (slices > 1 && double(e.batch) * double(slices) > kRaggedGrid) return best;
  for (int64_t const width : {kernel.tile[1], kernel.tile[1] / 2}) {  // GemmRealignedSm90::kMostColumns, kLeastColumns
    double const columns = double(width), area = columns / double(kernel.tile[1]);
    double const tiles = double(ceil_div(e.m, kernel.tile[0])) * double(ceil_div(e.n, width)) * double(e.batch);
    double const blocks = tiles * double(slices);
    double const share_b = std::min(double(e.n) / columns, 1.0);
    double const work =
        c_.REALIGNED_SHARED_SECONDS * area + share * shifting(std::gcd(e.lda, e.begins_a), true) +
        area * (kernel.b_along_k ? share_b : 1.0) * shifting(std::gcd(e.ldb, e.begins_b), kernel.b_along_k);
    // The multiprocessors that have two take the time.
    double const beside_it = blocks > multiprocessors ? kRaggedBlocks : 1.0;
    double const waves = std::max(1.0, blocks / (kRaggedBlocks * multiprocessors));
    double const each = steps * std::max(c_.REALIGNED_STEP_SECONDS, beside_it * work) + c_.REALIGNED_TILE_SECONDS +
                        beside_it * area * share * c_.REALIGNED_STORED_SECONDS;
    double const lines = share * rows + share_b * columns;
    double const loaded = blocks * steps * double(kernel.tile[2]) * 2 * lines;
    double const busy = (waves + std::ceil(waves)) / 2 * each;
    double seconds =
        c_.REALIGNED_LAUNCH_SECONDS + beside(busy, std::max(read, loaded / c_.REALIGNED_L2_BYTES_PER_SECOND));
    if (slices > 1) {
      // Those that divide K are added up at once, or by groups, and then these (UnalignedProduct::group).
      bool const at_once = slices <= kGroup;
      double const parts = at_once ? double(slices) : 2 * std::sqrt(double(slices));
      double const sums = share * rows * columns * 4 * parts;
      seconds += (at_once ? 1 : 2) * c_.REALIGNED_SPLIT_SECONDS + sums / c_.REALIGNED_SUMS_BYTES_PER_SECOND;
    }
    if (seconds < best.seconds) best = {seconds, slices, 1, kHeuristic, width};
  }
  return best;
}

// Seconds of a kernel that shares out K.
double Model::split(Kernel const& kernel, Extents const& e, Gpu const& gpu) const {
  int64_t const size = kernel.cluster[0] * kernel.cluster[2];
  int64_t const clusters = std::max<int64_t>(1, blocks_at_once(gpu.multiprocessors, size) / size);
  Division const made = divide({e.m, e.n, e.k, e.batch, kernel.tile[1], kernel.cluster[0], kernel.cluster[2], clusters,
                                kernel.a_along_k, kernel.b_along_k});
  double const busy = c_.SPLIT_STEP * made.steps * made.step_clocks / c_.CLOCK_HZ;
  double const loaded = floor(kernel, e, c_.SPLIT_DRAM_BYTES_PER_SECOND * memory(gpu)), softness = c_.SPLIT_SOFTNESS;
  // What L2 serves where rows begin between cache lines; the kernel's own `step_clocks` take them to begin on one.
  double const lines_a = double(made.height) / double(made.pair_n) * lines(e.lda, kernel.bits_a);
  double const lines_b = double(made.width) / double(made.pair_m) * lines(e.ldb, kernel.bits_b);
  double const touched = made.steps * (lines_a + lines_b) * kLineBytes / c_.SPLIT_L2_BYTES_PER_CLOCK / c_.CLOCK_HZ;
  double const mainloop =
      std::pow(std::pow(busy, softness) + std::pow(loaded, softness) + std::pow(touched, softness), 1 / softness);
  double const stored = double((made.tiles + made.segments) * kSplitRows * made.wide) * c_.SPLIT_ELEMENT_SECONDS;
  double const added = double(made.segments) * c_.SPLIT_PART_SECONDS +
                       made.part_bytes * (double(made.segments) + made.peers()) / c_.SPLIT_BYTES_PER_SECOND;
  return c_.SPLIT_LAUNCH_SECONDS + mainloop + stored + added;
}

// IEEE f32 and f64 on sm_90 with loads of vectors (mainloop_simt.h, mainloop_dmma.h): up to `most` thread blocks of a
// multiprocessor run at the same time (GemmSm80::kSharing). One that has it to itself at last reaches a share of the
// rate.
double Model::vectors(Kernel const& kernel, Extents const& e, Gpu const& gpu, int64_t shared_bytes,
                      int64_t slices) const {
  auto const [tile_m, tile_n, tile_k] = kernel.tile;
  int64_t const threads = kernel.warps * 32, registers = tile_m * tile_n / threads * (kernel.f64 ? 2 : 1);
  int64_t const fitting = (gpu.shared_memory + 1024) / (shared_bytes + 1024);
  int64_t const most = std::max<int64_t>(1, std::min((registers <= 64 ? 384 : 256) / threads, fitting));
  int64_t const tiles = saturated(saturated(ceil_div(e.m, tile_m), ceil_div(e.n, tile_n)), saturated(e.batch, slices));
  int64_t const each = ceil_div(tiles, gpu.multiprocessors), last = each % most;
  double const k = double(saturated(ceil_div(ceil_div(e.k, tile_k), slices), tile_k)), area = double(tile_m * tile_n);
  double const per_clock = kernel.f64 ? c_.DMMA_VECTOR_PER_CLOCK : c_.FMA_VECTOR_PER_CLOCK;
  double const bytes_per_clock = kernel.f64 ? c_.DMMA_VECTOR_BYTES_PER_CLOCK : c_.FMA_VECTOR_BYTES_PER_CLOCK;
  double const share = most < 3 && kernel.f64 ? c_.DMMA_VECTOR_ALONE_OF_TWO
                       : kernel.f64           ? c_.DMMA_VECTOR_ALONE
                                              : c_.FMA_VECTOR_ALONE;
  double const idle = last == 1 ? 1 / share - 1 : 0.0;
  double const busy = (double(each) + idle) * area * k / (per_clock * c_.CLOCK_HZ);
  double const loaded =
      double(each) * double((tile_m + tile_n) * kernel.bits_a / 8) * k / bytes_per_clock / c_.CLOCK_HZ;
  double seconds = std::pow(std::pow(busy, 4) + std::pow(loaded, 4), 0.25);
  seconds += double(ceil_div(each, most)) * c_.VECTOR_TILE_SECONDS + double(each) * area * c_.VECTOR_ELEMENT_SECONDS;
  if (slices == 1) return seconds;
  double const turn = c_.VECTOR_TURN_SECONDS + area * c_.VECTOR_TURN_ELEMENT_SECONDS;
  return seconds + c_.VECTOR_TURNS_SECONDS + double(slices - 1) * turn;
}

// IEEE f32 and f64 on sm_90 with loads of single elements: the thread blocks of a multiprocessor share its units,
// whatever their number.
double Model::alone(Kernel const& kernel, Extents const& e, Gpu const& gpu, int64_t slices) const {
  auto const [tile_m, tile_n, tile_k] = kernel.tile;
  double const k = double(saturated(ceil_div(ceil_div(e.k, tile_k), slices), tile_k));
  int64_t const tiles = saturated(saturated(ceil_div(e.m, tile_m), ceil_div(e.n, tile_n)), saturated(e.batch, slices));
  double const each = double(ceil_div(tiles, gpu.multiprocessors)), products = double(tile_m * tile_n) * k;
  double const busy = std::min(1.0, each * double(kernel.warps) / (kernel.f64 ? c_.DMMA_WARPS : c_.FMA_WARPS));
  if (kernel.f64) {
    double const turn = c_.DMMA_TURN_SECONDS + double(tile_m * tile_n) * c_.DMMA_TURN_ELEMENT_SECONDS;
    return each * (products / (c_.DMMA_PER_CLOCK * busy * c_.CLOCK_HZ) + c_.DMMA_TILE_SECONDS) +
           double(slices - 1) * turn;
  }
  auto const loaded = [&](int64_t elements, bool along_k) {
    return double(elements) * k * (along_k ? c_.FMA_ALONG_K_CLOCKS : c_.FMA_LOAD_CLOCKS);
  };
  double const clocks =
      products / c_.FMA_PER_CLOCK + loaded(tile_m, kernel.a_along_k) + loaded(tile_n, kernel.b_along_k);
  return each * (clocks / (busy * c_.CLOCK_HZ) + c_.FMA_TILE_SECONDS) + double(slices - 1) * c_.FMA_TURN_SECONDS;
}

double Model::multistage(Kernel const& kernel, Extents const& e, Gpu const& gpu, int64_t shared_bytes,
                         int64_t slices) const {
  auto const [tile_m, tile_n, tile_k] = kernel.tile;
  double const steps = std::max(1.0, std::ceil(double(e.k) / double(tile_k) / double(slices)));
  double const k = steps * double(tile_k);
  int64_t const residents =
      std::max<int64_t>(1, std::min<int64_t>(gpu.shared_memory / std::max<int64_t>(1, shared_bytes), 4));
  double const multiply = double(tile_m * tile_n) * k / (peak(kernel) * multistage_efficiency(kernel));
  int64_t const tiles = saturated(saturated(ceil_div(e.m, tile_m), ceil_div(e.n, tile_n)), saturated(e.batch, slices));
  int64_t const per_wave = gpu.multiprocessors * residents;
  if (kernel.op == Op::kGemm && kernel.mainloop == Mainloop::kTwoStage && kernel.bits_a == 16 &&
      kernel.capability == kHopper) {
    // A step waits for its loads, longer if more thread blocks of a multiprocessor load.
    double const sharing = std::clamp(double(tiles) / double(gpu.multiprocessors), 1.0, double(residents));
    double const step = c_.TWO_STAGE_STEP_SECONDS + sharing * c_.TWO_STAGE_SHARED_SECONDS;
    return std::max(1.0, double(tiles) / double(per_wave)) * (steps * step + c_.MULTISTAGE_TILE_SECONDS);
  }
  if (kernel.op == Op::kGemm && kernel.bits_a == 16 && kernel.capability == kHopper &&
      std::min(kernel.align_a, kernel.align_b) == 2) {
    // The thread blocks of a multiprocessor take turns: its instructions for loads are what limits them.
    double const each = double(ceil_div(tiles, gpu.multiprocessors)) * steps * c_.PAIRS_STEP_SECONDS;
    return each + c_.MULTISTAGE_TILE_SECONDS + double(slices - 1) * c_.TURN_SECONDS;
  }
  double const busy = std::min(1.0, double(tiles) / double(per_wave));
  double read = double(tile_m + tile_n) * k * double(kernel.bits_a) / 8 /
                (c_.MULTISTAGE_L2_BYTES_PER_CLOCK / std::max(busy, 0.25));
  read *= narrow_load_penalty(kernel);
  // Resident blocks share one multiprocessor's units, and hide each other's prologues.
  double const shared = tiles >= per_wave ? double(residents) : std::max(1.0, double(residents) * busy);
  double const wave = std::max(multiply, read) * shared;
  double const taken = std::ceil(double(tiles) / double(per_wave)) * (wave / c_.CLOCK_HZ + c_.MULTISTAGE_TILE_SECONDS);
  // The slices of a tile take turns: each but the first reads what the one before it has written.
  return taken + double(slices - 1) * c_.TURN_SECONDS;
}

// ---------------------------------------------------------------------------------------------------------------------
// Grouped products, products with vectors
// ---------------------------------------------------------------------------------------------------------------------

// Seconds of one launch, for all groups.
double Model::grouped(Kernel const& kernel, Extents const& e, Gpu const& gpu, int64_t shared_bytes) const {
  double seconds = product(kernel, e, gpu, shared_bytes, 1).seconds;
  // If memory bounds the time, all tiles take the same; those with fewer empty rows are better.
  double const filled = double(e.m) / double(round_up(e.m, kernel.tile[0]));
  seconds *= 1.0 + c_.GROUPED_EMPTY_ROWS * (1.0 - filled);
  if (kernel.mainloop == Mainloop::kTwoStage) seconds *= c_.GROUPED_NARROW;
  return kernel.fp8 && kernel.math != Math::kFast ? seconds * c_.GROUPED_FULL_ACCUMULATION : seconds;
}

// Every element is read once; more thread blocks read faster.
Launch Model::gemv(Kernel const& kernel, Extents const& e, Gpu const& gpu, int64_t slices) const {
  int64_t const n = e.n, wide = 128 / kernel.bits_b, at_once = int64_t(c_.GEMV_AT_ONCE);
  int64_t const threads_of_block = int64_t(c_.GEMV_THREADS);
  double seconds = double(e.batch) * double(n) * double(e.k) * double(kernel.bits_b) / 8 / dram(gpu);
  if (kernel.align_b == 1) seconds /= c_.GEMV_NARROW;
  double blocks = std::ceil(double(n) / double(8 * wide));
  if (kernel.b_along_k) {  // threads share columns if each has enough to read
    int64_t const threads =
        std::min(threads_of_block, std::max(threads_of_block / kernel.tile[1], e.k / slices / (at_once * wide)));
    blocks = std::ceil(double(n * threads) / double(threads_of_block));
  }
  double const each = blocks * double(e.batch) * double(slices) / double(gpu.multiprocessors);
  double const in_waves = std::max(1.0, each / c_.GEMV_RESIDENT);
  // Where thread blocks take long, those of the last wave leave multiprocessors idle.
  double const uneven = kernel.b_along_k ? 1.0 : (1 + std::ceil(in_waves) / in_waves) / 2;
  double const busy = seconds * uneven / std::min(1.0, each / c_.GEMV_BLOCKS);
  return {busy + c_.LAUNCH_SECONDS + (slices > 1 ? c_.GEMV_SLICES_SECONDS : 0.0), slices};
}

// ---------------------------------------------------------------------------------------------------------------------
// Convolutions
// ---------------------------------------------------------------------------------------------------------------------

// Includes casts of the result and the sum of slices, but no casts of the operands.
Launch Model::convolution(Kernel const& kernel, Extents const& e, Gpu const& gpu) const {
  double taken = 0.0;
  if (kernel.depthwise) {
    taken = depthwise_convolution(kernel, e, gpu);
  } else if (kernel.generation == Generation::kSm90) {
    taken = tma_convolution(kernel, e, gpu);
  } else {
    Extents product_of = e;
    product_of.k = ceil_div(e.k, e.split_k);
    product_of.batch = saturated(e.batch, e.split_k);
    product_of.lda = product_of.ldb = e.k;
    taken = product(kernel, product_of, gpu, kernel.shared_bytes, 1).seconds;
    if (e.split_k > 1) {
      double const results = double(e.split_k + 1) * double(e.m) * double(e.n) * double(kernel.bits_d);
      taken += c_.CAST_SECONDS + results / 8 / c_.REDUCED_BYTES_PER_SECOND;
    }
    taken *= c_.ITERATOR_PENALTY.at(kernel.iterator);
    taken *= c_.STRIDE_PENALTY.at(kernel.stride_support);
    // Among equally fast kernels, the one with wider loads.
    taken *= 1 + 1e-3 / double(kernel.align_a);
  }
  return {taken + (e.wide != 0 && e.split_k == 1 ? c_.CAST_SECONDS : 0.0), e.split_k};
}

// Of a convolution over TMA, which loads whole tiles of channels for each tap of the filter: a tile for each block.
double Model::tma_convolution(Kernel const& kernel, Extents const& e, Gpu const& gpu) const {
  auto const [tile_m, tile_n, tile_k] = kernel.tile;
  bool const wgrad = kernel.op == Op::kWgrad;
  int64_t const n = wgrad ? e.n / e.c * round_up(e.c, tile_n) : e.n;
  int64_t const k = wgrad ? e.k : e.k / e.channels * round_up(e.channels, tile_k);
  int64_t const steps = ceil_div(k, tile_k);
  auto const known = c_.CONV_TILES_AT_ONCE.find(tile_n);
  int64_t const residents = known == c_.CONV_TILES_AT_ONCE.end() ? 1 : int64_t(known->second);
  double const rate = 16384.0 / double(kernel.bits_a) * 2;  // multiply-adds per clock and multiprocessor: WGMMA's
  double const multiply = double(residents * tile_m * tile_n * tile_k * steps) / (rate * c_.CONV_EFFICIENCY);
  double const clocks = std::max(multiply, double(steps) * c_.CONV_STEP_CLOCKS);
  int64_t const in_waves =
      ceil_div(saturated(ceil_div(e.m, tile_m), ceil_div(n, tile_n)), gpu.multiprocessors * residents);
  double const floor = double(e.moved) / dram(gpu);
  double const seconds =
      std::max(double(in_waves) * (clocks / c_.CLOCK_HZ + c_.CONV_TILE_SECONDS), floor) + c_.LAUNCH_SECONDS;
  return seconds * (1 + 1e-3 / double(kernel.align_a));
}

// The time of its taps, or of reading and writing every array once.
double Model::depthwise_convolution(Kernel const& kernel, Extents const& e, Gpu const& gpu) const {
  bool const wgrad = kernel.op == Op::kWgrad;
  int64_t const tiles = ceil_div(e.c, kernel.tile[1]);
  int64_t const blocks =
      wgrad ? saturated(e.taps * tiles, e.split_k) : saturated(ceil_div(e.pixels, kernel.tile[0]), tiles);
  double const multiprocessors = double(gpu.multiprocessors);
  double rate = wgrad ? c_.DIRECT_WGRAD_TAPS_PER_CLOCK : c_.DIRECT_TAPS_PER_CLOCK;
  rate *= multiprocessors * std::min(1.0, double(blocks) / (c_.DIRECT_BLOCKS * multiprocessors));
  double const taps = double(e.pixels) * double(e.c) * double(e.taps);
  double const summing = taps / (rate * c_.CLOCK_HZ) + double(e.split_k - 1) * c_.SLICE_SECONDS;
  return std::max(summing, double(e.moved) / dram(gpu)) + c_.LAUNCH_SECONDS;
}

}  // namespace atomr_cutlass::estimate
