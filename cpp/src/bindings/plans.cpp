#include "plans.h"

#include <algorithm>
#include <deque>

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

DlManagedVersioned* permuted(DlManagedVersioned* allocation, Operand const& layout) {
  auto* const made = new Permuted{*allocation, allocation, {}, {}};
  std::copy_n(layout.shape, layout.rank, made->shape);
  std::copy_n(layout.strides, layout.rank, made->strides);
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

// A row-major layout whose dimensions come in the order of `axes`, unless they are null.
Operand arranged(Operand const& row_major, std::vector<int> const* axes) {
  Operand made = row_major;
  int64_t strides[kMaxRank];
  int64_t contiguous = 1;
  for (int i = row_major.rank - 1; i >= 0; --i) {
    strides[i] = contiguous;
    contiguous *= std::max<int64_t>(row_major.shape[i], 1);
  }
  for (int i = 0; i < made.rank; ++i) {
    int const from = axes != nullptr ? (*axes)[size_t(i)] : i;
    made.shape[i] = row_major.shape[from];
    made.strides[i] = strides[from];
  }
  return made;
}

py::object numbers_of(int64_t const* values, int count) {
  auto made = py::reinterpret_steal<py::object>(PyTuple_New(count));
  if (!made) throw py::error_already_set();
  for (int i = 0; i < count; ++i) {
    PyObject* const number = PyLong_FromLongLong(values[i]);
    if (number == nullptr) throw py::error_already_set();
    PyTuple_SET_ITEM(made.ptr(), i, number);
  }
  return made;
}

// How PyTorch's compiled models make arrays on the current GPU: in two thirds of the time that an array takes that
// views what DLPack's allocator holds, and streams may be recorded for its memory. `torch.empty` takes longer than
// either.
struct OwnAllocator {
  DlExchangeApi const* api;
  DlDataType dtype;
  DlDevice device;
  PyObject* function;  // null where there is none
  PyObject* element;   // PyTorch's name of the type
  Operand latest;      // that was made, and by which arguments
  py::object arguments;
};

// Under the GIL only; what is known stays, and stays where it is.
std::deque<OwnAllocator>& own_allocators() {
  static auto& known = *new std::deque<OwnAllocator>();
  return known;
}

OwnAllocator* own_allocator(DlExchangeApi const* api, Operand const& layout) {
  for (OwnAllocator& known : own_allocators()) {
    bool const element = known.dtype.code == layout.dtype.code && known.dtype.bits == layout.dtype.bits;
    if (known.api == api && element && known.device.id == layout.device.id) return &known;
  }
  return nullptr;
}

// What makes arrays like this one.
OwnAllocator* note_allocator(DlExchangeApi const* api, Operand const& layout, py::handle array) {
  OwnAllocator made{api, layout.dtype, layout.device, nullptr, nullptr, {}, {}};
  auto const name = py::str("torch");
  auto const torch = py::reinterpret_steal<py::object>(PyImport_GetModule(name.ptr()));
  py::object found = torch ? torch : py::none();
  for (char const* const part : {"_C", "_dynamo", "guards", "_empty_strided_cuda"}) {
    found = py::getattr(found, part, py::none());
  }
  DlTensor view{};
  if (!found.is_none() && py::isinstance(array, torch.attr("Tensor"))) {
    if (api->view_of_object(array.ptr(), &view) != 0) throw py::error_already_set();
    if (matches(view, layout)) {  // not so for elements that it packs
      made.element = py::object(array.attr("dtype")).release().ptr();
      made.function = found.release().ptr();
    }
  }
  own_allocators().push_back(std::move(made));
  return &own_allocators().back();
}

// Null where the function makes nothing of the kind.
py::object made_by(OwnAllocator& allocator, Operand const& wanted, void** data) {
  if (!allocator.arguments || !matches(allocator.latest, wanted)) {
    py::object const shape = numbers_of(wanted.shape, wanted.rank), strides = numbers_of(wanted.strides, wanted.rank);
    allocator.arguments = py::make_tuple(shape, strides, py::handle(allocator.element));
    allocator.latest = wanted;
  }
  py::object const arguments = allocator.arguments;
  DeviceGuard guard(allocator.device.id);
  CaptureRelaxed relaxed;
  auto array = py::reinterpret_steal<py::object>(PyObject_Call(allocator.function, arguments.ptr(), nullptr));
  DlTensor view{};
  if (array && exchange_api(array) == allocator.api && allocator.api->view_of_object(array.ptr(), &view) == 0 &&
      matches(view, wanted)) {
    if (data != nullptr) *data = static_cast<char*>(view.data) + view.byte_offset;
    return array;
  }
  if (PyErr_Occurred() != nullptr) {
    if (PyErr_ExceptionMatches(PyExc_Exception) == 0) throw py::error_already_set();
    PyErr_Clear();
  }
  return {};
}

// An array that views what DLPack's allocator holds; `axes`: whose dimensions are in another order than there.
py::object view_of_new(DlExchangeApi const* api, Operand const& layout, Operand const& wanted, bool axes, void** data) {
  Operand row_major = layout;
  DlTensor prototype{nullptr, layout.device, layout.rank, layout.dtype, row_major.shape, nullptr, 0};
  DlManagedVersioned* managed = framework_allocate(api, prototype);
  if (data != nullptr) *data = static_cast<char*>(managed->tensor.data) + managed->tensor.byte_offset;
  if (axes) managed = permuted(managed, wanted);
  void* object = nullptr;
  // Takes the memory where it fails too: DLPack has its ownership stolen.
  if (api->object_from_managed(managed, &object) != 0) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(static_cast<PyObject*>(object));
}

}  // namespace

py::object framework_array(DlExchangeApi const* api, Operand const& layout, std::vector<int> const* axes, void** data) {
  Operand const wanted = arranged(layout, axes);
  OwnAllocator* own = own_allocator(api, layout);
  py::object viewed;
  if (own == nullptr) {
    viewed = view_of_new(api, layout, wanted, axes != nullptr, data);
    own = note_allocator(api, wanted, viewed);
  }
  if (own->function != nullptr) {
    if (py::object array = made_by(*own, wanted, data)) return array;
  }
  return viewed ? viewed : view_of_new(api, layout, wanted, axes != nullptr, data);
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
