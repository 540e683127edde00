#include <cstring>
#include <optional>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include <pybind11/stl.h>

#include "../errors.h"
#include "bindings.h"
#include "exchange.h"
#include "plans.h"

namespace py = pybind11;

namespace atomr_cutlass {

namespace {

bool derives_from(PyTypeObject* type, char const* name) {
  PyObject* const bases = type->tp_mro;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(bases); ++i) {
    if (std::strcmp(reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(bases, i))->tp_name, name) == 0) return true;
  }
  return false;
}

ArrayType array_type(PyTypeObject* type) {
  DlExchangeApi const* api = nullptr;
  py::handle const holder(reinterpret_cast<PyObject*>(type));
  py::object const capsule = py::getattr(holder, "__dlpack_c_exchange_api__", py::none());
  if (PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api") != 0) {
    api = static_cast<DlExchangeApi const*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    while (api != nullptr && api->version.major != 1) api = api->previous;
    if (api != nullptr && api->view_of_object == nullptr) api = nullptr;
  }
  py::object requires_grad = py::getattr(holder, "requires_grad", py::none());
  if (Py_TYPE(requires_grad.ptr())->tp_descr_get == nullptr) requires_grad = py::object();
  Py_INCREF(holder.ptr());  // so that no other type can take its address
  bool const own = PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(py::type::of<OwnedOperand>().ptr())) != 0;
  return {api, requires_grad.release().ptr(), own, derives_from(type, "numpy.ndarray")};
}

// Whether PyTorch records operations for a backward pass in this thread. In inference, where it does not, every call
// with weights that require a gradient asks.
bool gradients_recorded() {
  // The module that was used last, and its function; under the GIL only.
  static PyObject* const name = PyUnicode_InternFromString("torch");
  static PyObject *torch = nullptr, *is_enabled = nullptr;
  PyObject* const module = PyDict_GetItemWithError(PyImport_GetModuleDict(), name);
  if (module == nullptr) return false;
  if (module != torch) {
    py::object made = py::handle(module).attr("is_grad_enabled");
    Py_INCREF(module);
    Py_XDECREF(std::exchange(torch, module));
    Py_XDECREF(std::exchange(is_enabled, made.release().ptr()));
  }
  auto const function = py::reinterpret_borrow<py::object>(is_enabled);
  auto const recorded = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(function.ptr()));
  if (!recorded) throw py::error_already_set();
  return recorded.ptr() == Py_True;
}

}  // namespace

ArrayType const& type_of(py::handle array) {
  // Both are touched under the GIL only.
  static auto& known = *new std::unordered_map<PyTypeObject*, ArrayType>();
  static std::pair<PyTypeObject* const, ArrayType> const* latest = nullptr;
  PyTypeObject* const type = Py_TYPE(array.ptr());
  if (latest != nullptr && latest->first == type) return latest->second;
  auto found = known.find(type);
  if (found == known.end()) {
    ArrayType const made = array_type(type);
    found = known.emplace(type, made).first;
  }
  latest = &*found;
  return latest->second;
}

DlExchangeApi const* exchange_api(py::handle array) { return type_of(array).api; }

Operand view_through(DlExchangeApi const* api, py::handle array) {
  DlTensor tensor{};
  if (api->view_of_object(array.ptr(), &tensor) != 0) throw py::error_already_set();
  return operand_from_view(tensor);
}

// Checks in C++; raises through Python for the message.
void refuse_gradient(py::handle array, char const* name) {
  PyObject* const descriptor = type_of(array).requires_grad;
  if (descriptor == nullptr) return;
  auto const required = py::reinterpret_steal<py::object>(
      Py_TYPE(descriptor)->tp_descr_get(descriptor, array.ptr(), reinterpret_cast<PyObject*>(Py_TYPE(array.ptr()))));
  if (!required) throw py::error_already_set();
  if (required.ptr() != Py_True || !gradients_recorded()) return;
  py::module_::import("atomr_cutlass.arrays.frameworks").attr("refuse_gradient")(array, name);
}

