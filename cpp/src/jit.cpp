#include "jit.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "atomr_cutlass/abi_layout.h"
#include "bytes.h"
#include "driver.h"
#include "errors.h"
#include "relocation.h"

namespace atomr_cutlass {

JitKernel::JitKernel(std::string name, std::string key, std::string const& kernel_image,
                     std::string const& companion_image)
    : name_(std::move(name)),
      key_(std::move(key)) {
  kernel_library_ = load_library(kernel_image.data());
  kernel_ = library_kernel(kernel_library_, name_.c_str());
  companion_library_ = load_library(companion_image.data());
  companion_ = library_kernel(companion_library_, (name_ + "_evaluate").c_str());
}

// The stream of all companions on a device: they are few, short, and waited for one by one.
static void* companion_stream(int device) {
  static std::mutex mutex;
  static std::array<void*, JitKernel::kMaxDevices> streams{};
  std::lock_guard<std::mutex> lock(mutex);
  void*& stream = streams[size_t(device)];
  if (stream == nullptr) stream = create_stream();
  return stream;
}

JitKernel::OnDevice& JitKernel::on_device() {
  int const device = current_device();
  if (device >= kMaxDevices) throw DeviceUnavailable("kernels run on the first 64 GPUs of a machine only");
  std::lock_guard<std::mutex> lock(mutex_);
  std::unique_ptr<OnDevice>& slot = devices_[size_t(device)];
  if (slot != nullptr) return *slot;
  CaptureRelaxed relaxed;
  auto made = std::make_unique<OnDevice>();
  made->stream = companion_stream(device);
  DevicePointer const constant =
      library_global(companion_library_, (name_ + "_info").c_str(), sizeof(atomr_cutlass_jit_info));
  copy_to_host(&made->info, constant, sizeof(made->info), made->stream);
  synchronize(made->stream);
  if (made->info.layout_digest != abi::kLayoutDigest) {
    throw LibraryFailure("jit", name_ +
                                    " was compiled with headers whose structs (kernel_abi.h, jit_abi.h) have another " +
                                    "layout than `_core` was built with: " + kOneBuild);
  }
  made->kernel = kernel_function(kernel_);
  made->companion = kernel_function(companion_);
  atomr_cutlass_jit_info const& info = made->info;
  if (info.setup_threads != 0) {
    made->setup = kernel_function(library_kernel(kernel_library_, (name_ + "_setup").c_str()));
  }
  allow_shared_memory(made->kernel, info.shared_bytes);
  LaunchShape const shape{{info.cluster[0], info.cluster[1], info.cluster[2]},
                          info.threads,
                          {info.cluster[0], info.cluster[1], info.cluster[2]},
                          info.shared_bytes};
  made->max_active_clusters = max_active_clusters(made->kernel, shape);
  if (made->max_active_clusters == 0) {
    throw Unsupported(name_ + " does not fit on this GPU: too much shared memory or too many registers");
  }
  made->answer_bytes = ATOMR_CUTLASS_JIT_PARAMS_OFFSET + (info.params_bytes + 127) / 128 * 128;
  made->scratch = allocate(2 * kMaxArgsBytes + 2 * made->answer_bytes);
  slot = std::move(made);
  return *slot;
}

namespace {

struct Evaluated {
  Bytes problem;
  atomr_cutlass_jit_evaluation answer;
  Bytes params;
  Relocations relocations;
};

class JitRow {
 public:
  JitRow(std::shared_ptr<JitKernel> kernel, ArgsLayout const& layout) : kernel_(std::move(kernel)), layout_(layout) {
    JitKernel::OnDevice const& place = kernel_->on_device();
    row_ = {kernel_->name().c_str(),
            kernel_->key().c_str(),
            "",
            place.info.params_bytes,
            place.info.params_align,
            place.info.shared_bytes,
            place.info.threads,
            0,
            0,
            this,
            &supports,
            &workspace_size,
            &prepare,
            &launch};
    function_ = place.kernel;
    setup_ = place.setup;
    setup_shape_ = {{1, 1, 1}, place.info.setup_threads, {1, 1, 1}, 0};
    shape_ = {{1, 1, 1},
              place.info.threads,
              {place.info.cluster[0], place.info.cluster[1], place.info.cluster[2]},
              place.info.shared_bytes};
  }

  atomr_cutlass_row const* row() const { return &row_; }

  static void const* handle(atomr_cutlass_row const* row) { return row->launch == &launch ? of(row).function_ : row; }

 private:
  static JitRow& of(atomr_cutlass_row const* row) { return *static_cast<JitRow*>(const_cast<void*>(row->context)); }

  // Entries are never removed: the reference stays good. There are as many as the plan has kinds of launches.
  Evaluated const& evaluated(void const* args) {
    Bytes problem(layout_.bytes);
    write_problem(layout_, args, problem.data());
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto const& known : known_) {
      if (known->problem == problem) return *known;
    }
    known_.push_back(std::make_unique<Evaluated>(evaluate(std::move(problem))));
    return *known_.back();
  }

