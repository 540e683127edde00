#include "plans.h"

#include "../errors.h"
#include "../jit.h"
#include "../registry.h"
#include "../stream_memory.h"

namespace py = pybind11;

namespace atomr_cutlass {

std::shared_ptr<atomr_cutlass_row const> row_of(py::object const& kernel, ArgsLayout const& layout) {
  if (py::isinstance<JitKernel>(kernel)) {
    auto const compiled = kernel.cast<std::shared_ptr<JitKernel>>();
    py::gil_scoped_release release_gil;
    return make_jit_row(compiled, layout);
  }
  auto const name = kernel.cast<std::string>();
  atomr_cutlass_row const* row = find_row(name);
  if (row == nullptr) throw Unsupported("there is no kernel " + name + " in the table");
  return {row, [](atomr_cutlass_row const*) {}};  // rows of the table live as long as the process
}

namespace {

// An allocation of a framework with its dimensions in another order.
struct Permuted {
  DlManagedVersioned managed;
  DlManagedVersioned* allocation;
  int64_t shape[kMaxRank], strides[kMaxRank];
};

DlManagedVersioned* permuted(DlManagedVersioned* allocation, std::vector<int> const& axes) {
  auto* const made = new Permuted{*allocation, allocation, {}, {}};
  int64_t strides[kMaxRank];
  int64_t contiguous = 1;
  for (int i = allocation->tensor.ndim - 1; i >= 0; --i) {
    strides[i] = contiguous;
    contiguous *= allocation->tensor.shape[i];
  }
  for (size_t i = 0; i < axes.size(); ++i) {
    made->shape[i] = allocation->tensor.shape[axes[i]];
    made->strides[i] = strides[axes[i]];
  }
  made->managed.tensor.shape = made->shape;
  made->managed.tensor.strides = made->strides;
  made->managed.manager = made;
  made->managed.deleter = [](DlManagedVersioned* managed) {
    auto* const held = static_cast<Permuted*>(managed->manager);
    if (held->allocation->deleter != nullptr) held->allocation->deleter(held->allocation);
    delete held;
  };
  return &made->managed;
}

}  // namespace

py::object framework_array(DlExchangeApi const* api, Operand const& layout, std::vector<int> const* axes, void** data) {
  Operand wanted = layout;
  DlTensor prototype{nullptr, wanted.device, wanted.rank, wanted.dtype, wanted.shape, nullptr, 0};
  DlManagedVersioned* managed = framework_allocate(api, prototype);
  if (data != nullptr) *data = static_cast<char*>(managed->tensor.data) + managed->tensor.byte_offset;
  if (axes != nullptr) managed = permuted(managed, *axes);
  void* object = nullptr;
  // Takes the memory where it fails too: DLPack has its ownership stolen.
  if (api->object_from_managed(managed, &object) != 0) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(static_cast<PyObject*>(object));
}

// The stream that an array's framework works on in this thread. The framework must have the exchange API.
void* framework_stream(DlExchangeApi const* api, DlDevice device) {
  void* stream = nullptr;
  if (api->current_stream(device.type, device.id, &stream) != 0) throw py::error_already_set();
  return stream;
}

double scalar_of(py::handle given, char const* name, double own) {
  if (given.is_none()) return own;
  // Arrays of one element convert too, but would have to be waited for.
  if (PyBool_Check(given.ptr()) == 0 && PySequence_Check(given.ptr()) == 0) {
    double const value = PyFloat_AsDouble(given.ptr());
    if (PyErr_Occurred() == nullptr) return value;
    if (PyErr_ExceptionMatches(PyExc_TypeError) == 0 && PyErr_ExceptionMatches(PyExc_OverflowError) == 0) {
      throw py::error_already_set();
    }
    PyErr_Clear();
  }
  throw InvalidOperand(std::string(name) + " is a " + Py_TYPE(given.ptr())->tp_name +
                       "; expected a number of a double's range");
}

bool finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

}  // namespace atomr_cutlass
