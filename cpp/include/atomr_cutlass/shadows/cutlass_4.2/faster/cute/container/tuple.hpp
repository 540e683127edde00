// CuTe's tuple: same interface and meaning, several times cheaper to compile.
//
// Most of what a CuTe kernel costs the compiler is tuples of static integers. CuTe finds an element's type through the
// standard library's recursive tuple and an element through four nested function templates, each of which the optimizer
// then has to inline. Here both take one step, and a value that its type determines is made from its type alone.
#pragma once

#include <cutlass/version.h>
#if CUTLASS_MAJOR != 4 || CUTLASS_MINOR != 2
#error "This header shadows that of CUTLASS 4.2, and another CUTLASS is there: generator/headers.py chooses the folders"
#endif

#include <cute/config.hpp>
#include <cute/container/cuda_types.hpp>
#include <cute/container/type_list.hpp>
#include <cute/numeric/integer_sequence.hpp>
#include <cute/numeric/integral_constant.hpp>
#include <cute/util/type_traits.hpp>

namespace cute {

template <class... T>
struct tuple;

namespace detail {

template <size_t I, class... T>
struct later_element;
template <size_t I, class... T>
struct pack_element : later_element<I, T...> {};
template <class T0, class... T>
struct pack_element<0, T0, T...> {
  using type = T0;
};
template <class T0, class T1, class... T>
struct pack_element<1, T0, T1, T...> {
  using type = T1;
};
template <class T0, class T1, class T2, class... T>
struct pack_element<2, T0, T1, T2, T...> {
  using type = T2;
};
template <class T0, class T1, class T2, class T3, class... T>
struct pack_element<3, T0, T1, T2, T3, T...> {
  using type = T3;
};
template <size_t I, class T0, class T1, class T2, class T3, class... T>
struct later_element<I, T0, T1, T2, T3, T...> : pack_element<I - 4, T...> {};

// An empty element takes no room; `get` makes a new one.
template <size_t I, class T, bool kEmpty = __is_empty(T)>
struct tuple_slot {
  T value{};
};
template <size_t I, class T>
struct tuple_slot<I, T, true> {
  tuple_slot() = default;
  CUTE_HOST_DEVICE constexpr tuple_slot(T const&) {}
};

template <class Indices, class... T>
struct tuple_slots;
template <size_t... I, class... T>
struct tuple_slots<index_sequence<I...>, T...> : tuple_slot<I, T>... {
  tuple_slots() = default;
  CUTE_HOST_DEVICE constexpr tuple_slots(T const&... t) : tuple_slot<I, T>{t}... {}
};

// The base of a tuple of empty elements; a type of its own, so that it never needs an address of its own.
template <class... T>
struct no_slots {
  no_slots() = default;
  CUTE_HOST_DEVICE constexpr no_slots(T const&...) {}
};

template <bool kEmpty, class... T>
struct slots_for {
  using type = tuple_slots<make_index_sequence<sizeof...(T)>, T...>;
};
template <class... T>
struct slots_for<true, T...> {
  using type = no_slots<T...>;
};

}  // namespace detail

template <class... T>
struct tuple : detail::slots_for<(__is_empty(T) && ...), T...>::type {
  using slots = typename detail::slots_for<(__is_empty(T) && ...), T...>::type;
  tuple() = default;
  CUTE_HOST_DEVICE constexpr tuple(T const&... t) : slots(t...) {}
};

template <>
struct tuple<> {};

// By far the most tuples are of these.
template <int v, int... w>
struct tuple<C<v>, C<w>...> {
  tuple() = default;
  CUTE_HOST_DEVICE constexpr tuple(C<v> const&, C<w> const&...) {}
};

template <class... T>
struct tuple_size<tuple<T...>, void> : CUTE_STL_NAMESPACE::integral_constant<size_t, sizeof...(T)> {};

template <class... T>
CUTE_HOST_DEVICE constexpr tuple<T...> make_tuple(T const&... t) {
  if constexpr ((__is_empty(T) && ...)) {
    return {};
  } else {
    return {t...};
  }
}

template <size_t I, class... T>
CUTE_HOST_DEVICE constexpr decltype(auto) get(tuple<T...> const& t) noexcept {
  using Element = typename detail::pack_element<I, T...>::type;
  if constexpr (__is_empty(Element)) {
    return Element{};
  } else {
    return (static_cast<detail::tuple_slot<I, Element, false> const&>(t).value);
  }
}

template <size_t I, class... T>
CUTE_HOST_DEVICE constexpr decltype(auto) get(tuple<T...>& t) noexcept {
  using Element = typename detail::pack_element<I, T...>::type;
  if constexpr (__is_empty(Element)) {
    return Element{};
  } else {
    return (static_cast<detail::tuple_slot<I, Element, false>&>(t).value);
  }
}

template <size_t I, class... T>
CUTE_HOST_DEVICE constexpr decltype(auto) get(tuple<T...>&& t) noexcept {
  using Element = typename detail::pack_element<I, T...>::type;
  if constexpr (__is_empty(Element)) {
    return Element{};
  } else {
    return static_cast<Element&&>(static_cast<detail::tuple_slot<I, Element, false>&>(t).value);
  }
}

// Where X comes first among the elements' types.
template <class X, class... T>
CUTE_HOST_DEVICE constexpr auto find(tuple<T...> const&) noexcept {
  return C<find_true_v<is_same_v<X, T>...>>{};
}

namespace detail {
template <class T>
auto has_tuple_size(T*) -> bool_constant<(0 <= tuple_size<T>::value)>;
auto has_tuple_size(...) -> false_type;
}  // namespace detail

template <class T>
struct is_tuple : decltype(detail::has_tuple_size(static_cast<T*>(nullptr))){};
template <class... T>
struct is_tuple<tuple<T...>> : true_type {};
template <auto v>
struct is_tuple<C<v>> : false_type {};
template <>
struct is_tuple<int> : false_type {};

template <class T>
static constexpr bool is_tuple_v = is_tuple<T>::value;

template <class... T>
struct is_integral<tuple<T...>> : false_type {};

// --- concatenation ---

namespace detail {

template <class... Tuples>
struct concatenation;
template <class... T>
struct concatenation<tuple<T...>> {
  using type = tuple<T...>;
};
template <class... T, class... U>
struct concatenation<tuple<T...>, tuple<U...>> {
  using type = tuple<T..., U...>;
};
template <class... T, class... U, class... V>
struct concatenation<tuple<T...>, tuple<U...>, tuple<V...>> {
  using type = tuple<T..., U..., V...>;
};
template <class... T, class... U, class... V, class... W, class... Rest>
struct concatenation<tuple<T...>, tuple<U...>, tuple<V...>, tuple<W...>, Rest...>
    : concatenation<tuple<T..., U..., V..., W...>, Rest...> {};

template <class T, class U, size_t... I, size_t... J>
CUTE_HOST_DEVICE constexpr auto concatenate(T const& t, U const& u, index_sequence<I...>, index_sequence<J...>) {
  return cute::make_tuple(get<I>(t)..., get<J>(u)...);
}

template <class T>
constexpr bool is_empty_tuple = false;
template <class... T>
constexpr bool is_empty_tuple<tuple<T...>> = (__is_empty(T) && ...);

}  // namespace detail

CUTE_HOST_DEVICE constexpr tuple<> tuple_cat() { return {}; }

template <class T, __CUTE_REQUIRES(is_tuple<T>::value)>
CUTE_HOST_DEVICE constexpr T const& tuple_cat(T const& t) {
  return t;
}

template <class T, class U, class... Rest>
CUTE_HOST_DEVICE constexpr auto tuple_cat(T const& t, U const& u, Rest const&... rest) {
  if constexpr (((detail::is_empty_tuple<T> && detail::is_empty_tuple<U>) && ... && detail::is_empty_tuple<Rest>)) {
    return typename detail::concatenation<T, U, Rest...>::type{};
  } else if constexpr (sizeof...(Rest) == 0) {
    return detail::concatenate(t, u, make_index_sequence<tuple_size<T>::value>{},
                               make_index_sequence<tuple_size<U>::value>{});
  } else {
    return cute::tuple_cat(detail::concatenate(t, u, make_index_sequence<tuple_size<T>::value>{},
                                               make_index_sequence<tuple_size<U>::value>{}),
                           rest...);
  }
}

// --- equality ---

namespace detail {
template <class T, class U, size_t... I>
CUTE_HOST_DEVICE constexpr auto equal_elements(T const& t, U const& u, index_sequence<I...>) {
  return (true_type{} && ... && (get<I>(t) == get<I>(u)));
}
}  // namespace detail

template <class T, class U, __CUTE_REQUIRES(is_tuple<T>::value&& is_tuple<U>::value)>
CUTE_HOST_DEVICE constexpr auto operator==(T const& t, U const& u) {
  if constexpr (tuple_size<T>::value == tuple_size<U>::value) {
    return detail::equal_elements(t, u, make_index_sequence<tuple_size<T>::value>{});
  } else {
    return false_type{};
  }
}

template <class T, class U, __CUTE_REQUIRES(is_tuple<T>::value != is_tuple<U>::value)>
CUTE_HOST_DEVICE constexpr auto operator==(T const&, U const&) {
  return false_type{};
}

template <class T, class U, __CUTE_REQUIRES(is_tuple<T>::value&& is_tuple<U>::value)>
CUTE_HOST_DEVICE constexpr auto operator!=(T const& t, U const& u) {
  return !(t == u);
}

template <class T, class U, __CUTE_REQUIRES(is_tuple<T>::value != is_tuple<U>::value)>
CUTE_HOST_DEVICE constexpr auto operator!=(T const&, U const&) {
  return true_type{};
}

// --- printing ---

namespace detail {
template <class T, size_t... I>
CUTE_HOST_DEVICE void print_tuple(T const& t, index_sequence<I...>, char open = '(', char close = ')') {
  using cute::print;
  if (sizeof...(I) == 0) print(open);
  ((void(print(I == 0 ? open : ',')), void(print(get<I>(t)))), ...);
  print(close);
}
}  // namespace detail

template <class T, __CUTE_REQUIRES(is_tuple<T>::value)>
CUTE_HOST_DEVICE void print(T const& t) {
  detail::print_tuple(t, make_index_sequence<tuple_size<T>::value>{});
}

#ifndef __CUDACC_RTC__
template <class T, __CUTE_REQUIRES(is_tuple<T>::value)>
CUTE_HOST std::ostream& operator<<(std::ostream& stream, T const& t) {
  char const* separator = "(";
  for_each(t, [&](auto const& element) {
    stream << separator << element;
    separator = ",";
  });
  return stream << (tuple_size<T>::value == 0 ? "()" : ")");
}
#endif

}  // namespace cute

// What structured bindings and generic code ask.
#ifdef CUTE_STL_NAMESPACE_IS_CUDA_STD
namespace std {
template <class... T>
struct tuple_size;
template <size_t I, class... T>
struct tuple_element;

template <class... T>
struct tuple_size<cute::tuple<T...>> : CUTE_STL_NAMESPACE::integral_constant<size_t, sizeof...(T)> {};
template <size_t I, class... T>
struct tuple_element<I, cute::tuple<T...>> : cute::detail::pack_element<I, T...> {};
}  // namespace std
#endif

namespace CUTE_STL_NAMESPACE {
template <class... T>
struct tuple_size<cute::tuple<T...>> : CUTE_STL_NAMESPACE::integral_constant<size_t, sizeof...(T)> {};
template <size_t I, class... T>
struct tuple_element<I, cute::tuple<T...>> : cute::detail::pack_element<I, T...> {};
}  // namespace CUTE_STL_NAMESPACE
