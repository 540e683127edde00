#include "../driver.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "../errors.h"
#include "../kernel_launch.h"
#include "bindings.h"
#include "plans.h"

namespace py = pybind11;

namespace atomr_cutlass {
namespace {

// Device memory for operands that live on the host, and for results of frameworks without a callable allocator: owned
// by Python, released with it.
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

  uint64_t pointer() const { return pointer_; }
  int device() const { return device_; }

 private:
  int device_;
  size_t bytes_;
  DevicePointer pointer_ = 0;
};

// A point in the work of a device's stream.
class StreamEvent {
 public:
  StreamEvent(int device, uint64_t stream) : device_(device) {
    DeviceGuard guard(device_);
    event_.record(reinterpret_cast<void*>(stream));
  }
  bool done() const {
    DeviceGuard guard(device_);
    return event_.done();
  }
  void wait() const {
    DeviceGuard guard(device_);
    event_.wait();
  }
  void hold(uint64_t stream) const {
    DeviceGuard guard(device_);
    event_.hold(reinterpret_cast<void*>(stream));
  }

 private:
  int device_;
  Event event_;
};

py::buffer_info contiguous(py::buffer const& buffer, bool writable) {
  py::buffer_info info = buffer.request(writable);
  if (PyBuffer_IsContiguous(info.view(), 'C') == 0) throw InvalidOperand("a host copy needs a C-contiguous buffer");
  return info;
}

// Both wait for everything on the device first: the memory may belong to a framework that works on other streams.
void upload(uint64_t pointer, int device, py::buffer const& source) {
  py::buffer_info const info = contiguous(source, false);
  py::gil_scoped_release release_gil;
  DeviceGuard guard(device);
  synchronize_device();
  copy_to_device(pointer, info.ptr, size_t(info.size * info.itemsize), nullptr);
  synchronize(nullptr);
}

void download(uint64_t pointer, int device, py::buffer const& target) {
  py::buffer_info const info = contiguous(target, true);
  py::gil_scoped_release release_gil;
  DeviceGuard guard(device);
  synchronize_device();
  copy_to_host(info.ptr, pointer, size_t(info.size * info.itemsize), nullptr);
  synchronize(nullptr);
}

}  // namespace

void bind_device(py::module_& module) {
  module.def(
      "driver_problem",
      [] {
        std::string reason;
        driver_available(&reason);
        return reason;
      },
      "Why no GPU can be used; empty when one can.");
  module.def("driver_version", &driver_version);
  module.def("device_count", &device_count);
  module.def("dependent_launch", &dependent_launch,
             "Whether kernels that wait for the launch before them themselves may start before that has ended.");
  module.def("set_dependent_launch", &set_dependent_launch, py::arg("enabled"));
  module.def(
      "synchronize",
      [](int device, uint64_t stream) {
        py::gil_scoped_release release_gil;
        DeviceGuard guard(device);
        synchronize(reinterpret_cast<void*>(stream));
      },
      py::arg("device"), py::arg("stream"));
  module.def(
      "order_streams",
      [](int device, uint64_t before, uint64_t after, bool fork) {
        py::gil_scoped_release release_gil;
        DeviceGuard guard(device);
        order_streams(reinterpret_cast<void*>(before), reinterpret_cast<void*>(after), fork);
      },
      py::arg("device"), py::arg("before"), py::arg("after"), py::arg("fork") = false,
      "Has what follows on `after` wait for what `before` has now, where captures allow it.");
  module.def("pointer_device", &pointer_device, py::arg("pointer"), "The index of the GPU that memory is of.");
  module.def(
      "copy_async",
      [](uint64_t to, uint64_t from, size_t size, int device, uint64_t stream) {
        py::gil_scoped_release release_gil;
        DeviceGuard guard(device);
        copy_on_device(to, from, size, reinterpret_cast<void*>(stream));
      },
      py::arg("to"), py::arg("source"), py::arg("size"), py::arg("device"), py::arg("stream"),
      "Copies within a device's memory, in the order of the stream.");
  module.def(
      "upload_async",
      [](uint64_t pointer, int device, py::buffer const& source, uint64_t stream) {
        py::buffer_info const info = contiguous(source, false);
        auto const* const first = static_cast<unsigned char const*>(info.ptr);
        std::vector<unsigned char> bytes(first, first + info.size * info.itemsize);
        py::gil_scoped_release release_gil;
        DeviceGuard guard(device);
        copy_bytes(pointer, std::move(bytes), reinterpret_cast<void*>(stream));
      },
      py::arg("pointer"), py::arg("device"), py::arg("source"), py::arg("stream"),
      "Copies a few host bytes in the order of the stream, without waiting; a graph may capture it.");
  module.def(
      "capturing",
      [](int device, uint64_t stream) {
        DeviceGuard guard(device);
        return capture_id(reinterpret_cast<void*>(stream)) != 0;
      },
      py::arg("device"), py::arg("stream"), "Whether a CUDA graph is being captured from the stream.");
  module.def(
      "device_properties",
      [](int device) {
        DeviceProperties const properties = device_properties(device);
        py::dict result;
        result["name"] = properties.name;
        result["capability"] = py::make_tuple(properties.major, properties.minor);
        result["multiprocessors"] = properties.multiprocessors;
        result["shared_memory"] = properties.shared_memory_per_block;
        result["l2_bytes"] = properties.l2_bytes;
        result["memory_bytes"] = properties.memory_bytes;
        result["memory_bytes_per_second"] = properties.memory_bytes_per_second;
        return result;
      },
      py::arg("device"));
  module.def("upload", &upload, py::arg("pointer"), py::arg("device"), py::arg("source"));
  module.def("download", &download, py::arg("pointer"), py::arg("device"), py::arg("target"));
  py::class_<StreamEvent>(module, "Event", "A point in the work of a stream: what was launched on it before.")
      .def(py::init<int, uint64_t>(), py::arg("device"), py::arg("stream"), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("done", &StreamEvent::done, "Whether it has been reached, or the context is lost.")
      .def("wait", &StreamEvent::wait, py::call_guard<py::gil_scoped_release>(), "Returns when it has been reached.")
      .def("hold", &StreamEvent::hold, py::arg("stream"), py::call_guard<py::gil_scoped_release>(),
           "Has what is launched on a stream from now on wait for it.");
  // Freeing device memory waits for the device.
  py::class_<Buffer, std::unique_ptr<Buffer, WithoutGil<Buffer>>>(module, "Buffer", "Device memory of our own.")
      .def(py::init([](int device, size_t size) {
             py::gil_scoped_release release_gil;
             return std::unique_ptr<Buffer, WithoutGil<Buffer>>(new Buffer(device, size));
           }),
           py::arg("device"), py::arg("size"))
      .def_property_readonly("pointer", &Buffer::pointer)
      .def_property_readonly("device", &Buffer::device);
}

}  // namespace atomr_cutlass
