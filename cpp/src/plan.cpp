#include "plan.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <list>
#include <set>

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

// Any aligned address will do to ask whether a kernel can implement a shape and strides.
void* const kProbe = reinterpret_cast<void*>(uintptr_t(4096));

// Whether int32, in which integer epilogues compute, holds the value.
bool whole(double value) { return value == std::floor(value) && value >= -2147483648.0 && value <= 2147483647.0; }

// Nothing tells when a captured graph dies, and it may outlive the plan: what it uses is never freed.
void keep_for_graph(std::shared_ptr<DeviceBlock> const& block) {
  static std::mutex mutex;
  static auto& kept = *new std::set<std::shared_ptr<DeviceBlock>>();
  std::lock_guard<std::mutex> lock(mutex);
  kept.insert(block);
}

// Called from inside the framework's C code, which no exception may cross.
void keep_error(void* context, char const* kind, char const* message) {
  *static_cast<std::string*>(context) = std::string(kind) + ": " + message;
}

}  // namespace

DeviceBlock::DeviceBlock(size_t bytes) : data_(reinterpret_cast<void*>(allocate(bytes))) {}

DeviceBlock::DeviceBlock(DlManagedVersioned* managed)
    : data_(static_cast<char*>(managed->tensor.data) + managed->tensor.byte_offset),
      managed_(managed) {}

DeviceBlock::~DeviceBlock() {
  if (managed_ != nullptr) {
    managed_->deleter(managed_);
  } else if (data_ != nullptr) {
    release(reinterpret_cast<DevicePointer>(data_));
  }
}

void bury(StreamBlock block, int device) noexcept {
  using Waiting = std::list<std::pair<int, StreamBlock>>;
  static std::mutex mutex;
  static auto& waiting = *new Waiting();  // at exit the driver may be gone
  Waiting mine;
  if (process_forked()) {
    // The memory is the parent's, and so may be the lock.
    new std::shared_ptr<DeviceBlock>(std::move(block.block));
    return;
  }
  try {
    if (block.block != nullptr) mine.emplace_back(device, std::move(block));
    {
      std::lock_guard<std::mutex> lock(mutex);
      waiting.splice(waiting.end(), mine);
      mine.splice(mine.end(), waiting);
    }
    for (auto one = mine.begin(); one != mine.end();) {
      DeviceGuard guard(one->first);
      one = one->second.used.done() ? mine.erase(one) : std::next(one);
    }
  } catch (std::exception const&) {
    // The context is gone. Kept, since nothing is known of what still uses the memory.
  }
  std::lock_guard<std::mutex> lock(mutex);
  waiting.splice(waiting.end(), mine);
}

GemmPlan::GemmPlan(std::shared_ptr<atomr_cutlass_row const> row, atomr_cutlass_gemm_args const& args, OperandSpec a,
                   OperandSpec b, OperandSpec c, OperandSpec d, std::vector<BatchLaunch> launches,
                   GemmPlanOptions options, DlExchangeApi const* allocator)
    : row_(std::move(row)),
      a_(a),
      b_(b),
      c_(c),
      d_(d),
      launches_(std::move(launches)),
      options_(options),
      allocator_(allocator) {
  std::memcpy(&args_, &args, sizeof(args));
  if (row_->params_bytes > kParamsBytes || row_->params_align > 128) {
    throw Unsupported(std::string(row_->name) + " has larger parameters than this package can launch");
  }
  DeviceGuard guard(options_.device);
  // Every problem that a call may turn into, so that no call meets one that has not been asked about.
  std::set<int32_t> batches;
  for (BatchLaunch const& launch : launches_) batches.insert(launch.batch);
  for (int32_t const batch : batches) {
    for (bool const with_c : {false, true}) {
      for (bool const null_product : {true, false}) {
        atomr_cutlass_gemm_args problem;
        std::memcpy(&problem, &args_, sizeof(problem));
        problem.batch = batch;
        problem.c = with_c ? kProbe : nullptr;
        if (null_product) {
          set_null_product(problem);
        } else if (problem.k == 0) {
          continue;
        }
        open(problem);
      }
    }
  }
  if (workspace_bytes_ != 0) spare_ = new_block(workspace_bytes_);
}

GemmPlan::~GemmPlan() {
  bury(std::move(spare_), options_.device);
  for (auto& one : workspaces_) bury(std::move(one.second), options_.device);
  for (auto& one : zeros_) bury(std::move(one.second), options_.device);
}

void GemmPlan::set_null_product(atomr_cutlass_gemm_args& args) const {
  args.alpha = 0.0;
  args.k = options_.null_k;
  args.lda = options_.null_lda;
  args.ldb = options_.null_ldb;
  args.batch_stride_a = args.batch_stride_b = 0;
}

