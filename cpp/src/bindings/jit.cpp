#include "../jit.h"

#include "bindings.h"

namespace py = pybind11;

namespace atomr_cutlass {

void bind_jit(py::module_& module) {
  py::class_<JitKernel, std::shared_ptr<JitKernel>>(module, "JitKernel", "A kernel compiled at run time, loaded.")
      .def(py::init([](std::string name, std::string key, py::bytes const& kernel, py::bytes const& companion) {
             std::string const images[] = {kernel, companion};
             py::gil_scoped_release release_gil;
             return std::make_shared<JitKernel>(std::move(name), std::move(key), images[0], images[1]);
           }),
           py::arg("name"), py::arg("key"), py::arg("kernel"), py::arg("companion"))
      .def_property_readonly("name", &JitKernel::name);
}

}  // namespace atomr_cutlass
