#include "launch_plan.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <optional>

#include "driver.h"
#include "errors.h"
#include "inline_vector.h"

namespace atomr_cutlass {
namespace {

constexpr size_t kAlignment = 256;

size_t round_up(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

bool whole(double value) { return value == std::floor(value) && value >= -2147483648.0 && value <= 2147483647.0; }

template <class Value>
void store(unsigned char* bytes, size_t offset, Value value) {
  std::memcpy(bytes + offset, &value, sizeof(value));
}

template <class Visit>
void visit_addresses(Step const& step, Visit&& visit) {
  if (step.kind != Step::Kind::kLaunch) visit(step.target);
  for (Patch const& patch : step.patches) visit(patch.address);
}

// Whether a step reads zeros.
bool reads_zeros(Step const& step) {
  bool found = false;
  visit_addresses(step, [&](Address const& address) { found |= address.base == Address::Base::kZeros; });
  return found;
}

bool taken(Step const& step, double alpha) {
  return step.when == Step::When::kAlways || (step.when == Step::When::kProduct) == (alpha != 0.0);
}

}  // namespace

LaunchPlan::LaunchPlan(std::vector<Slot> slots, std::vector<size_t> const& temporaries, std::vector<Step> steps,
                       LaunchPlanOptions options, DlExchangeApi const* allocator)
    : slots_(std::move(slots)),
      steps_(std::move(steps)),
      options_(options),
      memory_(options.device, allocator),
      zeros_(options.device, allocator) {
  check_steps(temporaries);
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].role == Slot::Role::kOutput) outputs_.push_back(i);
  }
  note_reaches();
  for (size_t const bytes : temporaries) {
    temporaries_.push_back(workspace_);
    workspace_ += round_up(bytes);
  }
  std::vector<std::string> rows;
  for (size_t i = 0; i < steps_.size(); ++i) {
    Step& step = steps_[i];
    if (step.kind != Step::Kind::kLaunch) continue;
    if (i == options_.main) main_kernel_ = kernels_.size();
    rows.emplace_back(step.row->name);
    kernels_.emplace_back(std::move(step.row), *step.layout);
  }
  DeviceGuard guard(options_.device);
  std::map<std::string, size_t> needed;
  size_t kernel = 0;
  for (Step const& step : steps_) {
    if (step.kind != Step::Kind::kLaunch) continue;
    open(kernels_[kernel], step);
    size_t& most = needed[rows[kernel]];
    most = std::max(most, size_t(kernels_[kernel].workspace_bytes()));
    ++kernel;
  }
  size_t end = workspace_;
  std::map<std::string, size_t> places;
  for (std::string const& row : rows) {
    if (needed[row] != 0 && places.emplace(row, round_up(end)).second) end = round_up(end) + needed[row];
    own_.push_back(places[row]);
  }
  memory_.reserve(end, true, workspace_);
  zeros_.reserve(options_.zeros, false, options_.zeros);
}

// Checks every problem that calls may make of the step, so that each problem of a call has been checked.
void LaunchPlan::open(KernelLaunch& kernel, Step const& step) {
  std::vector<unsigned char> probe = step.data;
  store(probe.data(), step.layout->workspace, kProbe);
  for (ScalarPatch const& scalar : step.scalars) {
    store(probe.data(), scalar.offset, scalar.beta ? options_.beta : options_.alpha);
  }
  bool optional = false;
  for (bool const given : {false, true}) {
    for (Patch const& patch : step.patches) {
      Address const& address = patch.address;
      bool const absent = address.base == Address::Base::kOperand && slots_[size_t(address.index)].optional && !given;
      optional |= absent;
      store(probe.data(), patch.offset, absent ? nullptr : kProbe);
    }
    if (given && !optional) return;
    kernel.open(probe.data());
    if (!kernel.dependent()) continue;
    for (SettledPatch const& patch : step.settled) {
      std::vector<unsigned char> settled = probe;
      store(settled.data(), patch.offset, patch.bits);
      kernel.ask(settled.data());
    }
  }
}

