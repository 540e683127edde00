// One registrar per subject; module.cpp calls them.
#pragma once

#include <pybind11/pybind11.h>

namespace atomr_cutlass {

void bind_estimate(pybind11::module_& module);
void bind_errors(pybind11::module_& module);
void bind_device(pybind11::module_& module);
void bind_table(pybind11::module_& module);
void bind_operand(pybind11::module_& module);
void bind_jit(pybind11::module_& module);
void bind_launch_plan(pybind11::module_& module);
void bind_plan_store(pybind11::module_& module);

}  // namespace atomr_cutlass
