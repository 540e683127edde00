#include "launch_plan.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include "driver.h"
#include "errors.h"

namespace atomr_cutlass {
namespace {

constexpr size_t kAlignment = 256;

size_t round_up(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

bool whole(double value) { return value == std::floor(value) && value >= -2147483648.0 && value <= 2147483647.0; }

template <class Value>
void store(std::vector<unsigned char>& bytes, size_t offset, Value value) {
  std::memcpy(bytes.data() + offset, &value, sizeof(value));
}

}  // namespace

LaunchPlan::LaunchPlan(std::vector<Slot> slots, std::vector<size_t> const& temporaries, std::vector<Step> steps,
                       LaunchPlanOptions options, DlExchangeApi const* allocator)
    : slots_(std::move(slots)),
      steps_(std::move(steps)),
      options_(options),
      memory_(options.device, allocator) {
  check_steps(temporaries);
  for (size_t const bytes : temporaries) {
    temporaries_.push_back(workspace_);
    workspace_ += round_up(bytes);
  }
  DeviceGuard guard(options_.device);
  std::map<std::string, size_t> needed;
  std::vector<std::string> rows;
  for (size_t i = 0; i < steps_.size(); ++i) {
    Step& step = steps_[i];
    if (step.kind != Step::Kind::kLaunch) continue;
    if (i == options_.main) main_kernel_ = kernels_.size();
    rows.emplace_back(step.row->name);
    kernels_.emplace_back(std::move(step.row), step.layout->bytes);
    std::vector<unsigned char> probe = step.data;
    for (Patch const& patch : step.patches) store(probe, patch.offset, kProbe);
    store(probe, step.layout->workspace, kProbe);
    for (ScalarPatch const& scalar : step.scalars) {
      store(probe, scalar.offset, scalar.beta ? options_.beta : options_.alpha);
    }
    kernels_.back().open(probe.data());
    size_t& most = needed[rows.back()];
    most = std::max(most, size_t(kernels_.back().workspace_bytes()));
  }
  size_t end = workspace_;
  std::map<std::string, size_t> places;
  for (std::string const& row : rows) {
    if (needed[row] != 0 && places.emplace(row, round_up(end)).second) end = round_up(end) + needed[row];
    own_.push_back(places[row]);
  }
  memory_.reserve(end, true, workspace_);
}

void LaunchPlan::check_steps(std::vector<size_t> const& temporaries) const {
  auto const check_address = [&](Address const& address, size_t bytes) {
    size_t const count = address.temporary ? temporaries.size() : slots_.size();
    std::string const name = (address.temporary ? "temporary " : "operand ") + std::to_string(address.index);
    if (address.index < 0 || size_t(address.index) >= count) throw InvalidOperand("there is no " + name);
    if (!address.temporary) return;
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
  for (KernelLaunch const& one : kernels_) names.emplace_back(one.row()->name);
  return names;
}

void LaunchPlan::check(size_t slot, Operand const& operand) const {
  check_operand(slots_[slot].name.c_str(), operand, slots_[slot].spec);
}

void LaunchPlan::check_overlap(std::vector<Operand> const& operands) const {
  struct Place {
    ByteRange range;
    size_t slot;
  };
  std::vector<Place> places;
  places.reserve(slots_.size());
  for (size_t i = 0; i < slots_.size(); ++i) {
    bool const result = slots_[i].role == Slot::Role::kOutput;
    if (result && operands[i].read_only) {
      throw InvalidOperand(slots_[i].name + " is read-only: give an array that may be written");
    }
    places.push_back({byte_range(operands[i]), i});
  }
  // In the order of their addresses only neighbours can meet: lists have a result for each of many groups.
  std::sort(places.begin(), places.end(), [](Place const& x, Place const& y) { return x.range.begin < y.range.begin; });
  for (size_t i = 0; i < places.size(); ++i) {
    for (size_t j = i + 1; j < places.size() && places[j].range.begin < places[i].range.end; ++j) {
      check_pair(operands, places[i].slot, places[j].slot);
    }
  }
}

void LaunchPlan::check_pair(std::vector<Operand> const& operands, size_t first, size_t second) const {
  if (slots_[first].role != Slot::Role::kOutput) std::swap(first, second);
  if (slots_[first].role != Slot::Role::kOutput || !overlap(operands[first], operands[second])) return;
  Operand const& out = operands[first];
  Operand const& other = operands[second];
  Slot::Role const role = slots_[second].role;
  bool const in_place = role == Slot::Role::kSource && other.data == out.data && other.rank == out.rank &&
                        other.dtype.bits == out.dtype.bits &&
                        std::equal(other.strides, other.strides + other.rank, out.strides);
  if (in_place) return;
  char const* const why = role == Slot::Role::kSource   ? " without being it: give it itself or separate memory"
                          : role == Slot::Role::kOutput ? ": results need memory of their own"
                                                        : ": the kernel would read what it has written";
  throw InvalidOperand(slots_[first].name + " overlaps " + slots_[second].name + why);
}

uint64_t LaunchPlan::resolve(Address const& address, std::vector<Operand> const& operands,
                             unsigned char* memory) const {
  void const* from =
      address.temporary ? memory + temporaries_[size_t(address.index)] : operands[size_t(address.index)].data;
  // An array without elements may have no address; to a kernel that would be an operand that is not given.
  if (from == nullptr) from = kProbe;
  return reinterpret_cast<uint64_t>(from) + uint64_t(address.bytes);
}

void LaunchPlan::copy(Step const& step, std::vector<Operand> const& operands, unsigned char* memory,
                      void* stream) const {
  std::vector<unsigned char> table = step.data;
  for (Patch const& patch : step.patches) store(table, patch.offset, resolve(patch.address, operands, memory));
  uint64_t const target = resolve(step.target, operands, memory);
  copy_bytes(target, std::move(table), stream);
}

void LaunchPlan::launch(std::vector<Operand> const& operands, double alpha, double beta, void* stream) {
  if (operands.size() != slots_.size()) {
    throw InvalidOperand("this plan takes " + std::to_string(slots_.size()) + " operands, not " +
                         std::to_string(operands.size()));
  }
  for (size_t i = 0; i < slots_.size(); ++i) check(i, operands[i]);
  check_overlap(operands);
  if (options_.integral && !(whole(alpha) && whole(beta))) {
    throw InvalidOperand("alpha and beta must be whole numbers of 32 bits where the result is an integer");
  }
  DeviceGuard guard(options_.device);
  StreamTurn turn(memory_, stream);
  unsigned char* const memory = turn.data();
  size_t kernel = 0;
  std::vector<unsigned char> args;
  bool written = false;  // by a clear or a copy since the last launch
  for (Step const& step : steps_) {
    switch (step.kind) {
      case Step::Kind::kClear:
        clear_async(resolve(step.target, operands, memory), step.bytes, stream, step.value);
        written = true;
        break;
      case Step::Kind::kCopy:
        copy(step, operands, memory, stream);
        written = true;
        break;
      case Step::Kind::kLaunch:
        args = step.data;
        for (Patch const& patch : step.patches) store(args, patch.offset, resolve(patch.address, operands, memory));
        for (ScalarPatch const& scalar : step.scalars) store(args, scalar.offset, scalar.beta ? beta : alpha);
        unsigned char* const own = memory != nullptr ? memory + own_[kernel] : nullptr;
        store(args, step.layout->workspace, kernels_[kernel].workspace_bytes() != 0 ? own : nullptr);
        kernels_[kernel].launch(args.data(), own, stream, written);
        written = false;
        ++kernel;
        break;
    }
  }
  turn.release();
}

}  // namespace atomr_cutlass
