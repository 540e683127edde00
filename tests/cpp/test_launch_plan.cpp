// Plans of any op over a driver whose device memory is the host's: what a call enqueues and with which addresses, what
// is refused before anything is, and who owns memory meanwhile.
#include "launch_plan.h"

#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "driver.h"
#include "errors.h"
#include "fake_libraries.h"

using namespace atomr_cutlass;

namespace {

using fake::Work;

// A kernel whose parameters are its arguments.
class Kernel {
 public:
  explicit Kernel(char const* op, char const* name = "cutlass_fake") : layout(*args_of(op)) {
    row_ = {name,
            "{}",
            "",
            uint32_t(layout.bytes),
            16,
            1024,
            128,
            0,
            13000,
            this,
            [](atomr_cutlass_row const* row, void const* args) {
              of(row).asked.push_back(of(row).bytes(args));
              return of(row).supports;
            },
            [](atomr_cutlass_row const* row, void const*, uint64_t* bytes) {
              return *bytes = of(row).workspace, int(ATOMR_CUTLASS_OK);
            },
            [](atomr_cutlass_row const* row, void const* args, void* params, atomr_cutlass_launch* launch) {
              Kernel const& self = of(row);
              std::memcpy(params, args, self.layout.bytes);
              *launch = {{7, 1, 1}, {128, 1, 1}, {1, 1, 1}, 1024, {0, 0, 0}, 0, self.clear_offset, self.clear_bytes};
              return int(ATOMR_CUTLASS_OK);
            },
            [](atomr_cutlass_row const* row, void const* params, atomr_cutlass_launch const*, void* stream) {
              Kernel& self = of(row);
              fake::note({Work::Kind::kKernel, 0, row, 0, stream});
              if (self.body) self.body(params, stream);
              std::lock_guard<std::mutex> lock(self.mutex_);
              self.launches.push_back(self.bytes(params));
              return self.status;
            }};
  }
  Kernel(Kernel const&) = delete;

  std::shared_ptr<atomr_cutlass_row const> row() const {
    return {&row_, [](atomr_cutlass_row const*) {}};
  }

  // What a launch was given, from the last back.
  template <class Args>
  Args args(size_t back = 0) const {
    Args found{};
    if (back < launches.size()) std::memcpy(&found, launches[launches.size() - 1 - back].data(), sizeof(found));
    return found;
  }

  ArgsLayout const& layout;
  uint64_t workspace = 0, clear_offset = 0, clear_bytes = 0;
  int supports = ATOMR_CUTLASS_OK, status = ATOMR_CUTLASS_OK;
  std::function<void(void const*, void*)> body;
  std::vector<std::vector<unsigned char>> asked, launches;

 private:
  static Kernel& of(atomr_cutlass_row const* row) { return *static_cast<Kernel*>(const_cast<void*>(row->context)); }
  std::vector<unsigned char> bytes(void const* args) const {
    auto const* const from = static_cast<unsigned char const*>(args);
    return {from, from + layout.bytes};
  }

  std::mutex mutex_;
  atomr_cutlass_row row_{};
};

Address operand_at(int index, int64_t bytes = 0) { return {Address::Base::kOperand, index, bytes}; }
Address temporary_at(int index, int64_t bytes = 0) { return {Address::Base::kTemporary, index, bytes}; }

// A launching step in the making.
struct Launch {
  explicit Launch(Kernel const& kernel) {
    step.kind = Step::Kind::kLaunch;
    step.row = kernel.row();
    step.layout = &kernel.layout;
    step.data.assign(kernel.layout.bytes, 0);
  }
  template <class Value>
  Launch& set(char const* name, Value value) {
    std::memcpy(step.data.data() + step.layout->field(name)->offset, &value, sizeof(value));
    return *this;
  }
  Launch& pointer(char const* name, Address address) {
    step.patches.push_back({step.layout->field(name)->offset, address});
    return *this;
  }
  Launch& scalar(char const* name, bool beta) {
    step.scalars.push_back({step.layout->field(name)->offset, beta});
    return *this;
  }
  operator Step() const { return step; }

