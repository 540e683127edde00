// What the operations of an epilogue tree compute, for float and double: a function for each name in
// generator/epilogue/ops.py. NaN comes through everything but comparisons and d_relu. Functions that are a product
// with x (gelu, gelu_tanh, silu, hardswish) make NaN of minus infinity; derivatives have their limits at infinities.
//
// An epilogue computes these between the tensor cores' work, where one instruction of the special-function unit takes
// the time of eight additions. So in float on the device nothing branches, exponentials and reciprocals are the
// hardware's, and polynomials are as short as the bounds let them be. The largest errors over all floats on an H100, in
// units of 2^-24,
//
// - relative to the exact value: log 1.4, sqrt 1.7, reciprocal 2.0, rsqrt 2.1, tanh 2.4, exp 2.9, hardswish 3.0,
//   sigmoid 4.0 (0 where it is below the normal range), d_sigmoid and d_tanh 6.6;
// - relative to the larger of the exact value and half of x: gelu 3.8, gelu_tanh 3.9, silu 3.8;
// - relative to the larger of the exact value and half of dy, for dy = 1: d_gelu 4.0, d_gelu_tanh 4.6, d_silu 4.5.
//
// The far negative tails of gelu and d_gelu, which are smaller than that, have few correct digits or are 0.
#pragma once

#ifndef __CUDACC_RTC__
#include <math.h>
#endif

#ifdef __CUDACC__
#define ATOMR_CUTLASS_OP __host__ __device__ inline
#else
#define ATOMR_CUTLASS_OP inline
#endif

