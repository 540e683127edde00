// Compiled functions from extents to the cached launch that serves them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "ranking.h"

namespace atomr_cutlass {

struct Number {
  bool real = false;
  int64_t whole = 0;    // the value of an integer
  double value = 0.0;   // the value of either kind
  static Number of(int64_t whole) { return {false, whole, double(whole)}; }
  static Number of(double value) { return {true, 0, value}; }
  bool operator==(Number const& other) const {
    return real == other.real && whole == other.whole && value == other.value;
  }
};

// The estimate that a step computes, for extents that are numbers of the program.
struct Estimated {
  std::vector<std::vector<uint32_t>> extents;  // of each formulation; kLeast: of the problem
  std::shared_ptr<estimate::Ranking const> ranking;
  bool undivided = false;  // of a ranking: K must not be divided
  std::shared_ptr<estimate::Model const> model;
  std::shared_ptr<estimate::Kernel const> kernel;
  estimate::Gpu gpu{};

  bool operator==(Estimated const& other) const;
};

// One step of a program. Each but a guard has a result, to which later steps refer by its index; a ranking has
// seven: entry (-1: none serves), formulation, seconds, slices of K, swizzle, raster, width.
struct Instruction {
  enum class Op : uint8_t {
    kConstant,
    kInput,  // the extent of index `a`
    kAdd,
    kSubtract,
    kMultiply,
    kDivide,
    kFloorDivide,
    kModulo,
    kAnd,
    kGcd,
    kLess,
    kLessEqual,
    kEqual,
    kRank,
    kLeast,
    kGuard,  // continues only if the number of index `a` is `constant`
    kEnd,    // of the program numbered `a`
  };
  Op op;
  uint32_t a = 0, b = 0;  // indices of numbers
  Number constant;
  std::optional<Estimated> estimated;  // of kRank and kLeast
};

// Programs that share their first steps and branch at guards. Steps are small and contiguous, since the first call of a
// shape finds none of them in the CPU's caches.
class ShapePrograms {
 public:
  // The number of the program whose guards hold for these extents, and its results.
  std::optional<size_t> find(int64_t const* extents, size_t count, std::vector<Number>& numbers) const;
  // False for a program that differs from another before any guard: it depends on more than extents.
  bool add(std::vector<Instruction> const& program, size_t number);

 private:
  friend class Evaluation;
  struct Step {
    Instruction::Op op;
    bool real = false;
    uint32_t a = 0, b = 0;  // of kRank and kLeast `a` is an index of `estimated_`
    uint32_t otherwise = 0;  // the next step if the guard does not hold; 0: there is none
    union {
      int64_t whole = 0;
      double value;
    };
    Number constant() const { return real ? Number::of(value) : Number::of(whole); }
    bool operator==(Step const& other) const {
      return op == other.op && a == other.a && b == other.b && constant() == other.constant();
    }
  };
  Step step_of(Instruction const& instruction);

  std::vector<Step> steps_;
  std::vector<Estimated> estimated_;
};

}  // namespace atomr_cutlass