  Step step;
};

Step clear(Address target, size_t bytes) {
  Step step{Step::Kind::kClear, nullptr, nullptr, {}, {}, {}, target, bytes};
  return step;
}

Step copy(Address target, std::vector<unsigned char> table, std::vector<Patch> patches) {
  return {Step::Kind::kCopy, nullptr, nullptr, {}, std::move(table), std::move(patches), target, 0};
}

alignas(256) float a_memory[256], b_memory[256], c_memory[256], d_memory[256];

Operand operand(void* data, std::vector<int64_t> const& shape, std::vector<int64_t> const& strides,
                DlDataType dtype = {2, 32, 1}) {
  Operand made;
  made.data = data;
  made.device = {kDlCuda, 0};
  made.dtype = dtype;
  made.rank = int32_t(shape.size());
  for (size_t i = 0; i < shape.size(); ++i) {
    made.shape[i] = shape[i];
    made.strides[i] = shape[i] == 1 ? 0 : strides[i];
  }
  return made;
}

void* stream_at(uintptr_t number) { return reinterpret_cast<void*>(number); }

// D (4 x 6) from A (4 x 5), B (5 x 6) and the source C.
struct Problem {
  Operand a = operand(a_memory, {4, 5}, {5, 1});
  Operand b = operand(b_memory, {5, 6}, {6, 1});
  Operand c = operand(c_memory, {4, 6}, {6, 1});
  Operand d = operand(d_memory, {4, 6}, {6, 1});
  std::vector<size_t> temporaries;
  std::vector<Step> steps;
  LaunchPlanOptions options;
  DlExchangeApi const* allocator = nullptr;

  Problem() {
    fake::device().work.clear();
    fake::device().capture += 1;
  }