namespace atomr_cutlass {
namespace ops {

template <class T>
inline constexpr bool kIsFloat = false;
template <>
inline constexpr bool kIsFloat<float> = true;

template <class T>
ATOMR_CUTLASS_OP T negate(T x) {
  return -x;
}

template <class T>
ATOMR_CUTLASS_OP T absolute(T x) {
  if constexpr (kIsFloat<T>) {
    return ::fabsf(x);
  } else {
    return ::fabs(x);
  }
}

template <class T>
ATOMR_CUTLASS_OP T square(T x) {
  return x * x;
}

template <class T>
ATOMR_CUTLASS_OP T sqrt(T x) {
#ifdef __CUDA_ARCH__
  if constexpr (kIsFloat<T>) {
    float result;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
  }
#endif
  if constexpr (kIsFloat<T>) {
    return ::sqrtf(x);
  } else {
    return ::sqrt(x);
  }
}

template <class T>
ATOMR_CUTLASS_OP T rsqrt(T x) {
#ifdef __CUDA_ARCH__
  if constexpr (kIsFloat<T>) return ::rsqrtf(x);
#endif
  return T(1) / sqrt(x);
}

template <class T>
ATOMR_CUTLASS_OP T reciprocal(T x) {
#ifdef __CUDA_ARCH__
  if constexpr (kIsFloat<T>) {
    float result;
    asm("rcp.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
  }
#endif
  return T(1) / x;
}

template <class T>
ATOMR_CUTLASS_OP T exp(T x) {
  if constexpr (kIsFloat<T>) {
    return ::expf(x);
  } else {
    return ::exp(x);
  }
}

template <class T>
ATOMR_CUTLASS_OP T log(T x) {
  if constexpr (kIsFloat<T>) {
    return ::logf(x);
  } else {
    return ::log(x);
  }
}

template <class T>
ATOMR_CUTLASS_OP T add(T x, T y) {
  return x + y;
}

template <class T>
ATOMR_CUTLASS_OP T subtract(T x, T y) {
  return x - y;
}

template <class T>
ATOMR_CUTLASS_OP T multiply(T x, T y) {
  return x * y;
}

template <class T>
ATOMR_CUTLASS_OP T fma(T x, T y, T z) {
  if constexpr (kIsFloat<T>) {
    return ::fmaf(x, y, z);
  } else {
    return ::fma(x, y, z);
  }
}

// An IEEE division branches to a subroutine for operands that are subnormal or huge. This one scales them. Its second
// step makes exact quotients exact and, but for a few of billions, rounds others correctly; near the smallest normal
// number a dividend's remainder is not exact, and the error up to 3 units.
template <class T>
ATOMR_CUTLASS_OP T divide(T x, T y) {
#ifdef __CUDA_ARCH__
  if constexpr (kIsFloat<T>) {
    float const magnitude = ::fabsf(y);
    float const scale = magnitude > 8.50705917e37f ? 0.25f : (magnitude < 1.17549435e-38f ? 16777216.0f : 1.0f);
    x *= scale;
    y *= scale;
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(y));
    float const first = x * inverse, second = fma(fma(-first, y, x), inverse, first);
    // The remainder of an infinite quotient, or of a quotient by infinity, is NaN.
    return second == second ? second : first;
  }
#endif
  return x / y;
}

template <class T>
ATOMR_CUTLASS_OP T maximum(T x, T y) {
#ifdef __CUDA_ARCH__
  if constexpr (kIsFloat<T>) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
    return result;
  }
#endif
  return x > y || x != x ? x : y;
}

template <class T>
ATOMR_CUTLASS_OP T minimum(T x, T y) {
#ifdef __CUDA_ARCH__
  if constexpr (kIsFloat<T>) {
    float result;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
    return result;
  }
#endif
  return x < y || x != x ? x : y;
}

template <class T>
ATOMR_CUTLASS_OP T clamp(T x, T low, T high) {
  return minimum(maximum(x, low), high);
}

template <class T>
ATOMR_CUTLASS_OP T equal(T x, T y) {
  return x == y ? T(1) : T(0);
}

template <class T>
ATOMR_CUTLASS_OP T not_equal(T x, T y) {
  return x != y ? T(1) : T(0);
}

template <class T>
ATOMR_CUTLASS_OP T less(T x, T y) {
  return x < y ? T(1) : T(0);
}

template <class T>
ATOMR_CUTLASS_OP T less_equal(T x, T y) {
  return x <= y ? T(1) : T(0);
}

template <class T>
ATOMR_CUTLASS_OP T greater(T x, T y) {
  return x > y ? T(1) : T(0);
}

template <class T>
ATOMR_CUTLASS_OP T greater_equal(T x, T y) {
  return x >= y ? T(1) : T(0);
}

template <class T>
ATOMR_CUTLASS_OP T select(T mask, T x, T y) {
  return mask != T(0) ? x : y;
}

namespace detail {

// x between 0 and 1; 0 for NaN.
template <class T>
ATOMR_CUTLASS_OP T saturate(T x) {
#ifdef __CUDA_ARCH__
  if constexpr (kIsFloat<T>) return __saturatef(x);
#endif
  return x > T(0) ? (x < T(1) ? x : T(1)) : T(0);
}

// power(x) is 2^x in float, which is the hardware's, and e^x in double; kLogE is the logarithm of e to that base.
template <class T>
inline constexpr T kLogE = T(1);
template <>
inline constexpr float kLogE<float> = 1.44269504f;

template <class T>
ATOMR_CUTLASS_OP T power(T x) {
  if constexpr (!kIsFloat<T>) {
    return ::exp(x);
  } else {
#ifdef __CUDA_ARCH__
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
#else
    return ::exp2f(x);
#endif
  }
}

// 1 / (1 + x) for x >= 0, which is 0 for an infinite x. Results below the normal range are 0 on the device.
template <class T>
ATOMR_CUTLASS_OP T reciprocal_1p(T x) {
#ifdef __CUDA_ARCH__
  if constexpr (kIsFloat<T>) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.0f + x));
    return result;
  }
#endif
  return T(1) / (T(1) + x);
}

// The normal distribution beyond x >= 0, from a fit to its logarithm that has the least error of the distribution
// itself for degree 8: 0.14 units, 0.71 with the roundings before the power. The leading coefficient is negative, so
// that large x give 0.
ATOMR_CUTLASS_OP float beyond(float x) {
  float p = -2.8423342e-6f;
  p = fma(p, x, 3.94648341e-5f);
  p = fma(p, x, -1.86590376e-4f);
  p = fma(p, x, -1.35944589e-4f);
  p = fma(p, x, 7.06210732e-3f);
  p = fma(p, x, -5.24952449e-2f);
  p = fma(p, x, -4.59208518e-1f);
  p = fma(p, x, -1.15110517f);
  return power(fma(p, x, -1.0f));
}

// gelu_tanh(x) is x times the logistic function of kGeluTanhLinear * x + kGeluTanhCubic * x^3.
inline constexpr double kGeluTanhLinear = 1.5957691216057308, kGeluTanhCubic = 0.044715 * kGeluTanhLinear;

}  // namespace detail

template <class T>
ATOMR_CUTLASS_OP T relu(T x) {
  return maximum(x, T(0));
}

template <class T>
ATOMR_CUTLASS_OP T gelu(T x) {
  if constexpr (kIsFloat<T>) {
    // For infinity, whose product with 0 would be NaN.
    float const y = ::fminf(::fabsf(x), 3.40282347e38f);
    return fma(-y, detail::beyond(y), x * (x > 0.0f ? 1.0f : 0.0f));
  } else {
    return 0.5 * x * ::erfc(x * -0.70710678118654752);
  }
}

