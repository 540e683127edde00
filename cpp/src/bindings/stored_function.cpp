// Functions whose calls find the plan of an earlier one: a warm call is one entry into C++, which reads the arrays,
// looks their plan up, allocates the result and launches. Python parses every other call, plans it, and has the plan
// kept.
#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include <pybind11/stl.h>

#include "../errors.h"
#include "../inline_vector.h"
#include "../registry.h"
#include "bindings.h"
#include "environment.h"
#include "exchange.h"
#include "plan_store.h"
#include "vectorcall.h"

namespace py = pybind11;

namespace atomr_cutlass {
namespace {

constexpr size_t kParametersAtMost = 32;
constexpr uint64_t kOthers = kParametersAtMost;  // from here on arguments are those that have no parameter
constexpr char kResult[] = "out";

struct Parameter {
  enum class Role : uint8_t { kOption, kShape, kArray, kScale, kFactor, kAlpha, kBeta, kStream };
  py::object name;
  Role role;
  std::string label;    // the operand's name; of an array
  py::object fallback;  // null: it must be given
};

// The arguments of a call, by parameter; null for those that are not given.
struct Arguments {
  std::array<PyObject*, kParametersAtMost> values{};
  std::vector<std::pair<PyObject*, PyObject*>> others;  // (name, value)
};

// One of the arrays of a call.
struct View {
  PyObject* array;
  size_t argument;
  int member;  // of a list, else -1
  Operand operand;
  size_t first;  // its place among the key's extents
};

using Operands = InlineVector<Operand, 6>;
using Places = InlineVector<Place, 6>;
using NewArrays = InlineVector<NewArray, 2>;

std::string label_of(std::string const& name, int member) {
  return member < 0 ? name : name + "[" + std::to_string(member) + "]";
}

bool listed(PyObject* value) { return PyList_Check(value) != 0 || PyTuple_Check(value) != 0; }

bool numpy_number(PyTypeObject* type) {
  static auto const& types = *[] {
    auto* const found = new std::vector<PyTypeObject*>();
    auto const numpy = py::module_::import("numpy");
    for (char const* const name :
         {"float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}) {
      found->push_back(reinterpret_cast<PyTypeObject*>(py::object(numpy.attr(name)).release().ptr()));
    }
    return found;
  }();
  return std::find(types.begin(), types.end(), type) != types.end();
}

// The value of a number, but of a boolean; nothing for what is none, or beyond a double's range.
std::optional<double> number_of(PyObject* value) {
  if (PyFloat_CheckExact(value) != 0) return PyFloat_AS_DOUBLE(value);
  if (PyLong_CheckExact(value) == 0 && !numpy_number(Py_TYPE(value))) return std::nullopt;
  double const number = PyFloat_AsDouble(value);
  if (number == -1.0 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    return std::nullopt;
  }
  return number;
}

// A call on the way to its plan: the arrays, imported for its launch stream, the scalars, and the key.
struct Attempt {
  std::optional<CallArrays> arrays;
  InlineVector<View, 6> views;
  InlineVector<py::object, 2> members;  // of lists, which may change meanwhile
  InlineVector<std::pair<PyObject*, size_t>, 1> shapes;  // options that are, with their places among the key's extents
  double alpha = 1.0, beta = 0.0, scale_d = 1.0;
  PlanStoreKey key;
  std::shared_ptr<PlanStoreKey const> kept;  // the key, once no plan has been found by it
  std::shared_ptr<PlanFamily> family;
};

Instruction::Op operation_of(std::string const& name) {
  using Op = Instruction::Op;
  static auto const& known = *new std::unordered_map<std::string, Op>{
      {"constant", Op::kConstant}, {"input", Op::kInput}, {"+", Op::kAdd},
      {"-", Op::kSubtract},        {"*", Op::kMultiply},  {"/", Op::kDivide},
      {"//", Op::kFloorDivide},    {"%", Op::kModulo},    {"&", Op::kAnd},
      {"gcd", Op::kGcd},           {"<", Op::kLess},      {"<=", Op::kLessEqual},
      {"==", Op::kEqual},          {"rank", Op::kRank},   {"least", Op::kLeast},
      {"guard", Op::kGuard}};
  return known.at(name);
}

Number number_from(py::handle value) {
  return PyFloat_Check(value.ptr()) != 0 ? Number::of(value.cast<double>()) : Number::of(value.cast<int64_t>());
}

// ("constant", number), ("input", place), (operation, place, place), ("rank", ranking, places of each formulation's
// extents, undivided), ("least", model, kernel, places of the extents, device), ("guard", place, number)
Instruction instruction_of(py::tuple const& given) {
  using Places = std::vector<uint32_t>;
  Instruction made{operation_of(given[0].cast<std::string>())};
  switch (made.op) {
    case Instruction::Op::kConstant: made.constant = number_from(given[1]); break;
    case Instruction::Op::kInput: made.a = given[1].cast<uint32_t>(); break;
    case Instruction::Op::kRank: {
      Estimated& of = made.estimated.emplace();
      of.ranking = given[1].cast<std::shared_ptr<estimate::Ranking>>();
      of.extents = given[2].cast<std::vector<Places>>();
      of.undivided = given[3].cast<bool>();
      break;
    }
    case Instruction::Op::kLeast: {
      Estimated& of = made.estimated.emplace();
      of.extents = {given[3].cast<Places>()};
      of.model = given[1].cast<std::shared_ptr<estimate::Model>>();
      of.kernel = given[2].cast<std::shared_ptr<estimate::Kernel>>();
      of.gpu = read_gpu(given[4]);
      break;
    }
    case Instruction::Op::kGuard:
      made.a = given[1].cast<uint32_t>();
      made.constant = number_from(given[2]);
      break;
    default: made.a = given[1].cast<uint32_t>(), made.b = given[2].cast<uint32_t>();
  }
  return made;
}

// What is left of a call that no plan is kept for: where the plan that is made of it belongs.
class PendingCall {
 public:
  PendingCall(std::shared_ptr<PlanStore> store, Attempt const& attempt, std::vector<std::string> labels)
      : store_(std::move(store)),
        key_(attempt.kept),
        family_(attempt.family),
        launch_(attempt.arrays ? attempt.arrays->launch_stream() : py::object()),
        labels_(std::move(labels)) {
    if (!learns()) return;
    auto const add = [this](PyObject* given, size_t first) {
      inputs_.append(py::make_tuple(py::reinterpret_borrow<py::object>(given), first));
    };
    for (View const& view : attempt.views) add(view.array, view.first);
    for (auto const& [shape, first] : attempt.shapes) add(shape, first);
  }

  // The `LaunchStream` that has imported arrays of the call; None where there is none.
  py::object launch() const { return launch_ ? launch_ : py::none(); }

  py::object plan() const {
    if (key_ == nullptr) return py::none();
    auto const kept = store_->find(*key_);
    return kept != nullptr && !kept->superseded() ? kept->plan : py::none();
  }

  // Whether others of its family are to profit from how this call is planned.
  bool learns() const { return family_ != nullptr && family_->learns(); }

  // Begins to learn; the arrays (and shapes) whose extents and strides are the inputs, each with the place of its
  // first.
  py::list inputs() const {
    family_->try_one();
    return inputs_;
  }

  // Keeps a plan for calls like this one. `names` and `views` are of its operands, in order; `made` is (name, shape,
  // element) of the results that a call makes; those with as many dimensions as `axes` are given to the caller in that
  // order of them. `learned` is (program, blueprint, what makes a plan of one), or None; `memory` as of CachedLaunch.
  void keep(py::object plan, std::vector<std::string> const& names, std::vector<OwnedOperand> const& views,
            py::list const& made, py::object arrange, std::vector<int> const& axes, std::pair<double, double> scalars,
            bool parsed, py::object const& learned, bool memory) const {
    if (key_ == nullptr) return;
    auto stored = std::make_shared<StoredPlan>();
    std::vector<CachedLaunch::Hole> holes;
    size_t count = names.size();
    if (py::isinstance<LaunchPlan>(plan)) {
      stored->launch = plan.cast<LaunchPlan*>();
      count = stored->launch->slots().size();
    }
    for (py::handle const result : made) {
      stored->results.push_back(result_of(result.cast<py::tuple>(), plan, axes, stored->results.size(), holes));
    }
    stored->sources.resize(count);
    for (size_t i = 0; i < names.size(); ++i) {
      // The operands that may be left out come last before the result.
      size_t const place = i + 1 == names.size() ? count - 1 : i;
      StoredPlan::Source& source = stored->sources[place];
      source.layout = views[i].operand;
      source.written = i + 1 == names.size() ||
                       (stored->launch != nullptr && stored->launch->slots()[place].role == Slot::Role::kOutput);
      if (!found(names[i], *stored, source)) return;
    }
    if (!arrange.is_none()) stored->arrange = std::move(arrange);
    std::tie(stored->alpha, stored->beta) = scalars;
    stored->parsed = parsed;
    if (!learned.is_none() && !parsed && family_ != nullptr && stored->launch != nullptr) {
      try {
        learn(learned, *stored, std::move(holes), memory);
      } catch (py::cast_error const&) {
        // A constant beyond 64 bits: the call has been served, and others are planned as it was.
      }
    }
    stored->plan = std::move(plan);
    stored->note_layouts();
    store_->put(key_, std::move(stored));
  }

 private:
  void learn(py::object const& learned, StoredPlan like, std::vector<CachedLaunch::Hole> holes, bool memory) const {
    auto const [program, blueprint, remake] = learned.cast<std::tuple<py::list, py::object, py::object>>();
    std::vector<Instruction> steps;
    for (py::handle const step : program) steps.push_back(instruction_of(step.cast<py::tuple>()));
    like.launch = nullptr;
    store_->learn(*family_, steps,
                  {blueprint.cast<Blueprint const&>(), remake, std::move(like), std::move(holes), memory});
  }

  static StoredPlan::Result result_of(py::tuple const& given, py::handle plan, std::vector<int> const& axes,
                                      size_t result, std::vector<CachedLaunch::Hole>& holes) {
    Operand layout;
    layout.device = {kDlCuda, plan.attr("device").cast<int>()};
    auto const [code, bits] = given[2].cast<std::pair<int, int>>();
    layout.dtype = {uint8_t(code), uint8_t(bits), 1};
    for (py::handle extent : given[1].cast<py::tuple>()) {
      if (is_symbol(extent)) {
        auto const& symbol = extent.cast<Symbol const&>();
        holes.push_back({result, layout.rank, symbol.place});
        extent = symbol.value;
      }
      layout.shape[layout.rank++] = extent.cast<int64_t>();
    }
    return {given[0].cast<py::str>(), layout, size_t(layout.rank) == axes.size() ? axes : std::vector<int>()};
  }

  bool found(std::string const& name, StoredPlan const& stored, StoredPlan::Source& source) const {
    for (size_t i = 0; i < stored.results.size(); ++i) {
      if (stored.results[i].label.cast<std::string>() == name) source.result = int(i);
    }
    for (size_t i = 0; i < labels_.size() && source.result < 0; ++i) {
      if (labels_[i] == name) source.view = int(i);
    }
    return source.result >= 0 || source.view >= 0;
  }

  std::shared_ptr<PlanStore> store_;
  std::shared_ptr<PlanStoreKey const> key_;  // null: plans of such calls are not kept
  std::shared_ptr<PlanFamily> family_;
  py::object launch_;
  py::list inputs_;
  std::vector<std::string> labels_;  // of the call's views
};

class StoredFunction {
 public:
  // `parameters` are (name, role, label, the default in a tuple, which is empty where there is none).
  StoredFunction(py::object function, std::shared_ptr<PlanStore> store, py::object serve, py::list const& parameters,
                 size_t positional, bool others, std::vector<std::string> environment)
      : function_(std::move(function)),
        serve_(std::move(serve)),
        store_(std::move(store)),
        positional_(positional),
        others_(others),
        environment_(std::move(environment)) {
    static auto const& roles = *new std::unordered_map<std::string, Parameter::Role>{
        {"option", Parameter::Role::kOption}, {"shape", Parameter::Role::kShape},   {"array", Parameter::Role::kArray},
        {"scale", Parameter::Role::kScale},   {"factor", Parameter::Role::kFactor}, {"alpha", Parameter::Role::kAlpha},
        {"beta", Parameter::Role::kBeta},     {"stream", Parameter::Role::kStream}};
    numpy_number(nullptr);  // finds NumPy's types now: not while another thread waits for that with the GIL
    static uint64_t functions = 0;
    number_ = ++functions;
    if (parameters.size() > kParametersAtMost) throw InvalidOperand("a stored function has too many parameters");
    for (py::handle const given : parameters) {
      auto const [name, role, label, fallback] = given.cast<std::tuple<py::str, std::string, std::string, py::tuple>>();
      PyObject* interned = py::object(name).release().ptr();
      PyUnicode_InternInPlace(&interned);
      if (role == "stream") stream_ = parameters_.size();
      if (label == kResult) out_ = parameters_.size();
      alpha_ |= role == "alpha" || role == "factor";
      beta_ |= role == "beta";
      parameters_.push_back({py::reinterpret_steal<py::object>(interned), roles.at(role), label,
                             fallback.size() != 0 ? py::object(fallback[0]) : py::object()});
    }
  }

  py::object call(PyObject* const* values, size_t count, PyObject* names) {
    py::object pending = py::none();
    if (Arguments arguments; bind(arguments, values, count, names)) {
      if (py::object result = warm(arguments, pending)) return result;
    }
    auto const described =
        py::reinterpret_steal<py::object>(PyObject_Vectorcall(function_.ptr(), values, count, names));
    if (!described) throw py::error_already_set();
    return serve_(described, pending);
  }

  std::string qualified_name() const { return function_.attr("__qualname__").cast<std::string>(); }

 private:
  // False for arguments that the function itself is to refuse.
  bool bind(Arguments& arguments, PyObject* const* values, size_t count, PyObject* names) const {
    if (count > positional_) return false;
    std::copy_n(values, count, arguments.values.begin());
    Py_ssize_t const named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
    for (Py_ssize_t i = 0; i < named; ++i) {
      PyObject* const name = PyTuple_GET_ITEM(names, i);
      PyObject* const value = values[count + size_t(i)];
      size_t const place = parameter(name);
      if (place == parameters_.size()) {
        if (!others_) return false;
        arguments.others.emplace_back(name, value);
      } else if (arguments.values[place] != nullptr) {
        return false;
      } else {
        arguments.values[place] = value;
      }
    }
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (arguments.values[i] == nullptr && !parameters_[i].fallback) return false;
    }
    return true;
  }

  // The place of a parameter, or their number. Names are nearly always interned.
  size_t parameter(PyObject* name) const {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (parameters_[i].name.ptr() == name) return i;
    }
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (PyUnicode_Compare(parameters_[i].name.ptr(), name) == 0) return i;
    }
    return parameters_.size();
  }