  std::vector<Slot> slots() const {
    return {{"a", {a, 4}, Slot::Role::kInput},
            {"b", {b, 4}, Slot::Role::kInput},
            {"c", {c, 4}, Slot::Role::kSource},
            {"out", {d, 4}, Slot::Role::kOutput}};
  }
  std::vector<Operand> operands() const { return {a, b, c, d}; }
  std::unique_ptr<LaunchPlan> plan() const {
    return std::make_unique<LaunchPlan>(slots(), temporaries, steps, options, allocator);
  }
};

Launch gemm(Kernel const& kernel) {
  return Launch(kernel)
      .pointer("a", operand_at(0))
      .pointer("b", operand_at(1))
      .pointer("c", operand_at(2))
      .pointer("d", operand_at(3))
      .scalar("alpha", false)
      .scalar("beta", true);
}

using GemmArgs = atomr_cutlass_gemm_args;

void test_addresses_and_scalars_of_the_call() {
  Kernel kernel("gemm");
  Problem problem;
  problem.steps = {gemm(kernel).set("k", int32_t(5)).set("ldd", int64_t(6)).pointer("scale_a", operand_at(1, 12)),
                   Launch(kernel).pointer("a", operand_at(0, -8)).pointer("d", operand_at(3)).set("alpha", 9.0)};
  auto const plan = problem.plan();
  // Asked with addresses where there will be some, and none where there will not.
  CHECK_EQUAL(kernel.asked.size(), 2u);
  GemmArgs asked;
  std::memcpy(&asked, kernel.asked[0].data(), sizeof(asked));
  CHECK(asked.a != nullptr && asked.c != nullptr && asked.scale_a != nullptr && asked.workspace != nullptr);
  CHECK(asked.scale_b == nullptr && asked.amax == nullptr);
  CHECK_EQUAL(asked.k, 5);

  plan->launch(problem.operands(), 2.0, 3.0, stream_at(42));
  auto const first = kernel.args<GemmArgs>(1), second = kernel.args<GemmArgs>(0);
  CHECK(first.a == a_memory && first.b == b_memory && first.c == c_memory && first.d == d_memory);
  CHECK(first.scale_a == b_memory + 3 && first.scale_b == nullptr);
  CHECK(first.alpha == 2.0 && first.beta == 3.0 && first.k == 5 && first.ldd == 6);
  CHECK(first.workspace == nullptr);  // it needs none
  CHECK(second.a == a_memory - 2 && second.b == nullptr && second.c == nullptr);
  CHECK(second.alpha == 9.0 && second.beta == 0.0);
  CHECK(fake::called()[0].stream == stream_at(42));
  CHECK_EQUAL(plan->workspace_bytes(), 0u);
  CHECK(fake::device().current == nullptr);  // the caller's context is back

  // Another call, other addresses.
  problem.a.data = a_memory + 100;
  plan->launch(problem.operands(), 1.0, 0.0, stream_at(42));
  CHECK(kernel.args<GemmArgs>(1).a == a_memory + 100);
  CHECK(kernel.args<GemmArgs>(0).a == a_memory + 98);
}

void test_an_array_without_elements_is_there() {
  // Frameworks give it no address; kernels take that for an operand that is not.
  Kernel kernel("gemm");
  Problem problem;
  problem.a = operand(nullptr, {4, 0}, {1, 1});
  problem.steps = {gemm(kernel)};
  auto const plan = problem.plan();
  plan->launch(problem.operands(), 1.0, 0.0, nullptr);
  auto const got = kernel.args<GemmArgs>();
  CHECK(got.a != nullptr);
  CHECK(reinterpret_cast<uintptr_t>(got.a) % 256 == 0);
}

void test_temporaries() {
  Kernel kernel("gemm");
  kernel.workspace = 1000;
  kernel.clear_offset = 256, kernel.clear_bytes = 512;
  Problem problem;
  problem.temporaries = {1, 300, 256};
  problem.steps = {gemm(kernel)
                       .pointer("scale_a", temporary_at(0))
                       .pointer("scale_b", temporary_at(1, 16))
                       .pointer("amax", temporary_at(2))};
  int const allocations = fake::device().allocations, frees = fake::device().frees;
  {
    auto const plan = problem.plan();
    CHECK_EQUAL(plan->workspace_bytes(), 256u + 512u + 256u + 1000u);
    CHECK_EQUAL(fake::device().allocations, allocations + 1);
    for (uintptr_t const stream : {0, 1, 0}) plan->launch(problem.operands(), 1.0, 0.0, stream_at(stream));
    // The first stream takes the piece that was there.
    CHECK_EQUAL(fake::device().allocations, allocations + 2);
    auto const first = kernel.args<GemmArgs>(2), other = kernel.args<GemmArgs>(1), again = kernel.args<GemmArgs>(0);
    CHECK(first.scale_a == again.scale_a && first.workspace == again.workspace);
    CHECK(first.scale_a != other.scale_a && first.workspace != other.workspace);
    auto const* const base = static_cast<char const*>(first.scale_a);
    CHECK(reinterpret_cast<uintptr_t>(base) % 256 == 0);
    CHECK(first.scale_b == base + 256 + 16);
    CHECK(first.amax == base + 256 + 512);
    CHECK(first.workspace == base + 256 + 512 + 256);
    // Cleared before each launch, within the kernel's own part.
    auto const work = fake::called();
    CHECK_EQUAL(work.size(), 6u);
    CHECK(work[0].kind == Work::Kind::kClear && work[1].kind == Work::Kind::kKernel);
    CHECK_EQUAL(work[0].target, reinterpret_cast<uint64_t>(base) + 256 + 512 + 256 + 256);
    CHECK_EQUAL(work[0].bytes, 512u);

    // A graph may replay beside the stream that it was captured on, and outlive the plan.
    fake::device().capturing = true;
    plan->launch(problem.operands(), 1.0, 0.0, nullptr);
    auto const captured = kernel.args<GemmArgs>();
    plan->launch(problem.operands(), 1.0, 0.0, nullptr);
    CHECK(kernel.args<GemmArgs>().workspace == captured.workspace);
    fake::device().capture += 1;
    plan->launch(problem.operands(), 1.0, 0.0, nullptr);
    fake::device().capturing = false;
    CHECK(captured.workspace != first.workspace && captured.workspace != other.workspace);
    CHECK(kernel.args<GemmArgs>().workspace != captured.workspace);
  }
  CHECK_EQUAL(fake::device().allocations, allocations + 4);
  CHECK_EQUAL(fake::device().frees, frees + 2);
}

void test_steps_in_order() {
  Kernel first("cast", "cutlass_first"), second("gemm", "cutlass_second");
  first.workspace = 100, second.workspace = 700;
  Problem problem;
  problem.temporaries = {64, 64};
  problem.steps = {clear(operand_at(3, 4), 8),
                   copy(temporary_at(1, 8), {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18},
                        {{8, operand_at(2, 24)}}),
                   Launch(first).pointer("a", operand_at(0)).pointer("d", temporary_at(0)), clear(temporary_at(1), 4),
                   gemm(second)};
  problem.options.main = 4;
  auto const plan = problem.plan();
  CHECK_EQUAL(plan->steps(), 5u);
  CHECK_EQUAL(plan->kernel_names().size(), 2u);
  CHECK_EQUAL(plan->kernel_names()[0], "cutlass_first");
  CHECK_EQUAL(std::string(plan->main().row()->name), "cutlass_second");
  CHECK_EQUAL(plan->main().geometry().grid[0], 7u);
  // What a kernel leaves in its workspace no other one writes to.
  CHECK_EQUAL(plan->workspace_bytes(), 512u + 256u + 700u);

  for (float& value : d_memory) value = 5;
  unsigned char before_table[4];
  plan->launch(problem.operands(), 1.0, 0.0, stream_at(9));
  auto const work = fake::called();
  CHECK_EQUAL(work.size(), 5u);
  CHECK(work[0].kind == Work::Kind::kClear && work[0].target == reinterpret_cast<uint64_t>(d_memory) + 4);
  CHECK(d_memory[0] == 5 && d_memory[1] == 0 && d_memory[2] == 0 && d_memory[3] == 5);
  CHECK(work[1].kind == Work::Kind::kCopy && work[1].bytes == 18);
  CHECK(work[2].kind == Work::Kind::kKernel && work[2].source == first.row().get());
  CHECK(work[3].kind == Work::Kind::kClear && work[3].bytes == 4 && work[3].target == work[1].target - 8);
  CHECK(work[4].kind == Work::Kind::kKernel && work[4].source == second.row().get());
  for (Work const& one : work) CHECK(one.stream == stream_at(9));
  auto const* const own = static_cast<char const*>(first.args<atomr_cutlass_cast_args>().workspace);
  CHECK(second.args<GemmArgs>().workspace == own + 256);
  for (int i = 0; i < 256 + 700; ++i) CHECK_EQUAL(int(own[i]), 0);

  auto const* const table = reinterpret_cast<unsigned char const*>(work[1].target);
  std::memcpy(before_table, table - 8, 4);
  CHECK(before_table[0] == 0 && table[0] == 1 && table[7] == 8 && table[16] == 17 && table[17] == 18);
  uint64_t address = 0;
  std::memcpy(&address, table + 8, sizeof(address));
  CHECK_EQUAL(address, reinterpret_cast<uint64_t>(c_memory) + 24);
}

void test_a_captured_copy_keeps_its_bytes() {
  Kernel kernel("grouped_gemm");
  Problem problem;
  problem.temporaries = {16};
  problem.steps = {copy(temporary_at(0), std::vector<unsigned char>(16, 3), {{8, operand_at(0)}}),
                   Launch(kernel).pointer("table", temporary_at(0))};
  problem.options.main = 1;
  fake::device().capturing = true;
  auto plan = problem.plan();
  plan->launch(problem.operands(), 1.0, 0.0, nullptr);
  Operand const first = problem.a;
  problem.a.data = a_memory + 4;
  plan->launch(problem.operands(), 1.0, 0.0, nullptr);
  plan.reset();
  fake::device().capturing = false;
  std::vector<Work> copies;
  for (Work const& one : fake::called()) {
    if (one.kind == Work::Kind::kCopy) copies.push_back(one);
  }
  CHECK_EQUAL(copies.size(), 2u);
  // The graph replays: each copy has its own bytes, though the plan is gone.
  for (size_t i = 0; i < copies.size(); ++i) {
    unsigned char table[16];
    std::memcpy(table, copies[i].source, 16);
    std::memcpy(reinterpret_cast<void*>(copies[i].target), table, 16);
    uint64_t address = 0;
    std::memcpy(&address, table + 8, sizeof(address));
    CHECK_EQUAL(address, reinterpret_cast<uint64_t>(a_memory + 4 * i));
    CHECK_EQUAL(int(table[7]), 3);
  }
}

void test_wrong_operands_launch_nothing() {
  Kernel kernel("gemm");
  Problem problem;
  problem.temporaries = {64};
  problem.steps = {clear(temporary_at(0), 64), gemm(kernel)};
  problem.options.main = 1;
  auto const plan = problem.plan();
  auto const launch = [&](std::function<void(std::vector<Operand>&)> const& change, double alpha = 1.0,
                          double beta = 0.0) {
    std::vector<Operand> operands = problem.operands();
    change(operands);
    plan->launch(operands, alpha, beta, nullptr);
  };
  using Operands = std::vector<Operand>&;
  CHECK_THROWS(InvalidOperand, "takes 4 operands, not 3", launch([](Operands o) { o.pop_back(); }));
  CHECK_THROWS(InvalidOperand, "takes 4 operands, not 0", launch([](Operands o) { o.clear(); }));
  CHECK_THROWS(InvalidOperand, "a is float32 of shape (5, 4)",
               launch([](Operands o) { o[0] = operand(a_memory, {5, 4}, {4, 1}); }));
  CHECK_THROWS(InvalidOperand, "b is", launch([](Operands o) { o[1].strides[0] = 8; }));
  CHECK_THROWS(InvalidOperand, "c is float16", launch([](Operands o) { o[2].dtype.bits = 16; }));
  CHECK_THROWS(InvalidOperand, "out is", launch([](Operands o) { o[3].device.id = 1; }));
  CHECK_THROWS(InvalidOperand, "a starts at an address that is a multiple of 2 bytes",
               launch([](Operands o) { o[0].data = reinterpret_cast<char*>(a_memory) + 2; }));
  CHECK_THROWS(InvalidOperand, "out is read-only", launch([](Operands o) { o[3].read_only = true; }));
  CHECK_THROWS(InvalidOperand, "out overlaps a", launch([](Operands o) { o[3].data = a_memory + 8; }));
  CHECK_THROWS(InvalidOperand, "out overlaps b", launch([](Operands o) { o[1].data = d_memory + 23; }));
  CHECK_THROWS(InvalidOperand, "out overlaps c without being c", launch([](Operands o) { o[3].data = c_memory + 1; }));
  CHECK_EQUAL(fake::called().size(), 0u);
  launch([](Operands o) { o[3].data = o[2].data; });
  CHECK_EQUAL(kernel.launches.size(), 1u);
  launch([](Operands o) { o[0].read_only = o[2].read_only = true; });
  launch([](Operands o) { o[0].data = o[1].data; });  // inputs may share
  CHECK_EQUAL(kernel.launches.size(), 3u);
}

void test_a_source_of_another_type_is_not_in_place() {
  Kernel kernel("gemm");
  Problem problem;
  problem.c = operand(c_memory, {4, 6}, {6, 1}, {2, 16, 1});
  problem.steps = {gemm(kernel)};
  auto const plan = problem.plan();
  problem.d.data = c_memory;
  CHECK_THROWS(InvalidOperand, "out overlaps c without being c", plan->launch(problem.operands(), 1, 1, nullptr));
}

void test_results_share_no_memory() {
  Kernel kernel("gemm");
  Problem problem;
  problem.steps = {gemm(kernel).pointer("amax", operand_at(4))};
  std::vector<Slot> slots = problem.slots();
  Operand const amax = operand(b_memory + 100, {}, {});
  slots.push_back({"amax", {amax, 4}, Slot::Role::kOutput});
  LaunchPlan plan(slots, {}, problem.steps, problem.options, nullptr);
  std::vector<Operand> operands = problem.operands();
  operands.push_back(amax);
  plan.launch(operands, 1.0, 0.0, nullptr);
  CHECK(kernel.args<GemmArgs>().amax == b_memory + 100);
  operands[4].data = d_memory + 3;
  CHECK_THROWS(InvalidOperand, "results need memory of their own", plan.launch(operands, 1.0, 0.0, nullptr));
  operands[4].data = b_memory;
  CHECK_THROWS(InvalidOperand, "amax overlaps b", plan.launch(operands, 1.0, 0.0, nullptr));
  operands[4].data = b_memory + 100;
  operands[4].read_only = true;
  CHECK_THROWS(InvalidOperand, "amax is read-only", plan.launch(operands, 1.0, 0.0, nullptr));
  CHECK_EQUAL(kernel.launches.size(), 1u);
}

void test_any_pair_that_meets_is_found() {
  Kernel kernel("gemm");
  std::mt19937 random(3);
  int refused = 0;
  for (int round = 0; round < 400; ++round) {
    std::vector<Slot> slots;
    std::vector<Operand> operands;
    for (int i = 0; i < 6; ++i) {
      // Some columns of some rows, of 16 to a row; sometimes none.
      int64_t const rows = random() % 4, columns = 1 + random() % 6;
      Operand const one = operand(d_memory + random() % 192, {rows, columns}, {16, 1});
      Slot::Role const role = random() % 3 == 0 ? Slot::Role::kOutput : Slot::Role::kInput;
      slots.push_back({"x" + std::to_string(i), {one, 4}, role});
      operands.push_back(one);
    }
    bool meets = false;
    for (size_t i = 0; i < slots.size(); ++i) {
      for (size_t j = 0; j < i; ++j) {
        bool const written = slots[i].role == Slot::Role::kOutput || slots[j].role == Slot::Role::kOutput;
        meets = meets || (written && overlap(operands[i], operands[j]));
      }
    }
    LaunchPlan plan(slots, {}, {Launch(kernel)}, {}, nullptr);
    refused += meets;
    if (meets) {
      CHECK_THROWS(InvalidOperand, "overlaps", plan.launch(operands, 1.0, 0.0, nullptr));
    } else {
      plan.launch(operands, 1.0, 0.0, nullptr);
    }
  }
  CHECK(refused > 50 && refused < 350);
}

// Of operands that lie as the slots say nothing but their places is looked at; who refuses them says the same.
void test_places_are_checked_as_operands_are() {
  std::mt19937 random(7);
  auto const below = [&random](int end) { return int(random() % unsigned(end)); };
  auto const refused = [](std::function<void()> const& launch) {
    try {
      launch();
    } catch (InvalidOperand const& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  size_t launched = 0, wrong = 0;
  for (int form = 0; form < 8; ++form) {
    Kernel kernel("gemm");
    Problem problem;
    problem.options.integral = form == 5;
    if (form == 1) problem.a = operand(a_memory, {4, 5}, {16, 2});
    if (form == 2) problem.d = operand(d_memory, {4, 6}, {-16, 1});
    if (form == 3) problem.b = operand(b_memory, {0, 6}, {6, 1});
    if (form == 4) problem.c = operand(c_memory, {4, 6}, {6, 1}, {2, 16, 1});
    problem.steps = {gemm(kernel)};
    std::vector<Slot> slots = problem.slots();
    slots[2].optional = form > 3;
    if (form == 6) slots[0].spec.alignment = 12;  // which no kernel asks for
    if (form == 7) slots[1].role = Slot::Role::kOutput;
    LaunchPlan plan(slots, {}, problem.steps, problem.options, nullptr);
    for (int round = 0; round < 500; ++round) {
      std::vector<Operand> operands = problem.operands();
      std::vector<Place> places(operands.size());
      for (size_t i = 0; i < operands.size(); ++i) {
        Operand& one = operands[i];
        if (below(3) == 0) one.data = d_memory + 64 + below(64);
        if (below(20) == 0) one.data = static_cast<char*>(one.data) + 2;
        if (below(20) == 0) one.data = operands[3].data;
        if (below(20) == 0) one.data = nullptr;
        one.read_only = below(20) == 0;
        if (i == 2 && below(2) == 0) one = Operand();
        if (i != 2 && below(40) == 0) one = Operand();
        places[i] = {one.data, one.given(), one.read_only, one.settled};
      }
      double const alpha = below(2) == 0 ? 0.5 : 2.0, beta = below(2) == 0 ? 0.0 : 3.0;
      std::string const of_operands = refused([&] { plan.launch(operands, alpha, beta, nullptr); });
      size_t const before = kernel.launches.size();
      std::string const of_places = refused([&] { plan.launch(places.data(), alpha, beta, nullptr); });
      CHECK_EQUAL(of_places, of_operands);
      CHECK_EQUAL(kernel.launches.size() - before, size_t(of_places.empty()));
      if (of_places.empty() && of_operands.empty()) {
        CHECK(kernel.launches[before] == kernel.launches[before - 1]);
      }
      ++(of_places.empty() ? launched : wrong);
    }
  }
  CHECK(launched > 500 && wrong > 500);
}

void test_integers_take_whole_scalars() {
  Kernel kernel("gemm");
  Problem problem;
  problem.steps = {gemm(kernel)};
  problem.options.integral = true;
  auto const plan = problem.plan();
  plan->launch(problem.operands(), 3.0, -2147483648.0, nullptr);
  for (double const bad : {0.5, std::nan(""), std::numeric_limits<double>::infinity(), 2147483648.0}) {
    CHECK_THROWS(InvalidOperand, "must be whole numbers", plan->launch(problem.operands(), bad, 0.0, nullptr));
    CHECK_THROWS(InvalidOperand, "must be whole numbers", plan->launch(problem.operands(), 1.0, bad, nullptr));
  }
  CHECK_EQUAL(kernel.launches.size(), 1u);
}

void test_kernels_that_cannot() {
  Kernel first("cast", "cutlass_first"), second("gemm", "cutlass_second");
  first.workspace = 64;
  second.supports = ATOMR_CUTLASS_CANNOT_IMPLEMENT;
  Problem problem;
  problem.steps = {Launch(first).pointer("a", operand_at(0)).pointer("d", operand_at(3)), gemm(second)};
  int const allocations = fake::device().allocations;
  CHECK_THROWS(Unsupported, "cutlass_second cannot implement", problem.plan());
  CHECK_EQUAL(fake::device().allocations, allocations);
  CHECK_EQUAL(fake::called().size(), 0u);
  problem.options.device = 1;
  CHECK_THROWS(DeviceUnavailable, "there is no GPU 1", problem.plan());
  CHECK(fake::device().current == nullptr);
}

void test_plans_that_make_no_sense() {
  Kernel kernel("gemm");
  auto const refused = [&](char const* says, std::function<void(Problem&)> const& change) {
    Problem problem;
    problem.temporaries = {64};
    problem.steps = {gemm(kernel)};
    change(problem);
    CHECK_THROWS(InvalidOperand, says, problem.plan());
  };
  refused("operand 4", [&](Problem& p) { p.steps[0].patches[0].address = operand_at(4); });
  refused("operand -1", [&](Problem& p) { p.steps[0].patches[0].address = operand_at(-1); });
  refused("temporary 1", [&](Problem& p) { p.steps.push_back(clear(temporary_at(1), 4)); });
  refused("beyond its end", [&](Problem& p) { p.steps.push_back(clear(temporary_at(0, 32), 33)); });
  refused("beyond its end", [&](Problem& p) { p.steps.push_back(copy(temporary_at(0, -1), {1, 2}, {})); });
  refused("outside", [&](Problem& p) { p.steps.push_back(copy(temporary_at(0), {1, 2}, {{0, operand_at(0)}})); });
  refused("no kernel", [](Problem& p) { p.steps.clear(); });
  refused("no kernel", [](Problem& p) {
    p.steps.insert(p.steps.begin(), clear(temporary_at(0), 4));
    p.options.main = 0;
  });
  CHECK_EQUAL(fake::called().size(), 0u);
}

void test_failures_leave_a_plan_usable() {
  Kernel first("cast", "cutlass_first"), second("gemm", "cutlass_second");
  Problem problem;
  problem.temporaries = {64};
  problem.steps = {clear(temporary_at(0), 64), Launch(first).pointer("a", operand_at(0)).pointer("d", temporary_at(0)),
                   gemm(second)};
  problem.options.main = 2;
  int const frees = fake::device().frees;
  {
    auto const plan = problem.plan();
    second.status = 1;
    CHECK_THROWS(LibraryFailure, "launching cutlass_second: SOME_ERROR",
                 plan->launch(problem.operands(), 1.0, 0.0, nullptr));
    CHECK(fake::device().current == nullptr);
    second.status = 700;
    CHECK_THROWS(ContextPoisoned, "restart the process", plan->launch(problem.operands(), 1.0, 0.0, nullptr));
    second.status = 0;
    plan->launch(problem.operands(), 1.0, 0.0, nullptr);
    CHECK_EQUAL(second.launches.size(), 3u);
  }
  CHECK_EQUAL(fake::device().frees, frees + 1);
  // What was launched before the failure uses the memory still.
  {
    auto const plan = problem.plan();
    second.status = 1;
    CHECK_THROWS(LibraryFailure, "SOME_ERROR", plan->launch(problem.operands(), 1.0, 0.0, nullptr));
    fake::device().busy = true;
  }
  CHECK_EQUAL(fake::device().frees, frees + 1);
  fake::device().busy = false;
  retire({}, 0);
  CHECK_EQUAL(fake::device().frees, frees + 2);
  CHECK_EQUAL(fake::device().events, 0);
}

void test_a_plan_may_go_while_its_launches_run() {
  Kernel kernel("gemm");
  kernel.workspace = 64;
  Problem problem;
  problem.steps = {gemm(kernel)};
  int const frees = fake::device().frees;
  {
    auto const plan = problem.plan();
    plan->launch(problem.operands(), 1.0, 0.0, nullptr);
    plan->launch(problem.operands(), 1.0, 0.0, stream_at(5));
    fake::device().busy = true;
  }
  retire({}, 0);
  CHECK_EQUAL(fake::device().frees, frees);
  fake::device().busy = false;
  retire({}, 0);
  CHECK_EQUAL(fake::device().frees, frees + 2);
  CHECK_EQUAL(fake::device().events, 0);
}

void test_frameworks_allocate() {
  alignas(256) static char memory[4096];
  static int deleted = 0;
  DlExchangeApi api{};
  api.version = {1, 3};
  api.current_stream = [](auto, int32_t, void** stream) { return *stream = nullptr, 0; };
  api.allocate = [](DlTensor* prototype, DlManagedVersioned** out, void*, auto) {
    auto* made = new DlManagedVersioned{};
    made->tensor = *prototype;
    made->tensor.data = memory;
    made->deleter = [](DlManagedVersioned* managed) { ++deleted, delete managed; };
    *out = made;
    return 0;
  };
  Kernel kernel("gemm");
  Problem problem;
  problem.temporaries = {64};
  problem.steps = {gemm(kernel).pointer("amax", temporary_at(0))};
  problem.allocator = &api;
  problem.plan()->launch(problem.operands(), 1.0, 0.0, nullptr);
  CHECK(kernel.args<GemmArgs>().amax == memory);
  CHECK_EQUAL(deleted, 1);
}

// Threads on one stream share its memory: the steps of one call must not fall between those of another.
void test_threads_on_one_stream() {
  Kernel kernel("grouped_gemm");
  static std::atomic<int> torn;
  torn = 0;
  kernel.body = [](void const* params, void*) {
    auto const* const args = static_cast<atomr_cutlass_grouped_args const*>(params);
    void const* there;
    std::this_thread::yield();
    std::memcpy(&there, args->table, sizeof(there));
    if (there != args->a) ++torn;
  };
  Problem problem;
  problem.temporaries = {8};
  problem.steps = {copy(temporary_at(0), std::vector<unsigned char>(8), {{0, operand_at(0)}}),
                   Launch(kernel).pointer("a", operand_at(0)).pointer("table", temporary_at(0))};
  problem.options.main = 1;
  auto const plan = problem.plan();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::vector<Operand> operands = problem.operands();
      operands[0].data = a_memory + t;
      for (int i = 0; i < 500; ++i) plan->launch(operands, 1.0, 0.0, stream_at(3));
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQUAL(torn.load(), 0);
  CHECK_EQUAL(kernel.launches.size(), 2000u);
}

void test_threads_on_streams_of_their_own() {
  Kernel kernel("gemm");
  kernel.workspace = 512, kernel.clear_bytes = 512;
  static std::mutex mutex;
  static std::map<void*, void*> workspaces;
  static std::atomic<int> mixed;
  mixed = 0;
  kernel.body = [](void const* params, void* stream) {
    std::lock_guard<std::mutex> lock(mutex);
    void* const used = static_cast<GemmArgs const*>(params)->workspace;
    if (workspaces.emplace(stream, used).first->second != used) ++mixed;
  };
  Problem problem;
  problem.steps = {gemm(kernel)};
  int const allocations = fake::device().allocations;
  auto const plan = problem.plan();
  std::vector<std::thread> threads;
  for (uintptr_t t = 1; t <= 2; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 500; ++i) plan->launch(problem.operands(), double(t), 0.0, stream_at(t));
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQUAL(mixed.load(), 0);
  CHECK_EQUAL(workspaces.size(), 2u);
  CHECK(workspaces[stream_at(1)] != workspaces[stream_at(2)]);
  CHECK_EQUAL(fake::device().allocations, allocations + 2);
}

void test_a_plan_is_replaced_while_threads_launch() {
  Kernel slow("gemm", "cutlass_slow"), fast("gemm", "cutlass_fast");
  for (Kernel* kernel : {&slow, &fast}) kernel->workspace = 512;
  Problem problem;
  problem.steps = {gemm(slow)};
  auto const plan = problem.plan();
  problem.steps = {gemm(fast)};
  auto const next = problem.plan();
  size_t const rounds = 500;
  std::atomic<bool> under_way{false};
  std::vector<std::thread> threads;
  for (uintptr_t t = 1; t <= 2; ++t) {
    threads.emplace_back([&, t] {
      for (size_t i = 0; i < rounds; ++i) {
        plan->launch(problem.operands(), double(t), 0.0, stream_at(t));
        under_way = true;
      }
    });
  }
  while (!under_way) std::this_thread::yield();
  plan->replace(next.get());
  for (std::thread& thread : threads) thread.join();
  CHECK_EQUAL(slow.launches.size() + fast.launches.size(), 2 * rounds);
  plan->launch(problem.operands(), 1.0, 0.0, stream_at(1));
  CHECK_EQUAL(slow.launches.size() + fast.launches.size(), 2 * rounds + 1);
  CHECK(&plan->serving() == next.get());
  // A graph that is captured from now on has the better kernel; one that began with the other goes on with it.
  size_t const before = slow.launches.size();
  fake::device().capturing = true;
  plan->launch(problem.operands(), 1.0, 0.0, stream_at(1));
  fake::device().capturing = false;
  CHECK_EQUAL(slow.launches.size(), before);
}

void test_a_plan_is_replaced_by_one_of_the_same_operands() {
  Kernel kernel("gemm");
  Problem problem, other;
  problem.steps = other.steps = {gemm(kernel)};
  other.b = operand(b_memory, {5, 6}, {1, 5});
  auto const plan = problem.plan(), transposed = other.plan();
  CHECK_THROWS(InvalidOperand, "a plan is replaced by one of other operands", plan->replace(transposed.get()));
  plan->launch(problem.operands(), 1.0, 0.0, nullptr);
  CHECK(&plan->serving() == plan.get());
}

}  // namespace

int main() {
  fake::libraries()["libcuda.so.1"] = fake::driver();
  test_addresses_and_scalars_of_the_call();
  test_an_array_without_elements_is_there();
  test_temporaries();
  test_steps_in_order();
  test_a_captured_copy_keeps_its_bytes();
  test_wrong_operands_launch_nothing();
  test_a_source_of_another_type_is_not_in_place();
  test_results_share_no_memory();
  test_any_pair_that_meets_is_found();
  test_places_are_checked_as_operands_are();
  test_integers_take_whole_scalars();
  test_kernels_that_cannot();
  test_plans_that_make_no_sense();
  test_failures_leave_a_plan_usable();
  test_a_plan_may_go_while_its_launches_run();
  test_frameworks_allocate();
  test_threads_on_one_stream();
  test_threads_on_streams_of_their_own();
  test_a_plan_is_replaced_while_threads_launch();
  test_a_plan_is_replaced_by_one_of_the_same_operands();
  return check::result();
}
