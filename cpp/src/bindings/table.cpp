#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "../registry.h"
#include "atomr_cutlass/abi_layout.h"
#include "bindings.h"

namespace py = pybind11;

namespace atomr_cutlass {

void bind_table(py::module_& module) {
  module.attr("ABI_VERSION") = ATOMR_CUTLASS_ABI_VERSION;
  module.attr("LAYOUT_DIGEST") = abi::kLayoutDigest;
  module.def(
      "layout",
      [] {
        py::dict structs;
        for (atomr_cutlass_struct_layout const& layout : abi::kStructs) {
          py::list fields;
          for (uint32_t i = 0; i < layout.field_count; ++i) {
            atomr_cutlass_field_layout const& field = layout.fields[i];
            fields.append(py::make_tuple(field.name, field.offset, field.bytes, std::string(1, char(field.kind))));
          }
          structs[layout.name] = fields;
        }
        return structs;
      },
      "(name, offset, bytes, kind) of every field of the ABI's structs, as the extension was built.");
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
          row["content"] = entry.row->content;
          result.append(row);
        }
        return result;
      },
      "The table: one dict per kernel, those of packs after those linked in.");
  module.def("registry_generation", &registry_generation);
  module.def("note_table_growth", &note_table_growth);
  module.def(
      "load_pack",
      [](std::string const& path, RowCheck const& check) {
        py::gil_scoped_release release_gil;
        return load_pack(path, check);
      },
      py::arg("path"), py::arg("check"));
}

}  // namespace atomr_cutlass
