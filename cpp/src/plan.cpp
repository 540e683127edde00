#include "plan.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <set>

#include "driver.h"
#include "errors.h"
#include "op_args.h"

namespace atomr_cutlass {
namespace {

// Whether int32, in which integer epilogues compute, holds the value.
bool whole(double value) { return value == std::floor(value) && value >= -2147483648.0 && value <= 2147483647.0; }

}  // namespace

GemmPlan::GemmPlan(std::shared_ptr<atomr_cutlass_row const> row, atomr_cutlass_gemm_args const& args, OperandSpec a,
                   OperandSpec b, OperandSpec c, OperandSpec d, std::vector<BatchLaunch> launches,
                   GemmPlanOptions options, DlExchangeApi const* allocator)
    : kernel_(std::move(row), kGemmArgs),
      a_(a),
      b_(b),
      c_(c),
      d_(d),
      launches_(std::move(launches)),
      options_(options),
      workspaces_(options.device, allocator),
      zeros_(options.device, allocator) {
  std::memcpy(&args_, &args, sizeof(args));
  DeviceGuard guard(options_.device);
  // Every problem that a call may turn into, so that no call meets one that has not been asked about.
  std::set<int32_t> batches;
  for (BatchLaunch const& launch : launches_) batches.insert(launch.batch);
  for (int32_t const batch : batches) {
    for (bool const with_c : {false, true}) {
      for (bool const null_product : {true, false}) {
        atomr_cutlass_gemm_args problem;
        std::memcpy(&problem, &args_, sizeof(problem));
        problem.batch = batch;
        problem.c = with_c ? kProbe : nullptr;
        if (null_product) {
          set_null_product(problem);
        } else if (problem.k == 0) {
          continue;
        }
        problem.a = problem.b = problem.d = problem.workspace = kProbe;
        kernel_.open(&problem);
        if (!kernel_.dependent() || null_product) continue;
        problem.padding = settled_bit();
        kernel_.open(&problem);
      }
    }
  }
  workspaces_.reserve(size_t(kernel_.workspace_bytes()), true, 0);
  zeros_.reserve(size_t(options_.null_bytes), false, size_t(options_.null_bytes));
}

void GemmPlan::set_null_product(atomr_cutlass_gemm_args& args) const {
  args.alpha = 0.0;
  args.k = options_.null_k;
  args.lda = options_.null_lda;
  args.ldb = options_.null_ldb;
  args.batch_stride_a = args.batch_stride_b = 0;
}

bool GemmPlan::row_major_output() const {
  int64_t contiguous = 1;
  for (int i = d_.layout.rank - 1; i >= 0; --i) {
    if (d_.layout.shape[i] != 1 && d_.layout.strides[i] != contiguous) return false;
    contiguous *= d_.layout.shape[i];
  }
  return true;
}

void GemmPlan::check_operands(Operand const& a, Operand const& b, Operand const* c, Operand const& d) const {
  check_operand("a", a, a_);
  check_operand("b", b, b_);
  if (c != nullptr) check_operand("c", *c, c_);
  check_operand("out", d, d_);
  if (d.read_only) throw InvalidOperand("out is read-only: give an array that may be written");
  if (overlap(d, a)) throw InvalidOperand("out overlaps a: the kernel would read what it has written");
  if (overlap(d, b)) throw InvalidOperand("out overlaps b: the kernel would read what it has written");
  if (c == nullptr) return;
  // One C for all batches is read after the first batch has been written: the same address is not yet the same operand.
  bool const in_place =
      c->data == d.data && c->rank == d.rank && std::equal(c->strides, c->strides + c->rank, d.strides);
  if (!in_place && overlap(d, *c)) {
    throw InvalidOperand("out overlaps c without being c: give c itself or separate memory");
  }
}

GemmPlan* GemmPlan::turn_to(Operand const& a, Operand const& b, Operand const* c, Operand const& d, void* stream) {
  GemmPlan* const next = next_.load(std::memory_order_acquire);
  if (next == nullptr) return nullptr;
  // Checked by the other kernel's needs, which may be stricter.
  auto const reads = [](Operand const& operand, OperandSpec const& spec) {
    return reinterpret_cast<uintptr_t>(operand.data) % size_t(spec.alignment) == 0;
  };
  if (!reads(a, next->a_) || !reads(b, next->b_) || !reads(d, next->d_) || (c != nullptr && !reads(*c, next->c_))) {
    return nullptr;
  }
  DeviceGuard guard(options_.device);
  uint64_t const capture = capture_id(stream);
  if (capture == 0) {
    replaced_ = true;
  } else if (!replaced_ || capture == capture_) {
    capture_ = capture;  // a graph that began with this kernel goes on with it
    return nullptr;
  }
  return next;
}

void GemmPlan::launch(Operand const& a, Operand const& b, Operand const* c, Operand const& d, double alpha, double beta,
                      void* stream) {
  if (GemmPlan* const next = turn_to(a, b, c, d, stream)) return next->launch(a, b, c, d, alpha, beta, stream);
  check_operands(a, b, c, d);
  if (c == nullptr && beta != 0.0) throw InvalidOperand("beta is not 0, so c is needed");
  if (c != nullptr && beta == 0.0) {
    throw InvalidOperand("c is given but beta is 0, so it would not be read: give beta, or leave c out");
  }
  if (options_.integral && !(whole(alpha) && whole(beta))) {
    throw InvalidOperand("alpha and beta must be whole numbers of 32 bits where the result is an integer");
  }
  if (d.data == nullptr || args_.m == 0 || args_.n == 0 || args_.batch == 0) return;
  DeviceGuard guard(options_.device);

  atomr_cutlass_gemm_args args;
  std::memcpy(&args, &args_, sizeof(args));
  args.alpha = alpha;
  args.beta = beta;
  StreamTurn workspace(workspaces_, stream);
  args.workspace = workspace.data();
  // BLAS: with alpha = 0 (or K = 0) A and B are not read, so a NaN in them does not reach D.
  bool const null_product = alpha == 0.0 || args_.k == 0;
  void const* zero = nullptr;
  std::optional<StreamTurn> zeros;
  if (null_product) {
    zero = zeros.emplace(zeros_, stream).data();
    // At every use, so that it is part of a graph that captures it.
    clear_async(reinterpret_cast<DevicePointer>(zero), size_t(options_.null_bytes), stream);
    set_null_product(args);
  }
  if (b.settled && kernel_.dependent() && !null_product) args.padding = settled_bit();
  Operand const& first = options_.exchanged ? b : a;
  Operand const& second = options_.exchanged ? a : b;

  for (BatchLaunch const& offset : launches_) {
    args.batch = offset.batch;
    int64_t const first_offset = options_.exchanged ? offset.b : offset.a;
    int64_t const second_offset = options_.exchanged ? offset.a : offset.b;
    args.a = null_product ? zero : static_cast<char const*>(first.data) + first_offset;
    args.b = null_product ? zero : static_cast<char const*>(second.data) + second_offset;
    args.c = c != nullptr ? static_cast<char const*>(c->data) + offset.c : nullptr;
    args.d = static_cast<char*>(d.data) + offset.d;
    kernel_.launch(&args, args.workspace, stream, null_product);
  }
  workspace.release();
  if (zeros) zeros->release();
}

}  // namespace atomr_cutlass