void GemmPlan::open(atomr_cutlass_gemm_args problem) {
  problem.a = problem.b = problem.d = problem.workspace = kProbe;
  atomr_cutlass_row const* const row = row_.get();
  check_row(row->supports(row, &problem), row, "asking");
  uint64_t bytes = 0;
  check_row(row->workspace_size(row, &problem, &bytes), row, "preparing");
  workspace_bytes_ = std::max(workspace_bytes_, bytes);
  alignas(128) unsigned char params[kParamsBytes];
  check_row(row->prepare(row, &problem, params, &geometry_), row, "preparing");
}

DlManagedVersioned* framework_allocate(DlExchangeApi const* allocator, DlTensor& prototype) {
  std::string error = "no memory";
  DlManagedVersioned* managed = nullptr;
  if (allocator->allocate(&prototype, &managed, &error, &keep_error) != 0 || managed == nullptr) {
    throw LibraryFailure("allocator", error);
  }
  return managed;
}

StreamBlock GemmPlan::new_block(size_t bytes) const {
  if (allocator_ == nullptr) return {std::make_shared<DeviceBlock>(bytes), {}};
  int64_t shape = int64_t(bytes);
  int64_t stride = 1;
  DlTensor prototype{nullptr, {kDlCuda, options_.device}, 1, {1, 8, 1}, &shape, &stride, 0};
  StreamBlock made{std::make_shared<DeviceBlock>(framework_allocate(allocator_, prototype)), {}};
  // The framework orders the block's former use on the stream that is its current one in this thread, no other.
  void* stream = nullptr;
  if (allocator_->current_stream(kDlCuda, options_.device, &stream) == 0) made.used.record(stream);
  return made;
}

bool GemmPlan::row_major_output() const {
  int64_t contiguous = 1;
  for (int i = d_.layout.rank - 1; i >= 0; --i) {
    if (d_.layout.shape[i] != 1 && d_.layout.strides[i] != contiguous) return false;
    contiguous *= d_.layout.shape[i];
  }
  return true;
}

StreamBlock& GemmPlan::block_for(StreamBlocks& blocks, size_t bytes, void* stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  uint64_t const capture = capture_id(stream);
  // A stream that is being captured does not tell its id; the capture does.
  StreamBlock& place = blocks[{capture != 0 ? reinterpret_cast<uint64_t>(stream) : stream_id(stream), capture}];
  if (place.block != nullptr) return place;
  if (capture != 0) {
    // Not from the framework: its allocator may give the memory to a later tensor of the same graph.
    place.block = std::make_shared<DeviceBlock>(bytes);
    keep_for_graph(place.block);
  } else if (&blocks == &workspaces_ && spare_.block != nullptr) {
    place = std::move(spare_);  // made with the plan, for the first stream
  } else {
    bury({}, options_.device);
    place = new_block(bytes);
  }
  place.used.hold(stream);
  return place;
}

void GemmPlan::check_operands(Operand const& a, Operand const& b, Operand const* c, Operand const& d) const {
  check_operand("a", a, a_);
  check_operand("b", b, b_);
  if (c != nullptr) check_operand("c", *c, c_);
  check_operand("out", d, d_);
  if (d.read_only) throw InvalidOperand("out is read-only: give an array that may be written");
  if (overlap(d, a)) throw InvalidOperand("out overlaps a: the kernel would read what it has written");
  if (overlap(d, b)) throw InvalidOperand("out overlaps b: the kernel would read what it has written");
  if (c == nullptr) return;
  // One C for all batches is read after the first batch has been written: the same address is not yet the same operand.
  bool const in_place =
      c->data == d.data && c->rank == d.rank && std::equal(c->strides, c->strides + c->rank, d.strides);
  if (!in_place && overlap(d, *c)) {
    throw InvalidOperand("out overlaps c without being c: give c itself or separate memory");
  }
}

void GemmPlan::prepare(atomr_cutlass_gemm_args const& args, unsigned char* params, atomr_cutlass_launch& geometry) {
  std::lock_guard<std::mutex> lock(prepared_mutex_);
  // Both sides were zeroed before they were filled, so that padding compares equal.
  if (!prepared_.valid || std::memcmp(&prepared_.args, &args, sizeof(args)) != 0) {
    prepared_.valid = false;
    check_row(row_->prepare(row_.get(), &args, prepared_.params, &prepared_.geometry), row_.get(), "preparing");
    std::memcpy(&prepared_.args, &args, sizeof(args));
    prepared_.valid = true;
  }
  // The caller's copy lives on its stack: the driver has read it when a launch returns, and no lock is held meanwhile.
  std::memcpy(params, prepared_.params, row_->params_bytes);
  geometry = prepared_.geometry;
}

