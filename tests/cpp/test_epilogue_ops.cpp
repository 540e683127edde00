// The operations of epilogue trees on the host, whose formulas are the device's: known values, errors against the exact
// functions, and what becomes of NaN, infinities, zeros of both signs, huge and subnormal numbers.
#include "atomr_cutlass/epilogue_ops.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "check.h"

namespace ops = atomr_cutlass::ops;
namespace narrow = atomr_cutlass::ops::narrow;

namespace {

template <class T>
using Limits = std::numeric_limits<T>;

template <class T>
constexpr T kInfinity = Limits<T>::infinity();
template <class T>
constexpr T kNan = Limits<T>::quiet_NaN();

float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// Finite floats in ascending order: some of every binade, and the evenly spaced ones around 0 where functions bend.
std::vector<float> ascending() {
  std::vector<float> magnitudes;
  for (uint64_t bits = 0; bits < 0x7f800000u; bits += 9973) magnitudes.push_back(from_bits(uint32_t(bits)));
  for (int i = 1; i < 200000; ++i) magnitudes.push_back(float(i) * 1.01e-4f);
  magnitudes.push_back(FLT_MAX);
  std::sort(magnitudes.begin(), magnitudes.end());
  std::vector<float> values;
  for (size_t i = magnitudes.size(); i-- > 0;) values.push_back(-magnitudes[i]);
  values.insert(values.end(), magnitudes.begin(), magnitudes.end());
  return values;
}

std::vector<float> const& grid() {
  static std::vector<float> const values = ascending();
  return values;
}

// The exact functions, in more digits than what is tested has.

template <class E>
E exact_sigmoid(E x) {
  return 1 / (1 + std::exp(-x));
}
template <class E>
E exact_gelu(E x) {
  return x / 2 * std::erfc(-x / std::sqrt(E(2)));
}
template <class E>
E gelu_tanh_exponent(E x) {
  return 2 * std::sqrt(2 / std::acos(E(-1))) * (x + E(0.044715L) * x * x * x);
}
template <class E>
E exact_gelu_tanh(E x) {
  return x * exact_sigmoid(gelu_tanh_exponent(x));
}
template <class E>
E exact_d_gelu(E x) {
  return std::erfc(-x / std::sqrt(E(2))) / 2 + x * std::exp(-x * x / 2) / std::sqrt(2 * std::acos(E(-1)));
}
template <class E>
E exact_d_gelu_tanh(E x) {
  // Its limit is reached, and the cubes below would overflow.
  if (std::fabs(x) > 100) return x > 0;
  E const v = gelu_tanh_exponent(x), slope = 2 * std::sqrt(2 / std::acos(E(-1))) * (x + E(0.134145L) * x * x * x);
  return exact_sigmoid(v) * (1 + slope * exact_sigmoid(-v));
}
template <class E>
E exact_d_silu(E x) {
  if (std::fabs(x) > 2000) return x > 0;
  return exact_sigmoid(x) * (1 + x * exact_sigmoid(-x));
}
template <class E>
E exact_d_sigmoid(E x) {
  return exact_sigmoid(x) * exact_sigmoid(-x);
}
template <class E>
E exact_d_tanh(E x) {
  return 4 * exact_d_sigmoid(2 * x);
}
template <class E>
E exact_hardswish(E x) {
  return x * (std::fmin(std::fmax(x + 3, E(0)), E(6)) / 6);
}

// What an error is relative to: the exact value alone, or that and half of what the function is a product with: x, or
// the gradient, which is 1 here.
enum class Scale { kValue, kFactor, kGradient };

template <class T, class E>
struct Function {
  char const* name;
  T (*compute)(T);
  E (*exact)(E);
  Scale scale;
  double units;  // of rounding, 2^-24 or 2^-53, that an error may have
};

// The bounds are closer than the device's, whose exponentials and reciprocals are less exact than a host's.
template <class T, class E>
std::vector<Function<T, E>> functions() {
  return {
      {"sqrt", ops::sqrt<T>, [](E x) { return std::sqrt(x); }, Scale::kValue, 4},
      {"rsqrt", ops::rsqrt<T>, [](E x) { return 1 / std::sqrt(x); }, Scale::kValue, 4},
      {"reciprocal", ops::reciprocal<T>, [](E x) { return 1 / x; }, Scale::kValue, 4},
      {"exp", ops::exp<T>, [](E x) { return std::exp(x); }, Scale::kValue, 4},
      {"log", ops::log<T>, [](E x) { return std::log(x); }, Scale::kValue, 4},
      {"relu", ops::relu<T>, [](E x) { return x < 0 ? E(0) : x; }, Scale::kValue, 0},
      {"gelu", ops::gelu<T>, exact_gelu<E>, Scale::kFactor, 3},
      {"gelu_tanh", ops::gelu_tanh<T>, exact_gelu_tanh<E>, Scale::kFactor, 3.5},
      {"silu", ops::silu<T>, [](E x) { return x * exact_sigmoid(x); }, Scale::kFactor, 3.5},
      {"sigmoid", ops::sigmoid<T>, exact_sigmoid<E>, Scale::kValue, 3.5},
      {"tanh", ops::tanh<T>, [](E x) { return std::tanh(x); }, Scale::kValue, 3},
      {"hardswish", ops::hardswish<T>, exact_hardswish<E>, Scale::kValue, 4},
      {"d_gelu", [](T x) { return ops::d_gelu(T(1), x); }, exact_d_gelu<E>, Scale::kGradient, 6},
      {"d_gelu_tanh", [](T x) { return ops::d_gelu_tanh(T(1), x); }, exact_d_gelu_tanh<E>, Scale::kGradient, 6},
      {"d_silu", [](T x) { return ops::d_silu(T(1), x); }, exact_d_silu<E>, Scale::kGradient, 6},
      {"d_sigmoid", [](T x) { return ops::d_sigmoid(T(1), x); }, exact_d_sigmoid<E>, Scale::kValue, 8},
      {"d_tanh", [](T x) { return ops::d_tanh(T(1), x); }, exact_d_tanh<E>, Scale::kValue, 8},
  };
}

// The largest error in units of rounding; infinite where one result is NaN and the other is not.
template <class T, class E>
double largest_error(Function<T, E> const& function, T& worst) {
  // The exact functions of double take long.
  size_t const step = sizeof(T) == 4 ? 1 : 5;
  double largest = 0;
  for (size_t i = 0; i < grid().size(); i += step) {
    T const x = T(grid()[i]), have = function.compute(x);
    E const want = function.exact(E(x));
    double units = kInfinity<double>;
    if (std::isnan(want) || std::isnan(have)) {
      if (std::isnan(want) && std::isnan(have)) units = 0;
    } else if (std::fabs(want) > E(Limits<T>::max())) {
      if (have == (want > 0 ? kInfinity<T> : -kInfinity<T>)) units = 0;
    } else if (std::fabs(want) < E(Limits<T>::min()) && have == T(0)) {
      units = 0;  // below the normal range, which an overflowing exponential stops short of
    } else {
      E scale = std::fmax(std::fabs(want), E(Limits<T>::min()));
      if (function.scale == Scale::kFactor) scale = std::fmax(scale, std::fabs(E(x)) / 2);
      if (function.scale == Scale::kGradient) scale = std::fmax(scale, E(0.5));
      units = double(std::fabs(E(have) - want) / scale) * 2 / double(Limits<T>::epsilon());
    }
    if (units > largest) largest = units, worst = x;
  }
  return largest;
}

template <class T, class E>
void test_errors() {
  for (Function<T, E> const& function : functions<T, E>()) {
    T worst = 0;
    double const units = largest_error(function, worst);
    if (!(units <= function.units)) {
      check::report(__FILE__, __LINE__,
                    std::string(function.name) + " of " + std::to_string(sizeof(T)) + " bytes is off by " +
                        std::to_string(units) + " units at " + std::to_string(worst));
    }
  }
}

// A derivative is multiplied once more, and by zero gives zero.
template <class T>
void test_gradients_are_products() {
  for (T const x : {T(-3.25), T(-0.5), T(0), T(0.875), T(5)}) {
    CHECK_EQUAL(ops::d_relu(T(3), x), x > 0 ? T(3) : T(0));
    for (T const dy : {T(-1.7), T(0), T(1e-20), T(3e5)}) {
      CHECK_EQUAL(ops::d_gelu(dy, x), dy * ops::d_gelu(T(1), x));
      CHECK_EQUAL(ops::d_gelu_tanh(dy, x), dy * ops::d_gelu_tanh(T(1), x));
      CHECK_EQUAL(ops::d_silu(dy, x), dy * ops::d_silu(T(1), x));
      CHECK_EQUAL(ops::d_sigmoid(dy, x), dy * ops::d_sigmoid(T(1), x));
      CHECK_EQUAL(ops::d_tanh(dy, x), dy * ops::d_tanh(T(1), x));
    }
  }
}

template <class T>
void test_arithmetic() {
  CHECK_EQUAL(ops::negate(T(2.5)), T(-2.5));
  CHECK_EQUAL(ops::absolute(T(-2.5)), T(2.5));
  CHECK(!std::signbit(ops::absolute(T(-0.0))) && std::signbit(ops::negate(T(0))));
  CHECK_EQUAL(ops::square(T(-3)), T(9));
  CHECK_EQUAL(ops::add(T(2), T(0.5)), T(2.5));
  CHECK_EQUAL(ops::subtract(T(2), T(0.5)), T(1.5));
  CHECK_EQUAL(ops::multiply(T(2), T(-0.5)), T(-1));
  CHECK_EQUAL(ops::divide(T(3), T(-2)), T(-1.5));
  CHECK_EQUAL(ops::maximum(T(3), T(-2)), T(3));
  CHECK_EQUAL(ops::minimum(T(3), T(-2)), T(-2));
  // Rounded once: the product's last bit would be lost.
  T const step = Limits<T>::epsilon();
  CHECK_EQUAL(ops::fma(T(1) + step, T(1) - step, T(-1)), -step * step);
  CHECK_EQUAL(ops::leaky_relu(T(-2), T(0.25)), T(-0.5));
  CHECK_EQUAL(ops::leaky_relu(T(2), T(0.25)), T(2));
  CHECK_EQUAL(ops::clamp(T(-2), T(-1), T(6)), T(-1));
  CHECK_EQUAL(ops::clamp(T(7), T(-1), T(6)), T(6));
  CHECK_EQUAL(ops::clamp(T(0.5), T(-1), T(6)), T(0.5));
  CHECK_EQUAL(ops::clamp(kInfinity<T>, T(-1), T(6)), T(6));
  CHECK_EQUAL(ops::clamp(-kInfinity<T>, -kInfinity<T>, T(6)), -kInfinity<T>);
}

template <class T>
void test_comparisons() {
  T const values[] = {-kInfinity<T>, T(-1), T(-0.0), T(0), T(1), kInfinity<T>, kNan<T>};
  for (T const x : values) {
    for (T const y : values) {
      CHECK_EQUAL(ops::equal(x, y), T(x == y));
      CHECK_EQUAL(ops::not_equal(x, y), T(x != y));
      CHECK_EQUAL(ops::less(x, y), T(x < y));
      CHECK_EQUAL(ops::less_equal(x, y), T(x <= y));
      CHECK_EQUAL(ops::greater(x, y), T(x > y));
      CHECK_EQUAL(ops::greater_equal(x, y), T(x >= y));
    }
  }
  CHECK_EQUAL(ops::select(T(1), T(2), T(3)), T(2));
  CHECK_EQUAL(ops::select(Limits<T>::denorm_min(), T(2), T(3)), T(2));
  CHECK_EQUAL(ops::select(T(0), T(2), T(3)), T(3));
  CHECK_EQUAL(ops::select(T(-0.0), T(2), T(3)), T(3));
  CHECK_EQUAL(ops::select(kNan<T>, T(2), T(3)), T(2));
  CHECK_EQUAL(ops::select(T(1), T(2), kNan<T>), T(2));
}

template <class T>
void test_nan() {
  T const nan = kNan<T>, inf = kInfinity<T>;
  for (T (*const function)(T) : {ops::negate<T>, ops::absolute<T>, ops::square<T>, ops::sqrt<T>, ops::rsqrt<T>,
                                 ops::reciprocal<T>, ops::exp<T>, ops::log<T>, ops::relu<T>, ops::gelu<T>,
                                 ops::gelu_tanh<T>, ops::silu<T>, ops::sigmoid<T>, ops::tanh<T>, ops::hardswish<T>}) {
    CHECK(std::isnan(function(nan)));
    CHECK(std::isnan(function(-nan)));
  }
  for (T (*const function)(T, T) :
       {ops::add<T>, ops::subtract<T>, ops::multiply<T>, ops::divide<T>, ops::maximum<T>, ops::minimum<T>,
        ops::leaky_relu<T>, ops::d_gelu<T>, ops::d_gelu_tanh<T>, ops::d_silu<T>, ops::d_sigmoid<T>, ops::d_tanh<T>}) {
    for (T const other : {T(-2), T(0), T(2), inf, -inf, nan}) {
      CHECK(std::isnan(function(nan, other)));
      if (function != ops::leaky_relu<T>) CHECK(std::isnan(function(other, nan)));
    }
  }
  CHECK(std::isnan(ops::clamp(nan, T(-1), T(1))));
  CHECK(std::isnan(ops::fma(nan, T(1), T(1))) && std::isnan(ops::fma(T(1), T(1), nan)));
  CHECK_EQUAL(ops::d_relu(T(2), nan), T(0));
  CHECK_EQUAL(ops::d_relu(nan, T(-1)), T(0));
  CHECK(std::isnan(ops::d_relu(nan, T(1))));
  CHECK(std::isnan(ops::sqrt(T(-1))) && std::isnan(ops::rsqrt(T(-1))) && std::isnan(ops::log(T(-1))));
  CHECK(std::isnan(ops::divide(T(0), T(0))) && std::isnan(ops::divide(inf, inf)));
}

template <class T>
void test_infinities_and_zeros() {
  T const inf = kInfinity<T>;
  for (T (*const function)(T) : {ops::gelu<T>, ops::gelu_tanh<T>, ops::silu<T>, ops::hardswish<T>}) {
    CHECK_EQUAL(function(inf), inf);
    CHECK(std::isnan(function(-inf)));
    CHECK_EQUAL(function(T(0)), T(0));
    CHECK_EQUAL(function(T(-0.0)), T(0));
    CHECK_EQUAL(function(Limits<T>::max()), Limits<T>::max());
    CHECK_EQUAL(function(-Limits<T>::max()), T(0));
    CHECK_EQUAL(function(T(-1000)), T(0));
  }
  CHECK(std::fabs(ops::gelu(T(-10))) < T(1e-20));
  for (T (*const function)(T, T) : {ops::d_gelu<T>, ops::d_gelu_tanh<T>, ops::d_silu<T>}) {
    for (T const far : {T(1000), T(1e30), Limits<T>::max(), inf}) {
      CHECK_EQUAL(function(T(3), far), T(3));
      CHECK(std::fabs(function(T(3), -far)) < T(1e-35));
    }
    CHECK_EQUAL(function(T(3), T(0)), T(1.5));
    CHECK_EQUAL(function(T(3), T(-0.0)), T(1.5));
    CHECK_EQUAL(function(T(3), Limits<T>::denorm_min()), T(1.5));
  }
  for (T const far : {T(1000), Limits<T>::max(), inf}) {
    CHECK_EQUAL(ops::sigmoid(far), T(1));
    CHECK(ops::sigmoid(-far) < T(1e-38));
    CHECK_EQUAL(ops::tanh(far), T(1));
    CHECK_EQUAL(ops::tanh(-far), T(-1));
    for (T const x : {far, -far}) {
      CHECK_EQUAL(ops::d_sigmoid(T(3), x), T(0));
      CHECK_EQUAL(ops::d_tanh(T(3), x), T(0));
    }
  }
  CHECK_EQUAL(ops::sigmoid(T(0)), T(0.5));
  CHECK_EQUAL(ops::d_sigmoid(T(4), T(0)), T(1));
  CHECK_EQUAL(ops::d_tanh(T(4), T(-0.0)), T(4));
  CHECK_EQUAL(ops::relu(inf), inf);
  CHECK_EQUAL(ops::relu(-inf), T(0));
  CHECK_EQUAL(ops::relu(T(-0.0)), T(0));
  CHECK_EQUAL(ops::reciprocal(T(0)), inf);
  CHECK_EQUAL(ops::reciprocal(T(-0.0)), -inf);
  CHECK_EQUAL(ops::reciprocal(-inf), T(0));
  CHECK_EQUAL(ops::rsqrt(T(0)), inf);
  CHECK_EQUAL(ops::rsqrt(inf), T(0));
  CHECK_EQUAL(ops::sqrt(inf), inf);
  CHECK_EQUAL(ops::exp(-inf), T(0));
  CHECK_EQUAL(ops::exp(inf), inf);
  CHECK_EQUAL(ops::log(T(0)), -inf);
  CHECK_EQUAL(ops::log(inf), inf);
  CHECK_EQUAL(ops::divide(T(-1), T(0)), -inf);
  CHECK_EQUAL(ops::divide(T(1), inf), T(0));
  CHECK_EQUAL(ops::hardswish(T(-3)), T(0));
  CHECK_EQUAL(ops::hardswish(T(3)), T(3));
}

template <class T>
void test_subnormals() {
  T const least = Limits<T>::denorm_min(), small = 1024 * least;
  for (T const x : {small, -small, least}) {
    CHECK_EQUAL(ops::tanh(x), x);
    CHECK_EQUAL(ops::absolute(x), std::fabs(x));
    CHECK_EQUAL(ops::relu(x), x > 0 ? x : T(0));
    CHECK_EQUAL(ops::sigmoid(x), T(0.5));
    CHECK_EQUAL(ops::exp(x), T(1));
  }
  for (T (*const function)(T) : {ops::gelu<T>, ops::gelu_tanh<T>, ops::silu<T>, ops::hardswish<T>}) {
    CHECK_EQUAL(function(small), small / 2);
    CHECK_EQUAL(function(-small), -small / 2);
  }
}

// From each value to the next float, and to the next value.
void test_monotony() {
  struct Rising {
    char const* name;
    float (*function)(float);
    float from;
  };
  for (Rising const& one : {Rising{"sqrt", ops::sqrt, 0},
                            {"exp", ops::exp, -FLT_MAX},
                            {"log", ops::log, 0},
                            {"relu", ops::relu, -FLT_MAX},
                            {"sigmoid", ops::sigmoid, -FLT_MAX},
                            {"tanh", ops::tanh, -FLT_MAX},
                            {"gelu", ops::gelu, 0},
                            {"gelu_tanh", ops::gelu_tanh, 0},
                            {"silu", ops::silu, 0},
                            {"hardswish", ops::hardswish, 0}}) {
    float before = -kInfinity<float>;
    int falls = 0;
    for (float const x : grid()) {
      if (x < one.from) continue;
      float const here = one.function(x), next = one.function(std::nextafter(x, kInfinity<float>));
      falls += !(before <= here && here <= next);
      before = here;
    }
    if (falls != 0)
      check::report(__FILE__, __LINE__, std::string(one.name) + " falls " + std::to_string(falls) + " times");
  }
  for (float const x : grid()) CHECK(std::fabs(ops::tanh(x)) <= 1.0f);
}

// A narrow form, and how far it may be from the exact function: `error` times the larger of the exact value and
// `least`.
struct Narrow {
  char const* name;
  float (*compute)(float);
  double (*exact)(double);
  double error;
  double least;
};

std::vector<Narrow> narrow_functions() {
  // hardswish is off where its factor is next to 0, d_gelu at its root, and both have no digits of their tails.
  return {
      {"gelu", narrow::gelu, exact_gelu<double>, 0x1.aep-15, 0x1p-14},
      {"gelu_tanh", narrow::gelu_tanh, exact_gelu_tanh<double>, 0x1.08p-14, 0x1p-14},
      {"silu", narrow::silu, [](double x) { return x * exact_sigmoid(x); }, 0x1.5p-16, 0},
      {"sigmoid", narrow::sigmoid, exact_sigmoid<double>, 0x1.5p-16, 0},
      {"tanh", narrow::tanh, [](double x) { return std::tanh(x); }, 0x1.c8p-16, 0},
      {"hardswish", narrow::hardswish, exact_hardswish<double>, 0x1p-22, 0.25},
      {"d_gelu", [](float x) { return narrow::d_gelu(1, x); }, exact_d_gelu<double>, 0x1.78p-15, 0x1p-8},
      {"d_sigmoid", [](float x) { return narrow::d_sigmoid(1, x); }, exact_d_sigmoid<double>, 0x1.1p-18, 0},
      {"d_tanh", [](float x) { return narrow::d_tanh(1, x); }, exact_d_tanh<double>, 0x1.5p-18, 0},
  };
}

void test_narrow_errors() {
  for (Narrow const& one : narrow_functions()) {
    double largest = 0;
    float worst = 0;
    for (float const x : grid()) {
      double const want = one.exact(x), scale = std::fmax(std::fmax(std::fabs(want), one.least), double(FLT_MIN));
      double const error = std::fabs(one.compute(x) - want) / scale;
      if (!(error <= largest)) largest = error, worst = x;
    }
    if (!(largest <= one.error)) {
      check::report(__FILE__, __LINE__,
                    std::string("narrow ") + one.name + " is off by 2^" + std::to_string(std::log2(largest)) + " at " +
                        std::to_string(worst));
    }
  }
}

// In steps of half a unit of f16: what 16 bits cannot tell apart may fall by roundings.
void test_narrow_monotony() {
  struct Turning {
    char const* name;
    float (*function)(float);
    float turn;  // from where on it rises
  };
  for (Turning const& one : {Turning{"gelu", narrow::gelu, -0.7517915f},
                             {"gelu_tanh", narrow::gelu_tanh, -0.7524614f},
                             {"silu", narrow::silu, -1.2784645f},
                             {"sigmoid", narrow::sigmoid, -FLT_MAX},
                             {"tanh", narrow::tanh, -FLT_MAX},
                             {"hardswish", narrow::hardswish, -1.5f}}) {
    int falls = 0;
    for (float const sign : {-1.0f, 1.0f}) {
      // Up to where a result may be subnormal.
      for (float size = 0x1p-8f; size < 12; size *= 1 + 0x1p-12f) {
        float const low = sign * size, high = low + 0x1p-12f * size;
        // Where it turns, it is flat.
        if (std::fabs(low - one.turn) < 0.02f) continue;
        bool const rises = one.function(low) <= one.function(high), sinks = one.function(low) >= one.function(high);
        falls += low > one.turn ? !rises : !sinks;
      }
    }
    if (falls != 0) {
      check::report(__FILE__, __LINE__,
                    std::string("narrow ") + one.name + " falls " + std::to_string(falls) + " times");
    }
  }
}

void test_narrow_special_values() {
  float const nan = kNan<float>, inf = kInfinity<float>, least = Limits<float>::denorm_min();
  for (Narrow const& one : narrow_functions()) {
    CHECK(std::isnan(one.compute(nan)));
    CHECK(std::isnan(one.compute(-nan)));
  }
  for (float (*const function)(float) : {narrow::gelu, narrow::gelu_tanh, narrow::silu, narrow::hardswish}) {
    CHECK_EQUAL(function(inf), inf);
    CHECK_EQUAL(function(FLT_MAX), FLT_MAX);
    for (float const far : {-200.0f, -1e10f, -FLT_MAX}) CHECK_EQUAL(function(far), 0.0f);
    for (float const x : {0.0f, -0.0f}) CHECK_EQUAL(function(x), 0.0f);
    for (float const x : grid()) {
      float const value = function(x);
      CHECK(x < 0 ? value <= 0 : value >= 0 && value <= x);
    }
    CHECK(std::fabs(function(1024 * least) - 512 * least) <= 2 * least);
  }
  // Here a form has the limit of its function, or NaN like the exact form.
  for (float (*const function)(float) : {narrow::gelu, narrow::gelu_tanh}) CHECK_EQUAL(function(-inf), 0.0f);
  for (float (*const function)(float) : {narrow::silu, narrow::hardswish}) CHECK(std::isnan(function(-inf)));
  for (float const far : {200.0f, FLT_MAX, inf}) {
    CHECK_EQUAL(narrow::sigmoid(far), 1.0f);
    CHECK_EQUAL(narrow::sigmoid(-far), 0.0f);
    CHECK_EQUAL(narrow::tanh(far), 1.0f);
    CHECK_EQUAL(narrow::tanh(-far), -1.0f);
    CHECK_EQUAL(narrow::d_gelu(3, far), 3.0f);
    CHECK_EQUAL(narrow::d_gelu(3, -far), 0.0f);
    for (float const x : {far, -far}) {
      CHECK_EQUAL(narrow::d_sigmoid(3, x), 0.0f);
      CHECK_EQUAL(narrow::d_tanh(3, x), 0.0f);
    }
  }
  for (float const x : {-2.0f, 0.0f, 0.5f, inf}) {
    CHECK(std::isnan(narrow::d_gelu(nan, x)));
    CHECK(std::isnan(narrow::d_sigmoid(nan, x)));
    CHECK(std::isnan(narrow::d_tanh(nan, x)));
    for (float const dy : {-1.7f, 0.0f, 3e5f}) CHECK_EQUAL(narrow::d_gelu(dy, x), dy * narrow::d_gelu(1, x));
  }
  CHECK_EQUAL(narrow::tanh(least), least);
}

// As in the functions of trees, which have this line.
void test_narrow_has_the_exact_operations() {
  namespace ops = atomr_cutlass::ops::narrow;
  for (float const x : grid()) {
    CHECK_EQUAL(ops::relu(x), ::ops::relu(x));
    CHECK_EQUAL(ops::d_silu(2.0f, x), ::ops::d_silu(2.0f, x));
    CHECK_EQUAL(ops::fma(x, 0.5f, 1.0f), ::ops::fma(x, 0.5f, 1.0f));
  }
  CHECK(ops::gelu(-1.0f) != ::ops::gelu(-1.0f));
}

template <class T>
void test_type() {
  test_arithmetic<T>();
  test_comparisons<T>();
  test_nan<T>();
  test_infinities_and_zeros<T>();
  test_subnormals<T>();
  test_gradients_are_products<T>();
}

}  // namespace

int main() {
  test_type<float>();
  test_type<double>();
  test_errors<float, double>();
  test_errors<double, long double>();
  test_monotony();
  test_narrow_errors();
  test_narrow_monotony();
  test_narrow_special_values();
  test_narrow_has_the_exact_operations();
  return check::result();
}