namespace {

OwnedOperand make_operand(uint64_t pointer, py::sequence const& shape, py::object const& strides,
                          py::tuple const& dtype, int device_type, int device, bool read_only, py::object owner,
                          bool settled) {
  if (shape.size() > size_t(kMaxRank)) {
    throw InvalidOperand("an operand has " + std::to_string(shape.size()) + " dimensions; at most 8 are taken");
  }
  int64_t dimensions[kMaxRank] = {}, steps[kMaxRank] = {};
  for (size_t i = 0; i < shape.size(); ++i) dimensions[i] = shape[i].cast<int64_t>();
  if (!strides.is_none()) {
    auto const given = strides.cast<py::sequence>();
    for (size_t i = 0; i < shape.size(); ++i) steps[i] = given[i].cast<int64_t>();
  }
  DlDataType const element{dtype[0].cast<uint8_t>(), dtype[1].cast<uint8_t>(), 1};
  DlTensor const tensor{reinterpret_cast<void*>(pointer),
                        {device_type, device},
                        int32_t(shape.size()),
                        element,
                        dimensions,
                        strides.is_none() ? nullptr : steps,
                        0};
  OwnedOperand result{operand_from_view(tensor), std::move(owner), {}};
  result.operand.read_only = read_only;
  result.operand.settled = settled;
  return result;
}

// Takes over a DLPack capsule, versioned or not, as its protocol asks: by renaming it.
OwnedOperand from_capsule(py::capsule capsule) {
  char const* const name = capsule.name();
  OwnedOperand result;
  if (name != nullptr && std::strcmp(name, "dltensor_versioned") == 0) {
    auto* managed = capsule.get_pointer<DlManagedVersioned>();
    if (managed->version.major != 1) throw InvalidOperand("a DLPack capsule of an unknown major version");
    result.operand = operand_from_view(managed->tensor);
    // Writes into a copy would never reach the caller's array.
    result.operand.read_only = (managed->flags & (kDlReadOnly | kDlCopied)) != 0;
    capsule.set_name("used_dltensor_versioned");
    result.owner = py::capsule(managed, [](void* pointer) {
      auto* held = static_cast<DlManagedVersioned*>(pointer);
      if (held->deleter != nullptr) held->deleter(held);
    });
  } else if (name != nullptr && std::strcmp(name, "dltensor") == 0) {
    auto* managed = capsule.get_pointer<DlManaged>();
    result.operand = operand_from_view(managed->tensor);
    capsule.set_name("used_dltensor");
    result.owner = py::capsule(managed, [](void* pointer) {
      auto* held = static_cast<DlManaged*>(pointer);
      if (held->deleter != nullptr) held->deleter(held);
    });
  } else {
    throw InvalidOperand("not a DLPack capsule, or one that has been used");
  }
  return result;
}

// Memory exported to another framework, with the reference that keeps it alive.
template <class Managed>
struct Export {
  Managed managed;
  int64_t shape[kMaxRank], strides[kMaxRank];
  PyObject* owner;
};

// The operand as a DLPack capsule of this form.
template <class Managed>
py::capsule capsule_of(OwnedOperand const& self, uint64_t flags) {
  auto* made = new Export<Managed>();
  std::memcpy(made->shape, self.operand.shape, sizeof(made->shape));
  int64_t contiguous = 1;
  for (int i = self.operand.rank - 1; i >= 0; --i) {
    made->strides[i] = self.operand.shape[i] == 1 ? contiguous : self.operand.strides[i];
    contiguous *= self.operand.shape[i];
  }
  made->owner = self.owner.inc_ref().ptr();
  made->managed.tensor = {
      self.operand.data, self.operand.device, self.operand.rank, self.operand.dtype, made->shape, made->strides, 0};
  made->managed.manager = made;
  made->managed.deleter = [](Managed* managed) {
    auto* held = static_cast<Export<Managed>*>(managed->manager);
    py::gil_scoped_acquire gil;
    Py_XDECREF(held->owner);
    delete held;
  };
  constexpr bool versioned = std::is_same<Managed, DlManagedVersioned>::value;
  if constexpr (versioned) {
    made->managed.version = kDlVersion;
    made->managed.flags = flags;
  }
  static constexpr char const* name = versioned ? "dltensor_versioned" : "dltensor";
  return py::capsule(&made->managed, name, [](PyObject* capsule) {
    if (PyCapsule_IsValid(capsule, name) == 0) return;  // a consumer took it over
    auto* managed = static_cast<Managed*>(PyCapsule_GetPointer(capsule, name));
    managed->deleter(managed);
  });
}

// The operand's bytes, from its first to its last, in memory of their own.
OwnedOperand copy_of(OwnedOperand const& self, void* stream) {
  ByteRange const range = byte_range(self.operand);
  size_t const bytes = range.end - range.begin, offset = reinterpret_cast<uintptr_t>(self.operand.data) - range.begin;
  OwnedOperand made{self.operand, {}, {}};
  made.operand.read_only = false;
  if (self.operand.device.type != kDlCuda) {
    py::bytearray memory(nullptr, bytes);
    if (bytes != 0) {
      std::memcpy(PyByteArray_AS_STRING(memory.ptr()), reinterpret_cast<void const*>(range.begin), bytes);
      made.operand.data = PyByteArray_AS_STRING(memory.ptr()) + offset;
    }
    made.owner = memory;
    return made;
  }
  py::object const memory =
      py::module_::import("atomr_cutlass._core").attr("Buffer")(self.operand.device.id, bytes != 0 ? bytes : 1);
  auto const to = memory.attr("pointer").cast<DevicePointer>();
  made.operand.data = reinterpret_cast<void*>(to + offset);
  made.owner = py::make_tuple(memory, self.owner);  // keeps the source alive as long as the copy
  py::gil_scoped_release release_gil;
  DeviceGuard guard(self.operand.device.id);
  if (bytes != 0) copy_on_device(to, range.begin, bytes, stream);
  return made;
}

// The consumer's stream, as the array API spells it; null for the legacy default stream.
void* consumer_stream(py::object const& given) {
  if (given.is_none()) return nullptr;
  auto const handle = given.cast<int64_t>();
  if (handle == 0 || handle < -1) {
    throw InvalidOperand("stream is " + std::to_string(handle) +
                         "; DLPack has 1 for the legacy default stream, 2 for each thread's, -1 for no order");
  }
  return handle == 1 ? nullptr : reinterpret_cast<void*>(handle);
}

// The operand as a DLPack capsule, for frameworks that import one: the consumer's stream waits for the last launch that
// wrote it.
py::capsule to_capsule(OwnedOperand const& self, py::object const& stream, py::object const& max_version,
                       py::object const& dl_device, py::object const& copy) {
  DlDevice const own = self.operand.device;
  if (!dl_device.is_none()) {
    auto const wanted = dl_device.cast<std::pair<int, int>>();
    if (wanted != std::make_pair(int(own.type), int(own.id))) {
      throw py::buffer_error("the operand is on device (" + std::to_string(own.type) + ", " + std::to_string(own.id) +
                             "), and exports no copy on another");
    }
  }
  bool const versioned = !max_version.is_none() && max_version.cast<std::pair<int, int>>().first >= 1;
  bool const copied = !copy.is_none() && copy.cast<bool>();
  bool const read_only = self.operand.read_only && !copied;
  if (read_only && !versioned) {
    throw py::buffer_error("the operand is read-only, which only DLPack 1.0 can say: ask with max_version=(1, 0)");
  }
  void* queue = nullptr;
  if (own.type == kDlCuda) {
    queue = consumer_stream(stream);
    bool const unordered = queue == reinterpret_cast<void*>(int64_t(-1));
    if (unordered) queue = nullptr;  // of a copy
    if (!unordered || copied) await_written(self, queue);
  } else if (!stream.is_none()) {
    throw InvalidOperand("stream is given, but the operand is in host memory, which has none");
  }
  OwnedOperand const exported = copied ? copy_of(self, queue) : self;
  uint64_t const flags = (read_only ? kDlReadOnly : 0) | (copied ? kDlCopied : 0);
  return versioned ? capsule_of<DlManagedVersioned>(exported, flags) : capsule_of<DlManaged>(exported, flags);
}

py::tuple int_tuple(int64_t const* values, int count) {
  py::tuple result(count);
  for (int i = 0; i < count; ++i) result[size_t(i)] = py::int_(values[i]);
  return result;
}

py::object framework_empty(py::object const& like, std::vector<int64_t> const& shape, py::tuple const& dtype,
                           int device) {
  DlExchangeApi const* api = exchange_api(like);
  if (api == nullptr) throw InvalidOperand("the framework of this array has no allocator that can be called");
  Operand layout;
  layout.device = {kDlCuda, device};
  layout.dtype = {dtype[0].cast<uint8_t>(), dtype[1].cast<uint8_t>(), 1};
  layout.rank = int32_t(shape.size());
  if (layout.rank > kMaxRank) throw InvalidOperand("a result has more dimensions than are taken");
  std::copy(shape.begin(), shape.end(), layout.shape);
  return framework_array(api, layout);
}

}  // namespace

