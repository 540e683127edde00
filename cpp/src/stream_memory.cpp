#include "stream_memory.h"

#include <algorithm>
#include <iterator>
#include <list>
#include <set>
#include <string>

#include "errors.h"

namespace atomr_cutlass {
namespace {

void keep_for_graph(std::shared_ptr<DeviceBlock> const& block) {
  static std::mutex mutex;
  static auto& kept = *new std::set<std::shared_ptr<DeviceBlock>>();
  std::lock_guard<std::mutex> lock(mutex);
  kept.insert(block);
}

// The stream of a device on which new memory is cleared.
void* clearing_stream() {
  static std::mutex mutex;
  static auto& streams = *new std::map<int, void*>();
  std::lock_guard<std::mutex> lock(mutex);
  void*& stream = streams[current_device()];
  if (stream == nullptr) stream = create_stream();
  return stream;
}

// Called from inside the framework's C code, which no exception may cross.
void keep_error(void* context, char const* kind, char const* message) {
  *static_cast<std::string*>(context) = std::string(kind) + ": " + message;
}

}  // namespace

bool StreamBlock::record() {
  if (!unrecorded) return true;
  void* const legacy = nullptr;
  if (capture_id(legacy) != 0) return false;
  used.record(legacy);
  unrecorded = false;
  return true;
}

DlManagedVersioned* framework_allocate(DlExchangeApi const* allocator, DlTensor& prototype) {
  std::string error = "no memory";
  DlManagedVersioned* managed = nullptr;
  CaptureRelaxed relaxed;
  if (allocator->allocate(&prototype, &managed, &error, &keep_error) != 0 || managed == nullptr) {
    throw LibraryFailure("allocator", error);
  }
  return managed;
}

DeviceBlock::DeviceBlock(size_t bytes) : data_(reinterpret_cast<void*>(allocate(bytes))) {}

DeviceBlock::DeviceBlock(DlManagedVersioned* managed)
    : data_(static_cast<char*>(managed->tensor.data) + managed->tensor.byte_offset),
      managed_(managed) {}

DeviceBlock::~DeviceBlock() {
  if (managed_ != nullptr) {
    CaptureRelaxed relaxed;
    managed_->deleter(managed_);
  } else if (data_ != nullptr) {
    release(reinterpret_cast<DevicePointer>(data_));
  }
}

void retire(StreamBlock block, int device) noexcept {
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
    for (auto entry = mine.begin(); entry != mine.end();) {
      DeviceGuard guard(entry->first);
      entry = entry->second.record() && entry->second.used.done() ? mine.erase(entry) : std::next(entry);
    }
  } catch (std::exception const&) {
    // The context is gone. Kept, since nothing is known of what still uses the memory.
  }
  std::lock_guard<std::mutex> lock(mutex);
  waiting.splice(waiting.end(), mine);
}

StreamMemory::StreamMemory(int device, DlExchangeApi const* allocator) : device_(device), allocator_(allocator) {}

StreamMemory::~StreamMemory() {
  retire(std::move(spare_), device_);
  for (auto& piece : pieces_) retire(std::move(piece.second), device_);
}

void StreamMemory::reserve(size_t bytes, bool now, size_t zeroed) {
  bytes_ = bytes;
  zeroed_ = zeroed;
  if (now && bytes != 0 && !is_captured()) spare_ = make();
}

// Whether a graph captures what the framework's current stream does: memory of it, and its clearing, would be the
// graph's.
bool StreamMemory::is_captured() const {
  void* stream = nullptr;
  return allocator_ != nullptr && allocator_->current_stream(kDlCuda, device_, &stream) == 0 && capture_id(stream) != 0;
}

// Memory of the driver, cleared. Legal during capture: no graph does the clearing, whose replays are to find what the
// launches before have left.
std::shared_ptr<DeviceBlock> StreamMemory::cleared() const {
  auto block = std::make_shared<DeviceBlock>(bytes_);
  if (zeroed_ < bytes_) {
    CaptureRelaxed relaxed;
    clear(*block, clearing_stream());
    synchronize(clearing_stream());
  }
  return block;
}

void StreamMemory::clear(DeviceBlock const& block, void* stream) const {
  clear_async(reinterpret_cast<DevicePointer>(block.data()) + zeroed_, bytes_ - zeroed_, stream);
}

StreamBlock StreamMemory::make() const {
  if (allocator_ == nullptr) return {cleared(), {}};
  int64_t shape = int64_t(bytes_);
  int64_t stride = 1;
  DlTensor prototype{nullptr, {kDlCuda, device_}, 1, {1, 8, 1}, &shape, &stride, 0};
  StreamBlock made{std::make_shared<DeviceBlock>(framework_allocate(allocator_, prototype)), {}};
  // The framework orders the block's former use on the stream that is its current one in this thread, no other.
  void* stream = nullptr;
  if (allocator_->current_stream(kDlCuda, device_, &stream) == 0) made.used.record(stream);
  if (zeroed_ < bytes_) {
    made.used.hold(clearing_stream());
    clear(*made.block, clearing_stream());
    made.used.record(clearing_stream());
  }
  return made;
}

