// Common parts of the bindings of plans.
#pragma once

#include <pybind11/pybind11.h>

#include <map>
#include <memory>
#include <vector>

#include "../launch_plan.h"
#include "../op_args.h"
#include "../operand.h"
#include "../shape_program.h"
#include "exchange.h"

namespace atomr_cutlass {

// A number of a plan that other extents make another: which of a program's, and what it is now.
struct Symbol {
  uint32_t place;
  pybind11::object value;
};

inline bool is_symbol(pybind11::handle value) {
  return PyLong_CheckExact(value.ptr()) == 0 && pybind11::isinstance<Symbol>(value);
}

// Everything that a plan is made from, with holes for numbers that depend on extents.
class Blueprint {
 public:
  Blueprint(pybind11::list const& slots, pybind11::list const& temporaries, pybind11::list const& steps,
            pybind11::dict const& options, pybind11::sequence const& facts);

  // For other extents, by the numbers of their program. Throws InvalidOperand for a number that does not fit.
  Blueprint filled(std::vector<Number> const& numbers) const;
  std::unique_ptr<LaunchPlan> plan(DlExchangeApi const* allocator) &&;
  int device() const { return options_.device; }
  // The integers among the arguments of a launch that have these names.
  pybind11::dict arguments(size_t launch, pybind11::sequence const& names) const;
  // Numbers of the problem, which no launch reads.
  std::vector<int64_t> const& facts() const { return facts_; }

 private:
  struct Hole {
    enum class Where : uint8_t { kShape, kStride, kTemporary, kInt32, kInt64, kPatch, kTarget, kBytes, kZeros, kFact };
    Where where;
    size_t index, place;  // of the slot, temporary or step, and in it
    uint32_t number;
  };
  // A number of what is described, with a hole if it is a symbol.
  int64_t number(pybind11::handle value, Hole::Where where, size_t index, size_t place);
  void fill(Hole const& hole, int64_t number);
  Slot slot_of(pybind11::tuple const& given, size_t index);
  Address address_of(pybind11::handle value, Hole::Where where, size_t index, size_t place);
  Step launch_step(pybind11::tuple const& given, size_t index);
  Step step_of(pybind11::tuple const& given, size_t index);

  std::vector<Slot> slots_;
  std::vector<size_t> temporaries_;
  std::vector<Step> steps_;
  LaunchPlanOptions options_;
  std::vector<int64_t> facts_;
  std::vector<Hole> holes_;
  std::map<PyObject*, std::shared_ptr<atomr_cutlass_row const>> rows_;  // of the kernels while they are read
};

// The row of a kernel: of the table by its name, or one compiled at run time.
std::shared_ptr<atomr_cutlass_row const> row_of(pybind11::object const& kernel, ArgsLayout const& layout);

// A row-major array of the framework, uninitialised, its dimensions in the order of `axes` unless they are null; `data`
// is set to its address.
pybind11::object framework_array(DlExchangeApi const* api, Operand const& layout,
                                 std::vector<int> const* axes = nullptr, void** data = nullptr);

// The stream that an array's framework works on in this thread. The framework must have the exchange API.
void* framework_stream(DlExchangeApi const* api, DlDevice device);

// The facts of a `Device` that the model of kernels' times knows.
estimate::Gpu read_gpu(pybind11::handle device);

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