void LaunchPlan::check_steps(std::vector<size_t> const& temporaries) const {
  auto const check_address = [&](Address const& address, size_t bytes) {
    if (address.base == Address::Base::kZeros) return;
    bool const temporary = address.base == Address::Base::kTemporary;
    size_t const count = temporary ? temporaries.size() : slots_.size();
    std::string const name = (temporary ? "temporary " : "operand ") + std::to_string(address.index);
    if (address.index < 0 || size_t(address.index) >= count) throw InvalidOperand("there is no " + name);
    if (!temporary) return;
    size_t const size = temporaries[size_t(address.index)];
    if (address.bytes < 0 || size_t(address.bytes) > size || bytes > size - size_t(address.bytes)) {
      throw InvalidOperand("a step reaches beyond its end in " + name);
    }
  };
  for (Step const& step : steps_) {
    if (step.kind != Step::Kind::kLaunch) {
      check_address(step.target, step.kind == Step::Kind::kCopy ? step.data.size() : step.bytes);
    }
    for (Patch const& patch : step.patches) {
      check_address(patch.address, 0);
      if (step.data.size() < sizeof(uint64_t) || patch.offset > step.data.size() - sizeof(uint64_t)) {
        throw InvalidOperand("an address is put outside of what takes it");
      }
    }
  }
  if (options_.main >= steps_.size() || steps_[options_.main].kind != Step::Kind::kLaunch) {
    throw InvalidOperand("the step that names the plan launches no kernel");
  }
}

std::vector<std::string> LaunchPlan::kernel_names() const {
  std::vector<std::string> names;
  size_t kernel = 0;
  for (Step const& step : steps_) {
    if (step.kind != Step::Kind::kLaunch) continue;
    if (step.when != Step::When::kNoProduct) names.emplace_back(kernels_[kernel].row()->name);
    ++kernel;
  }
  return names;
}

size_t LaunchPlan::steps() const {
  return size_t(std::count_if(steps_.begin(), steps_.end(), [](Step const& step) { return taken(step, 1.0); }));
}

void LaunchPlan::replace(LaunchPlan* next) {
  bool same = next->slots_.size() == slots_.size();
  for (size_t i = 0; same && i < slots_.size(); ++i) {
    Slot const& mine = slots_[i];
    Slot const& other = next->slots_[i];
    same = mine.name == other.name && mine.role == other.role && mine.optional == other.optional &&
           matches(mine.spec.layout, other.spec.layout);
  }
  if (!same) throw InvalidOperand("a plan is replaced by one of other operands");
  next_.store(next, std::memory_order_release);
}

LaunchPlan* LaunchPlan::switch_to_next(Place const* places, size_t count, void* stream) {
  LaunchPlan* const next = next_.load(std::memory_order_acquire);
  if (next == nullptr || count != slots_.size()) return nullptr;
  // Checked against the other plan's requirements, which may be stricter.
  for (size_t i = 0; i < count; ++i) {
    if (reinterpret_cast<uintptr_t>(places[i].data) % uintptr_t(next->slots_[i].spec.alignment) != 0) return nullptr;
  }
  DeviceGuard guard(options_.device);
  uint64_t const capture = capture_id(stream);
  if (capture == 0) {
    replaced_ = true;
  } else if (!replaced_ || capture == capture_) {
    capture_ = capture;  // a graph that began with these kernels continues with them
    return nullptr;
  }
  return next;
}

void LaunchPlan::check(size_t slot, Operand const& operand) const {
  check_operand(slots_[slot].name.c_str(), operand, slots_[slot].spec);
}

void LaunchPlan::note_reaches() {
  if (outputs_.size() != 1) return;
  for (Slot const& slot : slots_) {
    Operand layout = slot.spec.layout;
    layout.data = nullptr;
    ByteRange const range = byte_range(layout);
    reaches_.push_back({range.begin, range.end, uintptr_t(slot.spec.alignment) - 1});
    bool const power_of_two = (slot.spec.alignment & (slot.spec.alignment - 1)) == 0;
    if (!power_of_two) {
      reaches_.clear();
      return;
    }
  }
}