// Pieces of streams that no launch uses any more, the one that has been idle longest first.
std::vector<StreamMemory::Pieces::iterator> StreamMemory::idle() {
  std::vector<Pieces::iterator> found;
  for (auto entry = pieces_.begin(); entry != pieces_.end(); ++entry) {
    bool const of_capture = entry->first.second != 0;
    Piece& piece = entry->second;
    if (!of_capture && piece.calls == 0 && piece.record() && piece.used.done()) found.push_back(entry);
  }
  std::sort(found.begin(), found.end(), [](auto x, auto y) { return x->second.latest < y->second.latest; });
  return found;
}

// The piece that a stream which has none takes over, or the end.
StreamMemory::Pieces::iterator StreamMemory::left_over(void* stream) {
  // One handle that is another stream in every thread (CU_STREAM_PER_THREAD): nothing says that the other is gone.
  void* const per_thread = reinterpret_cast<void*>(uintptr_t(2));
  size_t count = 0;
  for (auto entry = pieces_.begin(); entry != pieces_.end(); ++entry) {
    if (entry->first.second != 0) continue;
    ++count;
    if (entry->second.stream == stream && stream != per_thread && entry->second.calls == 0) return entry;
  }
  if (count < kStreams) return pieces_.end();
  auto const unused = idle();
  return unused.empty() ? pieces_.end() : unused.front();
}

// Frees idle pieces until there are `most` for streams, or no idle one is left.
void StreamMemory::trim(size_t most) {
  auto const of_stream = [](auto const& piece) { return piece.first.second == 0; };
  auto count = size_t(std::count_if(pieces_.begin(), pieces_.end(), of_stream));
  if (count <= most) return;
  for (auto const& entry : idle()) {
    if (count-- <= most) return;
    retire(std::move(entry->second), device_);
    pieces_.erase(entry);
  }
}

StreamMemory::Piece& StreamMemory::place(void* stream, uint64_t capture) {
  // A stream that is being captured does not tell its id; the capture does.
  Pieces::key_type const key{capture != 0 ? reinterpret_cast<uint64_t>(stream) : stream_id(stream), capture};
  auto const known = pieces_.find(key);
  if (known != pieces_.end()) return known->second;
  auto const former = capture != 0 ? pieces_.end() : left_over(stream);
  if (former == pieces_.end()) return pieces_[key];
  auto node = pieces_.extract(former);
  node.key() = key;
  node.mapped().ordered = false;
  return pieces_.insert(std::move(node)).position->second;
}

StreamMemory::Piece& StreamMemory::acquire(void* stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  uint64_t const capture = capture_id(stream);
  Piece& piece = place(stream, capture);
  piece.stream = stream;
  piece.latest = ++calls_;
  if (piece.block == nullptr) {
    if (capture != 0) {
      // Not from the framework: its allocator may give the memory to a later tensor of the same graph.
      piece.block = cleared();
      keep_for_graph(piece.block);
    } else if (spare_.block != nullptr) {
      static_cast<StreamBlock&>(piece) = std::move(spare_);  // made with the plan, for the first stream
    } else {
      retire({}, device_);
      static_cast<StreamBlock&>(piece) = make();
    }
  }
  ++piece.calls;
  if (piece.ordered) return piece;
  try {
    if (capture == 0) trim(kStreams);
    piece.used.hold(stream);
  } catch (...) {
    --piece.calls;
    throw;
  }
  piece.ordered = true;
  return piece;
}

void StreamMemory::release(Piece& piece, void* stream) {
  bool const captured = capture_id(stream) != 0;
  std::lock_guard<std::mutex> lock(mutex_);
  if (!captured && is_legacy(stream)) {
    piece.unrecorded = true;
  } else if (!captured) {
    piece.used.record(stream);
  }
  --piece.calls;  // if that failed the piece stays taken: nothing tells when its last launch ends
}

StreamTurn::StreamTurn(StreamMemory& memory, void* stream) : memory_(memory), stream_(stream) {
  if (memory.bytes() == 0) return;
  piece_ = &memory.acquire(stream);
  lock_ = std::unique_lock<std::mutex>(piece_->turn);
}

StreamTurn::~StreamTurn() {
  try {
    release();
  } catch (std::exception const&) {
    // What has failed already is being reported.
  }
}

unsigned char* StreamTurn::data() const {
  return piece_ != nullptr ? static_cast<unsigned char*>(piece_->block->data()) : nullptr;
}

void StreamTurn::release() {
  if (piece_ == nullptr) return;
  StreamMemory::Piece& piece = *piece_;
  piece_ = nullptr;
  lock_.unlock();  // before others may free the piece, which the lock is part of
  memory_.release(piece, stream_);
}

}  // namespace atomr_cutlass
