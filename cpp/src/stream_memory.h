// Device memory that the launches of a plan share, a piece for each stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "dlpack_abi.h"
#include "driver.h"

namespace atomr_cutlass {

// Memory like `prototype` from a framework's allocator; throws LibraryFailure with the framework's own words.
DlManagedVersioned* framework_allocate(DlExchangeApi const* allocator, DlTensor& prototype);

// A block of device memory, from the driver or from a framework's allocator.
//
// Freeing one waits for nothing: give a block that a launch may still use to `retire`.
class DeviceBlock {
 public:
  explicit DeviceBlock(size_t bytes);                 // cuMemAlloc on the current device
  explicit DeviceBlock(DlManagedVersioned* managed);  // takes ownership
  ~DeviceBlock();
  DeviceBlock(DeviceBlock const&) = delete;
  DeviceBlock& operator=(DeviceBlock const&) = delete;
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
  DlManagedVersioned* managed_ = nullptr;
};

// Memory that launches on one stream use, one after the other, and the end of the last of them (of its former use,
// where there was none yet).
struct StreamBlock {
  std::shared_ptr<DeviceBlock> block;
  Event used;
  bool unrecorded = false;  // the last launch was on the legacy default stream, and `used` is not its end: see `record`

  // Records the end of the last launch where that has been put off. False while a capture forbids it. The device must
  // be current.
  bool record();
};

// Frees the block once its last launch has ended: now, or when a later block is retired or requested. Legal while
// streams are captured.
void retire(StreamBlock block, int device) noexcept;

// Launches on different streams may run at once, and a graph may replay beside them: each stream, and each stream of
// each capture, has memory of its own. Memory of a captured graph is never freed: the destruction of graphs cannot be
// observed, and a graph may outlive the plan.
//
// Nor can the destruction of streams be observed, so that the end of every launch is recorded immediately, except on
// the legacy default stream, which is never destroyed. A stream that is new here takes over the piece of the one that
// had its handle before; if there are kStreams pieces, the one that has been idle longest, and idle ones beyond that
// many are freed. If the former stream still exists, it gets another piece at its next launch.
class StreamMemory {
 public:
  static constexpr size_t kStreams = 16;

  // `allocator` may be null: the driver's memory then.
  StreamMemory(int device, DlExchangeApi const* allocator);
  ~StreamMemory();
  StreamMemory(StreamMemory const&) = delete;
  StreamMemory& operator=(StreamMemory const&) = delete;

  // Sets the size of every piece, before the first is taken, and allocates the first stream's if `now`, unless a graph
  // captures the framework's current stream. A piece is zeros from `zeroed` on when it is first taken; whoever relies
  // on that later leaves zeros. The device must be current.
  void reserve(size_t bytes, bool now, size_t zeroed);
  size_t bytes() const { return bytes_; }

  struct Piece : StreamBlock {
    std::mutex turn;  // of the launches of one call
    void* stream = nullptr;
    bool ordered = false;  // the stream waits for the piece's former use
    int calls = 0;  // that have acquired the piece and not yet released it
    uint64_t latest = 0;  // place of the latest call in the order of all
  };

  // The piece for launches that follow on this stream. The device must be current. Thread-safe, as `release` is.
  Piece& acquire(void* stream);
  // To be called when they have been launched, once for each `acquire`.
  void release(Piece& piece, void* stream);

 private:
  using Pieces = std::map<std::pair<uint64_t, uint64_t>, Piece>;  // by stream and capture

  bool is_captured() const;
  StreamBlock make() const;
  std::shared_ptr<DeviceBlock> cleared() const;
  void clear(DeviceBlock const& block, void* stream) const;
  Piece& place(void* stream, uint64_t capture);
  Pieces::iterator left_over(void* stream);
  std::vector<Pieces::iterator> idle();
  void trim(size_t most);

  int device_;
  DlExchangeApi const* allocator_;
  size_t bytes_ = 0, zeroed_ = 0;
  std::mutex mutex_;
  Pieces pieces_;
  uint64_t calls_ = 0;
  StreamBlock spare_;
};

// The launches of one call, one after the other in the stream's piece: those of another thread on the stream come
// before or after. If one fails, those before it still use the memory, so its end is noted all the same.
class StreamTurn {
 public:
  // Without memory if pieces have no bytes.
  StreamTurn(StreamMemory& memory, void* stream);
  ~StreamTurn();
  StreamTurn(StreamTurn const&) = delete;
  StreamTurn& operator=(StreamTurn const&) = delete;

  unsigned char* data() const;
  // To be called when all has been launched.
  void release();

 private:
  StreamMemory& memory_;
  void* stream_;
  StreamMemory::Piece* piece_ = nullptr;
  std::unique_lock<std::mutex> lock_;
};

}  // namespace atomr_cutlass