  // The result of a call that a kept plan serves; null for others, with `pending` for those that can have a plan kept.
  py::object warm(Arguments const& arguments, py::object& pending) {
    Attempt attempt;
    std::shared_ptr<StoredPlan const> stored;
    bool keyed = false;
    try {
      keyed = describe(arguments, attempt);
      if (keyed) {
        stored = store_->find(attempt.key);
        if (stored == nullptr) stored = derived(attempt);
      }
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_Exception)) throw;  // parsing will meet it again
      keyed = false;
    } catch (std::exception const&) {
      keyed = false;  // likewise
    }
    if (stored != nullptr && !stored->parsed && !stored->superseded()) {
      try {
        return launch(*stored, arguments, attempt);
      } catch (InvalidOperand const&) {
        // A plan refuses operands before it launches: parsing says in the caller's words why.
      } catch (py::error_already_set& error) {
        if (!error.matches(py::module_::import("atomr_cutlass.errors").attr("InvalidOperandError"))) throw;
      }
    }
    py::object const launch = attempt.arrays ? attempt.arrays->launch_stream() : py::object();
    if (keyed || launch) {
      std::vector<std::string> labels;
      for (View const& view : attempt.views) labels.push_back(label_of(label(arguments, view.argument), view.member));
      if (!keyed) attempt.kept = nullptr, attempt.family = nullptr;
      if (keyed && attempt.kept == nullptr) attempt.kept = attempt.key.moved();
      pending = py::cast(PendingCall(store_, attempt, std::move(labels)));
    }
    return {};
  }

  // The plan of a call that differs from others in extents and strides alone; null where they do not tell it.
  std::shared_ptr<StoredPlan const> derived(Attempt& attempt) const {
    attempt.kept = attempt.key.moved();
    attempt.family = store_->family(attempt.kept);
    if (attempt.family == nullptr) return nullptr;
    try {
      return remade(attempt);
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_Exception)) throw;
    } catch (std::exception const&) {
      // Python will meet it again, and say what it is.
    }
    return nullptr;
  }

  std::shared_ptr<StoredPlan const> remade(Attempt& attempt) const {
    std::vector<Number> numbers;
    auto const cached = attempt.family->find(*attempt.kept, numbers);
    if (cached == nullptr) return nullptr;
    auto stored = std::make_shared<StoredPlan>(cached->like);
    stored->plan = cached->remake(py::cast(cached->blueprint.filled(numbers)), attempt.members[0]);
    stored->launch = stored->plan.cast<LaunchPlan*>();
    for (auto const& [result, dimension, number] : cached->holes) {
      stored->results[result].layout.shape[dimension] = numbers.at(number).whole;
    }
    for (size_t i = 0; i < stored->sources.size(); ++i) {
      StoredPlan::Source& source = stored->sources[i];
      if (source.view < 0 && source.result < 0) continue;
      bool const own = source.view >= 0 && !cached->memory;
      source.layout = own ? attempt.views[size_t(source.view)].operand : stored->launch->slots()[i].spec.layout;
    }
    stored->note_layouts();
    store_->put(attempt.kept, stored);
    return stored;
  }

  std::string label(Arguments const& arguments, size_t argument) const {
    return argument < kOthers ? parameters_[argument].label
                              : py::cast<std::string>(py::handle(arguments.others[argument - kOthers].first));
  }

  // Imports the arrays and writes the key. False for a call that a kept plan cannot serve.
  bool describe(Arguments const& arguments, Attempt& attempt) const {
    PyObject* first = arguments.values[0];
    if (listed(first)) {
      if (PySequence_Fast_GET_SIZE(first) == 0) return false;
      first = PySequence_Fast_GET_ITEM(first, 0);
    }
    if (first == Py_None || type_of(first).numpy) return false;
    PlanStoreKey& key = attempt.key;
    key.add(number_);
    key.add(reinterpret_cast<uintptr_t>(Py_TYPE(first)));  // results and workspaces come from its framework
    key.add(registry_generation());  // a pack that was loaded may have a better kernel
    key.add(store_->cleared());  // as may a choice that was loaded, or a user named
    for (std::string const& value : environment_.values()) key.add_text(0, value);
    attempt.members.emplace_back(py::reinterpret_borrow<py::object>(first));
    PyObject* const stream = stream_ < parameters_.size() ? arguments.values[stream_] : nullptr;
    attempt.arrays.emplace(stream != nullptr ? stream : Py_None, first, parameters_[0].label.c_str());
    for (size_t i = 0; i < parameters_.size(); ++i) {
      PyObject* const value = arguments.values[i];
      if (value == nullptr || value == parameters_[i].fallback.ptr()) continue;
      if (!describe(i, value, attempt)) return false;
    }
    for (size_t i = 0; i < arguments.others.size(); ++i) {
      auto const [name, value] = arguments.others[i];
      char const* const text = PyUnicode_AsUTF8(name);
      if (text == nullptr) throw py::error_already_set();
      key.add_text(kOthers + i, text);
      if (!describe_arrays(kOthers + i, text, value, attempt)) return false;
    }
    // Where a scalar is 0, plans leave operands out.
    double const beta = attempt.beta * attempt.scale_d;
    key.add(uint64_t(attempt.alpha == 0.0) | uint64_t(attempt.beta == 0.0) << 1 | uint64_t(beta == 0.0) << 2);
    attempt.beta = beta;
    return true;
  }

  bool describe(size_t argument, PyObject* value, Attempt& attempt) const {
    Parameter const& parameter = parameters_[argument];
    std::optional<double> number;
    switch (parameter.role) {
      case Parameter::Role::kStream: return true;
      case Parameter::Role::kOption: return attempt.key.add_option(argument, value);
      case Parameter::Role::kShape: {
        size_t const first = attempt.key.extents().size();
        if (!attempt.key.add_shape(argument, value)) return attempt.key.add_option(argument, value);
        attempt.shapes.emplace_back(value, first);
        return true;
      }
      case Parameter::Role::kArray: return describe_arrays(argument, parameter.label.c_str(), value, attempt);
      case Parameter::Role::kAlpha:
        // Not in place of what there is: scales that are numbers may come before it.
        if ((number = number_of(value))) attempt.alpha *= *number;
        return number.has_value();
      case Parameter::Role::kFactor: {
        // A positive float; some formats have none but 1.
        number = number_of(value);
        auto const factor = number ? float(*number) : 0.0f;
        if (!(factor > 0.0f && std::isfinite(factor))) return false;
        if (factor != 1.0f) attempt.key.add_number(argument);
        attempt.alpha *= double(factor);
        return true;
      }
      case Parameter::Role::kBeta:
        if ((number = number_of(value))) attempt.beta = *number;
        return number.has_value();
      case Parameter::Role::kScale:
        number = number_of_all(value);
        if (!number) return describe_arrays(argument, parameter.label.c_str(), value, attempt);
        // Most functions refuse lists of numbers, and some every factor of the result but 1.
        attempt.key.add_number(argument);
        attempt.key.add(listed(value) ? reinterpret_cast<uintptr_t>(Py_TYPE(value)) : 0);
        attempt.alpha *= *number;
        if (parameter.label == "scale_d") {
          attempt.key.add(uint64_t(*number == 1.0));
          attempt.scale_d = *number;
        }
        return true;
    }
    return false;
  }

  // An array, or a list of them.
  static bool describe_arrays(size_t argument, char const* name, PyObject* value, Attempt& attempt) {
    if (value == Py_None) return true;
    if (!listed(value)) return describe_array(argument, -1, name, value, attempt);
    attempt.key.add_list(argument, size_t(PySequence_Fast_GET_SIZE(value)));
    // Importing may run Python's code, which may change the list.
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); ++i) {
      PyObject* const member = PySequence_Fast_GET_ITEM(value, i);
      attempt.members.emplace_back(py::reinterpret_borrow<py::object>(member));
      if (!describe_array(argument, int(i), name, member, attempt)) return false;
    }
    return true;
  }

  static bool describe_array(size_t argument, int member, char const* name, PyObject* array, Attempt& attempt) {
    View const& view = attempt.views.emplace_back(array, argument, member, attempt.arrays->import(array, name),
                                                  attempt.key.extents().size());
    if (view.operand.device.type != kDlCuda) return false;
    attempt.key.add_view(argument, view.operand);
    return true;
  }

  // The value of a number, or of a list of equal ones.
  static std::optional<double> number_of_all(PyObject* value) {
    if (!listed(value)) return number_of(value);
    std::optional<double> all;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); ++i) {
      std::optional<double> const number = number_of(PySequence_Fast_GET_ITEM(value, i));
      bool const same = !all || (number && (*number == *all || (std::isnan(*number) && std::isnan(*all))));
      if (!number || !same) return std::nullopt;
      all = number;
    }
    return all;
  }

  py::object launch(StoredPlan const& stored, Arguments const& arguments, Attempt& attempt) const {
    CallArrays& arrays = *attempt.arrays;
    double const alpha = alpha_ ? attempt.alpha : stored.alpha, beta = beta_ ? attempt.beta : stored.beta;
    NewArrays made;
    for (StoredPlan::Result const& result : stored.results) {
      made.emplace_back(arrays.allocate(result.layout, result.axes.empty() ? nullptr : &result.axes));
    }
    if (stored.laid_out) {
      launch_at(stored, attempt, made, alpha, beta);
    } else {
      launch_as_laid(stored, attempt, made, alpha, beta);
    }
    for (StoredPlan::Source const& source : stored.sources) {
      if (source.written && source.view >= 0) arrays.written(attempt.views[size_t(source.view)].array);
    }
    for (NewArray& result : made) result.array = arrays.exported(std::move(result));
    py::object returned = arranged(stored, arguments, made);
    arrays.finish();
    return returned;
  }

  // The array that a source of a call is; null for an operand that is left out.
  static Operand const* given_for(StoredPlan::Source const& source, Attempt const& attempt, NewArrays const& made) {
    if (source.view >= 0) return &attempt.views[size_t(source.view)].operand;
    return source.result >= 0 ? &made[size_t(source.result)].operand : nullptr;
  }

  static void launch_at(StoredPlan const& stored, Attempt& attempt, NewArrays const& made, double alpha, double beta) {
    Places places;
    for (StoredPlan::Source const& source : stored.sources) {
      Place& place = places.emplace_back();
      Operand const* const given = given_for(source, attempt, made);
      if (given != nullptr) place = {given->data, source.layout.given(), given->read_only, given->settled};
    }
    attempt.arrays->run([&](void* stream) { stored.launch->launch(places.data(), alpha, beta, stream); });
  }

  // For plans that Python calls, and operands that only the plan can say are wrong.
  static void launch_as_laid(StoredPlan const& stored, Attempt& attempt, NewArrays const& made, double alpha,
                             double beta) {
    CallArrays& arrays = *attempt.arrays;
    Operands operands;
    for (StoredPlan::Source const& source : stored.sources) {
      Operand& operand = operands.emplace_back(source.layout);
      Operand const* const given = given_for(source, attempt, made);
      if (given == nullptr) continue;
      operand.data = given->data;
      operand.read_only = given->read_only;
      operand.settled = given->settled;
    }
    if (stored.launch != nullptr) {
      arrays.run([&](void* stream) { stored.launch->launch({operands.data(), operands.size()}, alpha, beta, stream); });
    } else {
      arrays.run_in_python([&](void* stream) { launch_in_python(stored, attempt, operands, alpha, beta, stream); });
    }
  }

  static void launch_in_python(StoredPlan const& stored, Attempt const& attempt, Operands const& operands, double alpha,
                               double beta, void* stream) {
    py::list views;
    for (size_t i = 0; i < operands.size(); ++i) {
      int const view = stored.sources[i].view;
      py::object owner = view < 0 ? py::none() : py::reinterpret_borrow<py::object>(attempt.views[size_t(view)].array);
      views.append(py::cast(OwnedOperand{operands[i], std::move(owner), {}}));
    }
    py::object const out = views[operands.size() - 1];
    views.attr("pop")();
    stored.plan(*views, py::arg("out") = out, py::arg("alpha") = alpha, py::arg("beta") = beta,
                py::arg("stream") = reinterpret_cast<uint64_t>(stream));
  }

  // What the caller gets.
  py::object arranged(StoredPlan const& stored, Arguments const& arguments, NewArrays const& made) const {
    PyObject* const out = out_ < parameters_.size() ? arguments.values[out_] : nullptr;
    bool const given = out != nullptr && out != Py_None;
    if (!stored.arrange) {
      int const result = stored.sources.back().result;
      return result >= 0 ? made[size_t(result)].array : py::reinterpret_borrow<py::object>(out);
    }
    py::dict results;
    results[kResult] = given ? out : Py_None;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (!parameters_[i].label.empty() && arguments.values[i] != nullptr) {
        results[parameters_[i].label.c_str()] = arguments.values[i];
      }
    }
    for (auto const& [name, value] : arguments.others) results[name] = value;
    for (size_t i = 0; i < made.size(); ++i) results[stored.results[i].label] = made[i].array;
    return stored.arrange(results);
  }

  py::object function_, serve_;
  std::shared_ptr<PlanStore> store_;
  std::vector<Parameter> parameters_;
  uint64_t number_;  // of this function, which no other has
  size_t positional_, stream_ = kParametersAtMost, out_ = kParametersAtMost;
  bool alpha_ = false, beta_ = false;  // whether there are such parameters
  bool others_;
  mutable Environment environment_;
};