void bind_operand(py::module_& module) {
  py::class_<OwnedOperand>(module, "Operand", "An array as the kernels see it, keeping alive what it points into.")
      .def(py::init(&make_operand), py::arg("pointer"), py::arg("shape"), py::arg("strides"), py::arg("dtype"),
           py::arg("device_type"), py::arg("device"), py::arg("read_only") = false, py::arg("owner") = py::none(),
           py::arg("settled") = false)
      .def_static("from_capsule", &from_capsule, py::arg("capsule"))
      .def_static(
          "of",
          [](py::object const& array, std::string const& name) {
            if (type_of(array).own) return array.cast<OwnedOperand>();
            if (DlExchangeApi const* api = exchange_api(array)) {
              refuse_gradient(array, name.c_str());
              return OwnedOperand{view_through(api, array), array, {}};
            }
            auto const imported = py::module_::import("atomr_cutlass.arrays.operands").attr("as_operand")(array, name);
            return imported.cast<OwnedOperand>();
          },
          py::arg("array"), py::arg("name") = "an array", "A view of any array; the array stays alive with it.")
      .def("__dlpack__", &to_capsule, py::kw_only(), py::arg("stream") = py::none(),
           py::arg("max_version") = py::none(), py::arg("dl_device") = py::none(), py::arg("copy") = py::none())
      .def("__dlpack_device__",
           [](OwnedOperand const& self) { return py::make_tuple(self.operand.device.type, self.operand.device.id); })
      .def_property_readonly("pointer",
                             [](OwnedOperand const& self) { return reinterpret_cast<uint64_t>(self.operand.data); })
      .def_property_readonly("shape",
                             [](OwnedOperand const& self) { return int_tuple(self.operand.shape, self.operand.rank); })
      .def_property_readonly(
          "strides", [](OwnedOperand const& self) { return int_tuple(self.operand.strides, self.operand.rank); })
      .def_property_readonly(
          "dtype",
          [](OwnedOperand const& self) { return py::make_tuple(self.operand.dtype.code, self.operand.dtype.bits); })
      .def_property_readonly("device_type", [](OwnedOperand const& self) { return self.operand.device.type; })
      .def_property_readonly("device", [](OwnedOperand const& self) { return self.operand.device.id; })
      .def_property_readonly("read_only", [](OwnedOperand const& self) { return self.operand.read_only; })
      .def_property_readonly("settled", [](OwnedOperand const& self) { return self.operand.settled; })
      .def_property_readonly("alignment", [](OwnedOperand const& self) { return address_alignment(self.operand.data); })
      .def("__repr__", [](OwnedOperand const& self) { return "<Operand " + describe(self.operand) + ">"; });
  module.def(
      "note_written",
      [](OwnedOperand& operand, uint64_t stream) { note_written(operand, reinterpret_cast<void*>(stream)); },
      py::arg("operand"), py::arg("stream"), "Notes that a launch on the stream writes the operand.");
  module.def(
      "await_written",
      [](OwnedOperand const& operand, uint64_t stream) { await_written(operand, reinterpret_cast<void*>(stream)); },
      py::arg("operand"), py::arg("stream"), "Has the stream wait for the launch that wrote the operand last.");
  module.def("overlap", [](OwnedOperand const& a, OwnedOperand const& b) { return overlap(a.operand, b.operand); });
  module.def("has_exchange_api", [](py::object const& array) { return exchange_api(array) != nullptr; });
  module.def(
      "framework_stream",
      [](py::object const& like, std::optional<int> device) {
        DlExchangeApi const* api = exchange_api(like);
        if (api == nullptr) throw InvalidOperand("the framework of this array does not tell its current stream");
        DlDevice const on = device ? DlDevice{kDlCuda, *device} : view_through(api, like).device;
        return reinterpret_cast<uint64_t>(on.type == kDlCuda ? framework_stream(api, on) : nullptr);
      },
      py::arg("like"), py::arg("device") = py::none(),
      "The stream that the framework of `like` works on in this thread, on the array's device or another.");
  module.def("framework_empty", &framework_empty, py::arg("like"), py::arg("shape"), py::arg("dtype"),
             py::arg("device"), "A row-major array from the allocator of the framework of `like`.");
}

}  // namespace atomr_cutlass
