#include <pybind11/stl.h>

#include "../errors.h"
#include "exchange.h"
#include "plans.h"

namespace py = pybind11;

namespace atomr_cutlass {
namespace {

py::object of_module(char const* module, char const* name) { return py::module_::import(module).attr(name); }

constexpr char kOperands[] = "atomr_cutlass.arrays.operands";

void* handle_of(py::handle stream) {
  // Handles that are none, such as negative ones, are refused there too.
  if (PyLong_CheckExact(stream.ptr()) != 0) {
    unsigned long long const handle = PyLong_AsUnsignedLongLong(stream.ptr());
    if (PyErr_Occurred() == nullptr) return reinterpret_cast<void*>(uint64_t(handle));
    PyErr_Clear();
  }
  return reinterpret_cast<void*>(of_module(kOperands, "stream_handle")(stream).cast<uint64_t>());
}

}  // namespace

void note_written(OwnedOperand& operand, void* stream) {
  if (operand.operand.device.type != kDlCuda || !driver_available()) return;
  auto reached = std::make_shared<Event>();
  {
    py::gil_scoped_release release_gil;
    DeviceGuard guard(operand.operand.device.id);
    if (capture_id(stream) != 0) return;
    reached->record(stream);
  }
  operand.written = std::move(reached);
}

void await_written(OwnedOperand const& operand, void* stream) {
  std::shared_ptr<Event const> const written = operand.written;
  if (written == nullptr) return;
  py::gil_scoped_release release_gil;
  DeviceGuard guard(operand.operand.device.id);
  if (capture_id(stream) == 0) written->hold(stream);
}

CallArrays::CallArrays(py::handle stream, py::handle first, char const* name)
    : first_(first),
      api_(exchange_api(first)),
      named_(!stream.is_none()) {
  if (named_) stream_ = handle_of(stream);
  if (api_ != nullptr) {
    refuse_gradient(first, name);
    view_ = view_through(api_, first);
    if (view_.device.type != kDlCuda) return;
    device_ = view_.device.id;
    if (!named_) stream_ = framework_stream(api_, view_.device);
  } else if (!named_) {
    stream_ = reinterpret_cast<void*>(of_module(kOperands, "current_stream")(first).cast<uint64_t>());
  }
}

Operand CallArrays::import(py::handle array, char const* name) {
  if (api_ != nullptr && array.is(first_)) return view_;
  if (DlExchangeApi const* api = exchange_api(array)) {
    refuse_gradient(array, name);
    Operand const operand = view_through(api, array);
    if (api != api_ && !named_ && operand.device.type == kDlCuda) {
      void* const stream = framework_stream(api, operand.device);
      device_ = operand.device.id;
      if (stream != stream_) others_.push_back({stream, false});
    }
    return operand;
  }
  py::object imported;
  if (type_of(array).own) {
    imported = py::reinterpret_borrow<py::object>(array);
    await_written(imported.cast<OwnedOperand const&>(), stream_);
  } else {
    imported = python().attr("import_array")(array, name);
  }
  keep_.push_back(imported);
  return imported.cast<OwnedOperand const&>().operand;
}

py::object const& CallArrays::python() {
  if (!launch_stream_) {
    launch_stream_ = of_module("atomr_cutlass.arrays.frameworks", "LaunchStream")(reinterpret_cast<uint64_t>(stream_),
                                                                                  py::arg("named") = named_);
  }
  return launch_stream_;
}

NewArray CallArrays::allocate(Operand const& layout, std::vector<int> const* axes) {
  if (api_ == nullptr) {
    py::tuple shape(layout.rank);
    for (int i = 0; i < layout.rank; ++i) shape[size_t(i)] = layout.shape[i];
    auto const element = py::make_tuple(layout.dtype.code, layout.dtype.bits);
    py::tuple const made = python().attr("allocate")(shape, element, layout.device.id, first_);
    py::object view = made[1];
    Operand const operand = view.cast<OwnedOperand const&>().operand;
    return {made[0], operand, std::move(view), axes};
  }
  // Of the stream that the allocator takes the memory to be used on.
  void* const stream = named_ ? framework_stream(api_, layout.device) : stream_;
  if (stream != stream_) others_.push_back({stream, true});
  device_ = layout.device.id;
  NewArray made{{}, layout, {}, nullptr};
  made.array = framework_array(api_, layout, axes, &made.operand.data);
  return made;
}

void CallArrays::acquire() const {
  DeviceGuard guard(device_);
  for (Other const& other : others_) order_streams(other.stream, stream_, other.fork);
}

void CallArrays::release() const {
  DeviceGuard guard(device_);
  for (Other const& other : others_) order_streams(stream_, other.stream, false);
}

void CallArrays::written(py::handle array) const {
  if (type_of(array).own) note_written(array.cast<OwnedOperand&>(), stream_);
}

py::object CallArrays::exported(NewArray&& made) const {
  if (!made.view) return std::move(made.array);
  py::object const array = of_module(kOperands, "finished")(made.array, made.view, reinterpret_cast<uint64_t>(stream_));
  if (made.axes == nullptr) return array;
  return of_module("atomr_cutlass.arrays.layouts", "permuted")(array, py::tuple(py::cast(*made.axes)));
}

void CallArrays::finish() const {
  if (launch_stream_) launch_stream_.attr("release")();
}

}  // namespace atomr_cutlass