// Conditions of nearly every call under which `check_operands` would find no error.
bool LaunchPlan::plainly_fine(Place const* places, double alpha, double beta) const {
  if (reaches_.empty() || (options_.integral && !(whole(alpha) && whole(beta)))) return false;
  size_t const output = outputs_[0];
  auto const to = reinterpret_cast<uintptr_t>(places[output].data);
  uintptr_t const begin = to + reaches_[output].begin, end = to + reaches_[output].end;
  bool fine = places[output].given && !places[output].read_only && !slots_[output].optional;
  for (size_t i = 0; i < reaches_.size(); ++i) {
    Place const& place = places[i];
    bool const optional = slots_[i].optional;
    fine &= place.given ? !(optional && beta == 0.0) : optional && beta == 0.0;
    if (!place.given) continue;
    Reach const& reach = reaches_[i];
    auto const from = reinterpret_cast<uintptr_t>(place.data);
    fine &= (from & reach.unaligned) == 0;
    fine &= i == output || from + reach.end <= begin || end <= from + reach.begin;
  }
  return fine;
}

void LaunchPlan::check_places(Place const* places, double alpha, double beta) const {
  if (plainly_fine(places, alpha, beta)) return;
  std::vector<Operand> operands(slots_.size());
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (!places[i].given) continue;
    operands[i] = slots_[i].spec.layout;
    operands[i].data = places[i].data;
    operands[i].read_only = places[i].read_only;
    operands[i].settled = places[i].settled;
  }
  check_operands(operands, alpha, beta);
}

void LaunchPlan::check_operands(OperandSpan operands, double alpha, double beta) const {
  if (operands.size() != slots_.size()) {
    throw InvalidOperand("this plan takes " + std::to_string(slots_.size()) + " operands, not " +
                         std::to_string(operands.size()));
  }
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (operands[i].given()) {
      check(i, operands[i]);
    } else if (!slots_[i].optional) {
      throw InvalidOperand(slots_[i].name + " is needed");
    }
    if (!slots_[i].optional) continue;
    if (!operands[i].given() && beta != 0.0) {
      throw InvalidOperand("beta is not 0, so " + slots_[i].name + " is needed");
    }
    if (operands[i].given() && beta == 0.0) {
      throw InvalidOperand(slots_[i].name + " is given but beta is 0, so it would not be read: give beta, or leave " +
                           slots_[i].name + " out");
    }
  }
  check_overlap(operands);
  if (options_.integral && !(whole(alpha) && whole(beta))) {
    throw InvalidOperand("alpha and beta must be whole numbers of 32 bits where the result is an integer");
  }
}

void LaunchPlan::check_overlap(OperandSpan operands) const {
  for (size_t const output : outputs_) {
    if (operands[output].read_only) {
      throw InvalidOperand(slots_[output].name + " is read-only: give an array that may be written");
    }
  }
  if (outputs_.size() == 1) {
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (i != outputs_[0]) check_pair(operands, outputs_[0], i);
    }
    return;
  }
  struct Lying {
    ByteRange range;
    size_t slot;
  };
  std::vector<Lying> places;
  places.reserve(slots_.size());
  for (size_t i = 0; i < slots_.size(); ++i) places.push_back({byte_range(operands[i]), i});
  // Sorted by address only neighbours can overlap: lists have a result for each of many groups.
  std::sort(places.begin(), places.end(), [](Lying const& x, Lying const& y) { return x.range.begin < y.range.begin; });
  for (size_t i = 0; i < places.size(); ++i) {
    for (size_t j = i + 1; j < places.size() && places[j].range.begin < places[i].range.end; ++j) {
      check_pair(operands, places[i].slot, places[j].slot);
    }
  }
}

void LaunchPlan::check_pair(OperandSpan operands, size_t first, size_t second) const {
  if (slots_[first].role != Slot::Role::kOutput) std::swap(first, second);
  if (slots_[first].role != Slot::Role::kOutput || !overlap(operands[first], operands[second])) return;
  Operand const& out = operands[first];
  Operand const& other = operands[second];
  Slot::Role const role = slots_[second].role;
  // One C for all batches is read after the first batch has been written: the same address is not yet the same operand.
  bool const in_place = role == Slot::Role::kSource && other.data == out.data && other.rank == out.rank &&
                        other.dtype.bits == out.dtype.bits &&
                        std::equal(other.strides, other.strides + other.rank, out.strides);
  if (in_place) return;
  std::string const why = role == Slot::Role::kSource ? " without being " + slots_[second].name + ": give " +
                                                            slots_[second].name + " itself or separate memory"
                          : role == Slot::Role::kOutput ? ": results need memory of their own"
                                                        : ": the kernel would read what it has written";
  throw InvalidOperand(slots_[first].name + " overlaps " + slots_[second].name + why);
}

