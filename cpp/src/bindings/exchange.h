// From Python arrays to operands: through DLPack's C exchange API where the array's type has one (PyTorch), which costs
// some ten nanoseconds; through the package's Python code otherwise.
#pragma once

#include <pybind11/pybind11.h>

#include "../operand.h"

namespace atomr_cutlass {

// An operand that keeps alive what it points into. Python sees it as `_core.Operand`.
struct OwnedOperand {
  Operand operand;
  pybind11::object owner;
};

// The exchange API of the array's type, or null.
DlExchangeApi const* exchange_api(pybind11::handle array);

// A view of the array, which errors call `name`. `keep` receives whatever must stay alive while the view is used.
// Throws InvalidOperandError for a tensor that requires a gradient while gradients are recorded.
Operand view(pybind11::handle array, pybind11::object& keep, char const* name);

}  // namespace atomr_cutlass
