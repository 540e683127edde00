// What the bindings of plans have in common.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

#include "../op_args.h"
#include "../operand.h"
#include "exchange.h"

namespace atomr_cutlass {

// From (array, alignment in bytes).
OperandSpec spec_of(pybind11::tuple const& pair);

// The row of a kernel: of the table by its name, or one compiled at run time.
std::shared_ptr<atomr_cutlass_row const> row_of(pybind11::object const& kernel, ArgsLayout const& layout);

// A row-major array of the framework, uninitialised, its dimensions in the order of `axes` unless they are null; `data`
// is set to its address.
pybind11::object framework_array(DlExchangeApi const* api, Operand const& layout,
                                 std::vector<int> const* axes = nullptr, void** data = nullptr);

// The stream that an array's framework works on in this thread. The framework must have the exchange API.
void* framework_stream(DlExchangeApi const* api, DlDevice device);

// A scalar of a call: the one given, or None for the plan's own.
double scalar_of(pybind11::handle given, char const* name, double own);

bool finalizing();

// Freeing a workspace can wait for the GPU, and what that waits for can wait for the GIL.
template <class Plan>
struct WithoutGil {
  void operator()(Plan* plan) const {
    // In a process that ends, a thread that gave the GIL up would not get it back.
    if (finalizing()) {
      delete plan;
      return;
    }
    pybind11::gil_scoped_release release_gil;
    delete plan;
  }
};

}  // namespace atomr_cutlass