  Evaluated evaluate(Bytes problem) const {
    JitKernel::OnDevice& place = kernel_->on_device();
    Bytes both[] = {sentinel_args(layout_, problem, false), sentinel_args(layout_, problem, true)};
    for (Bytes& args : both) store(args.data() + layout_.max_active_clusters, int32_t(place.max_active_clusters));
    size_t const stride = place.answer_bytes;
    Bytes answers(2 * stride);
    {
      CaptureRelaxed relaxed;
      std::lock_guard<std::mutex> lock(place.mutex);
      uint64_t const results = place.scratch + 2 * kMaxArgsBytes;
      for (int i = 0; i < 2; ++i) {
        copy_to_device(place.scratch + i * layout_.bytes, both[i].data(), layout_.bytes, place.stream);
      }
      clear_async(results, 2 * stride, place.stream);
      uint64_t values[] = {place.scratch, results, stride};
      void* arguments[] = {&values[0], &values[1], &values[2]};
      int const status = launch_function(place.companion, {{2, 1, 1}, 1, {1, 1, 1}, 0}, arguments, place.stream);
      if (status != 0) throw_cuda(status, "evaluating the parameters of " + kernel_->name());
      copy_to_host(answers.data(), results, answers.size(), place.stream);
      synchronize(place.stream);
    }
    Evaluated made{std::move(problem), {}, {}, {}};
    made.answer = load<atomr_cutlass_jit_evaluation>(answers.data());
    if (made.answer.implementable == 0) return made;
    unsigned char* const first = answers.data() + ATOMR_CUTLASS_JIT_PARAMS_OFFSET;
    size_t unexplained = 0;
    auto relocations = find_relocations(layout_, both[0].data(), both[1].data(), first, first + stride,
                                        place.info.params_bytes, &unexplained);
    if (!relocations) {
      throw LibraryFailure("jit",
                           "the kernel's parameters depend on its pointers and scalars in an unknown way, at byte " +
                               std::to_string(unexplained) + "; please report this");
    }
    made.relocations = std::move(*relocations);
    made.params.assign(first, first + place.info.params_bytes);
    return made;
  }

  static int supports(atomr_cutlass_row const* row, void const* args) {
    return of(row).evaluated(args).answer.implementable != 0 ? ATOMR_CUTLASS_OK : ATOMR_CUTLASS_CANNOT_IMPLEMENT;
  }

  static int workspace_size(atomr_cutlass_row const* row, void const* args, uint64_t* bytes) {
    *bytes = of(row).evaluated(args).answer.workspace_bytes;
    return ATOMR_CUTLASS_OK;
  }

  static int prepare(atomr_cutlass_row const* row, void const* args, void* params, atomr_cutlass_launch* launch) {
    JitRow& self = of(row);
    Evaluated const& known = self.evaluated(args);
    atomr_cutlass_jit_evaluation const& answer = known.answer;
    if (answer.implementable == 0) return ATOMR_CUTLASS_CANNOT_IMPLEMENT;
    auto* const bytes = static_cast<unsigned char*>(params);
    std::memcpy(bytes, known.params.data(), known.params.size());
    relocate(known.relocations, args, bytes);
    *launch = {{answer.grid[0], answer.grid[1], answer.grid[2]},
               {self.shape_.block, 1, 1},
               {self.shape_.cluster[0], self.shape_.cluster[1], self.shape_.cluster[2]},
               self.shape_.shared_bytes,
               {answer.setup_grid[0], answer.setup_grid[1], answer.setup_grid[2]},
               answer.padding,
               answer.clear_offset,
               answer.clear_bytes};
    return ATOMR_CUTLASS_OK;
  }

  static int launch(atomr_cutlass_row const* row, void const* params, atomr_cutlass_launch const* launch,
                    void* stream) {
    JitRow const& self = of(row);
    LaunchShape shape = self.shape_;
    for (int i = 0; i < 3; ++i) shape.grid[i] = launch->grid[i];
    shape.dependent = (launch->padding & ATOMR_CUTLASS_LAUNCH_DEPENDENT) != 0;
    void* arguments[] = {const_cast<void*>(params)};
    if (self.setup_ != nullptr) {
      LaunchShape setup = self.setup_shape_;
      for (int i = 0; i < 3; ++i) setup.grid[i] = launch->setup_grid[i];
      int const status = launch_function(self.setup_, setup, arguments, stream);
      if (status != 0) return status;
    }
    return launch_function(self.function_, shape, arguments, stream);
  }

  std::shared_ptr<JitKernel> kernel_;
  ArgsLayout const& layout_;
  atomr_cutlass_row row_{};
  void* function_ = nullptr;
  void* setup_ = nullptr;
  LaunchShape shape_{};
  LaunchShape setup_shape_{};
  std::mutex mutex_;
  std::vector<std::unique_ptr<Evaluated>> known_;
};

}  // namespace

void const* kernel_handle(atomr_cutlass_row const* row) { return JitRow::handle(row); }

std::shared_ptr<atomr_cutlass_row const> make_jit_row(std::shared_ptr<JitKernel> kernel, ArgsLayout const& layout) {
  auto const made = std::make_shared<JitRow>(std::move(kernel), layout);
  return {made, made->row()};
}

}  // namespace atomr_cutlass