GemmPlan* GemmPlan::turn_to(Operand const& a, Operand const& b, Operand const* c, Operand const& d, void* stream) {
  GemmPlan* const next = next_.load(std::memory_order_acquire);
  if (next == nullptr) return nullptr;
  // Checked by the other kernel's needs, which may be stricter.
  auto const reads = [](Operand const& operand, OperandSpec const& spec) {
    return reinterpret_cast<uintptr_t>(operand.data) % size_t(spec.alignment) == 0;
  };
  if (!reads(a, next->a_) || !reads(b, next->b_) || !reads(d, next->d_) || (c != nullptr && !reads(*c, next->c_))) {
    return nullptr;
  }
  DeviceGuard guard(options_.device);
  uint64_t const capture = capture_id(stream);
  if (capture == 0) {
    replaced_ = true;
  } else if (!replaced_ || capture == capture_) {
    capture_ = capture;  // a graph that began with this kernel goes on with it
    return nullptr;
  }
  return next;
}

void GemmPlan::launch(Operand const& a, Operand const& b, Operand const* c, Operand const& d, double alpha, double beta,
                      void* stream) {
  if (GemmPlan* const next = turn_to(a, b, c, d, stream)) return next->launch(a, b, c, d, alpha, beta, stream);
  check_operands(a, b, c, d);
  if (c == nullptr && beta != 0.0) throw InvalidOperand("beta is not 0, so c is needed");
  if (c != nullptr && beta == 0.0) {
    throw InvalidOperand("c is given but beta is 0, so it would not be read: give beta, or leave c out");
  }
  if (options_.integral && !(whole(alpha) && whole(beta))) {
    throw InvalidOperand("alpha and beta must be whole numbers of 32 bits where the result is an integer");
  }
  if (d.data == nullptr || args_.m == 0 || args_.n == 0 || args_.batch == 0) return;
  DeviceGuard guard(options_.device);

  atomr_cutlass_gemm_args args;
  std::memcpy(&args, &args_, sizeof(args));
  args.alpha = alpha;
  args.beta = beta;
  StreamBlock* used[2] = {};
  if (workspace_bytes_ != 0) {
    used[0] = &block_for(workspaces_, workspace_bytes_, stream);
    args.workspace = used[0]->block->data();
  }
  // BLAS: with alpha = 0 (or K = 0) A and B are not read, so a NaN in them does not reach D.
  bool const null_product = alpha == 0.0 || args_.k == 0;
  void const* zero = nullptr;
  if (null_product) {
    used[1] = &block_for(zeros_, size_t(options_.null_bytes), stream);
    zero = used[1]->block->data();
    // At every use, so that it is part of a graph that captures it.
    clear_async(reinterpret_cast<DevicePointer>(zero), size_t(options_.null_bytes), stream);
    set_null_product(args);
  }
  Operand const& first = options_.exchanged ? b : a;
  Operand const& second = options_.exchanged ? a : b;

  alignas(128) unsigned char params[kParamsBytes];
  atomr_cutlass_launch geometry;
  for (BatchLaunch const& offset : launches_) {
    args.batch = offset.batch;
    int64_t const first_offset = options_.exchanged ? offset.b : offset.a;
    int64_t const second_offset = options_.exchanged ? offset.a : offset.b;
    args.a = null_product ? zero : static_cast<char const*>(first.data) + first_offset;
    args.b = null_product ? zero : static_cast<char const*>(second.data) + second_offset;
    args.c = c != nullptr ? static_cast<char const*>(c->data) + offset.c : nullptr;
    args.d = static_cast<char*>(d.data) + offset.d;
    prepare(args, params, geometry);
    // Two threads on one stream share its workspace: one's clearing must not fall between the other's and its launch.
    std::unique_lock<std::mutex> lock(launch_mutex_, std::defer_lock);
    if (geometry.clear_bytes != 0) {
      lock.lock();
      clear_async(reinterpret_cast<DevicePointer>(args.workspace) + geometry.clear_offset, size_t(geometry.clear_bytes),
                  stream);
    }
    check_row(row_->launch(row_.get(), params, &geometry, stream), row_.get(), "launching");
  }
  for (StreamBlock* const block : used) {
    if (block == nullptr || capture_id(stream) != 0) continue;
    std::lock_guard<std::mutex> lock(mutex_);
    block->used.record(stream);
  }
}

}  // namespace atomr_cutlass
