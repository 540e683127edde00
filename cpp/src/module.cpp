#include "bindings/bindings.h"

PYBIND11_MODULE(_core, module) {
  module.doc() = "The kernel table, packs, operands and plans: what a launch needs, without any CUDA library linked.";
  atomr_cutlass::bind_errors(module);
  atomr_cutlass::bind_estimate(module);
  atomr_cutlass::bind_device(module);
  atomr_cutlass::bind_table(module);
  atomr_cutlass::bind_operand(module);
  atomr_cutlass::bind_jit(module);
  atomr_cutlass::bind_launch_plan(module);
  atomr_cutlass::bind_plan_store(module);
}
