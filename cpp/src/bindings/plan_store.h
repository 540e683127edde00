// The plans of all functions, by everything that they depend on: the layouts of all operands, and every option.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../inline_vector.h"
#include "../launch_plan.h"
#include "../shape_program.h"
#include "plans.h"

namespace atomr_cutlass {

// The key by which calls share a plan. Values are words; of objects there are the type and the hash, and
// the objects themselves to be compared. Calls that differ in the extents and strides of arrays alone are a family.
class PlanStoreKey {
 public:
  PlanStoreKey() = default;
  PlanStoreKey(PlanStoreKey const&) = delete;
  PlanStoreKey& operator=(PlanStoreKey const&) = delete;

  void add(uint64_t word) {
    if (count_ == words_.size()) spill();
    words_[count_++] = word;
  }
  // A view of the argument of this number. Its address counts as far as it says which loads are aligned.
  void add_view(uint64_t argument, Operand const& operand);
  // Extents that are an option; false for what is no tuple of such.
  bool add_shape(uint64_t argument, pybind11::handle value);
  // False for a value that a plan cannot be found by: one without a hash of what it holds, or that may be called.
  bool add_option(uint64_t argument, pybind11::handle value);
  void add_text(uint64_t argument, std::string_view text);
  // A scalar in the place of an array: its value does not count.
  void add_number(uint64_t argument);
  // The length of a list of arrays, whose views follow.
  void add_list(uint64_t argument, size_t size);

  // Of the words so far; `family`: but for extents and strides.
  uint64_t hash(bool family = false) const;
  bool same_words(PlanStoreKey const& other, bool family = false) const;
  // Extents, then strides, of each view, and shapes.
  InlineVector<int64_t, 48> const& extents() const { return extents_; }
  bool has_objects() const { return !objects_.empty(); }
  // May run Python code.
  bool same_objects(PlanStoreKey const& other) const;

  // For a key that outlives the call; this one is of no use then.
  std::shared_ptr<PlanStoreKey const> moved();

 private:
  bool add_object(uint64_t argument, pybind11::handle value);
  void spill();

  // Most calls fit; others go on in the vector.
  std::array<uint64_t, 96> words_;
  size_t count_ = 0;
  std::vector<uint64_t> spilt_;
  InlineVector<int64_t, 48> extents_;
  std::vector<pybind11::object> objects_;
};

// A plan, and how the arguments of a call become its operands and its results.
struct StoredPlan {
  struct Source {
    int view = -1;    // of the call's views, or
    int result = -1;  // of the new results; neither for an operand that is left out
    Operand layout;   // which is not always the array's: some functions take arrays as memory
    bool written = false;
  };
  struct Result {
    pybind11::str label;
    Operand layout;  // row-major
    std::vector<int> axes;  // the dimensions in the caller's order; empty where that is the same
  };
  pybind11::object plan;
  LaunchPlan* launch = nullptr;  // null for a plan that is called with views, by Python
  std::vector<Source> sources;   // one for each operand, the last one a result
  std::vector<Result> results;   // those that a call makes
  pybind11::object arrange;      // makes of results by name what the caller gets; null: it is `out` alone
  double alpha = 1.0, beta = 0.0;  // of functions without such arguments
  bool parsed = false;             // calls are to be checked by parsing them nonetheless
  bool laid_out = false;           // the layouts of the sources are those of the plan's operands

  // Sets `laid_out`, once all else is there.
  void note_layouts();
  bool superseded() const;
};

// The launch of a call, from which those of others of its family are made.
struct CachedLaunch {
  struct Hole {
    size_t result;
    int dimension;
    uint32_t number;
  };
  Blueprint blueprint;
  pybind11::object remake;  // makes a plan of a blueprint and the first array of a call
  StoredPlan like;          // without a plan
  std::vector<Hole> holes;  // in the extents of results
  bool memory = false;      // arrays stand for memory: only the plan says how operands lie in it
};

// The launches of a family.
class PlanFamily {
 public:
  static constexpr size_t kLaunchesAtMost = 256, kTries = 64;

  explicit PlanFamily(std::shared_ptr<PlanStoreKey const> member) : member_(std::move(member)) {}
  PlanStoreKey const& member() const { return *member_; }

  // That from which the launch of a call is made, or null, and the numbers that it needs.
  std::shared_ptr<CachedLaunch const> find(PlanStoreKey const& key, std::vector<Number>& numbers);
  void add(std::vector<Instruction> const& program, CachedLaunch launch);
  // Whether to learn that of a call that there is none for: not of the first, which may stay the only one, nor where
  // each call seems to need its own.
  bool learns() const { return missed_ > 1 && launches_.size() < kLaunchesAtMost && tried_ < kTries + 2 * served_; }
  void try_one() { ++tried_; }

 private:
  std::shared_ptr<PlanStoreKey const> member_;
  ShapePrograms programs_;
  std::vector<std::shared_ptr<CachedLaunch const>> launches_;
  size_t missed_ = 0, served_ = 0, tried_ = 0;
};

// The most recently used plans. The GIL guards it.
class PlanStore {
 public:
  explicit PlanStore(size_t capacity);

  // The plan of a key, which is now the one used last, or null.
  std::shared_ptr<StoredPlan const> find(PlanStoreKey const& key);
  // The family of a key; null where comparing objects says so.
  std::shared_ptr<PlanFamily> family(std::shared_ptr<PlanStoreKey const> const& key);
  // Adds a launch to a family of this store.
  void learn(PlanFamily& family, std::vector<Instruction> const& program, CachedLaunch launch);
  // Keeps a plan, in place of any other of its key.
  void put(std::shared_ptr<PlanStoreKey const> key, std::shared_ptr<StoredPlan const> plan);
  void clear();
  // How often it was cleared: calls that began before keep plans of what was known then.
  uint64_t cleared() const { return cleared_; }
  size_t size() const { return places_.size(); }
  pybind11::list plans() const;

 private:
  struct Kept {
    std::shared_ptr<PlanStoreKey const> key;
    std::shared_ptr<StoredPlan const> plan;
  };
  struct Reference {
    PlanStoreKey const* key;
    uint64_t hash;
    bool operator==(Reference const& other) const { return hash == other.hash && key->same_words(*other.key); }
  };
  struct Hash {
    size_t operator()(Reference const& reference) const { return size_t(reference.hash); }
  };
  using Order = std::list<Kept>;  // the latest use first

  struct SameFamily {
    bool operator()(Reference const& a, Reference const& b) const {
      return a.hash == b.hash && a.key->same_words(*b.key, true);
    }
  };

  using Families = std::unordered_map<Reference, std::shared_ptr<PlanFamily>, Hash, SameFamily>;
  static constexpr size_t kLaunchesAtMost = 4096;  // of all families: some 20 KB each

  size_t capacity_, learned_ = 0;
  uint64_t cleared_ = 0;
  Order order_;
  Families families_;
  std::unordered_map<Reference, Order::iterator, Hash> places_;
};

}  // namespace atomr_cutlass
