#include "../driver.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "../errors.h"
#include "bindings.h"

namespace py = pybind11;

namespace atomr_cutlass {
namespace {

// Device memory for operands that live on the host: owned by Python, released with it.
class Buffer {
 public:
  Buffer(int device, size_t bytes) : device_(device), bytes_(bytes) {
    DeviceGuard guard(device_);
    if (bytes_ != 0) pointer_ = allocate(bytes_);
  }
  ~Buffer() {
    if (pointer_ == 0) return;
    try {
      DeviceGuard guard(device_);
      release(pointer_);
    } catch (std::exception const&) {
      // The context is gone, and the memory with it.
    }
  }
  Buffer(Buffer const&) = delete;
  Buffer& operator=(Buffer const&) = delete;

  void upload(py::buffer const& source) {
    py::buffer_info const info = contiguous(source, false);
    py::gil_scoped_release release_gil;
    DeviceGuard guard(device_);
    copy_to_device(pointer_, info.ptr, bytes_, nullptr);
    synchronize(nullptr);
  }

  void download(py::buffer const& target) const {
    py::buffer_info const info = contiguous(target, true);
    py::gil_scoped_release release_gil;
    DeviceGuard guard(device_);
    copy_to_host(info.ptr, pointer_, bytes_, nullptr);
    synchronize(nullptr);
  }

  uint64_t pointer() const { return pointer_; }
  int device() const { return device_; }

 private:
  py::buffer_info contiguous(py::buffer const& buffer, bool writable) const {
    py::buffer_info info = buffer.request(writable);
    if (!PyBuffer_IsContiguous(info.view(), 'C') || size_t(info.size * info.itemsize) != bytes_) {
      throw InvalidOperand("a host copy needs a C-contiguous buffer of " + std::to_string(bytes_) + " bytes");
    }
    return info;
  }

  int device_;
  size_t bytes_;
  DevicePointer pointer_ = 0;
};

}  // namespace

void bind_device(py::module_& module) {
  module.def("driver_problem", [] {
    std::string reason;
    driver_available(&reason);
    return reason;
  }, "Why no GPU can be used; empty when one can.");
  module.def("driver_version", &driver_version);
  module.def("device_count", &device_count);
  module.def("synchronize", [](int device, uint64_t stream) {
    py::gil_scoped_release release_gil;
    DeviceGuard guard(device);
    synchronize(reinterpret_cast<void*>(stream));
  }, py::arg("device"), py::arg("stream"));
  module.def("device_properties", [](int device) {
    DeviceProperties const properties = device_properties(device);
    py::dict result;
    result["name"] = properties.name;
    result["capability"] = py::make_tuple(properties.major, properties.minor);
    result["multiprocessors"] = properties.multiprocessors;
    result["shared_memory"] = properties.shared_memory_per_block;
    result["l2_bytes"] = properties.l2_bytes;
    result["memory_bytes"] = properties.memory_bytes;
    return result;
  }, py::arg("device"));
  py::class_<Buffer>(module, "Buffer", "Device memory that holds a copy of host data.")
      .def(py::init<int, size_t>(), py::arg("device"), py::arg("bytes"))
      .def("upload", &Buffer::upload, py::arg("source"))
      .def("download", &Buffer::download, py::arg("target"))
      .def_property_readonly("pointer", &Buffer::pointer)
      .def_property_readonly("device", &Buffer::device);
}

}  // namespace atomr_cutlass