template <class T>
ATOMR_CUTLASS_OP T gelu_tanh(T x) {
  // (1 + tanh(t)) / 2 is sigmoid(2 t), which does not cancel for negative t.
  constexpr T kLinear = -detail::kLogE<T> * T(detail::kGeluTanhLinear);
  constexpr T kCubic = -detail::kLogE<T> * T(detail::kGeluTanhCubic);
  return x * detail::reciprocal_1p(detail::power(x * fma(x * x, kCubic, kLinear)));
}

template <class T>
ATOMR_CUTLASS_OP T silu(T x) {
  return x * detail::reciprocal_1p(detail::power(x * -detail::kLogE<T>));
}

template <class T>
ATOMR_CUTLASS_OP T sigmoid(T x) {
  return detail::reciprocal_1p(exp(-x));
}

template <class T>
ATOMR_CUTLASS_OP T tanh(T x) {
  if constexpr (kIsFloat<T>) {
    // 1 - 2 / (1 + exp(2 y)) loses digits of small results, which the polynomial gives.
    float const y = ::fabsf(x), s = x * x;
    float const far = fma(-2.0f, detail::reciprocal_1p(detail::power(y * 2.88539008f)), 1.0f);
    float p = -4.41038422e-3f;
    p = fma(p, s, 1.91899855e-2f);
    p = fma(p, s, -5.31759001e-2f);
    p = fma(p, s, 1.33227572e-1f);
    p = fma(p, s, -3.33328664e-1f);
    float const near = fma(p * s, y, y);
    return ::copysignf(y < 0.8f ? near : far, x);
  } else {
    return ::tanh(x);
  }
}

template <class T>
ATOMR_CUTLASS_OP T hardswish(T x) {
  return x * detail::saturate((x + T(3)) * T(1.0 / 6.0));
}

template <class T>
ATOMR_CUTLASS_OP T leaky_relu(T x, T slope) {
  return x > T(0) ? x : slope * x;
}

template <class T>
ATOMR_CUTLASS_OP T d_relu(T dy, T x) {
  return x > T(0) ? dy : T(0);
}

template <class T>
ATOMR_CUTLASS_OP T d_gelu(T dy, T x) {
  // Beyond the limit everything is 0; infinity would make NaN of the product with the density.
  T const y = minimum(absolute(x), T(40));
  T tail, density;
  if constexpr (kIsFloat<T>) {
    tail = detail::beyond(y);
    density = detail::power(fma(y * y, -0.721347520f, -1.32574806f));
  } else {
    tail = 0.5 * ::erfc(y * 0.70710678118654752);
    density = 0.39894228040143268 * ::exp(-0.5 * y * y);
  }
  T const negative = fma(-y, density, tail);
  return dy * (x > T(0) ? T(1) - negative : negative);
}

// With s the logistic function of v, (x s)' = s (1 + x v' (1 - s)), and 1 - s is s times the power. x is limited to
// where the power is finite.

template <class T>
ATOMR_CUTLASS_OP T d_gelu_tanh(T dy, T x) {
  constexpr T kLinear = T(detail::kGeluTanhLinear), kCubic = T(detail::kGeluTanhCubic);
  constexpr T kLimit = kIsFloat<T> ? T(10.04) : T(21);
  T const y = clamp(x, -kLimit, kLimit), s = y * y;
  T const power = detail::power(y * fma(s, -detail::kLogE<T> * kCubic, -detail::kLogE<T> * kLinear));
  T const logistic = detail::reciprocal_1p(power);
  T const slope = y * fma(s, T(3) * kCubic, kLinear);
  return dy * (logistic * fma(slope, power * logistic, T(1)));
}

template <class T>
ATOMR_CUTLASS_OP T d_silu(T dy, T x) {
  constexpr T kLimit = kIsFloat<T> ? T(88) : T(709);
  T const y = clamp(x, -kLimit, kLimit);
  T const power = detail::power(y * -detail::kLogE<T>);
  T const logistic = detail::reciprocal_1p(power);
  return dy * (logistic * fma(y, power * logistic, T(1)));
}

template <class T>
ATOMR_CUTLASS_OP T d_sigmoid(T dy, T x) {
  T const power = exp(-absolute(x)), logistic = detail::reciprocal_1p(power);
  return dy * (power * logistic * logistic);
}

