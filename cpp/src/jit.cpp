#include "jit.h"

#include <algorithm>
#include <cstring>

#include "driver.h"
#include "errors.h"

namespace atomr_cutlass {
namespace {

// Two sets of arguments that differ in every pointer by another distance, and in every scalar.
constexpr uint64_t kPages[] = {0x7a0000001000, 0x7a0000003000, 0x7a0000007000, 0x7a000000f000, 0x7a000001f000};
constexpr uint64_t kShifts[] = {0x10000000000, 0x20000001000, 0x30000003000, 0x40000007000, 0x5000000f000};

atomr_cutlass_gemm_args sentinel(atomr_cutlass_gemm_args const& problem, bool second) {
  atomr_cutlass_gemm_args args;
  std::memcpy(&args, &problem, sizeof(args));
  auto const pointer = [&](int i) { return reinterpret_cast<void*>(kPages[i] + (second ? kShifts[i] : 0)); };
  args.a = pointer(0);
  args.b = pointer(1);
  args.c = problem.c != nullptr ? pointer(2) : nullptr;
  args.d = pointer(3);
  args.workspace = pointer(4);
  args.alpha = second ? 5.0 : 3.0;
  args.beta = second ? 11.0 : 7.0;
  return args;
}

// What of the arguments the evaluation depends on: all but pointers and scalars, and whether there is a C.
atomr_cutlass_gemm_args problem_of(atomr_cutlass_gemm_args const& args) {
  atomr_cutlass_gemm_args problem;
  std::memcpy(&problem, &args, sizeof(args));
  problem.c = args.c != nullptr ? reinterpret_cast<void const*>(uintptr_t(1)) : nullptr;
  problem.a = problem.b = nullptr;
  problem.d = problem.workspace = nullptr;
  problem.alpha = problem.beta = 0.0;
  return problem;
}

template <class Value>
Value load(unsigned char const* from) {
  Value value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

template <class Value>
void store(unsigned char* to, Value value) {
  std::memcpy(to, &value, sizeof(value));
}

struct Pointers {
  uint64_t at[5];
  explicit Pointers(atomr_cutlass_gemm_args const& args) {
    void const* const values[] = {args.a, args.b, args.c, args.d, args.workspace};
    for (int i = 0; i < 5; ++i) at[i] = reinterpret_cast<uint64_t>(values[i]);
  }
};

// The pointer that explains both values, as the same distance from it.
bool explain_pointer(Pointers const& first, Pointers const& second, uint64_t x, uint64_t y, Relocation& found) {
  for (int i = 0; i < 5; ++i) {
    if (first.at[i] != 0 && x - first.at[i] == y - second.at[i]) {
      found.source = Relocation::Source(i);
      found.form = Relocation::Form::kPointer;
      found.addend = int64_t(x - first.at[i]);
      return true;
    }
  }
  return false;
}

template <class Value>
bool explain_scalar(atomr_cutlass_gemm_args const& first, atomr_cutlass_gemm_args const& second, unsigned char const* x,
                    unsigned char const* y, Relocation::Form form, Relocation& found) {
  auto const same = [](unsigned char const* bytes, double value) {
    auto const converted = Value(value);
    return std::memcmp(bytes, &converted, sizeof(converted)) == 0;
  };
  bool const alpha = same(x, first.alpha) && same(y, second.alpha);
  if (!alpha && !(same(x, first.beta) && same(y, second.beta))) return false;
  found.source = alpha ? Relocation::Source::kAlpha : Relocation::Source::kBeta;
  found.form = form;
  found.addend = 0;
  return true;
}

[[noreturn]] void unexplained(size_t offset) {
  throw LibraryFailure("jit", "the kernel's parameters depend on its pointers and scalars in an unknown way, at byte " +
                                  std::to_string(offset) + "; please report this");
}

}  // namespace

std::vector<Relocation> find_relocations(atomr_cutlass_gemm_args const& first, atomr_cutlass_gemm_args const& second,
                                         unsigned char* first_params, unsigned char const* second_params,
                                         size_t bytes) {
  constexpr size_t kMapBytes = 128, kMapAlignment = 64;
  Pointers const one(first), two(second);
  std::vector<Relocation> found;
  size_t offset = 0;
  while (offset < bytes) {
    Relocation relocation{uint32_t(offset), {}, {}, 0};
    unsigned char* const x = first_params + offset;
    unsigned char const* const y = second_params + offset;
    if (offset % kMapAlignment == 0 && offset + kMapBytes <= bytes &&
        load<uint64_t>(x) == ATOMR_CUTLASS_TENSOR_MAP_MAGIC) {
      auto request = load<atomr_cutlass_tensor_map_request>(x);
      auto other = load<atomr_cutlass_tensor_map_request>(y);
      if (!explain_pointer(one, two, request.address, other.address, relocation)) unexplained(offset);
      other.address = request.address;
      if (std::memcmp(&request, &other, sizeof(request)) != 0) unexplained(offset);
      relocation.form = Relocation::Form::kTensorMap;
      alignas(kMapAlignment) unsigned char map[kMapBytes];
      encode_tensor_map(map, request);
      std::memcpy(x, map, kMapBytes);
      found.push_back(relocation);
      offset += kMapBytes;
      continue;
    }
    size_t step = sizeof(uint32_t);
    size_t const left = bytes - offset;
    if (offset % sizeof(uint64_t) == 0 && left >= sizeof(uint64_t)) {
      bool const differs = std::memcmp(x, y, sizeof(uint64_t)) != 0;
      if (differs && (explain_pointer(one, two, load<uint64_t>(x), load<uint64_t>(y), relocation) ||
                      explain_scalar<double>(first, second, x, y, Relocation::Form::kDouble, relocation))) {
        found.push_back(relocation);
        step = sizeof(uint64_t);
      }
      if (!differs) step = sizeof(uint64_t);
    }
    if (step == sizeof(uint32_t)) {
      size_t const width = std::min(left, sizeof(uint32_t));
      if (std::memcmp(x, y, width) != 0) {
        if (width < sizeof(uint32_t) ||
            !(explain_scalar<float>(first, second, x, y, Relocation::Form::kFloat, relocation) ||
              explain_scalar<int32_t>(first, second, x, y, Relocation::Form::kInt32, relocation))) {
          unexplained(offset);
        }
        found.push_back(relocation);
      }
    }
    offset += step;
  }
  return found;
}

void relocate(std::vector<Relocation> const& relocations, atomr_cutlass_gemm_args const& args, unsigned char* params) {
  Pointers const pointers(args);
  for (Relocation const& one : relocations) {
    unsigned char* const place = params + one.offset;
    double const scalar = one.source == Relocation::Source::kAlpha ? args.alpha : args.beta;
    switch (one.form) {
      case Relocation::Form::kPointer: store(place, pointers.at[size_t(one.source)] + uint64_t(one.addend)); break;
      case Relocation::Form::kTensorMap:
        move_tensor_map(place, pointers.at[size_t(one.source)] + uint64_t(one.addend));
        break;
      case Relocation::Form::kDouble: store(place, scalar); break;
      case Relocation::Form::kFloat: store(place, float(scalar)); break;
      case Relocation::Form::kInt32: store(place, int32_t(scalar)); break;
    }
  }
}

JitKernel::JitKernel(std::string name, std::string key, std::string const& kernel_image,
                     std::string const& companion_image)
    : name_(std::move(name)),
      key_(std::move(key)) {
  kernel_ = library_kernel(load_library(kernel_image.data()), name_.c_str());
  companion_library_ = load_library(companion_image.data());
  companion_ = library_kernel(companion_library_, (name_ + "_evaluate").c_str());
}

JitKernel::OnDevice& JitKernel::on_device() {
  int const device = current_device();
  if (device >= kMaxDevices) throw DeviceUnavailable("kernels run on the first 64 GPUs of a machine only");
  std::lock_guard<std::mutex> lock(mutex_);
  std::unique_ptr<OnDevice>& slot = devices_[size_t(device)];
  if (slot != nullptr) return *slot;
  auto made = std::make_unique<OnDevice>();
  made->stream = create_stream();
  DevicePointer const constant =
      library_global(companion_library_, (name_ + "_info").c_str(), sizeof(atomr_cutlass_jit_info));
  copy_to_host(&made->info, constant, sizeof(made->info), made->stream);
  synchronize(made->stream);
  made->kernel = kernel_function(kernel_);
  made->companion = kernel_function(companion_);
  atomr_cutlass_jit_info const& info = made->info;
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
  made->scratch = allocate(2 * sizeof(atomr_cutlass_gemm_args) + 128 + 2 * made->answer_bytes);
  slot = std::move(made);
  return *slot;
}

namespace {

struct Evaluated {
  atomr_cutlass_gemm_args problem;
  atomr_cutlass_jit_evaluation answer;
  std::vector<unsigned char> params;
  std::vector<Relocation> relocations;
};

class JitRow {
 public:
  explicit JitRow(std::shared_ptr<JitKernel> kernel) : kernel_(std::move(kernel)) {
    JitKernel::OnDevice const& place = kernel_->on_device();
    row_ = {kernel_->name().c_str(),
            kernel_->key().c_str(),
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
    shape_ = {{1, 1, 1},
              place.info.threads,
              {place.info.cluster[0], place.info.cluster[1], place.info.cluster[2]},
              place.info.shared_bytes};
  }

  atomr_cutlass_row const* row() const { return &row_; }

 private:
  using Args = atomr_cutlass_gemm_args;

  static JitRow& of(atomr_cutlass_row const* row) { return *static_cast<JitRow*>(const_cast<void*>(row->context)); }

  Evaluated const& evaluated(Args const& args) {
    Args const problem = problem_of(args);
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto const& known : known_) {
      if (std::memcmp(&known->problem, &problem, sizeof(problem)) == 0) return *known;
    }
    known_.push_back(std::make_unique<Evaluated>(evaluate(problem)));
    return *known_.back();
  }

