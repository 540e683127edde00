// CuTe's algorithms on tuples: same interface and meaning, cheaper to compile.
//
// Nearly all calls have arguments that their types determine (static shapes and strides, lambdas without captures), and
// so has what they return. Such a call is answered from the type of what it would return: nothing is left of it for the
// compiler to emit and the optimizer to inline.
#pragma once

#include <cutlass/version.h>
#if CUTLASS_MAJOR != 4 || CUTLASS_MINOR != 2
#error "This header shadows that of CUTLASS 4.2, and another CUTLASS is there: generator/headers.py chooses the folders"
#endif

#include <cute/algorithm/functional.hpp>
#include <cute/container/tuple.hpp>
#include <cute/container/type_list.hpp>
#include <cute/numeric/integer_sequence.hpp>
#include <cute/numeric/integral_constant.hpp>
#include <cute/util/type_traits.hpp>

namespace cute {

namespace detail {

template <class... T>
constexpr bool all_empty = (__is_empty(T) && ...);

// The elements' types of a static tuple or integer sequence; void for what is neither.
template <class T>
struct static_elements {
  using type = void;
};
template <class... T>
struct static_elements<tuple<T...>> {
  using type = type_list<T...>;
};
template <class I, I... Is>
struct static_elements<integer_sequence<I, Is...>> {
  using type = type_list<integral_constant<I, Is>...>;
};

// Whether what a function makes of the elements of T... may be static. If it is, then the call is not made: functions
// given to transform, filter_tuple and fold do nothing but return.
template <class... T>
constexpr bool are_static =
    (true && ... &&
     (__is_empty(remove_cvref_t<T>) && !is_same_v<typename static_elements<remove_cvref_t<T>>::type, void>));

template <class T>
using elements_of = typename static_elements<remove_cvref_t<T>>::type;

// What g(f(t)...) makes; declared only.
template <class F, class G, class... T>
auto mapped(F& f, G& g, type_list<T...>) -> decltype(g(f(declval<T>())...));
template <class F, class G, class... T, class... U>
auto mapped(F& f, G& g, type_list<T...>, type_list<U...>) -> decltype(g(f(declval<T>(), declval<U>())...));

struct into_tuple {
  template <class... T>
  CUTE_HOST_DEVICE constexpr auto operator()(T const&... t) const -> tuple<T...> {
    return cute::make_tuple(t...);
  }
};

struct into_concatenation {
  template <class... T>
  CUTE_HOST_DEVICE constexpr auto operator()(T const&... t) const {
    return cute::tuple_cat(t...);
  }
};

template <class T, class F, int... I>
CUTE_HOST_DEVICE constexpr auto apply(T&& t, F&& f, seq<I...>) {
  return f(get<I>(static_cast<T&&>(t))...);
}

template <class T, class F, class G, int... I>
CUTE_HOST_DEVICE constexpr auto tapply(T&& t, F&& f, G&& g, seq<I...>) {
  if constexpr (are_static<T> && __is_empty(remove_cvref_t<F>) && __is_empty(remove_cvref_t<G>) &&
                sizeof...(I) == tuple_size<remove_cvref_t<T>>::value) {
    using Result = remove_cvref_t<decltype(mapped(f, g, elements_of<T>{}))>;
    if constexpr (__is_empty(Result)) {
      return Result{};
    } else {
      return g(f(get<I>(static_cast<T&&>(t)))...);
    }
  } else {
    return g(f(get<I>(static_cast<T&&>(t)))...);
  }
}

template <class T, class U, class F, class G, int... I>
CUTE_HOST_DEVICE constexpr auto tapply(T&& t, U&& u, F&& f, G&& g, seq<I...>) {
  return g(f(get<I>(static_cast<T&&>(t)), get<I>(static_cast<U&&>(u)))...);
}

template <class T, class U, class V, class F, class G, int... I>
CUTE_HOST_DEVICE constexpr auto tapply(T&& t, U&& u, V&& v, F&& f, G&& g, seq<I...>) {
  return g(f(get<I>(static_cast<T&&>(t)), get<I>(static_cast<U&&>(u)), get<I>(static_cast<V&&>(v)))...);
}

}  // namespace detail

// --- f(t...) ---

template <class T, class F>
CUTE_HOST_DEVICE constexpr auto apply(T&& t, F&& f) {
  return detail::apply(static_cast<T&&>(t), f, tuple_seq<T>{});
}

// --- g(f(t)...) ---

template <class T, class F, class G>
CUTE_HOST_DEVICE constexpr auto transform_apply(T&& t, F&& f, G&& g) {
  if constexpr (is_tuple<remove_cvref_t<T>>::value) {
    if constexpr (detail::are_static<T>) {
      using Result = remove_cvref_t<decltype(detail::mapped(f, g, detail::elements_of<T>{}))>;
      if constexpr (__is_empty(Result)) {
        return Result{};
      } else {
        return detail::tapply(static_cast<T&&>(t), f, g, tuple_seq<T>{});
      }
    } else {
      return detail::tapply(static_cast<T&&>(t), f, g, tuple_seq<T>{});
    }
  } else {
    return g(f(static_cast<T&&>(t)));
  }
}

template <class T, class U, class F, class G>
CUTE_HOST_DEVICE constexpr auto transform_apply(T&& t, U&& u, F&& f, G&& g) {
  if constexpr (is_tuple<remove_cvref_t<T>>::value) {
    if constexpr (detail::are_static<T, U>) {
      using Result = remove_cvref_t<decltype(detail::mapped(f, g, detail::elements_of<T>{}, detail::elements_of<U>{}))>;
      if constexpr (__is_empty(Result)) {
        return Result{};
      } else {
        return detail::tapply(static_cast<T&&>(t), static_cast<U&&>(u), f, g, tuple_seq<T>{});
      }
    } else {
      return detail::tapply(static_cast<T&&>(t), static_cast<U&&>(u), f, g, tuple_seq<T>{});
    }
  } else {
    return g(f(static_cast<T&&>(t), static_cast<U&&>(u)));
  }
}

template <class T, class U, class V, class F, class G>
CUTE_HOST_DEVICE constexpr auto transform_apply(T&& t, U&& u, V&& v, F&& f, G&& g) {
  if constexpr (is_tuple<remove_cvref_t<T>>::value) {
    return detail::tapply(static_cast<T&&>(t), static_cast<U&&>(u), static_cast<V&&>(v), f, g, tuple_seq<T>{});
  } else {
    return g(f(static_cast<T&&>(t), static_cast<U&&>(u), static_cast<V&&>(v)));
  }
}

// --- f(t), ... ---

template <class T, class F>
CUTE_HOST_DEVICE constexpr void for_each(T&& t, F&& f) {
  if constexpr (is_tuple<remove_cvref_t<T>>::value) {
    detail::apply(t, [&](auto&&... a) { (f(static_cast<decltype(a)&&>(a)), ...); }, tuple_seq<T>{});
  } else {
    f(static_cast<T&&>(t));
  }
}

template <class T, class F>
CUTE_HOST_DEVICE constexpr auto for_each_leaf(T&& t, F&& f) {
  if constexpr (is_tuple<remove_cvref_t<T>>::value) {
    return detail::apply(
        static_cast<T&&>(t), [&](auto&&... a) { return (for_each_leaf(static_cast<decltype(a)&&>(a), f), ...); },
        tuple_seq<T>{});
  } else {
    return f(static_cast<T&&>(t));
  }
}

// --- (f(t)...) ---

template <class T, class F>
CUTE_HOST_DEVICE constexpr auto transform(T const& t, F&& f) {
  if constexpr (is_tuple<T>::value) {
    return transform_apply(t, f, detail::into_tuple{});
  } else {
    return f(t);
  }
}

template <class T, class U, class F>
CUTE_HOST_DEVICE constexpr auto transform(T const& t, U const& u, F&& f) {
  if constexpr (is_tuple<T>::value) {
    static_assert(tuple_size<T>::value == tuple_size<U>::value, "tuples of different sizes");
    return transform_apply(t, u, f, detail::into_tuple{});
  } else {
    return f(t, u);
  }
}

template <class T, class U, class V, class F>
CUTE_HOST_DEVICE constexpr auto transform(T const& t, U const& u, V const& v, F&& f) {
  if constexpr (is_tuple<T>::value) {
    static_assert(tuple_size<T>::value == tuple_size<U>::value && tuple_size<T>::value == tuple_size<V>::value,
                  "tuples of different sizes");
    return transform_apply(t, u, v, f, detail::into_tuple{});
  } else {
    return f(t, u, v);
  }
}

template <class T, class F>
CUTE_HOST_DEVICE constexpr auto transform_leaf(T const& t, F&& f) {
  if constexpr (is_tuple<T>::value) {
    return transform(t, [&](auto const& a) { return transform_leaf(a, f); });
  } else {
    return f(t);
  }
}

template <class T, class U, class F>
CUTE_HOST_DEVICE constexpr auto transform_leaf(T const& t, U const& u, F&& f) {
  if constexpr (is_tuple<T>::value) {
    return transform(t, u, [&](auto const& a, auto const& b) { return transform_leaf(a, b, f); });
  } else {
    return f(t, u);
  }
}

// --- searching ---

template <class T, class F>
CUTE_HOST_DEVICE constexpr auto find_if(T const& t, F&& f) {
  if constexpr (is_tuple<T>::value) {
    return detail::tapply(t, f, [](auto... a) { return C<find_true_v<decltype(a)::value...>>{}; }, tuple_seq<T>{});
  } else {
    return C<decltype(f(t))::value ? 0 : 1>{};
  }
}

template <class T, class X>
CUTE_HOST_DEVICE constexpr auto find(T const& t, X const& x) {
  return find_if(t, [&](auto const& a) { return a == x; });
}

template <class T, class F>
CUTE_HOST_DEVICE constexpr auto any_of(T const& t, F&& f) {
  if constexpr (is_tuple<T>::value) {
    return transform_apply(t, f, [](auto... a) { return (false_type{} || ... || a); });
  } else {
    return f(t);
  }
}

template <class T, class F>
CUTE_HOST_DEVICE constexpr auto all_of(T const& t, F&& f) {
  if constexpr (is_tuple<T>::value) {
    return transform_apply(t, f, [](auto... a) { return (true_type{} && ... && a); });
  } else {
    return f(t);
  }
}

template <class T, class F>
CUTE_HOST_DEVICE constexpr auto none_of(T const& t, F&& f) {
  return !any_of(t, f);
}

// --- f returns tuples, which are concatenated ---

template <class T, class F>
CUTE_HOST_DEVICE constexpr auto filter_tuple(T const& t, F&& f) {
  return transform_apply(t, f, detail::into_concatenation{});
}

template <class T, class U, class F>
CUTE_HOST_DEVICE constexpr auto filter_tuple(T const& t, U const& u, F&& f) {
  return transform_apply(t, u, f, detail::into_concatenation{});
}

template <class T, class U, class V, class F>
CUTE_HOST_DEVICE constexpr auto filter_tuple(T const& t, U const& u, V const& v, F&& f) {
  return transform_apply(t, u, v, f, detail::into_concatenation{});
}

// --- f(...f(f(v, t0), t1)..., tn) ---

namespace detail {

template <class F, class V, class... T>
struct folded;
template <class F, class V>
struct folded<F, V> {
  using type = V;
};
template <class F, class V, class T, class... Rest>
struct folded<F, V, T, Rest...>
    : folded<F, remove_cvref_t<decltype(declval<F&>()(declval<V&>(), declval<T>()))>, Rest...> {};

template <class F, class V, class... T>
auto folded_over(F&, V const&, type_list<T...>) -> typename folded<F, V, T...>::type;

template <class F, class V>
CUTE_HOST_DEVICE constexpr V accumulate(F&, V const& v) {
  return v;
}
template <class F, class V, class T, class... Rest>
CUTE_HOST_DEVICE constexpr auto accumulate(F& f, V v, T&& t, Rest&&... rest) {
  if constexpr (sizeof...(Rest) == 0) {
    auto result = f(v, static_cast<T&&>(t));
    return result;
  } else {
    return detail::accumulate(f, f(v, static_cast<T&&>(t)), static_cast<Rest&&>(rest)...);
  }
}

template <class T, class V, class F, int... I>
CUTE_HOST_DEVICE constexpr auto fold(T&& t, V const& v, F&& f, seq<I...>) {
  return detail::accumulate(f, v, get<I>(static_cast<T&&>(t))...);
}

}  // namespace detail

template <class T, class V, class F>
CUTE_HOST_DEVICE constexpr auto fold(T&& t, V const& v, F&& f) {
  if constexpr (is_tuple<remove_cvref_t<T>>::value) {
    if constexpr (detail::are_static<T> && __is_empty(V)) {
      using Result = decltype(detail::folded_over(f, v, detail::elements_of<T>{}));
      if constexpr (__is_empty(Result)) {
        return Result{};
      } else {
        return detail::fold(static_cast<T&&>(t), v, f, tuple_seq<T>{});
      }
    } else {
      return detail::fold(static_cast<T&&>(t), v, f, tuple_seq<T>{});
    }
  } else {
    return f(v, static_cast<T&&>(t));
  }
}

template <class T, class F>
CUTE_HOST_DEVICE constexpr auto fold_first(T&& t, F&& f) {
  if constexpr (is_tuple<remove_cvref_t<T>>::value) {
    return detail::fold(static_cast<T&&>(t), get<0>(t), f, make_range<1, tuple_size<remove_cvref_t<T>>::value>{});
  } else {
    return t;
  }
}

// --- parts of tuples ---

template <class T>
CUTE_HOST_DEVICE constexpr decltype(auto) front(T&& t) {
  if constexpr (is_tuple<remove_cvref_t<T>>::value) {
    return front(get<0>(static_cast<T&&>(t)));
  } else {
    return static_cast<T&&>(t);
  }
}

template <class T>
CUTE_HOST_DEVICE constexpr decltype(auto) back(T&& t) {
  if constexpr (is_tuple<remove_cvref_t<T>>::value) {
    constexpr int last = tuple_size<remove_cvref_t<T>>::value - 1;
    // One level early: a leaf that `get` made must be returned by value.
    if constexpr (is_tuple<remove_cvref_t<decltype(get<last>(static_cast<T&&>(t)))>>::value) {
      return back(get<last>(static_cast<T&&>(t)));
    } else {
      return get<last>(static_cast<T&&>(t));
    }
  } else {
    return static_cast<T&&>(t);
  }
}

namespace detail {

template <class X, int>
using repeated = X;

// (elements I of t..., x for each J, elements K of t...)
template <class... T, class X, int... I, int... J, int... K>
auto constructed(tuple<T...> const&, X const&, seq<I...>, seq<J...>, seq<K...>)
    -> tuple<typename pack_element<I, T...>::type..., repeated<X, J>..., typename pack_element<K, T...>::type...>;

template <class T, class X, int... I, int... J, int... K>
CUTE_HOST_DEVICE constexpr auto construct(T const& t, X const& x, seq<I...> i, seq<J...> j, seq<K...> k) {
  if constexpr (is_empty_tuple<T> && (__is_empty(X) || sizeof...(J) == 0)) {
    return decltype(constructed(t, x, i, j, k)){};
  } else {
    return cute::make_tuple(get<I>(t)..., (void(J), x)..., get<K>(t)...);
  }
}

template <class T, int... I>
CUTE_HOST_DEVICE constexpr auto choose(T const& t, seq<I...> i) {
  if constexpr (is_empty_tuple<T>) {
    return decltype(constructed(t, 0, i, seq<>{}, seq<>{})){};
  } else {
    return cute::make_tuple(get<I>(t)...);
  }
}

}  // namespace detail

template <int B, int E, class T>
CUTE_HOST_DEVICE constexpr auto take(T const& t) {
  if constexpr (E == -1) {
    if constexpr (is_tuple<T>::value) {
      return take<B, tuple_size<T>::value>(t);
    } else {
      return take<B, 1>(t);
    }
  } else {
    static_assert(B <= E);
    return detail::choose(t, make_range<B, E>{});
  }
}

template <int... I, class T>
CUTE_HOST_DEVICE constexpr auto select(T const& t) {
  return detail::choose(t, seq<I...>{});
}

template <class T>
CUTE_HOST_DEVICE constexpr auto wrap(T const& t) {
  if constexpr (is_tuple<T>::value) {
    return t;
  } else {
    return cute::make_tuple(t);
  }
}

template <class T>
CUTE_HOST_DEVICE constexpr auto unwrap(T const& t) {
  if constexpr (is_tuple<T>::value) {
    if constexpr (tuple_size<T>::value == 1) {
      return unwrap(get<0>(t));
    } else {
      return t;
    }
  } else {
    return t;
  }
}

// --- flat and nested ---

template <class T>
struct is_flat : true_type {};
template <class... T>
struct is_flat<tuple<T...>> : bool_constant<(true && ... && !is_tuple<T>::value)> {};

namespace detail {
template <class T>
struct flattened {
  using type = tuple<T>;
};
template <class... T>
struct flattened<tuple<T...>> : concatenation<tuple<>, tuple<>, typename flattened<T>::type...> {};
}  // namespace detail

template <class T>
CUTE_HOST_DEVICE constexpr auto flatten_to_tuple(T const& t) {
  if constexpr (!is_tuple<T>::value) {
    return cute::make_tuple(t);
  } else if constexpr (is_flat<T>::value) {
    return t;
  } else if constexpr (detail::is_empty_tuple<T>) {
    return typename detail::flattened<T>::type{};
  } else {
    return filter_tuple(t, [](auto const& a) { return flatten_to_tuple(a); });
  }
}

template <class T>
CUTE_HOST_DEVICE constexpr auto flatten(T const& t) {
  if constexpr (is_tuple<T>::value) {
    return flatten_to_tuple(t);
  } else {
    return t;
  }
}

namespace detail {

// (the first elements of `flat` in the shape of `profile`, the elements left)
template <class Flat, class Profile>
CUTE_HOST_DEVICE constexpr auto unflatten_impl(Flat const& flat, Profile const& profile) {
  if constexpr (is_tuple<Profile>::value) {
    return fold(profile, cute::make_tuple(cute::make_tuple(), flat), [](auto const& done, auto const& mode) {
      auto const step = unflatten_impl(get<1>(done), mode);
      return cute::make_tuple(append(get<0>(done), get<0>(step)), get<1>(step));
    });
  } else {
    return cute::make_tuple(get<0>(flat), take<1, tuple_size<Flat>::value>(flat));
  }
}

}  // namespace detail

template <class Flat, class Profile>
CUTE_HOST_DEVICE constexpr auto unflatten(Flat const& flat, Profile const& profile) {
  auto const result = detail::unflatten_impl(flat, profile);
  static_assert(tuple_size<remove_cvref_t<decltype(get<1>(result))>>::value == 0, "more elements than the profile has");
  auto const nested = get<0>(result);
  return nested;
}

// --- with elements added, removed or replaced ---

template <int N, class T, class X>
CUTE_HOST_DEVICE constexpr auto insert(T const& t, X const& x) {
  return detail::construct(t, x, make_seq<N>{}, seq<0>{}, make_range<N, tuple_size<T>::value>{});
}

template <int N, class T>
CUTE_HOST_DEVICE constexpr auto remove(T const& t) {
  return detail::construct(t, 0, make_seq<N>{}, seq<>{}, make_range<N + 1, tuple_size<T>::value>{});
}

template <int N, class T, class X>
CUTE_HOST_DEVICE constexpr auto replace(T const& t, X const& x) {
  if constexpr (is_tuple<T>::value) {
    return detail::construct(t, x, make_seq<N>{}, seq<0>{}, make_range<N + 1, tuple_size<T>::value>{});
  } else {
    static_assert(N == 0);
    return x;
  }
}

template <class T, class X>
CUTE_HOST_DEVICE constexpr auto replace_front(T const& t, X const& x) {
  return replace<0>(t, x);
}

template <class T, class X>
CUTE_HOST_DEVICE constexpr auto replace_back(T const& t, X const& x) {
  if constexpr (is_tuple<T>::value) {
    return replace<tuple_size<T>::value - 1>(t, x);
  } else {
    return x;
  }
}

template <int N, class X>
CUTE_HOST_DEVICE constexpr auto tuple_repeat(X const& x) {
  return detail::construct(tuple<>{}, x, seq<>{}, make_seq<N>{}, seq<>{});
}

template <int N, class X>
CUTE_HOST_DEVICE constexpr auto repeat(X const& x) {
  if constexpr (N == 1) {
    return x;
  } else {
    return tuple_repeat<N>(x);
  }
}

namespace detail {
template <class T, class X>
struct repeated_like {
  using type = X;
};
template <class... T, class X>
struct repeated_like<tuple<T...>, X> {
  using type = tuple<typename repeated_like<T, X>::type...>;
};
template <class T>
constexpr bool is_plain_tuple = false;
template <class... T>
constexpr bool is_plain_tuple<tuple<T...>> = true;
}  // namespace detail

template <class T, class X>
CUTE_HOST_DEVICE constexpr auto repeat_like(T const& t, X const& x) {
  if constexpr (!is_tuple<T>::value) {
    return x;
  } else if constexpr (detail::is_plain_tuple<T> && __is_empty(X)) {
    return typename detail::repeated_like<T, X>::type{};
  } else {
    return transform(t, [&](auto const& a) { return repeat_like(a, x); });
  }
}

template <int B, int E, class T>
CUTE_HOST_DEVICE constexpr auto group(T const& t) {
  if constexpr (!is_tuple<T>::value) {
    if constexpr (E == -1) {
      return group<B, 1>(t);
    } else {
      return detail::construct(t, take<B, E>(t), make_seq<B>{}, make_seq<(B < E)>{}, make_range<E, 1>{});
    }
  } else if constexpr (E == -1) {
    return group<B, tuple_size<T>::value>(t);
  } else {
    static_assert(B <= E);
    return detail::construct(t, take<B, E>(t), make_seq<B>{}, make_seq<(B < E)>{},
                             make_range<E, tuple_size<T>::value>{});
  }
}

template <int N, class T, class X>
CUTE_HOST_DEVICE constexpr auto append(T const& t, X const& x) {
  if constexpr (is_tuple<T>::value) {
    constexpr int size = tuple_size<T>::value;
    if constexpr (N == size) {
      return t;
    } else {
      static_assert(N > size);
      return detail::construct(t, x, make_seq<size>{}, make_seq<N - size>{}, seq<>{});
    }
  } else if constexpr (N == 1) {
    return t;
  } else {
    return detail::construct(cute::make_tuple(t), x, seq<0>{}, make_seq<N - 1>{}, seq<>{});
  }
}

template <class T, class X>
CUTE_HOST_DEVICE constexpr auto append(T const& t, X const& x) {
  if constexpr (is_tuple<T>::value) {
    return detail::construct(t, x, make_seq<tuple_size<T>::value>{}, seq<0>{}, seq<>{});
  } else {
    return cute::make_tuple(t, x);
  }
}

template <int N, class T, class X>
CUTE_HOST_DEVICE constexpr auto prepend(T const& t, X const& x) {
  if constexpr (is_tuple<T>::value) {
    constexpr int size = tuple_size<T>::value;
    if constexpr (N == size) {
      return t;
    } else {
      static_assert(N > size);
      return detail::construct(t, x, seq<>{}, make_seq<N - size>{}, make_seq<size>{});
    }
  } else if constexpr (N == 1) {
    return t;
  } else {
    return detail::construct(cute::make_tuple(t), x, seq<>{}, make_seq<N - 1>{}, seq<0>{});
  }
}

template <class T, class X>
CUTE_HOST_DEVICE constexpr auto prepend(T const& t, X const& x) {
  if constexpr (is_tuple<T>::value) {
    return detail::construct(t, x, seq<>{}, seq<0>{}, make_seq<tuple_size<T>::value>{});
  } else {
    return cute::make_tuple(x, t);
  }
}

// --- prefix sums ---

namespace detail {

template <bool kInclusive, class T, class V, class F, class Done, int I, int... Rest>
CUTE_HOST_DEVICE constexpr auto scan(T const& t, V const& v, F& f, Done const& done, seq<I, Rest...>) {
  if constexpr (!kInclusive && sizeof...(Rest) == 0) {
    return append(done, v);
  } else {
    auto const next = f(v, get<I>(t));
    if constexpr (kInclusive && sizeof...(Rest) == 0) {
      return append(done, next);
    } else if constexpr (kInclusive) {
      return detail::scan<kInclusive>(t, next, f, append(done, next), seq<Rest...>{});
    } else {
      return detail::scan<kInclusive>(t, next, f, append(done, v), seq<Rest...>{});
    }
  }
}

}  // namespace detail

template <class T, class V, class F>
CUTE_HOST_DEVICE constexpr auto iscan(T const& t, V const& v, F&& f) {
  return detail::scan<true>(t, v, f, tuple<>{}, tuple_seq<T>{});
}

template <class T, class V, class F>
CUTE_HOST_DEVICE constexpr auto escan(T const& t, V const& v, F&& f) {
  return detail::scan<false>(t, v, f, tuple<>{}, tuple_seq<T>{});
}

// --- transposition ---

namespace detail {

template <class... T>
struct zipped;
template <class... T, class... U>
struct zipped<tuple<T...>, tuple<U...>> {
  using type = tuple<tuple<T, U>...>;
};
template <class... T, class... U, class... V>
struct zipped<tuple<T...>, tuple<U...>, tuple<V...>> {
  using type = tuple<tuple<T, U, V>...>;
};

template <class T>
struct is_zippable_static : false_type {};
template <class... T, class... U>
struct is_zippable_static<tuple<tuple<T...>, tuple<U...>>> : bool_constant<all_empty<T..., U...>> {
  using type = typename zipped<tuple<T...>, tuple<U...>>::type;
};

template <int J, class... T>
CUTE_HOST_DEVICE constexpr auto zip_mode(T const&... t) {
  return cute::make_tuple(get<J>(t)...);
}

template <class T, int... I, int... J>
CUTE_HOST_DEVICE constexpr auto zip(T const& t, seq<I...>, seq<J...>) {
  static_assert((true && ... && (tuple_size<tuple_element_t<0, T>>::value == tuple_size<tuple_element_t<I, T>>::value)),
                "tuples of different sizes");
  return cute::make_tuple(zip_mode<J>(get<I>(t)...)...);
}

}  // namespace detail

template <class T>
CUTE_HOST_DEVICE constexpr auto zip(T const& t) {
  if constexpr (is_tuple<T>::value) {
    if constexpr (detail::is_zippable_static<T>::value) {
      return typename detail::is_zippable_static<T>::type{};
    } else if constexpr (is_tuple<tuple_element_t<0, T>>::value) {
      return detail::zip(t, tuple_seq<T>{}, tuple_seq<tuple_element_t<0, T>>{});
    } else {
      return cute::make_tuple(t);
    }
  } else {
    return t;
  }
}

template <class T, class U, class... Rest>
CUTE_HOST_DEVICE constexpr auto zip(T const& t, U const& u, Rest const&... rest) {
  return zip(cute::make_tuple(t, u, rest...));
}

// ((A,a),((B,b),(C,c)),d) by the guide (X,(X,X)) -> ((A,(B,C)),(a,(b,c),d))
namespace detail {

template <class T, class Guide, int... I, int... J>
CUTE_HOST_DEVICE constexpr auto zip2_by(T const& t, Guide const& guide, seq<I...>, seq<J...>) {
  auto const split = cute::make_tuple(zip2_by(get<I>(t), get<I>(guide))...);
  return cute::make_tuple(cute::make_tuple(get<0>(get<I>(split))...),
                          cute::make_tuple(get<1>(get<I>(split))..., get<J>(t)...));
}

// The same for a static tuple.
template <class T, class Guide>
struct zipped2_by;
template <class First, class Second, class Guide>
struct zipped2_by<tuple<First, Second>, Guide> {
  using first = First;
  using second = Second;
};
template <class T, class Guide, class I, class J>
struct zipped2_by_modes;
template <class... T, class... Guide, int... I, int... J>
struct zipped2_by_modes<tuple<T...>, tuple<Guide...>, seq<I...>, seq<J...>> {
  using first = tuple<typename zipped2_by<typename pack_element<I, T...>::type, Guide>::first...>;
  using second = tuple<typename zipped2_by<typename pack_element<I, T...>::type, Guide>::second...,
                       typename pack_element<J, T...>::type...>;
};
template <class... T, class... Guide>
struct zipped2_by<tuple<T...>, tuple<Guide...>>
    : zipped2_by_modes<tuple<T...>, tuple<Guide...>, make_seq<sizeof...(Guide)>,
                       make_range<sizeof...(Guide), sizeof...(T)>> {};
template <class First, class Second, class... Guide>
struct zipped2_by<tuple<First, Second>, tuple<Guide...>>
    : zipped2_by_modes<tuple<First, Second>, tuple<Guide...>, make_seq<sizeof...(Guide)>,
                       make_range<sizeof...(Guide), 2>> {};

}  // namespace detail

template <class T, class Guide>
CUTE_HOST_DEVICE constexpr auto zip2_by(T const& t, Guide const& guide) {
  if constexpr (is_tuple<Guide>::value) {
    constexpr int modes = tuple_size<T>::value, guided = tuple_size<Guide>::value;
    static_assert(modes >= guided, "the guide has more modes than the tuple");
    if constexpr (detail::is_empty_tuple<T> && detail::is_plain_tuple<Guide>) {
      using Zipped = detail::zipped2_by<T, Guide>;
      return tuple<typename Zipped::first, typename Zipped::second>{};
    } else {
      return detail::zip2_by(t, guide, make_seq<guided>{}, make_range<guided, modes>{});
    }
  } else {
    static_assert(tuple_size<T>::value == 2, "a leaf of the guide takes a pair");
    return t;
  }
}

template <class T>
CUTE_HOST_DEVICE constexpr auto reverse(T const& t) {
  if constexpr (is_tuple<T>::value) {
    return detail::choose(t, tuple_rseq<T>{});
  } else {
    return t;
  }
}

}  // namespace cute
