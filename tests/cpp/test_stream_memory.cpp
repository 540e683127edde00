// The memory that a plan's launches use on each stream, over a driver without a GPU: streams come and go, and nothing
// tells when one is destroyed.
#include "stream_memory.h"

#include <mutex>
#include <set>
#include <vector>

#include "check.h"
#include "driver.h"
#include "errors.h"
#include "fake_libraries.h"

using namespace atomr_cutlass;

namespace {

constexpr size_t kBytes = 512, kZeroed = 128;

void* handle(uintptr_t value) { return reinterpret_cast<void*>(value); }

// Memory of a plan, and what was allocated and freed since it was made.
struct Fixture {
  int const allocated = fake::device().allocations, freed = fake::device().frees, waited = fake::device().waits;
  StreamMemory memory{0, nullptr};

  Fixture() {
    memory.reserve(kBytes, true, kZeroed);
    fake::device().incarnation = 0;
  }

  int allocations() const { return fake::device().allocations - allocated; }
  int frees() const { return fake::device().frees - freed; }
  int waits() const { return fake::device().waits - waited; }

  // One call on a stream; where its memory was.
  void* call(void* stream) {
    StreamMemory::Piece& piece = memory.acquire(stream);
    memory.release(piece, stream);
    return piece.block->data();
  }
};

void test_a_stream_takes_over_from_the_one_that_had_its_handle() {
  Fixture fixture;
  void* const first = fixture.call(handle(64));
  CHECK_EQUAL(fixture.waits(), 0);
  fake::device().busy = true;  // what was launched on destroyed streams still runs
  for (uint64_t incarnation = 1; incarnation <= 100; ++incarnation) {
    fake::device().incarnation = incarnation;
    CHECK_EQUAL(fixture.call(handle(64)), first);
    CHECK_EQUAL(fixture.waits(), int(incarnation));  // each new stream waits for its predecessor's work
    CHECK_EQUAL(fixture.call(handle(64)), first);
    CHECK_EQUAL(fixture.waits(), int(incarnation));  // once
  }
  fake::device().busy = false;
  CHECK_EQUAL(fixture.allocations(), 1);
}

void test_idle_memory_goes_from_stream_to_stream() {
  int const frees = fake::device().frees;
  {
    Fixture fixture;
    for (uintptr_t stream = 1; stream <= 100; ++stream) fixture.call(handle(64 * stream));
    CHECK_EQUAL(fixture.allocations(), int(StreamMemory::kStreams));
    CHECK_EQUAL(fixture.waits(), 100 - int(StreamMemory::kStreams));
    CHECK_EQUAL(fixture.frees(), 0);
  }
  CHECK_EQUAL(fake::device().frees, frees + int(StreamMemory::kStreams));
}

void test_the_memory_that_was_idle_longest_goes_first() {
  Fixture fixture;
  std::vector<void*> data;
  for (uintptr_t stream = 1; stream <= StreamMemory::kStreams; ++stream)
    data.push_back(fixture.call(handle(64 * stream)));
  CHECK_EQUAL(fixture.call(handle(64)), data[0]);  // the first is the latest now
  CHECK_EQUAL(fixture.call(handle(64 * 50)), data[1]);
  // The stream that it was taken from is alive after all.
  CHECK_EQUAL(fixture.call(handle(128)), data[2]);
  CHECK_EQUAL(fixture.call(handle(64)), data[0]);
  CHECK_EQUAL(fixture.allocations(), int(StreamMemory::kStreams));
}

void test_streams_at_work_share_nothing_and_their_memory_is_freed_later() {
  Fixture fixture;
  fake::device().busy = true;
  std::set<void*> data;
  for (uintptr_t stream = 1; stream <= 40; ++stream) data.insert(fixture.call(handle(64 * stream)));
  CHECK_EQUAL(data.size(), 40u);
  CHECK_EQUAL(fixture.frees(), 0);
  fake::device().busy = false;
  CHECK(data.count(fixture.call(handle(64 * 41))) == 1);
  CHECK_EQUAL(fixture.allocations(), 40);
  CHECK_EQUAL(fixture.frees(), 40 - int(StreamMemory::kStreams));
}

void test_memory_of_a_call_under_way_is_not_given_to_another() {
  Fixture fixture;
  StreamMemory::Piece& piece = fixture.memory.acquire(handle(64));
  void* const mine = piece.block->data();
  fake::device().incarnation = 1;
  CHECK(fixture.call(handle(64)) != mine);
  for (uintptr_t stream = 2; stream <= 60; ++stream) CHECK(fixture.call(handle(64 * stream)) != mine);
  CHECK_EQUAL(piece.block->data(), mine);
  fake::device().incarnation = 0;
  fixture.memory.release(piece, handle(64));
  CHECK_EQUAL(fixture.call(handle(64)), mine);
}

void test_memory_of_a_captured_graph_stays_the_graphs() {
  Fixture fixture;
  fake::device().capturing = true;
  void* const graph = fixture.call(handle(64));
  fake::device().capturing = false;
  fake::device().incarnation = 1;
  for (uintptr_t stream = 1; stream <= 60; ++stream) CHECK(fixture.call(handle(64 * stream)) != graph);
  CHECK_EQUAL(fixture.frees(), 0);
  fake::device().capturing = true;
  CHECK_EQUAL(fixture.call(handle(64)), graph);  // the same capture goes on
  fake::device().capturing = false;
}

// Clears since some of the work, of so many bytes each.
int clears(size_t begin, size_t bytes) {
  int count = 0;
  for (size_t i = begin; i < fake::device().work.size(); ++i) {
    fake::Work const& one = fake::device().work[i];
    count += one.kind == fake::Work::Kind::kClear && one.bytes == bytes;
  }
  return count;
}

void test_memory_is_zeros_when_it_is_first_taken() {
  size_t const begin = fake::device().work.size();
  Fixture fixture;
  auto* const first = static_cast<unsigned char*>(fixture.call(handle(64)));
  for (size_t i = kZeroed; i < kBytes; ++i) CHECK_EQUAL(int(first[i]), 0);
  CHECK_EQUAL(clears(begin, kBytes - kZeroed), 1);
  // Later calls find what the first has left, those of a stream that takes it over too.
  first[kZeroed] = 7;
  fixture.call(handle(64));
  fake::device().incarnation = 1;
  CHECK_EQUAL(fixture.call(handle(64)), static_cast<void*>(first));
  CHECK_EQUAL(int(first[kZeroed]), 7);
  CHECK_EQUAL(clears(begin, kBytes - kZeroed), 1);
}

void test_a_graphs_memory_is_cleared_at_once_and_not_by_the_graph() {
  Fixture fixture;
  size_t const begin = fake::device().work.size();
  fake::device().capturing = true;
  fixture.call(handle(64));
  fixture.call(handle(64));
  fake::device().capturing = false;
  CHECK_EQUAL(clears(begin, kBytes - kZeroed), 1);
  for (size_t i = begin; i < fake::device().work.size(); ++i) CHECK(fake::device().work[i].stream != handle(64));
}

void test_the_default_streams_of_threads_share_nothing() {
  Fixture fixture;
  void* const per_thread = handle(2);
  void* const first = fixture.call(per_thread);
  fake::device().incarnation = 1;  // as another thread would call
  void* const second = fixture.call(per_thread);
  CHECK(first != second);
  fake::device().incarnation = 0;
  CHECK_EQUAL(fixture.call(per_thread), first);
}

// Recording an event costs a third of a launch.
void test_the_default_stream_records_the_end_of_its_work_when_it_is_asked_for() {
  int const frees = fake::device().frees, records = fake::device().records;
  {
    Fixture fixture;
    void* const first = fixture.call(nullptr);
    for (int i = 0; i < 10; ++i) CHECK_EQUAL(fixture.call(nullptr), first);
    CHECK_EQUAL(fake::device().records, records);
    fixture.call(handle(64));
    CHECK_EQUAL(fake::device().records, records + 1);
    fake::device().busy = true;
  }
  CHECK_EQUAL(fake::device().records, records + 2);
  CHECK_EQUAL(fake::device().frees, frees);
  fake::device().busy = false;
  retire({}, 0);
  CHECK_EQUAL(fake::device().frees, frees + 2);
}

void test_idle_memory_of_the_default_stream_goes_to_others_when_its_work_has_ended() {
  Fixture fixture;
  void* const first = fixture.call(nullptr);
  for (uintptr_t stream = 1; stream < StreamMemory::kStreams; ++stream) fixture.call(handle(64 * stream));
  fake::device().busy = true;
  CHECK(fixture.call(handle(64 * 50)) != first);
  fake::device().busy = false;
  int const waits = fixture.waits();
  CHECK_EQUAL(fixture.call(handle(64 * 51)), first);
  CHECK_EQUAL(fixture.waits(), waits + 1);
}

void test_memory_of_a_plan_that_dies_beside_a_capture_is_freed_after_it() {
  int const frees = fake::device().frees;
  {
    Fixture fixture;
    fixture.call(nullptr);
    fake::device().capturing = true;
  }
  retire({}, 0);
  CHECK_EQUAL(fake::device().frees, frees);  // no event can be recorded on the default stream yet
  fake::device().capturing = false;
  fake::device().busy = true;
  retire({}, 0);
  CHECK_EQUAL(fake::device().frees, frees);
  fake::device().busy = false;
  retire({}, 0);
  CHECK_EQUAL(fake::device().frees, frees + 1);
}

void test_a_stream_that_could_not_wait_tries_again() {
  Fixture fixture;
  void* const first = fixture.call(handle(64));
  fake::device().incarnation = 1;
  fake::device().wait_status = 1;
  CHECK_THROWS(LibraryFailure, "having a stream wait", fixture.call(handle(64)));
  CHECK_THROWS(LibraryFailure, "having a stream wait", fixture.call(handle(64)));
  fake::device().wait_status = 0;
  CHECK_EQUAL(fixture.call(handle(64)), first);
  CHECK_EQUAL(fixture.waits(), 3);
  // The failed calls do not hold it either.
  fake::device().incarnation = 2;
  CHECK_EQUAL(fixture.call(handle(64)), first);
}

void test_a_turn_leaves_its_memory_before_others_may_free_it() {
  Fixture fixture;
  StreamMemory::Piece& piece = fixture.memory.acquire(handle(64));
  StreamTurn turn(fixture.memory, handle(64));
  turn.release();
  CHECK(piece.turn.try_lock());
  piece.turn.unlock();
  fixture.memory.release(piece, handle(64));
}

void test_streams_are_ordered_by_one_event_that_goes() {
  int const waited = fake::device().waits, events = fake::device().events;
  order_streams(handle(64), handle(128), false);
  CHECK_EQUAL(fake::device().waits, waited + 1);
  order_streams(handle(64), handle(64), false);
  order_streams(nullptr, handle(1), false);  // the legacy default stream has two handles
  CHECK_EQUAL(fake::device().waits, waited + 1);
  CHECK_EQUAL(fake::device().events, events);
}

}  // namespace

int main() {
  fake::libraries()["libcuda.so.1"] = fake::driver();
  DeviceGuard guard(0);
  test_a_stream_takes_over_from_the_one_that_had_its_handle();
  test_idle_memory_goes_from_stream_to_stream();
  test_the_memory_that_was_idle_longest_goes_first();
  test_streams_at_work_share_nothing_and_their_memory_is_freed_later();
  test_memory_of_a_call_under_way_is_not_given_to_another();
  test_memory_of_a_captured_graph_stays_the_graphs();
  test_memory_is_zeros_when_it_is_first_taken();
  test_a_graphs_memory_is_cleared_at_once_and_not_by_the_graph();
  test_the_default_streams_of_threads_share_nothing();
  test_the_default_stream_records_the_end_of_its_work_when_it_is_asked_for();
  test_idle_memory_of_the_default_stream_goes_to_others_when_its_work_has_ended();
  test_memory_of_a_plan_that_dies_beside_a_capture_is_freed_after_it();
  test_a_stream_that_could_not_wait_tries_again();
  test_a_turn_leaves_its_memory_before_others_may_free_it();
  test_streams_are_ordered_by_one_event_that_goes();
  return check::result();
}
