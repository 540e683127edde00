// Plans of plain GEMM, as the package makes them: C where beta is not 0, and a product of zeros where alpha is 0.
#pragma once

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "launch_plan.h"

// Where a launch's operands lie, in bytes from the caller's, and how many batches it takes.
struct BatchLaunch {
  int64_t a = 0, b = 0, c = 0, d = 0;
  int32_t batch = 1;
};

struct GemmPlanOptions {
  bool swapped = false;  // the caller's A is the kernel's B
  int32_t null_k = 4;
  int64_t null_lda = 4, null_ldb = 8;
  std::vector<BatchLaunch> launches{{}};
};

inline std::vector<atomr_cutlass::Slot> gemm_slots(atomr_cutlass::OperandSpec a, atomr_cutlass::OperandSpec b,
                                                   atomr_cutlass::OperandSpec c, atomr_cutlass::OperandSpec d) {
  using Role = atomr_cutlass::Slot::Role;
  return {{"a", a}, {"b", b}, {"c", c, Role::kSource, true}, {"out", d, Role::kOutput}};
}

inline std::vector<atomr_cutlass::Step> gemm_steps(std::shared_ptr<atomr_cutlass_row const> const& row,
                                                   atomr_cutlass_gemm_args const& problem,
                                                   GemmPlanOptions const& options) {
  using namespace atomr_cutlass;
  std::vector<Step> steps;
  auto const add = [&](BatchLaunch const& launch, atomr_cutlass_gemm_args args, Address a, Address b, Step::When when) {
    using Args = atomr_cutlass_gemm_args;
    Step step{};
    step.kind = Step::Kind::kLaunch;
    step.row = row;
    step.layout = args_of("gemm");
    step.when = when;
    args.batch = launch.batch;
    step.data.resize(sizeof(args));
    std::memcpy(step.data.data(), &args, sizeof(args));
    auto const base = Address::Base::kOperand;
    step.patches = {{offsetof(Args, a), a},
                    {offsetof(Args, b), b},
                    {offsetof(Args, c), {base, 2, launch.c}},
                    {offsetof(Args, d), {base, 3, launch.d}}};
    step.scalars.push_back({offsetof(Args, beta), true});
    if (when == Step::When::kProduct) {
      step.scalars.push_back({offsetof(Args, alpha), false});
      int const bit = options.swapped ? ATOMR_CUTLASS_A_SETTLED : ATOMR_CUTLASS_B_SETTLED;
      step.settled.push_back({offsetof(Args, settled), 1, bit});
    }
    steps.push_back(std::move(step));
  };
  for (BatchLaunch const& launch : options.launches) {
    if (problem.k == 0) continue;
    Address a{Address::Base::kOperand, 0, launch.a}, b{Address::Base::kOperand, 1, launch.b};
    if (options.swapped) std::swap(a, b);
    add(launch, problem, a, b, Step::When::kProduct);
  }
  atomr_cutlass_gemm_args nothing;
  std::memcpy(&nothing, &problem, sizeof(nothing));
  nothing.alpha = 0.0;
  nothing.k = options.null_k;
  nothing.lda = options.null_lda;
  nothing.ldb = options.null_ldb;
  nothing.batch_stride_a = nothing.batch_stride_b = 0;
  Address const zeros{Address::Base::kZeros, 0, 0};
  for (BatchLaunch const& launch : options.launches) {
    add(launch, nothing, zeros, zeros, problem.k == 0 ? Step::When::kAlways : Step::When::kNoProduct);
  }
  return steps;
}

inline atomr_cutlass::LaunchPlanOptions with_zeros(size_t bytes) {
  atomr_cutlass::LaunchPlanOptions made;
  made.zeros = bytes;
  return made;
}

inline void launch_gemm(atomr_cutlass::LaunchPlan& plan, atomr_cutlass::Operand const& a,
                        atomr_cutlass::Operand const& b, atomr_cutlass::Operand const* c,
                        atomr_cutlass::Operand const& d, double alpha, double beta, void* stream) {
  plan.launch({a, b, c != nullptr ? *c : atomr_cutlass::Operand{}, d}, alpha, beta, stream);
}
