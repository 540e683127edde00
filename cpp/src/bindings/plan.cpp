#include "../plan.h"

#include <pybind11/stl.h>

#include <cstring>
#include <optional>

#include "../driver.h"
#include "../errors.h"
#include "../jit.h"
#include "../registry.h"
#include "bindings.h"
#include "exchange.h"
#include "plans.h"

namespace py = pybind11;

namespace atomr_cutlass {
namespace {

template <class Value>
Value take(py::dict const& values, char const* name) {
  return values[name].cast<Value>();
}

std::unique_ptr<GemmPlan, WithoutGil<GemmPlan>> make_plan(py::object const& kernel, py::dict const& problem,
                                                          py::tuple const& a, py::tuple const& b, py::tuple const& c,
                                                          py::tuple const& d,
                                                          std::vector<std::array<int64_t, 5>> const& launches,
                                                          py::dict const& options, py::object const& like) {
  atomr_cutlass_gemm_args args;
  std::memset(&args, 0, sizeof(args));
  args.m = take<int32_t>(problem, "m");
  args.n = take<int32_t>(problem, "n");
  args.k = take<int32_t>(problem, "k");
  args.batch = take<int32_t>(problem, "batch");
  args.lda = take<int64_t>(problem, "lda");
  args.ldb = take<int64_t>(problem, "ldb");
  args.ldc = take<int64_t>(problem, "ldc");
  args.ldd = take<int64_t>(problem, "ldd");
  args.batch_stride_a = take<int64_t>(problem, "batch_stride_a");
  args.batch_stride_b = take<int64_t>(problem, "batch_stride_b");
  args.batch_stride_c = take<int64_t>(problem, "batch_stride_c");
  args.batch_stride_d = take<int64_t>(problem, "batch_stride_d");
  args.split_k = take<int32_t>(problem, "split_k");
  args.swizzle = take<int32_t>(problem, "swizzle");
  args.raster = take<int32_t>(problem, "raster");
  args.sm_count = take<int32_t>(problem, "sm_count");
  args.alpha = 1.0;
  GemmPlanOptions plan_options;
  plan_options.device = take<int>(options, "device");
  plan_options.exchanged = take<bool>(options, "exchanged");
  plan_options.integral = take<bool>(options, "integral");
  plan_options.alpha = take<double>(options, "alpha");
  plan_options.beta = take<double>(options, "beta");
  plan_options.null_k = take<int>(options, "null_k");
  plan_options.null_lda = take<int64_t>(options, "null_lda");
  plan_options.null_ldb = take<int64_t>(options, "null_ldb");
  plan_options.null_bytes = take<uint64_t>(options, "null_bytes");
  std::vector<BatchLaunch> batches;
  for (auto const& launch : launches) {
    batches.push_back({launch[0], launch[1], launch[2], launch[3], int32_t(launch[4])});
  }
  DlExchangeApi const* allocator = like.is_none() ? nullptr : exchange_api(like);
  OperandSpec const specs[] = {spec_of(a), spec_of(b), spec_of(c), spec_of(d)};
  DeviceGuard guard(plan_options.device);
  std::shared_ptr<atomr_cutlass_row const> row = row_of(kernel, kGemmArgs);
  py::gil_scoped_release release_gil;  // the first use of a kernel loads its module
  return std::unique_ptr<GemmPlan, WithoutGil<GemmPlan>>(new GemmPlan(
      std::move(row), args, specs[0], specs[1], specs[2], specs[3], std::move(batches), plan_options, allocator));
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

py::object call(GemmPlan& self, py::object const& a, py::object const& b, py::object const& c, py::object out,
                py::object const& alpha, py::object const& beta, py::object const& stream) {
  CallArrays arrays(stream, a, "a");
  Operand const view_a = arrays.import(a, "a");
  Operand const view_b = arrays.import(b, "b");
  Operand view_c;
  if (!c.is_none()) view_c = arrays.import(c, "c");
  double const factor = scalar_of(alpha, "alpha", self.options().alpha);
  double const source_factor = scalar_of(beta, "beta", self.options().beta);

  if (out.is_none()) {
    // A wrong operand must be refused before memory is asked for.
    check_operand("a", view_a, self.input_a());
    check_operand("b", view_b, self.input_b());
    if (exchange_api(a) == nullptr) {
      throw InvalidOperand("out is needed: arrays of this type come from an allocator that plans cannot call");
    }
    if (!self.row_major_output()) throw InvalidOperand("out is needed: this plan's result is not row-major contiguous");
    out = arrays.allocate(self.output().layout);
  }
  Operand const view_out = arrays.import(out, "out");
  arrays.run(out, [&](void* queue) {
    self.launch(view_a, view_b, c.is_none() ? nullptr : &view_c, view_out, factor, source_factor, queue);
  });
  return out;
}

}  // namespace

void bind_plan(py::module_& module) {
  py::class_<JitKernel, std::shared_ptr<JitKernel>>(module, "JitKernel", "A kernel compiled at run time, loaded.")
      .def(py::init([](std::string name, std::string key, py::bytes const& kernel, py::bytes const& companion) {
             std::string const images[] = {kernel, companion};
             py::gil_scoped_release release_gil;
             return std::make_shared<JitKernel>(std::move(name), std::move(key), images[0], images[1]);
           }),
           py::arg("name"), py::arg("key"), py::arg("kernel"), py::arg("companion"))
      .def_property_readonly("name", &JitKernel::name);
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
  py::class_<GemmPlan, std::unique_ptr<GemmPlan, WithoutGil<GemmPlan>>>(
      module, "GemmPlan", py::dynamic_attr(),
      "One kernel and one problem with everything decided; calling it only launches.")
      .def(py::init(&make_plan), py::arg("kernel"), py::arg("problem"), py::arg("a"), py::arg("b"), py::arg("c"),
           py::arg("d"), py::arg("launches"), py::arg("options"), py::arg("like") = py::none())
      .def("__call__", &call, py::arg("a"), py::arg("b"), py::arg("c") = py::none(), py::kw_only(),
           py::arg("out") = py::none(), py::arg("alpha") = py::none(), py::arg("beta") = py::none(),
           py::arg("stream") = py::none())
      .def("replace", &GemmPlan::replace, py::arg("next"), py::keep_alive<1, 2>(),
           "Has launches go to another plan of the same problem, but never during the capture of a graph.")
      .def_property_readonly("kernel_name",
                             [](GemmPlan const& self) { return std::string(self.serving().row()->name); })
      .def_property_readonly(
          "kernel_handle",
          [](GemmPlan const& self) { return reinterpret_cast<uintptr_t>(kernel_handle(self.serving().row())); },
          "What identifies the loaded kernel in this process.")
      .def_property_readonly("workspace_bytes", [](GemmPlan const& self) { return self.serving().workspace_bytes(); })
      .def_property_readonly("device", &GemmPlan::device)
      .def_property_readonly("grid", [](GemmPlan const& self) {
        auto const& grid = self.serving().geometry().grid;
        return py::make_tuple(grid[0], grid[1], grid[2]);
      });
}

}  // namespace atomr_cutlass
