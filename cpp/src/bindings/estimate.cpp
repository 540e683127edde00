#include "../estimate.h"

#include <pybind11/stl.h>

#include "../ranking.h"
#include "../split_division.h"
#include "bindings.h"

namespace py = pybind11;

namespace atomr_cutlass {
namespace {

using namespace estimate;

template <typename Value>
Value named(std::map<std::string, Value> const& values, std::string const& name, Value other) {
  auto const found = values.find(name);
  return found == values.end() ? other : found->second;
}

// Calls `use` with each constant's name and the constant.
template <class OfConstants, class Use>
void each_constant(OfConstants& constants, Use&& use) {
#define CONSTANT(name, value) use(#name, constants.name);
#define CONSTANT_BY(type, name, ...) use(#name, constants.name);
#include "../estimate_constants.inc"
#undef CONSTANT
#undef CONSTANT_BY
}

py::dict to_dict(Constants const& constants) {
  py::dict made;
  each_constant(constants, [&made](char const* name, auto const& value) { made[name] = value; });
  return made;
}

// The constants with these in the place of their own.
Constants changed(py::dict const& values) {
  Constants made;
  py::dict left = values.attr("copy")();
  each_constant(made, [&](char const* name, auto& value) {
    if (!left.contains(name)) return;
    value = left.attr("pop")(name).template cast<std::decay_t<decltype(value)>>();
  });
  if (!left.empty()) {
    throw py::key_error("the model has no constant " + py::repr(left.begin()->first).cast<std::string>());
  }
  return made;
}

// The kernel of a KernelKey.
std::shared_ptr<Kernel> read_kernel(py::object const& key, bool common, int64_t shared_bytes,
                                    std::pair<int64_t, int64_t> const& widths) {
  auto const text = [&key](char const* name) { return key.attr(name).cast<std::string>(); };
  auto const number = [&key](char const* name) { return key.attr(name).cast<int64_t>(); };
  auto const bits = [&key](char const* name) { return key.attr(name).attr("bits").cast<int64_t>(); };
  auto const made = std::make_shared<Kernel>();
  made->name = text("name");
  made->op = op_of(text("op"));
  made->generation =
      named<Generation>({{"sm80", Generation::kSm80}, {"sm90", Generation::kSm90}, {"sm120", Generation::kSm120}},
                        text("generation"), Generation::kSm100);
  made->mainloop = named<Mainloop>({{"few", Mainloop::kFew},
                                    {"ragged", Mainloop::kRagged},
                                    {"unaligned", Mainloop::kUnaligned},
                                    {"realigned", Mainloop::kRealigned},
                                    {"split", Mainloop::kSplit},
                                    {"pingpong", Mainloop::kPingpong},
                                    {"2sm", Mainloop::kTwoSm},
                                    {"twostage", Mainloop::kTwoStage}},
                                   text("mainloop"), Mainloop::kOther);
  made->math = named<Math>(
      {{"default", Math::kDefault}, {"fast", Math::kFast}, {"ieee", Math::kIeee}, {"3xtf32", Math::k3xTf32}},
      text("math"), Math::kOther);
  made->capability = key.attr("arch").attr("capability").cast<std::pair<int, int>>();
  made->tile = key.attr("tile").cast<std::array<int64_t, 3>>();
  made->cluster = key.attr("cluster").cast<std::array<int64_t, 3>>();
  auto const warps = key.attr("warps").cast<std::array<int64_t, 3>>();
  made->warps = warps[0] * warps[1] * warps[2];
  made->bits_a = bits("a"), made->bits_b = bits("b"), made->bits_d = bits("d");
  made->align_a = number("align_a"), made->align_b = number("align_b");
  made->a_along_k = text("layout_a") == "r", made->b_along_k = text("layout_b") == "c";
  made->d_columns = text("layout_d") == "c";
  std::string const a = key.attr("a").attr("value").cast<std::string>();
  made->f64 = a == "f64", made->i8 = a == "i8", made->fp8 = a == "e4m3" || a == "e5m2";
  made->stream_k = text("scheduler") == "streamk", made->sliced = text("scheduler") == "sliced";
  made->nosmem = text("epilogue_schedule") == "nosmem";
  made->gated = text("epilogue").rfind("gated", 0) == 0;
  made->block_scaled = !text("scale_type").empty();
  made->common = common;
  made->slices_in_d = made->generation == Generation::kSm80 && made->bits_d >= bits("acc") && text("epilogue") == "lc";
  made->depthwise = text("group_mode") == "depthwise";
  made->iterator = text("iterator"), made->stride_support = text("stride_support");
  made->shared_bytes = shared_bytes;
  std::tie(made->narrowest, made->width_step) = widths;
  return made;
}

}  // namespace

Gpu read_gpu(py::handle device) {
  Gpu made{};
  made.capability = device.attr("capability").cast<std::pair<int, int>>();
  if (py::object const arch = device.attr("arch"); !arch.is_none()) {
    made.target = arch.attr("capability").cast<std::pair<int, int>>();
  }
  made.multiprocessors = device.attr("multiprocessors").cast<int64_t>();
  made.shared_memory = device.attr("shared_memory").cast<int64_t>();
  made.l2_bytes = device.attr("l2_bytes").cast<int64_t>();
  made.memory_bytes_per_second = device.attr("memory_bytes_per_second").cast<double>();
  return made;
}

namespace {

py::tuple told(Launch const& launch) {
  return py::make_tuple(launch.seconds, launch.split_k, launch.swizzle, launch.raster, launch.width);
}

py::tuple told(Ranking::Found const& found) { return py::make_tuple(found.entry, found.place, told(found.launch)); }

using Values = std::vector<int64_t>;
using KernelPointer = std::shared_ptr<Kernel>;

void bind_model(py::module_& module) {
  py::class_<Launch>(module, "ModelLaunch", "How a kernel is launched, and the estimated time of it.")
      .def_readonly("seconds", &Launch::seconds)
      .def_readonly("split_k", &Launch::split_k)
      .def_readonly("swizzle", &Launch::swizzle)
      .def_readonly("raster", &Launch::raster)
      .def_readonly("width", &Launch::width);
  py::class_<Model, std::shared_ptr<Model>>(module, "TimeModel",
                                            "The analytic model; constants may be changed by name.")
      .def(py::init([](py::dict const& values, bool corrected) {
             return std::make_shared<Model>(changed(values), corrected);
           }),
           py::arg("constants") = py::dict(), py::kw_only(), py::arg("corrected") = true)
      .def_property_readonly("constants", [](Model const& model) { return to_dict(model.constants()); })
      .def(
          "launch",
          [](Model const& model, KernelPointer const& kernel, Values const& extents, py::object const& device,
             int64_t shared_bytes, int64_t split_k) {
            return model.launch(*kernel, Extents::of(kernel->op, extents), read_gpu(device), shared_bytes, split_k);
          },
          py::arg("kernel"), py::arg("extents"), py::arg("device"), py::arg("shared_bytes"), py::arg("split_k"),
          "The best launch with these slices of K.")
      .def(
          "bound",
          [](Model const& model, KernelPointer const& kernel, Values const& extents, py::object const& device) {
            return model.bound(*kernel, Extents::of(kernel->op, extents), read_gpu(device));
          },
          py::arg("kernel"), py::arg("extents"), py::arg("device"))
      .def(
          "least",
          [](Model const& model, KernelPointer const& kernel, Values const& extents, py::object const& device) {
            return model.least(*kernel, Extents::of(kernel->op, extents), read_gpu(device));
          },
          py::arg("kernel"), py::arg("extents"), py::arg("device"))
      .def(
          "slices",
          [](Model const& model, KernelPointer const& kernel, Values const& extents, py::object const& device) {
            return py::tuple(py::cast(model.slices(*kernel, Extents::of(kernel->op, extents), read_gpu(device))));
          },
          py::arg("kernel"), py::arg("extents"), py::arg("device"))
      .def(
          "is_corrected",
          [](Model const& model, KernelPointer const& kernel, Values const& extents) {
            return model.is_corrected(*kernel, Extents::of(kernel->op, extents));
          },
          py::arg("kernel"), py::arg("extents"), "Whether estimates are corrected by what timings of kernels taught.")
      .def(
          "kernel_sample",
          [](Model const& model, KernelPointer const& kernel, Values const& extents, py::object const& device,
             int64_t shared_bytes, int64_t split_k) {
            KernelSample const made =
                model.kernel_sample(*kernel, Extents::of(kernel->op, extents), read_gpu(device), shared_bytes, split_k);
            return py::make_tuple(made.launch, py::tuple(py::cast(made.inputs)));
          },
          py::arg("kernel"), py::arg("extents"), py::arg("device"), py::arg("shared_bytes"), py::arg("split_k"),
          "The launch before the correction of kernels, and the inputs of that.")
      .def(
          "few_samples",
          [](Model const& model, KernelPointer const& kernel, Values const& extents, py::object const& device) {
            py::list made;
            for (FewSample const& each :
                 model.few_samples(*kernel, Extents::of(kernel->op, extents), read_gpu(device))) {
              made.append(py::make_tuple(each.share, each.height, each.seconds, py::tuple(py::cast(each.inputs))));
            }
            return made;
          },
          py::arg("kernel"), py::arg("extents"), py::arg("device"),
          "(share, rows of a tile, seconds by the formula, inputs of the correction) of each division.");
  py::class_<Ranking, std::shared_ptr<Ranking>>(
      module, "Ranking", "Kernels that may serve problems of the same types, layouts and alignments.")
      .def(py::init([](std::shared_ptr<Model> model, py::object const& device,
                       std::vector<std::tuple<int, KernelPointer, int64_t, std::vector<int>>> const& entries) {
             std::vector<Ranking::Entry> made;
             for (auto const& [suitability, kernel, shared_bytes, places] : entries) {
               made.push_back({suitability, kernel, shared_bytes, places});
             }
             return std::make_shared<Ranking>(std::move(model), read_gpu(device), std::move(made));
           }),
           py::arg("model"), py::arg("device"), py::arg("entries"))
      .def(
          "every",
          [](Ranking const& ranking, std::vector<Values> const& extents, bool whole) {
            py::list made;
            for (Ranking::Found const& found : ranking.every(extents, whole)) made.append(told(found));
            return made;
          },
          py::arg("extents"), py::arg("whole"))
      .def(
          "first",
          [](Ranking const& ranking, std::vector<Values> const& extents, bool whole) -> py::object {
            std::optional<Ranking::Found> const found = ranking.first(extents, whole);
            return found ? py::object(told(*found)) : py::none();
          },
          py::arg("extents"), py::arg("whole"));
}

}  // namespace

void bind_estimate(py::module_& module) {
  py::class_<Kernel, KernelPointer>(module, "ModelKernel", "The fields of a KernelKey that the model knows.")
      .def(py::init(&read_kernel), py::arg("key"), py::arg("common"), py::arg("shared_bytes"),
           py::arg("widths") = std::pair<int64_t, int64_t>{0, 0})
      .def(
          "is_for", [](Kernel const& kernel, int64_t m, int64_t n, int64_t k) { return is_for(kernel, m, n, k); },
          py::arg("m"), py::arg("n"), py::arg("k"), "Whether the kernel is for products of these extents.");
  bind_model(module);
  module.attr("SWIZZLES") = py::tuple(py::cast(kSwizzles));
  py::class_<TileList>(module, "TileList", "The tiles that a launch visits.")
      .def_readonly("rows", &TileList::rows)
      .def_readonly("columns", &TileList::columns)
      .def_readonly("swizzle", &TileList::swizzle)
      .def_readonly("raster", &TileList::raster)
      .def_readonly("blocks", &TileList::blocks)
      .def_property_readonly("tiles", &TileList::tiles);
  module.def(
      "tile_list",
      [](std::array<int64_t, 3> const& blocks, std::pair<int64_t, int64_t> const& cluster, int64_t multiprocessors,
         int64_t swizzle, int raster, bool stream_k) {
        Grid const grid{blocks[0], blocks[1], blocks[2]};
        return tile_list(grid, cluster.first, cluster.second, multiprocessors, swizzle, raster, stream_k);
      },
      py::arg("blocks"), py::arg("cluster"), py::arg("multiprocessors"), py::arg("swizzle"), py::arg("raster"),
      py::kw_only(), py::arg("stream_k") = false);
  module.def("blocks_at_once", &blocks_at_once, py::arg("multiprocessors"), py::arg("cluster"));
  module.def(
      "orders",
      [](std::array<int64_t, 3> const& blocks, std::pair<int64_t, int64_t> const& cluster, bool stream_k) {
        return orders({blocks[0], blocks[1], blocks[2]}, cluster.first, cluster.second, stream_k);
      },
      py::arg("blocks"), py::arg("cluster"), py::kw_only(), py::arg("stream_k") = false);
  module.def(
      "decompose",
      [](TileList const& tiles, int64_t k_tiles) {
        Decomposition const made = decompose(tiles, k_tiles);
        return py::make_tuple(made.whole, made.cut, made.units, made.splits);
      },
      py::arg("tiles"), py::arg("k_tiles"), "(whole tiles, cut ones, their parts, parts of each).");
  module.def("l2_misses", &l2_misses, py::arg("tiles"), py::arg("widths"), py::arg("held"));
  py::class_<Division>(module, "Division", "One way to divide a problem among the clusters of a launch.")
      .def_readonly("wide", &Division::wide)
      .def_property_readonly("pair", [](Division const& made) { return py::make_tuple(made.pair_m, made.pair_n); })
      .def_readonly("height", &Division::height)
      .def_readonly("width", &Division::width)
      .def_readonly("whole", &Division::whole)
      .def_readonly("cut", &Division::cut)
      .def_readonly("sharing", &Division::sharing)
      .def_readonly("segments", &Division::segments);
  module.def(
      "divide",
      [](Kernel const& kernel, Values const& extents, int64_t clusters) {
        Extents const of = Extents::of(kernel.op, extents);
        return divide({of.m, of.n, of.k, of.batch, kernel.tile[1], kernel.cluster[0], kernel.cluster[2], clusters,
                       kernel.a_along_k, kernel.b_along_k});
      },
      py::arg("kernel"), py::arg("extents"), py::arg("clusters"),
      "The division that a kernel which shares out K takes.");
  module.attr("CORRECTION_INPUTS") = py::make_tuple(KernelCorrection::kInputsOfHalf, KernelCorrection::kInputs);
  module.attr("SPLIT_BOX") = kSplitBox;
  module.attr("SPLIT_LEAST_STEPS") = kSplitLeastSteps;
}

}  // namespace atomr_cutlass