uint64_t LaunchPlan::resolve(Address const& address, Place const* places, Memory const& memory) const {
  void const* from = nullptr;
  switch (address.base) {
    case Address::Base::kTemporary: from = memory.temporaries + temporaries_[size_t(address.index)]; break;
    case Address::Base::kZeros: from = memory.zeros; break;
    case Address::Base::kOperand: {
      Place const& place = places[size_t(address.index)];
      if (!place.given) return 0;
      // An array without elements may have a null address, which a kernel would take for a missing operand.
      from = place.data != nullptr ? place.data : kProbe;
      break;
    }
  }
  return reinterpret_cast<uint64_t>(from) + uint64_t(address.bytes);
}

void LaunchPlan::copy(Step const& step, Place const* places, Memory const& memory, void* stream) const {
  std::vector<unsigned char> table = step.data;
  for (Patch const& patch : step.patches) store(table.data(), patch.offset, resolve(patch.address, places, memory));
  uint64_t const target = resolve(step.target, places, memory);
  copy_bytes(target, std::move(table), stream);
}

void LaunchPlan::launch(OperandSpan operands, double alpha, double beta, void* stream) {
  InlineVector<Place, 8> places;
  for (size_t i = 0; i < operands.size(); ++i) {
    Operand const& operand = operands[i];
    places.emplace_back(operand.data, operand.given(), operand.read_only, operand.settled);
  }
  if (LaunchPlan* const next = switch_to_next(places.data(), places.size(), stream)) {
    return next->launch(operands, alpha, beta, stream);
  }
  check_operands(operands, alpha, beta);
  enqueue(places.data(), alpha, beta, stream);
}

void LaunchPlan::launch(Place const* places, double alpha, double beta, void* stream) {
  if (LaunchPlan* const next = switch_to_next(places, slots_.size(), stream)) {
    return next->launch(places, alpha, beta, stream);
  }
  check_places(places, alpha, beta);
  enqueue(places, alpha, beta, stream);
}

void LaunchPlan::enqueue(Place const* places, double alpha, double beta, void* stream) {
  DeviceGuard guard(options_.device);
  StreamTurn turn(memory_, stream);
  std::optional<StreamTurn> zeros;
  Memory memory{turn.data(), nullptr};
  size_t kernel = 0;
  unsigned char args[kMaxArgsBytes];
  bool written = false;  // by a clear or a copy since the last launch
  for (Step const& step : steps_) {
    size_t const own_kernel = kernel;
    if (step.kind == Step::Kind::kLaunch) ++kernel;
    if (!taken(step, alpha)) continue;
    if (!zeros && reads_zeros(step)) {
      memory.zeros = zeros.emplace(zeros_, stream).data();
      // At every use, so that a graph captures it.
      clear_async(reinterpret_cast<DevicePointer>(memory.zeros), options_.zeros, stream);
      written = true;
    }
    switch (step.kind) {
      case Step::Kind::kClear:
        clear_async(resolve(step.target, places, memory), step.bytes, stream, step.value);
        written = true;
        break;
      case Step::Kind::kCopy:
        copy(step, places, memory, stream);
        written = true;
        break;
      case Step::Kind::kLaunch:
        KernelLaunch& launched = kernels_[own_kernel];
        std::memcpy(args, step.data.data(), step.layout->bytes);
        for (Patch const& patch : step.patches) store(args, patch.offset, resolve(patch.address, places, memory));
        for (ScalarPatch const& scalar : step.scalars) store(args, scalar.offset, scalar.beta ? beta : alpha);
        if (launched.dependent()) {
          for (SettledPatch const& patch : step.settled) {
            if (places[size_t(patch.operand)].settled) store(args, patch.offset, patch.bits);
          }
        }
        unsigned char* const own = memory.temporaries != nullptr ? memory.temporaries + own_[own_kernel] : nullptr;
        store(args, step.layout->workspace, launched.workspace_bytes() != 0 ? own : nullptr);
        launched.launch(args, own, stream, written);
        written = false;
        break;
    }
  }
  turn.release();
  if (zeros) zeros->release();
}

}  // namespace atomr_cutlass