// As of Python's functions: one that is found in a class is a method.
PyObject* bound_method(PyObject* self, PyObject* object, PyObject*) {
  if (object != nullptr && object != Py_None) return PyMethod_New(self, object);
  Py_INCREF(self);
  return self;
}

py::object call_function(StoredFunction& self, PyObject* const* values, size_t count, PyObject* names) {
  return self.call(values, count, names);
}

void setup_function(PyHeapTypeObject* heap_type) {
  Vectorcall<StoredFunction, &call_function>::setup(heap_type);
  heap_type->ht_type.tp_descr_get = &bound_method;
}

}  // namespace

void bind_plan_store(py::module_& module) {
  py::class_<PlanStore, std::shared_ptr<PlanStore>>(module, "PlanStore",
                                                    "Plans of all functions, by everything that they depend on.")
      .def(py::init<size_t>(), py::arg("capacity"))
      .def("__len__", &PlanStore::size)
      .def("clear", &PlanStore::clear, "Drops every plan.")
      .def_property_readonly("plans", &PlanStore::plans, "The plans, the one used last first.");
  py::class_<PendingCall>(module, "PendingCall", "A call that no kept plan serves: where the plan made of it is kept.")
      .def_property_readonly("launch", &PendingCall::launch,
                             "The `LaunchStream` that has imported arrays of the call, if any has.")
      .def_property_readonly("plan", &PendingCall::plan, "The plan that is kept for such calls, if any is.")
      .def_property_readonly("learns", &PendingCall::learns,
                             "Whether other extents are to profit from how this call is planned.")
      .def("inputs", &PendingCall::inputs, "Begins to learn; the call's arrays and shapes, each with its first input.")
      .def("keep", &PendingCall::keep, py::arg("plan"), py::arg("names"), py::arg("views"), py::arg("made"),
           py::arg("arrange"), py::arg("axes"), py::arg("scalars"), py::arg("parsed"), py::arg("learned") = py::none(),
           py::arg("memory") = false);
  py::class_<StoredFunction>(module, "StoredFunction", py::dynamic_attr(), py::custom_type_setup(&setup_function),
                             "A function whose calls find the plan of an earlier one.")
      .def(py::init<py::object, std::shared_ptr<PlanStore>, py::object, py::list const&, size_t, bool,
                    std::vector<std::string>>(),
           py::arg("function"), py::arg("store"), py::arg("serve"), py::arg("parameters"), py::arg("positional"),
           py::arg("others"), py::arg("environment"))
      .def("__reduce__", &StoredFunction::qualified_name);
}

}  // namespace atomr_cutlass
