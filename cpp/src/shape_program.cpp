#include "shape_program.h"

#include <numeric>
#include <utility>

namespace atomr_cutlass {
namespace {

// The numbers of a program, and what a step leaves; false where 64 bits do not hold it.
class Evaluation {
 public:
  Evaluation(int64_t const* extents, size_t count, std::vector<Number>& numbers)
      : extents_(extents),
        count_(count),
        numbers_(numbers) {}

  bool step(Instruction const& step) {
    using Op = Instruction::Op;
    switch (step.op) {
      case Op::kConstant: return leave(step.constant);
      case Op::kInput: return step.a < count_ && leave(Number::of(extents_[step.a]));
      case Op::kRank: return rank(step);
      case Op::kLeast: {
        auto const extents = estimate::Extents::of(step.kernel->op, wholes(step.extents[0]));
        return leave(Number::of(step.model->least(*step.kernel, extents, step.gpu)));
      }
      case Op::kGuard: return true;
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

  bool rank(Instruction const& step) {
    std::vector<std::vector<int64_t>> extents;
    for (auto const& places : step.extents) extents.push_back(wholes(places));
    auto const found = step.ranking->first(extents, step.undivided);
    leave(Number::of(found ? int64_t(found->entry) : int64_t(-1)));
    leave(Number::of(int64_t(found ? found->place : 0)));
    auto const launch = found ? found->launch : estimate::Launch{};
    leave(Number::of(launch.seconds));
    for (int64_t const option : {launch.split_k, launch.swizzle, int64_t(launch.raster), launch.width}) {
      leave(Number::of(option));
    }
    return true;
  }

  int64_t const* extents_;
  size_t count_;
  std::vector<Number>& numbers_;
};

}  // namespace

bool Instruction::operator==(Instruction const& other) const {
  return op == other.op && a == other.a && b == other.b && constant == other.constant && extents == other.extents &&
         ranking == other.ranking && undivided == other.undivided && model == other.model && kernel == other.kernel;
}

std::optional<size_t> ShapePrograms::find(int64_t const* extents, size_t count, std::vector<Number>& numbers) const {
  Evaluation evaluation(extents, count, numbers);
  for (Part const* part = &first_; part->known;) {
    for (Instruction const& step : part->steps) {
      if (!evaluation.step(step)) return std::nullopt;
    }
    if (!part->guard) return part->number;
    auto const next = part->next.find(numbers[*part->guard].value);
    if (next == part->next.end()) return std::nullopt;
    part = next->second.get();
  }
  return std::nullopt;
}

bool ShapePrograms::add(std::vector<Instruction> const& program, size_t number) {
  Part* part = &first_;
  auto begin = program.begin();
  while (true) {
    auto end = begin;
    while (end != program.end() && end->op != Instruction::Op::kGuard) ++end;
    bool const last = end == program.end();
    if (!part->known) {
      part->known = true;
      part->steps.assign(begin, end);
      if (!last) part->guard = end->a;
    } else if (!std::equal(begin, end, part->steps.begin(), part->steps.end()) || part->guard.has_value() == last ||
               (!last && *part->guard != end->a)) {
      return false;
    }
    if (last) {
      part->number = number;
      return true;
    }
    auto& next = part->next[end->constant.value];
    if (next == nullptr) next = std::make_unique<Part>();
    part = next.get();
    begin = end + 1;
  }
}

}  // namespace atomr_cutlass