  Evaluated evaluate(Args const& problem) const {
    JitKernel::OnDevice& place = kernel_->on_device();
    Args both[] = {sentinel(problem, false), sentinel(problem, true)};
    for (Args& args : both) args.max_active_clusters = place.max_active_clusters;
    size_t const stride = place.answer_bytes;
    std::vector<unsigned char> answers(2 * stride);
    {
      CaptureRelaxed relaxed;
      std::lock_guard<std::mutex> lock(place.mutex);
      uint64_t const problems = place.scratch;
      uint64_t const results = (problems + sizeof(both) + 127) / 128 * 128;
      copy_to_device(problems, both, sizeof(both), place.stream);
      clear_async(results, 2 * stride, place.stream);
      uint64_t values[] = {problems, results, stride};
      void* arguments[] = {&values[0], &values[1], &values[2]};
      int const status = launch_function(place.companion, {{2, 1, 1}, 1, {1, 1, 1}, 0}, arguments, place.stream);
      if (status != 0) throw_cuda(status, "evaluating the parameters of " + kernel_->name());
      copy_to_host(answers.data(), results, answers.size(), place.stream);
      synchronize(place.stream);
    }
    Evaluated made{problem, {}, {}, {}};
    std::memcpy(&made.answer, answers.data(), sizeof(made.answer));
    if (made.answer.implementable == 0) return made;
    unsigned char* const first = answers.data() + ATOMR_CUTLASS_JIT_PARAMS_OFFSET;
    made.relocations = find_relocations(both[0], both[1], first, first + stride, place.info.params_bytes);
    made.params.assign(first, first + place.info.params_bytes);
    return made;
  }

