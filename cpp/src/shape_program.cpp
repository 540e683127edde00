#include "shape_program.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace atomr_cutlass {
namespace {

constexpr size_t kNumbers = 512;  // enough for most programs

}  // namespace

// The numbers of a program, and the result of a step; false if it exceeds 64 bits.
class Evaluation {
 public:
  Evaluation(ShapePrograms const& programs, int64_t const* extents, size_t count, std::vector<Number>& numbers)
      : programs_(programs),
        extents_(extents),
        count_(count),
        numbers_(numbers) {}

  bool step(ShapePrograms::Step const& step) {
    switch (step.op) {
      case Op::kConstant: return leave(step.constant());
      case Op::kInput: return step.a < count_ && leave(Number::of(extents_[step.a]));
      case Op::kRank: return rank(programs_.estimated_[step.a]);
      case Op::kLeast: {
        Estimated const& of = programs_.estimated_[step.a];
        auto const extents = estimate::Extents::of(of.kernel->op, wholes(of.extents[0]));
        return leave(Number::of(of.model->least(*of.kernel, extents, of.gpu)));
      }
      default: return compute(step.op, numbers_[step.a], numbers_[step.b]);
    }
  }

 private:
  using Op = Instruction::Op;

  bool leave(Number number) {
    numbers_.push_back(number);
    return true;
  }

  bool compute(Op op, Number const a, Number const b) {
    switch (op) {
      case Op::kLess: return leave(Number::of(int64_t(a.real || b.real ? a.value < b.value : a.whole < b.whole)));
      case Op::kLessEqual:
        return leave(Number::of(int64_t(a.real || b.real ? a.value <= b.value : a.whole <= b.whole)));
      case Op::kEqual: return leave(Number::of(int64_t(a.real || b.real ? a.value == b.value : a.whole == b.whole)));
      default:
        return a.real || b.real || op == Op::kDivide ? reals(op, a.value, b.value) : wholes(op, a.whole, b.whole);
    }
  }

  bool reals(Op op, double a, double b) {
    switch (op) {
      case Op::kAdd: return leave(Number::of(a + b));
      case Op::kSubtract: return leave(Number::of(a - b));
      case Op::kMultiply: return leave(Number::of(a * b));
      case Op::kDivide: return b != 0.0 && leave(Number::of(a / b));
      default: return false;
    }
  }

  bool wholes(Op op, int64_t a, int64_t b) {
    int64_t made = 0;
    switch (op) {
      case Op::kAdd: return !__builtin_add_overflow(a, b, &made) && leave(Number::of(made));
      case Op::kSubtract: return !__builtin_sub_overflow(a, b, &made) && leave(Number::of(made));
      case Op::kMultiply: return !__builtin_mul_overflow(a, b, &made) && leave(Number::of(made));
      case Op::kAnd: return leave(Number::of(a & b));
      case Op::kGcd: return leave(Number::of(std::gcd(a, b)));
      case Op::kFloorDivide:
      case Op::kModulo: {
        if (b == 0 || (b == -1 && a == INT64_MIN)) return false;
        int64_t const rest = a % b, below = rest != 0 && (rest < 0) != (b < 0);  // as Python rounds: down
        return leave(Number::of(op == Op::kModulo ? rest + below * b : a / b - below));
      }
      default: return false;
    }
  }

  std::vector<int64_t> wholes(std::vector<uint32_t> const& places) const {
    std::vector<int64_t> made;
    for (uint32_t const place : places) made.push_back(numbers_[place].whole);
    return made;
  }

  bool rank(Estimated const& of) {
    std::vector<std::vector<int64_t>> extents;
    for (auto const& places : of.extents) extents.push_back(wholes(places));
    auto const found = of.ranking->first(extents, of.undivided);
    leave(Number::of(found ? int64_t(found->entry) : int64_t(-1)));
    leave(Number::of(int64_t(found ? found->place : 0)));
    auto const launch = found ? found->launch : estimate::Launch{};
    leave(Number::of(launch.seconds));
    for (int64_t const option : {launch.split_k, launch.swizzle, int64_t(launch.raster), launch.width}) {
      leave(Number::of(option));
    }
    return true;
  }

  ShapePrograms const& programs_;
  int64_t const* extents_;
  size_t count_;
  std::vector<Number>& numbers_;
};

bool Estimated::operator==(Estimated const& other) const {
  return extents == other.extents && ranking == other.ranking && undivided == other.undivided && model == other.model &&
         kernel == other.kernel;
}

std::optional<size_t> ShapePrograms::find(int64_t const* extents, size_t count, std::vector<Number>& numbers) const {
  Evaluation evaluation(*this, extents, count, numbers);
  numbers.reserve(kNumbers);
  for (size_t at = 0; at < steps_.size();) {
    Step const& step = steps_[at];
    if (step.op == Instruction::Op::kEnd) return step.a;
    if (step.op != Instruction::Op::kGuard) {
      if (!evaluation.step(step)) return std::nullopt;
      ++at;
    } else if (numbers[step.a].value == step.constant().value) {
      ++at;
    } else if (step.otherwise != 0) {
      at = step.otherwise;
    } else {
      return std::nullopt;
    }
  }
  return std::nullopt;
}

ShapePrograms::Step ShapePrograms::step_of(Instruction const& instruction) {
  Step made{instruction.op, instruction.constant.real, instruction.a, instruction.b};
  if (made.real) {
    made.value = instruction.constant.value;
  } else {
    made.whole = instruction.constant.whole;
  }
  if (instruction.estimated) {
    auto const found = std::find(estimated_.begin(), estimated_.end(), *instruction.estimated);
    made.a = uint32_t(found - estimated_.begin());
    if (found == estimated_.end()) estimated_.push_back(*instruction.estimated);
  }
  return made;
}

bool ShapePrograms::add(std::vector<Instruction> const& program, size_t number) {
  using Op = Instruction::Op;
  std::vector<Step> steps;
  for (Instruction const& instruction : program) steps.push_back(step_of(instruction));
  steps.push_back({Op::kEnd, false, uint32_t(number)});
  if (steps_.empty()) {
    steps_ = std::move(steps);
    return true;
  }
  size_t at = 0;
  for (auto next = steps.begin(); next != steps.end(); ++next, ++at) {
    while (next->op == Op::kGuard && steps_[at].op == Op::kGuard && steps_[at].a == next->a &&
           steps_[at].constant().value != next->constant().value) {
      if (steps_[at].otherwise == 0) {
        steps_[at].otherwise = uint32_t(steps_.size());
        steps_.insert(steps_.end(), next, steps.end());
        return true;
      }
      at = steps_[at].otherwise;
    }
    if (next->op == Op::kEnd && steps_[at].op == Op::kEnd) {
      steps_[at] = *next;
      return true;
    }
    if (!(steps_[at] == *next)) return false;
  }
  return false;
}

}  // namespace atomr_cutlass