template <class T>
ATOMR_CUTLASS_OP T d_tanh(T dy, T x) {
  T const power = exp(T(-2) * absolute(x)), logistic = detail::reciprocal_1p(power);
  return dy * (T(4) * power * logistic * logistic);
}

// The operations for trees whose D and stored matrices are at most 16 bits wide. What is here has fewer instructions
// than the exact form, or one of the special-function unit for two, which is then hidden behind the others; everything
// else is the exact form. The largest errors on a host, relative to the exact value; but for tanh they are the fits',
// beside which those of a GPU's instructions are small:
//
// - gelu_tanh 2^-13.9, gelu 2^-14.2, d_gelu 2^-14.4; of values below 2^-14, and of d_gelu below 2^-8, what they are
//   there;
// - tanh 2^-15, next to where it is the identity, sigmoid and silu 2^-15.6, all with their tails;
// - hardswish, d_sigmoid and d_tanh a few times those of the exact forms.
//
// At minus infinity gelu and gelu_tanh are 0.
namespace narrow {

using namespace atomr_cutlass::ops;

// With T a cubic polynomial, T^3 + e T + f takes as many instructions as a polynomial of degree 5 and fits better.

ATOMR_CUTLASS_OP float gelu(float x) {
  // Beyond the limit the power is 0, whose product with infinity would be NaN.
  float const y = ::fminf(::fabsf(x), 40.0f);
  float t = -5.24463e-4f;
  t = fma(t, y, 1.5148572e-2f);
  t = fma(t, y, -4.3779573e-1f);
  t = fma(t, y, -8.723284e-1f);
  float const beyond = detail::power(fma(fma(t, t, 3.439946e-1f), t, -3.6189556e-2f));
  return fma(-y, beyond, maximum(x, 0.0f));
}

ATOMR_CUTLASS_OP float gelu_tanh(float x) {
  float const y = ::fminf(::fabsf(x), 16.0f);
  float s = fma(-9.807226e-2f, y, 9.400622e-1f);
  s = fma(s, s, -6.401077e-1f);
  float t = fma(s, s, 2.3423108e-1f);
  t = fma(t, s, -5.174122e-1f);
  t = fma(t, y, -1.1538063f);
  return fma(-y, detail::power(fma(t, y, -9.9991006e-1f)), maximum(x, 0.0f));
}

ATOMR_CUTLASS_OP float sigmoid(float x) {
  // t is 1 / (1 + power), exactly 1 where the power is 0.
  float const power = detail::power(::fabsf(x) * -1.44269504f);
  float t = -7.0259385e-2f;
  t = fma(t, power, 3.2774624e-1f);
  t = fma(t, power, -6.743484e-1f);
  t = fma(t, power, 3.6441204e-1f);
  t = fma(fma(t, t, 1.0830283f), t, 5.5693895e-1f);
  return x < 0.0f ? power * t : t;
}

ATOMR_CUTLASS_OP float silu(float x) { return x * sigmoid(x); }

ATOMR_CUTLASS_OP float tanh(float x) {
  float const far = fma(-2.0f, detail::reciprocal_1p(detail::power(x * 2.88539008f)), 1.0f);
  return ::fabsf(x) < 0.009f ? x : far;
}

ATOMR_CUTLASS_OP float hardswish(float x) { return x * detail::saturate(fma(x, 1.0f / 6.0f, 0.5f)); }

ATOMR_CUTLASS_OP float d_gelu(float dy, float x) {
  // At -|x|, a line through the root times a power.
  float const y = minimum(absolute(x), 16.0f);
  float s = fma(5.0234213e-3f, y, -8.958563e-2f);
  s = fma(s, y, 3.4810764e-1f);
  float t = fma(s, s, 1.8777268e-1f);
  t = fma(t, s, -6.7212737e-1f);
  t = fma(t, y, -3.8216335e-1f);
  float const negative = (7.5179152e-1f - y) * detail::power(fma(t, y, -5.884485e-1f));
  return dy * (x > 0.0f ? 1.0f - negative : negative);
}

ATOMR_CUTLASS_OP float d_sigmoid(float dy, float x) {
  float const power = detail::power(::fabsf(x) * -1.44269504f), logistic = detail::reciprocal_1p(power);
  return dy * (power * logistic * logistic);
}

ATOMR_CUTLASS_OP float d_tanh(float dy, float x) {
  float const power = detail::power(::fabsf(x) * -2.88539008f), twice = 2.0f * detail::reciprocal_1p(power);
  return dy * (power * twice * twice);
}

}  // namespace narrow

}  // namespace ops
}  // namespace atomr_cutlass