  static int supports(atomr_cutlass_row const* row, void const* args) {
    return of(row).evaluated(*static_cast<Args const*>(args)).answer.implementable != 0
               ? ATOMR_CUTLASS_OK
               : ATOMR_CUTLASS_CANNOT_IMPLEMENT;
  }

  static int workspace_size(atomr_cutlass_row const* row, void const* args, uint64_t* bytes) {
    *bytes = of(row).evaluated(*static_cast<Args const*>(args)).answer.workspace_bytes;
    return ATOMR_CUTLASS_OK;
  }

  static int prepare(atomr_cutlass_row const* row, void const* args, void* params, atomr_cutlass_launch* launch) {
    JitRow& self = of(row);
    Args const& given = *static_cast<Args const*>(args);
    Evaluated const& known = self.evaluated(given);
    atomr_cutlass_jit_evaluation const& answer = known.answer;
    if (answer.implementable == 0) return ATOMR_CUTLASS_CANNOT_IMPLEMENT;
    auto* const bytes = static_cast<unsigned char*>(params);
    std::memcpy(bytes, known.params.data(), known.params.size());
    relocate(known.relocations, given, bytes);
    *launch = {{answer.grid[0], answer.grid[1], answer.grid[2]},
               {self.shape_.block, 1, 1},
               {self.shape_.cluster[0], self.shape_.cluster[1], self.shape_.cluster[2]},
               self.shape_.shared_bytes,
               answer.clear_offset,
               answer.clear_bytes};
    return ATOMR_CUTLASS_OK;
  }

  static int launch(atomr_cutlass_row const* row, void const* params, atomr_cutlass_launch const* launch,
                    void* stream) {
    JitRow const& self = of(row);
    LaunchShape shape = self.shape_;
    for (int i = 0; i < 3; ++i) shape.grid[i] = launch->grid[i];
    void* arguments[] = {const_cast<void*>(params)};
    return launch_function(self.function_, shape, arguments, stream);
  }

  std::shared_ptr<JitKernel> kernel_;
  atomr_cutlass_row row_{};
  void* function_ = nullptr;
  LaunchShape shape_{};
  std::mutex mutex_;
  std::vector<std::unique_ptr<Evaluated>> known_;
};

}  // namespace

std::shared_ptr<atomr_cutlass_row const> make_jit_row(std::shared_ptr<JitKernel> kernel) {
  auto const made = std::make_shared<JitRow>(std::move(kernel));
  return {made, made->row()};
}

}  // namespace atomr_cutlass
