#include <pybind11/stl.h>

#include "../registry.h"
#include "bindings.h"

namespace py = pybind11;

namespace atomr_cutlass {

void bind_table(py::module_& module) {
  module.attr("ABI_VERSION") = ATOMR_CUTLASS_ABI_VERSION;
  module.def(
      "rows",
      [] {
        py::list result;
        for (RegisteredRow const& entry : registered_rows()) {
          py::dict row;
          row["name"] = entry.row->name;
          row["key"] = entry.row->key;
          row["pack"] = entry.pack;
          row["ptx"] = (entry.row->flags & ATOMR_CUTLASS_FLAG_PTX) != 0;
          row["shared_bytes"] = entry.row->shared_bytes;
          row["threads"] = entry.row->threads;
          row["cuda_version"] = entry.row->cuda_version;
          result.append(row);
        }
        return result;
      },
      "The table: one dict per kernel, those of packs after those linked in.");
  module.def("registry_generation", &registry_generation);
  module.def(
      "load_pack",
      [](std::string const& path) {
        py::gil_scoped_release release_gil;
        return load_pack(path);
      },
      py::arg("path"));
}

}  // namespace atomr_cutlass
