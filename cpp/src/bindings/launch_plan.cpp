#include "../launch_plan.h"

#include <pybind11/stl.h>

#include <cstring>
#include <map>

#include "../errors.h"
#include "../inline_vector.h"
#include "../jit.h"
#include "bindings.h"
#include "plans.h"
#include "vectorcall.h"

namespace py = pybind11;

namespace atomr_cutlass {
namespace {

template <class Value>
void store(Step& step, size_t offset, Value value) {
  std::memcpy(step.data.data() + offset, &value, sizeof(value));
}

Step::When when_of(std::string const& when) {
  return when == "product" ? Step::When::kProduct : when == "no product" ? Step::When::kNoProduct : Step::When::kAlways;
}

using Owned = std::unique_ptr<LaunchPlan, WithoutGil<LaunchPlan>>;

Owned make(Blueprint& blueprint, py::object const& like, bool keep) {
  DlExchangeApi const* allocator = like.is_none() ? nullptr : exchange_api(like);
  DeviceGuard guard(blueprint.device());
  Blueprint own = keep ? blueprint : std::move(blueprint);
  py::gil_scoped_release release_gil;  // the first use of a kernel loads its module
  return Owned(std::move(own).plan(allocator).release());
}

// Names of arguments, interned, as those of calls nearly always are.
struct Names {
  PyObject* out = PyUnicode_InternFromString("out");
  PyObject* alpha = PyUnicode_InternFromString("alpha");
  PyObject* beta = PyUnicode_InternFromString("beta");
  PyObject* stream = PyUnicode_InternFromString("stream");
};

struct Given {
  explicit Given(size_t slots) : arrays(slots) {}
  InlineVector<PyObject*, 8> arrays;  // one for each slot, the result last; null for what is not given
  PyObject* alpha = Py_None;
  PyObject* beta = Py_None;
  PyObject* stream = Py_None;
};

void give(Given& given, size_t slot, std::string const& name, PyObject* value) {
  if (value == Py_None) return;
  if (given.arrays[slot] != nullptr) throw InvalidOperand(name + " is given twice");
  given.arrays[slot] = value;
}

void read_arguments(Given& given, std::vector<Slot> const& slots, PyObject* const* values, size_t count,
                    PyObject* names) {
  static Names const& known = *new Names();
  if (count > slots.size()) {
    throw InvalidOperand("this plan takes " + std::to_string(slots.size() - 1) + " operands and a result, not " +
                         std::to_string(count));
  }
  for (size_t i = 0; i < count; ++i) give(given, i, slots[i].name, values[i]);
  Py_ssize_t const named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  for (Py_ssize_t i = 0; i < named; ++i) {
    PyObject* const name = PyTuple_GET_ITEM(names, i);
    PyObject* const value = values[count + size_t(i)];
    auto const is = [name](PyObject* other) { return name == other || PyUnicode_Compare(name, other) == 0; };
    if (is(known.out)) {
      give(given, slots.size() - 1, "out", value);
    } else if (is(known.stream)) {
      given.stream = value;
    } else if (is(known.alpha)) {
      given.alpha = value;
    } else if (is(known.beta)) {
      given.beta = value;
    } else {
      size_t slot = 0;
      while (slot < slots.size() && PyUnicode_CompareWithASCIIString(name, slots[slot].name.c_str()) != 0) ++slot;
      if (slot == slots.size()) throw py::type_error("this plan has no argument " + py::cast<std::string>(name));
      give(given, slot, slots[slot].name, value);
    }
  }
}

bool row_major(Operand const& layout) {
  int64_t contiguous = 1;
  for (int i = layout.rank - 1; i >= 0; --i) {
    if (layout.shape[i] != 1 && layout.strides[i] != contiguous) return false;
    contiguous *= layout.shape[i];
  }
  return true;
}

// The place of the array whose framework the call belongs to: the first one that is not a view of ours, such as a bound
// operand is; of views alone the first.
size_t leading_array(Given const& given) {
  if (exchange_api(given.arrays[0]) != nullptr) return 0;
  for (size_t i = 0; i + 1 < given.arrays.size(); ++i) {
    if (given.arrays[i] != nullptr && !py::isinstance<OwnedOperand>(given.arrays[i])) return i;
  }
  return 0;
}

// Launches a call of nearly every loop: all arrays, the result among them, belong to one framework with the exchange
// API, lie as the plan was made for, and no stream is named. False for others, which are imported one by one.
bool launch_at(LaunchPlan& self, Given const& given, double alpha, double beta) {
  std::vector<Slot> const& slots = self.slots();
  DlExchangeApi const* const api = exchange_api(given.arrays[0]);
  if (api == nullptr || given.stream != Py_None) return false;
  InlineVector<Place, 6> places;
  for (size_t i = 0; i < slots.size(); ++i) {
    PyObject* const array = given.arrays[i];
    Place& place = places.emplace_back();
    if (array == nullptr && slots[i].optional) continue;
    if (array == nullptr || exchange_api(array) != api) return false;
    refuse_gradient(array, slots[i].name.c_str());
    DlTensor view;
    if (api->view_of_object(array, &view) != 0) throw py::error_already_set();
    if (!matches(view, slots[i].spec.layout)) return false;
    place = {static_cast<char*>(view.data) + view.byte_offset, true, false, false};
  }
  void* const stream = framework_stream(api, {kDlCuda, self.options().device});
  py::gil_scoped_release release_gil;
  self.launch(places.data(), alpha, beta, stream);
  return true;
}

// The last operand, a result, comes from that framework where it is not given.
py::object call(LaunchPlan& self, Given const& given) {
  std::vector<Slot> const& slots = self.slots();
  size_t const last = slots.size() - 1;
  double const alpha = scalar_of(given.alpha, "alpha", self.options().alpha);
  double const beta = scalar_of(given.beta, "beta", self.options().beta);
  if (given.arrays[0] != nullptr && given.arrays[last] != nullptr && launch_at(self, given, alpha, beta)) {
    return py::reinterpret_borrow<py::object>(given.arrays[last]);
  }
  if (given.arrays[0] == nullptr) throw InvalidOperand(slots[0].name + " is needed");
  InlineVector<Operand, 6> operands(slots.size());
  size_t const leading = leading_array(given);
  CallArrays arrays(given.stream, given.arrays[leading], slots[leading].name.c_str());
  for (size_t i = 0; i < last; ++i) {
    if (given.arrays[i] != nullptr) {
      operands[i] = arrays.import(given.arrays[i], slots[i].name.c_str());
    } else if (!slots[i].optional) {
      throw InvalidOperand(slots[i].name + " is needed");
    }
  }
  auto out = py::reinterpret_borrow<py::object>(given.arrays[last]);
  if (!out) {
    OperandSpec const& result = slots[last].spec;
    // A wrong operand must be refused before memory is asked for.
    for (size_t i = 0; i < last; ++i) {
      if (operands[i].given()) self.check(i, operands[i]);
    }
    if (exchange_api(given.arrays[leading]) == nullptr) {
      throw InvalidOperand("out is needed: arrays of this type come from an allocator that plans cannot call");
    }
    if (!row_major(result.layout)) {
      throw InvalidOperand("out is needed: this plan's result is not row-major contiguous");
    }
    NewArray made = arrays.allocate(result.layout);
    operands[last] = made.operand;
    out = std::move(made.array);
  } else {
    operands[last] = arrays.import(out, slots[last].name.c_str());
  }
  arrays.run([&](void* queue) { self.launch({operands.data(), operands.size()}, alpha, beta, queue); });
  arrays.written(out);
  arrays.finish();
  return out;
}

py::object vectorcall(LaunchPlan& self, PyObject* const* values, size_t count, PyObject* names) {
  Given given(self.slots().size());
  read_arguments(given, self.slots(), values, count, names);
  return call(self, given);
}

}  // namespace

Blueprint::Blueprint(py::list const& slots, py::list const& temporaries, py::list const& steps, py::dict const& options,
                     py::sequence const& facts) {
  options_.device = options["device"].cast<int>();
  options_.integral = options["integral"].cast<bool>();
  options_.alpha = options["alpha"].cast<double>();
  options_.beta = options["beta"].cast<double>();
  options_.main = options["main"].cast<size_t>();
  options_.zeros = size_t(number(options["zeros"], Hole::Where::kZeros, 0, 0));
  for (py::handle const slot : slots) slots_.push_back(slot_of(slot.cast<py::tuple>(), slots_.size()));
  for (py::handle const bytes : temporaries) {
    temporaries_.push_back(size_t(number(bytes, Hole::Where::kTemporary, temporaries_.size(), 0)));
  }
  for (py::handle const step : steps) steps_.push_back(step_of(step.cast<py::tuple>(), steps_.size()));
  for (py::handle const fact : facts) facts_.push_back(number(fact, Hole::Where::kFact, facts_.size(), 0));
  rows_.clear();
}

int64_t Blueprint::number(py::handle value, Hole::Where where, size_t index, size_t place) {
  if (!is_symbol(value)) return value.cast<int64_t>();
  auto const& symbol = value.cast<Symbol const&>();
  holes_.push_back({where, index, place, symbol.place});
  return symbol.value.cast<int64_t>();
}

// (name, shape, strides, element, alignment, role)
Slot Blueprint::slot_of(py::tuple const& given, size_t index) {
  auto const role = given[5].cast<std::string>();
  auto const shape = given[1].cast<py::sequence>(), strides = given[2].cast<py::sequence>();
  if (shape.size() > size_t(kMaxRank)) throw InvalidOperand("an operand of a plan has too many dimensions");
  Slot made{given[0].cast<std::string>(), {}};
  Operand& layout = made.spec.layout;
  layout.device = {kDlCuda, options_.device};
  auto const [code, bits] = given[3].cast<std::pair<int, int>>();
  layout.dtype = {uint8_t(code), uint8_t(bits), 1};
  layout.rank = int32_t(shape.size());
  for (size_t i = 0; i < shape.size(); ++i) {
    layout.shape[i] = number(shape[i], Hole::Where::kShape, index, i);
    layout.strides[i] = number(strides[i], Hole::Where::kStride, index, i);
    if (layout.shape[i] == 1) layout.strides[i] = 0;
  }
  made.spec.alignment = given[4].cast<int>();
  made.optional = role == "optional source";
  if (role == "source" || made.optional) made.role = Slot::Role::kSource;
  if (role == "output") made.role = Slot::Role::kOutput;
  return made;
}

// (base, index, bytes)
Address Blueprint::address_of(py::handle value, Hole::Where where, size_t index, size_t place) {
  auto const parts = value.cast<py::tuple>();
  auto const base = parts[0].cast<std::string>();
  Address made{Address::Base::kOperand, parts[1].cast<int>(), number(parts[2], where, index, place)};
  if (base == "temporary") made.base = Address::Base::kTemporary;
  if (base == "zeros") made.base = Address::Base::kZeros;
  return made;
}

// ("launch", kernel, op, {field: value}, when): numbers, ("settled", operand, bits) for an int32, None or an address
// for pointers, "alpha" or "beta" for scalars. Launches of a kernel share its row.
Step Blueprint::launch_step(py::tuple const& given, size_t index) {
  auto const op = given[2].cast<std::string>();
  Step step{};
  step.kind = Step::Kind::kLaunch;
  step.layout = args_of(op);
  if (step.layout == nullptr) throw Unsupported("there are no plans of op " + op);
  auto& row = rows_[py::object(given[1]).ptr()];
  if (row == nullptr) {
    DeviceGuard guard(options_.device);  // a kernel compiled at run time loads its module on the current device
    row = row_of(py::object(given[1]), *step.layout);
  }
  step.row = row;
  if (given.size() > 4) step.when = when_of(given[4].cast<std::string>());
  step.data.assign(step.layout->bytes, 0);
  for (auto const& [name, value] : given[3].cast<py::dict>()) {
    auto const field_name = name.cast<std::string>();
    ArgsField const* field = step.layout->field(field_name);
    if (field == nullptr) throw InvalidOperand("the arguments of " + op + " have no field " + field_name);
    switch (field->kind) {
      case ArgsField::Kind::kInt32:
        if (PyTuple_Check(value.ptr()) != 0) {
          auto const settled = value.cast<py::tuple>();
          step.settled.push_back({field->offset, settled[1].cast<int>(), settled[2].cast<int32_t>()});
        } else if (is_symbol(value)) {
          store(step, field->offset, int32_t(number(value, Hole::Where::kInt32, index, field->offset)));
        } else {
          store(step, field->offset, value.cast<int32_t>());
        }
        break;
      case ArgsField::Kind::kInt64:
        store(step, field->offset, number(value, Hole::Where::kInt64, index, field->offset));
        break;
      case ArgsField::Kind::kDouble:
        if (py::isinstance<py::str>(value)) {
          step.scalars.push_back({field->offset, value.cast<std::string>() == "beta"});
        } else {
          store(step, field->offset, value.cast<double>());
        }
        break;
      case ArgsField::Kind::kPointer:
        if (value.is_none()) break;
        step.patches.push_back({field->offset, address_of(value, Hole::Where::kPatch, index, step.patches.size())});
        break;
    }
  }
  return step;
}

Step Blueprint::step_of(py::tuple const& given, size_t index) {
  auto const kind = given[0].cast<std::string>();
  if (kind == "launch") return launch_step(given, index);
  Step step{};
  step.target = address_of(given[1], Hole::Where::kTarget, index, 0);
  if (kind == "clear") {  // ("clear", address, bytes, value)
    step.kind = Step::Kind::kClear;
    step.bytes = size_t(number(given[2], Hole::Where::kBytes, index, 0));
    step.value = given[3].cast<unsigned char>();
    return step;
  }
  step.kind = Step::Kind::kCopy;  // ("copy", address, table, [(offset, address)])
  auto const table = given[2].cast<std::string>();
  step.data.assign(table.begin(), table.end());
  for (py::handle const patch : given[3].cast<py::list>()) {
    auto const pair = patch.cast<py::tuple>();
    Address const address = address_of(pair[1], Hole::Where::kPatch, index, step.patches.size());
    step.patches.push_back({pair[0].cast<size_t>(), address});
    if (step.patches.back().offset + sizeof(uint64_t) > step.data.size()) {
      throw InvalidOperand("a patch lies outside its table");
    }
  }
  return step;
}

Blueprint Blueprint::filled(std::vector<Number> const& numbers) const {
  Blueprint made = *this;
  for (Hole const& hole : holes_) made.fill(hole, numbers.at(hole.number).whole);
  for (Slot& slot : made.slots_) {
    Operand& layout = slot.spec.layout;
    for (int i = 0; i < layout.rank; ++i) {
      if (layout.shape[i] == 1) layout.strides[i] = 0;
    }
  }
  return made;
}

void Blueprint::fill(Hole const& hole, int64_t number) {
  switch (hole.where) {
    case Hole::Where::kShape: slots_[hole.index].spec.layout.shape[hole.place] = number; break;
    case Hole::Where::kStride: slots_[hole.index].spec.layout.strides[hole.place] = number; break;
    case Hole::Where::kTemporary: temporaries_[hole.index] = size_t(number); break;
    case Hole::Where::kInt32:
      if (number != int32_t(number)) throw InvalidOperand("an argument of a kernel is beyond 32 bits");
      store(steps_[hole.index], hole.place, int32_t(number));
      break;
    case Hole::Where::kInt64: store(steps_[hole.index], hole.place, number); break;
    case Hole::Where::kPatch: steps_[hole.index].patches[hole.place].address.bytes = number; break;
    case Hole::Where::kTarget: steps_[hole.index].target.bytes = number; break;
    case Hole::Where::kBytes: steps_[hole.index].bytes = size_t(number); break;
    case Hole::Where::kZeros: options_.zeros = size_t(number); break;
    case Hole::Where::kFact: facts_[hole.index] = number; break;
  }
}

std::unique_ptr<LaunchPlan> Blueprint::plan(DlExchangeApi const* allocator) && {
  return std::make_unique<LaunchPlan>(std::move(slots_), temporaries_, std::move(steps_), options_, allocator);
}

py::dict Blueprint::arguments(size_t launch, py::sequence const& names) const {
  py::dict made;
  for (Step const& step : steps_) {
    if (step.kind != Step::Kind::kLaunch || launch-- != 0) continue;
    for (py::handle const name : names) {
      ArgsField const* field = step.layout->field(name.cast<std::string>());
      if (field == nullptr || field->kind == ArgsField::Kind::kPointer || field->kind == ArgsField::Kind::kDouble) {
        continue;
      }
      int64_t value = 0;
      bool const wide = field->kind == ArgsField::Kind::kInt64;
      std::memcpy(&value, step.data.data() + field->offset, wide ? sizeof(int64_t) : sizeof(int32_t));
      made[name] = wide ? value : int64_t(int32_t(value));
    }
    break;
  }
  return made;
}

void bind_launch_plan(py::module_& module) {
  py::class_<Symbol>(module, "Symbol", "A number of a plan that other extents make another.")
      .def(py::init<uint32_t, py::object>(), py::arg("place"), py::arg("value"))
      .def_readonly("place", &Symbol::place)
      .def_readonly("value", &Symbol::value);
  py::class_<Blueprint>(module, "Blueprint", "Everything that a plan is made from, whose numbers may be symbols.")
      .def(py::init<py::list const&, py::list const&, py::list const&, py::dict const&, py::sequence const&>(),
           py::arg("slots"), py::arg("temporaries"), py::arg("steps"), py::arg("options"),
           py::arg("facts") = py::tuple())
      .def_property_readonly("facts", &Blueprint::facts, "Numbers of the problem, which no launch reads.")
      .def("arguments", &Blueprint::arguments, py::arg("launch"), py::arg("names"),
           "The integers among the arguments of a launch that have these names.");
  py::class_<LaunchPlan, Owned>(module, "LaunchPlan", py::dynamic_attr(),
                                py::custom_type_setup(&Vectorcall<LaunchPlan, &vectorcall>::setup),
                                "Kernels and one problem with everything decided; calling it only launches.")
      .def(py::init(&make), py::arg("blueprint"), py::arg("like") = py::none(), py::arg("keep") = false)
      .def("replace", &LaunchPlan::replace, py::arg("next"), py::keep_alive<1, 2>(),
           "Has launches go to another plan of the same operands, but never during the capture of a graph.")
      .def_property_readonly(
          "replaced", [](LaunchPlan const& self) { return &self.serving() != &self; },
          "Whether launches go to another plan by now.")
      .def_property("superseded", &LaunchPlan::superseded, &LaunchPlan::supersede,
                    "Whether a plan that is made now would have a better kernel, which this one cannot switch to.")
      .def_property_readonly("slots",
                             [](LaunchPlan const& self) {
                               py::list names;
                               for (Slot const& slot : self.slots()) names.append(slot.name);
                               return names;
                             })
      .def_property_readonly("kernel_names", [](LaunchPlan const& self) { return self.serving().kernel_names(); })
      .def_property_readonly("kernel_name",
                             [](LaunchPlan const& self) { return std::string(self.serving().main().row()->name); })
      .def_property_readonly(
          "kernel_handle",
          [](LaunchPlan const& self) {
            return reinterpret_cast<uintptr_t>(kernel_handle(self.serving().main().row()));
          },
          "What identifies the loaded kernel in this process.")
      .def_property_readonly("workspace_bytes", [](LaunchPlan const& self) { return self.serving().workspace_bytes(); })
      .def_property_readonly(
          "launches", [](LaunchPlan const& self) { return self.serving().steps(); },
          "Kernels, clears and copies that a call enqueues.")
      .def_property_readonly("grid",
                             [](LaunchPlan const& self) {
                               auto const& grid = self.serving().main().geometry().grid;
                               return py::make_tuple(grid[0], grid[1], grid[2]);
                             })
      .def_property_readonly("device", [](LaunchPlan const& self) { return self.options().device; });
}

}  // namespace atomr_cutlass
