#include "kernel_launch.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <string>

#include "driver.h"
#include "errors.h"

namespace atomr_cutlass {
namespace {

void check_row(int status, atomr_cutlass_row const* row, char const* doing) {
  if (status == ATOMR_CUTLASS_OK) return;
  if (status == ATOMR_CUTLASS_CANNOT_IMPLEMENT) {
    throw Unsupported(std::string(row->name) + " cannot implement this problem (alignment, strides or grid size)");
  }
  throw_cuda(status, std::string(doing) + " " + row->name);
}

// Kernels whose tiles have one width do not read the one of their arguments, which estimates and records rest upon.
// Those whose launches choose one refuse themselves what they have no tiles of.
void check_width(atomr_cutlass_row const* row, ArgsLayout const& layout, void const* args) {
  ArgsField const* const field = layout.field("width");
  auto const is = [&](char const* kind) { return std::strstr(row->name, kind) != nullptr; };
  if (field == nullptr) return;
  if (is("_fitted") || is("_few_") || is("_ragged_") || is("_unaligned_") || is("_realigned_")) return;
  int32_t width = 0;
  std::memcpy(&width, static_cast<char const*>(args) + field->offset, sizeof(width));
  if (width == 0) return;
  throw Unsupported(std::string(row->name) + " has tiles of one width: the launch option width must be 0, not " +
                    std::to_string(width));
}

std::atomic<bool>& dependent_launch_state() {
  static std::atomic<bool> enabled{[] {
    char const* const text = std::getenv("ATOMR_CUTLASS_DEPENDENT_LAUNCH");
    return text == nullptr || std::string(text) != "off";
  }()};
  return enabled;
}

// Graphs have edges for such launches since CUDA 12.3: a driver before it refuses to capture them.
bool capturable() {
  constexpr int kSince = 12030;
  static bool const known = driver_version() >= kSince;
  return known;
}

}  // namespace

bool dependent_launch() { return dependent_launch_state().load(std::memory_order_relaxed); }

void set_dependent_launch(bool enabled) { dependent_launch_state().store(enabled, std::memory_order_relaxed); }

KernelLaunch::KernelLaunch(std::shared_ptr<atomr_cutlass_row const> row, ArgsLayout const& layout)
    : row_(std::move(row)),
      layout_(layout) {
  if (row_->params_bytes > kParamsBytes || row_->params_align > 128) {
    throw Unsupported(std::string(row_->name) + " has larger parameters than this package can launch");
  }
}

void KernelLaunch::ask(void const* args) const {
  check_width(row_.get(), layout_, args);
  check_row(row_->supports(row_.get(), args), row_.get(), "asking");
}

void KernelLaunch::open(void const* args) {
  atomr_cutlass_row const* const row = row_.get();
  ask(args);
  uint64_t bytes = 0;
  check_row(row->workspace_size(row, args, &bytes), row, "preparing");
  workspace_bytes_ = std::max(workspace_bytes_, bytes);
  alignas(128) unsigned char params[kParamsBytes];
  check_row(row->prepare(row, args, params, &geometry_), row, "preparing");
}

void KernelLaunch::evaluate(Prepared& prepared, void const* args) const {
  check_row(row_->prepare(row_.get(), args, prepared.params, &prepared.geometry), row_.get(), "preparing");
}

// None unless they give what the row evaluated for this launch too.
std::optional<Relocations> KernelLaunch::relocations(Prepared const& prepared) const {
  Bytes args[2];
  alignas(128) unsigned char params[2][kParamsBytes] = {};
  try {
    for (int i = 0; i < 2; ++i) {
      atomr_cutlass_launch geometry{};
      args[i] = sentinel_args(layout_, prepared.problem, i == 1);
      if (row_->prepare(row_.get(), args[i].data(), params[i], &geometry) != ATOMR_CUTLASS_OK) return std::nullopt;
      if (std::memcmp(&geometry, &prepared.geometry, sizeof(geometry)) != 0) return std::nullopt;
    }
    auto found =
        find_relocations(layout_, args[0].data(), args[1].data(), params[0], params[1], size_t(row_->params_bytes));
    if (!found) return std::nullopt;
    relocate(*found, prepared.args.data(), params[0]);
    return std::memcmp(params[0], prepared.params, row_->params_bytes) == 0 ? found : std::nullopt;
  } catch (std::exception const&) {
    return std::nullopt;  // the row goes on evaluating, and says itself what is wrong
  }
}

KernelLaunch::Prepared& KernelLaunch::prepared(void const* args) {
  auto const* const bytes = static_cast<unsigned char const*>(args);
  unsigned char problem[kMaxArgsBytes];
  write_problem(layout_, args, problem);
  auto const same = [&](auto const& known) { return std::memcmp(known->problem.data(), problem, layout_.bytes) == 0; };
  auto const known = std::find_if(prepared_.begin(), prepared_.end(), same);
  if (known == prepared_.end()) {
    auto made = std::make_unique<Prepared>();
    made->problem.assign(problem, problem + layout_.bytes);
    evaluate(*made, args);
    made->args.assign(bytes, bytes + layout_.bytes);
    made->valid = true;
    prepared_.push_back(std::move(made));
    return *prepared_.back();
  }
  Prepared& found = **known;
  if (found.valid && std::memcmp(found.args.data(), args, layout_.bytes) == 0) return found;
  found.valid = false;
  if (found.relocations) {
    relocate(*found.relocations, args, found.params);
  } else {
    evaluate(found, args);
  }
  found.args.assign(bytes, bytes + layout_.bytes);
  found.valid = true;
  if (!found.relocations_sought) {
    found.relocations_sought = true;
    found.relocations = relocations(found);
  }
  return found;
}

void KernelLaunch::prepare(void const* args, unsigned char* params, atomr_cutlass_launch& geometry) {
  std::lock_guard<std::mutex> lock(prepared_mutex_);
  // Arguments were zeroed before they were filled, so that padding compares equal.
  bool const again =
      latest_ != nullptr && latest_->valid && std::memcmp(latest_->args.data(), args, layout_.bytes) == 0;
  if (!again) latest_ = &prepared(args);
  // The caller's copy lives on its stack: the driver has read it when a launch returns, and no lock is held meanwhile.
  std::memcpy(params, latest_->params, row_->params_bytes);
  geometry = latest_->geometry;
}

void KernelLaunch::launch(void const* args, void* workspace, void* stream, bool serialized) {
  alignas(128) unsigned char params[kParamsBytes];
  atomr_cutlass_launch geometry;
  prepare(args, params, geometry);
  if ((geometry.padding & ATOMR_CUTLASS_LAUNCH_DEPENDENT) != 0 &&
      (serialized || geometry.clear_bytes != 0 || geometry.setup_grid[0] != 0 || !dependent_launch() ||
       (!capturable() && capture_id(stream) != 0))) {
    geometry.padding &= ~uint32_t(ATOMR_CUTLASS_LAUNCH_DEPENDENT);
  }
  // Two threads on one stream share its workspace: one's clearing or setup must not fall between the other's and its
  // launch.
  std::unique_lock<std::mutex> lock(launch_mutex_, std::defer_lock);
  if (geometry.clear_bytes != 0 || geometry.setup_grid[0] != 0) lock.lock();
  if (geometry.clear_bytes != 0) {
    clear_async(reinterpret_cast<DevicePointer>(workspace) + geometry.clear_offset, size_t(geometry.clear_bytes),
                stream);
  }
  check_row(row_->launch(row_.get(), params, &geometry, stream), row_.get(), "launching");
}

}  // namespace atomr_cutlass
