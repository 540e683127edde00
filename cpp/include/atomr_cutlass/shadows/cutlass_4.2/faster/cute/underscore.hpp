// CuTe's slicing of tuples: same interface and meaning, cheaper to compile. What a slice of a static tuple is
// follows from the types, so nothing is emitted for it.
#pragma once

#include <cutlass/version.h>
#if CUTLASS_MAJOR != 4 || CUTLASS_MINOR != 2
#error "This header shadows that of CUTLASS 4.2, and another CUTLASS is there: generator/headers.py chooses the folders"
#endif

#include <cute/algorithm/tuple_algorithms.hpp>
#include <cute/container/tuple.hpp>
#include <cute/numeric/integral_constant.hpp>

namespace cute {

struct Underscore : Int<0> {};

CUTE_INLINE_CONSTANT Underscore _;

using X = Underscore;

template <>
struct is_integral<Underscore> : true_type {};

template <class T>
struct is_underscore : false_type {};
template <>
struct is_underscore<Underscore> : true_type {};

// Whether any, or every, leaf of a nested tuple is `Element`.
template <class T, class Element, class = void>
struct has_elem : bool_constant<is_same_v<T, Element>> {};
template <class... T, class Element>
struct has_elem<tuple<T...>, Element, void> : bool_constant<(has_elem<T, Element>::value || ...)> {};
template <class I, I... Is, class Element>
struct has_elem<integer_sequence<I, Is...>, Element, void>
    : bool_constant<(is_same_v<integral_constant<I, Is>, Element> || ...)> {};

template <class T, class Element, class = void>
struct all_elem : bool_constant<is_same_v<T, Element>> {};
template <class... T, class Element>
struct all_elem<tuple<T...>, Element, void> : bool_constant<(all_elem<T, Element>::value && ...)> {};
template <class I, I... Is, class Element>
struct all_elem<integer_sequence<I, Is...>, Element, void>
    : bool_constant<(is_same_v<integral_constant<I, Is>, Element> && ...)> {};

namespace detail {
// Of tuples by other names.
template <class T>
using if_other_tuple = enable_if_t<is_tuple<T>::value && is_same_v<elements_of<T>, void>>;
template <class T, int... I>
auto as_plain_tuple(seq<I...>) -> tuple<tuple_element_t<I, T>...>;
}  // namespace detail
template <class T, class Element>
struct has_elem<T, Element, detail::if_other_tuple<T>>
    : has_elem<decltype(detail::as_plain_tuple<T>(tuple_seq<T>{})), Element> {};
template <class T, class Element>
struct all_elem<T, Element, detail::if_other_tuple<T>>
    : all_elem<decltype(detail::as_plain_tuple<T>(tuple_seq<T>{})), Element> {};

template <class T>
using has_underscore = has_elem<T, Underscore>;
template <class T>
using all_underscore = all_elem<T, Underscore>;
template <class T>
using has_int1 = has_elem<T, Int<1>>;
template <class T>
using has_int0 = has_elem<T, Int<0>>;

namespace detail {

// The elements of the second tuple that stand where the first has an underscore (or, to dice, where it has none), as a
// flat tuple.
template <bool kDice, class A, class B>
struct sliced {
  using type = tuple<B>;
};
template <class A, class B>
struct sliced<false, A, B> {
  using type = tuple<>;
};
template <class B>
struct sliced<false, Underscore, B> {
  using type = tuple<B>;
};
template <class B>
struct sliced<true, Underscore, B> {
  using type = tuple<>;
};
template <bool kDice, class... A, class... B>
struct sliced<kDice, tuple<A...>, tuple<B...>>
    : concatenation<tuple<>, tuple<>, typename sliced<kDice, A, B>::type...> {};
template <class... A, class... B>
struct sliced<false, tuple<A...>, tuple<B...>>
    : concatenation<tuple<>, tuple<>, typename sliced<false, A, B>::type...> {};

template <bool kDice, class A, class B>
CUTE_HOST_DEVICE constexpr auto lift(A const& a, B const& b) {
  if constexpr (is_tuple<A>::value) {
    static_assert(tuple_size<A>::value == tuple_size<B>::value, "tuples of different sizes");
    if constexpr (is_plain_tuple<A> && is_plain_tuple<B>) {
      using Result = typename sliced<kDice, A, B>::type;
      if constexpr (__is_empty(Result)) {
        return Result{};
      } else {
        return filter_tuple(a, b, [](auto const& x, auto const& y) { return lift<kDice>(x, y); });
      }
    } else {
      return filter_tuple(a, b, [](auto const& x, auto const& y) { return lift<kDice>(x, y); });
    }
  } else if constexpr (is_underscore<A>::value != kDice) {
    return tuple<B>{b};
  } else {
    return tuple<>{};
  }
}

template <class A, class B>
CUTE_HOST_DEVICE constexpr auto lift_slice(A const& a, B const& b) {
  return lift<false>(a, b);
}

template <class A, class B>
CUTE_HOST_DEVICE constexpr auto lift_dice(A const& a, B const& b) {
  return lift<true>(a, b);
}

}  // namespace detail

template <class A, class B>
CUTE_HOST_DEVICE constexpr auto slice(A const& a, B const& b) {
  if constexpr (is_underscore<A>::value) {
    return b;
  } else {
    return detail::lift<false>(a, b);
  }
}

template <class A, class B>
CUTE_HOST_DEVICE constexpr auto dice(A const& a, B const& b) {
  if constexpr (is_tuple<A>::value || is_underscore<A>::value) {
    return detail::lift<true>(a, b);
  } else {
    return b;
  }
}

CUTE_HOST_DEVICE void print(Underscore const&) { printf("_"); }

#ifndef __CUDACC_RTC__
CUTE_HOST std::ostream& operator<<(std::ostream& stream, Underscore const&) { return stream << '_'; }
#endif

}  // namespace cute
