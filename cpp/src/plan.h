// A plan: one kernel, one problem, everything decided and allocated; calling it only launches.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "atomr_cutlass/kernel_abi.h"
#include "kernel_launch.h"
#include "operand.h"
#include "stream_memory.h"

namespace atomr_cutlass {

// One launch of a plan: where its operands lie, in bytes from the pointers that the caller gave, and how many batches
// it takes. Plans have one, but for batches that no single stride reaches or that a grid cannot hold.
struct BatchLaunch {
  int64_t a = 0, b = 0, c = 0, d = 0;
  int32_t batch = 1;
};

struct GemmPlanOptions {
  int device = 0;
  // D column-major: the kernel computes D^T = B^T A^T, so the caller's A is its B.
  bool exchanged = false;
  bool integral = false;  // alpha and beta must be whole numbers
  double alpha = 1.0, beta = 0.0;  // of calls that give none
  // K of the launch that stands in for K = 0 or alpha = 0, and the leading dimensions of its zero operands.
  int null_k = 0;
  int64_t null_lda = 0, null_ldb = 0;
  uint64_t null_bytes = 0;
};

class GemmPlan {
 public:
  // `args` holds the problem with null pointers. Throws Unsupported when the kernel can't implement it. The row of a
  // kernel compiled at run time launches its companion and waits for it: not while this thread captures a stream.
  GemmPlan(std::shared_ptr<atomr_cutlass_row const> row, atomr_cutlass_gemm_args const& args, OperandSpec a,
           OperandSpec b, OperandSpec c, OperandSpec d, std::vector<BatchLaunch> launches, GemmPlanOptions options,
           DlExchangeApi const* allocator);
  GemmPlan(GemmPlan const&) = delete;
  GemmPlan& operator=(GemmPlan const&) = delete;

  // Checks the operands and launches. `c` may be null when beta is 0. Thread-safe. Legal under stream capture.
  void launch(Operand const& a, Operand const& b, Operand const* c, Operand const& d, double alpha, double beta,
              void* stream);

  // From now on launches go to `next`, a plan of the same problem, which must outlive this one: but for streams that
  // are being captured before the first launch outside a capture has, and for operands that only this plan's kernel can
  // read.
  void replace(GemmPlan* next) { next_.store(next, std::memory_order_release); }
  GemmPlan const& serving() const { return replaced_ ? *next_.load(std::memory_order_acquire) : *this; }

  atomr_cutlass_row const* row() const { return kernel_.row(); }
  uint64_t workspace_bytes() const { return kernel_.workspace_bytes(); }
  OperandSpec const& input_a() const { return a_; }
  OperandSpec const& input_b() const { return b_; }
  OperandSpec const& output() const { return d_; }
  bool row_major_output() const;
  GemmPlanOptions const& options() const { return options_; }
  int device() const { return options_.device; }
  atomr_cutlass_launch const& geometry() const { return kernel_.geometry(); }

 private:
  GemmPlan* turn_to(Operand const& a, Operand const& b, Operand const* c, Operand const& d, void* stream);
  void check_operands(Operand const& a, Operand const& b, Operand const* c, Operand const& d) const;
  // What the kernel is told where the caller's B is settled.
  int32_t settled_bit() const { return options_.exchanged ? ATOMR_CUTLASS_A_SETTLED : ATOMR_CUTLASS_B_SETTLED; }
  void set_null_product(atomr_cutlass_gemm_args& args) const;

  KernelLaunch kernel_;
  atomr_cutlass_gemm_args args_;
  OperandSpec a_, b_, c_, d_;
  std::vector<BatchLaunch> launches_;
  GemmPlanOptions options_;
  StreamMemory workspaces_, zeros_;
  std::atomic<GemmPlan*> next_{nullptr};
  std::atomic<bool> replaced_{false};
  std::atomic<uint64_t> capture_{0};  // the latest that this plan's own kernel served, though there was another plan
};

}  // namespace atomr_cutlass
