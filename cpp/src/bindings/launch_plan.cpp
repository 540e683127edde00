#include "../launch_plan.h"

#include <pybind11/stl.h>

#include <cstring>

#include "../errors.h"
#include "../jit.h"
#include "bindings.h"
#include "plans.h"

namespace py = pybind11;

namespace atomr_cutlass {
namespace {

// ("operand" or "temporary", index, bytes)
Address address_of(py::handle value) {
  auto const parts = value.cast<py::tuple>();
  return {parts[0].cast<std::string>() == "temporary", parts[1].cast<int>(), parts[2].cast<int64_t>()};
}

template <class Value>
void store(Step& step, size_t offset, Value value) {
  std::memcpy(step.data.data() + offset, &value, sizeof(value));
}

// ("launch", kernel, op, {field: value}): numbers, None or an address for pointers, "alpha" or "beta" for scalars.
Step launch_step(py::tuple const& given) {
  auto const op = given[2].cast<std::string>();
  Step step{Step::Kind::kLaunch, nullptr, args_of(op), {}, {}, {}, {}, 0};
  if (step.layout == nullptr) throw Unsupported("there are no plans of op " + op);
  step.row = row_of(py::object(given[1]), *step.layout);
  step.data.assign(step.layout->bytes, 0);
  for (auto const& [name, value] : given[3].cast<py::dict>()) {
    auto const field_name = name.cast<std::string>();
    ArgsField const* field = step.layout->field(field_name);
    if (field == nullptr) throw InvalidOperand("the arguments of " + op + " have no field " + field_name);
    switch (field->kind) {
      case ArgsField::Kind::kInt32: store(step, field->offset, value.cast<int32_t>()); break;
      case ArgsField::Kind::kInt64: store(step, field->offset, value.cast<int64_t>()); break;
      case ArgsField::Kind::kDouble:
        if (py::isinstance<py::str>(value)) {
          step.scalars.push_back({field->offset, value.cast<std::string>() == "beta"});
        } else {
          store(step, field->offset, value.cast<double>());
        }
        break;
      case ArgsField::Kind::kPointer:
        if (!value.is_none()) step.patches.push_back({field->offset, address_of(value)});
        break;
    }
  }
  return step;
}

Step step_of(py::tuple const& given) {
  auto const kind = given[0].cast<std::string>();
  if (kind == "launch") return launch_step(given);
  Step step{Step::Kind::kClear, nullptr, nullptr, {}, {}, {}, address_of(given[1]), 0};
  if (kind == "clear") {  // ("clear", address, bytes, value)
    step.bytes = given[2].cast<size_t>();
    step.value = given[3].cast<unsigned char>();
    return step;
  }
  step.kind = Step::Kind::kCopy;  // ("copy", address, table, [(offset, address)])
  auto const table = given[2].cast<std::string>();
  step.data.assign(table.begin(), table.end());
  for (py::handle const patch : given[3].cast<py::list>()) {
    auto const pair = patch.cast<py::tuple>();
    step.patches.push_back({pair[0].cast<size_t>(), address_of(pair[1])});
    if (step.patches.back().offset + sizeof(uint64_t) > step.data.size()) {
      throw InvalidOperand("a patch lies outside its table");
    }
  }
  return step;
}

using Owned = std::unique_ptr<LaunchPlan, WithoutGil<LaunchPlan>>;

Owned make(py::list const& slots, std::vector<size_t> const& temporaries, py::list const& steps,
           py::dict const& options, py::object const& like) {
  std::vector<Slot> made_slots;
  for (py::handle const one : slots) {  // (name, array, alignment, role)
    auto const given = one.cast<py::tuple>();
    auto const role = given[3].cast<std::string>();
    made_slots.push_back(
        {given[0].cast<std::string>(), spec_of(py::make_tuple(given[1], given[2])),
         role == "output" ? Slot::Role::kOutput : (role == "source" ? Slot::Role::kSource : Slot::Role::kInput)});
  }
  LaunchPlanOptions made_options;
  made_options.device = options["device"].cast<int>();
  made_options.integral = options["integral"].cast<bool>();
  made_options.alpha = options["alpha"].cast<double>();
  made_options.beta = options["beta"].cast<double>();
  made_options.main = options["main"].cast<size_t>();
  DlExchangeApi const* allocator = like.is_none() ? nullptr : exchange_api(like);
  DeviceGuard guard(made_options.device);
  std::vector<Step> made_steps;
  for (py::handle const one : steps) made_steps.push_back(step_of(one.cast<py::tuple>()));
  py::gil_scoped_release release_gil;  // the first use of a kernel loads its module
  return Owned(new LaunchPlan(std::move(made_slots), temporaries, std::move(made_steps), made_options, allocator));
}

bool row_major(Operand const& layout) {
  int64_t contiguous = 1;
  for (int i = layout.rank - 1; i >= 0; --i) {
    if (layout.shape[i] != 1 && layout.strides[i] != contiguous) return false;
    contiguous *= layout.shape[i];
  }
  return true;
}

// One array for each slot. The last, a result, may be given by name, or as None: it comes from the framework of the
// first array then.
py::object call(LaunchPlan& self, py::args const& arrays, py::object out, py::object const& alpha,
                py::object const& beta, py::object const& stream) {
  std::vector<Slot> const& slots = self.slots();
  size_t const count = slots.size();
  if (arrays.size() != count && arrays.size() != count - 1) {
    throw InvalidOperand("this plan takes " + std::to_string(count - 1) + " operands and a result, not " +
                         std::to_string(arrays.size()));
  }
  double const factor = scalar_of(alpha, "alpha", self.options().alpha);
  double const source_factor = scalar_of(beta, "beta", self.options().beta);
  if (arrays.size() == count) {
    if (!out.is_none()) throw InvalidOperand("out is given twice");
    out = py::object(arrays[count - 1]);
  }
  std::vector<Operand> operands(count);
  CallArrays imports(stream, arrays[0], slots[0].name.c_str());
  for (size_t i = 0; i + 1 < count; ++i) {
    if (arrays[i].is_none()) throw InvalidOperand(slots[i].name + " is needed");
    operands[i] = imports.import(arrays[i], slots[i].name.c_str());
  }
  OperandSpec const& result = slots[count - 1].spec;
  if (out.is_none()) {
    // A wrong operand must be refused before memory is asked for.
    for (size_t i = 0; i + 1 < count; ++i) self.check(i, operands[i]);
    if (exchange_api(arrays[0]) == nullptr) {
      throw InvalidOperand("out is needed: arrays of this type come from an allocator that plans cannot call");
    }
    if (!row_major(result.layout)) {
      throw InvalidOperand("out is needed: this plan's result is not row-major contiguous");
    }
    out = imports.allocate(result.layout);
  }
  operands[count - 1] = imports.import(out, slots[count - 1].name.c_str());
  imports.run(out, [&](void* queue) { self.launch(operands, factor, source_factor, queue); });
  return out;
}

}  // namespace

void bind_launch_plan(py::module_& module) {
  py::class_<LaunchPlan, Owned>(module, "LaunchPlan", py::dynamic_attr(),
                                "Kernels and one problem with everything decided; calling it only launches.")
      .def(py::init(&make), py::arg("slots"), py::arg("temporaries"), py::arg("steps"), py::arg("options"),
           py::arg("like") = py::none())
      .def("__call__", &call, py::kw_only(), py::arg("out") = py::none(), py::arg("alpha") = py::none(),
           py::arg("beta") = py::none(), py::arg("stream") = py::none())
      .def_property_readonly("slots",
                             [](LaunchPlan const& self) {
                               py::list names;
                               for (Slot const& slot : self.slots()) names.append(slot.name);
                               return names;
                             })
      .def_property_readonly("kernel_names", &LaunchPlan::kernel_names)
      .def_property_readonly("kernel_name", [](LaunchPlan const& self) { return std::string(self.main().row()->name); })
      .def_property_readonly(
          "kernel_handle",
          [](LaunchPlan const& self) { return reinterpret_cast<uintptr_t>(kernel_handle(self.main().row())); },
          "What identifies the loaded kernel in this process.")
      .def_property_readonly("workspace_bytes", &LaunchPlan::workspace_bytes)
      .def_property_readonly("launches", &LaunchPlan::steps, "Kernels, clears and copies that a call enqueues.")
      .def_property_readonly("device", [](LaunchPlan const& self) { return self.options().device; });
}

}  // namespace atomr_cutlass
