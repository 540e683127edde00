// The innermost loops of CuTe's layout algebra. Where shapes and
// strides are static integers, which is nearly always, CuTe's recursion over
// the modes, a dozen templates each, becomes a loop that the compiler
// evaluates. These overloads are more specialized than CuTe's own, which follow
// and still take everything else.
#pragma once

#include <cutlass/version.h>
#if CUTLASS_MAJOR != 4 || CUTLASS_MINOR != 2
#error "This header shadows that of CUTLASS 4.2, and another CUTLASS is there: generator/headers.py chooses the folders"
#endif

#include <cute/int_tuple.hpp>
#include <cute/numeric/integral_constant.hpp>
#include <cute/stride.hpp>
#include <cute/underscore.hpp>

namespace cute {

template <class Shape, class Stride>
struct Layout;

template <class... T>
constexpr auto rank_v<tuple<T...>> = int(sizeof...(T));

template <class... T>
CUTE_HOST_DEVICE constexpr Int<int(sizeof...(T))> rank(tuple<T...> const&) {
  return {};
}
template <class... Shape, class Stride>
CUTE_HOST_DEVICE constexpr Int<int(sizeof...(Shape))> rank(Layout<tuple<Shape...>, Stride> const&) {
  return {};
}
// A type parameter comes first lest the mode in shape<1>(tuple) be taken for an element.
template <class = void, int... v>
CUTE_HOST_DEVICE constexpr tuple<C<v>...> shape(tuple<C<v>...> const&) {
  return {};
}

namespace detail {

// Layouts side by side, as make_layout has them.
template <class... Layouts>
struct side_by_side;
template <class... Shape, class... Stride>
struct side_by_side<Layout<Shape, Stride>...> {
  using type = Layout<tuple<Shape...>, tuple<Stride...>>;
};

template <int I, class Layout>
struct mode_of;
template <int I, class... Shape, class... Stride>
struct mode_of<I, Layout<tuple<Shape...>, tuple<Stride...>>> {
  using type = Layout<typename pack_element<I, Shape...>::type, typename pack_element<I, Stride...>::type>;
};

// Static modes transformed each on its own: the result's type is all that is
// asked of the function.
template <class... Shape, class... Stride, class... T, class F, int... I, int... J, int... K>
CUTE_HOST_DEVICE constexpr auto transform_layout(Layout<tuple<Shape...>, tuple<Stride...>> const& layout,
                                                 tuple<T...> const& t, F&& f, seq<I...>, seq<J...>, seq<K...>) {
  if constexpr (all_empty<Shape..., Stride..., T...>) {
    using Whole = Layout<tuple<Shape...>, tuple<Stride...>>;
    using Result =
        typename side_by_side<remove_cvref_t<decltype(f(declval<typename mode_of<I, Whole>::type>(),
                                                        declval<typename pack_element<I, T...>::type>()))>...,
                              typename mode_of<J, Whole>::type..., typename pack_element<K, T...>::type...>::type;
    if constexpr (__is_empty(Result)) {
      return Result{};
    } else {
      return make_layout(f(get<I>(layout), get<I>(t))..., get<J>(layout)..., get<K>(t)...);
    }
  } else {
    return make_layout(f(get<I>(layout), get<I>(t))..., get<J>(layout)..., get<K>(t)...);
  }
}

template <class... T, class... U, class F, int... I, int... J, int... K>
CUTE_HOST_DEVICE constexpr auto transform_layout(tuple<T...> const& t, tuple<U...> const& u, F&& f, seq<I...>,
                                                 seq<J...>, seq<K...>) {
  if constexpr (all_empty<T..., U...>) {
    using Result =
        typename side_by_side<remove_cvref_t<decltype(f(declval<typename pack_element<I, T...>::type>(),
                                                        declval<typename pack_element<I, U...>::type>()))>...,
                              typename pack_element<J, T...>::type..., typename pack_element<K, U...>::type...>::type;
    if constexpr (__is_empty(Result)) {
      return Result{};
    } else {
      return make_layout(f(get<I>(t), get<I>(u))..., get<J>(t)..., get<K>(u)...);
    }
  } else {
    return make_layout(f(get<I>(t), get<I>(u))..., get<J>(t)..., get<K>(u)...);
  }
}

template <int N>
struct modes {
  int shape[N + 1] = {}, stride[N + 1] = {};
  int count = 0;
};

// Shape and stride as CuTe writes them: an integer if there is one mode, else a
// tuple.
template <int... Shape, int... Stride>
CUTE_HOST_DEVICE constexpr auto layout_of_modes(seq<Shape...>, seq<Stride...>) {
  if constexpr (sizeof...(Shape) == 1) {
    return Layout<C<Shape>..., C<Stride>...>{};
  } else {
    return Layout<tuple<C<Shape>...>, tuple<C<Stride>...>>{};
  }
}

// Merges the modes before the last with it, back to front, wherever they are
// contiguous.
template <int N>
CUTE_HOST_DEVICE constexpr modes<N> coalesced_modes(int last, int const (&shape)[N], int const (&stride)[N],
                                                    int end_shape, int end_stride) {
  modes<N> reversed;
  int front_shape = end_shape, front_stride = end_stride;
  for (int i = last; i >= 0; --i) {
    if (shape[i] == 1) continue;
    if (reversed.count == 0 && front_shape == 1) {
      front_shape = shape[i];
      front_stride = stride[i];
    } else if (shape[i] * stride[i] == front_stride) {
      front_shape *= shape[i];
      front_stride = stride[i];
    } else {
      reversed.shape[reversed.count] = front_shape;
      reversed.stride[reversed.count++] = front_stride;
      front_shape = shape[i];
      front_stride = stride[i];
    }
  }
  reversed.shape[reversed.count] = front_shape;
  reversed.stride[reversed.count++] = front_stride;
  modes<N> result;
  for (int i = 0; i < reversed.count; ++i) {
    result.shape[i] = reversed.shape[reversed.count - 1 - i];
    result.stride[i] = reversed.stride[reversed.count - 1 - i];
  }
  result.count = reversed.count;
  if (result.count == 1 && result.shape[0] == 1) result.stride[0] = 0;
  return result;
}

template <int kLast, class Shape, class Stride, int kEndShape, int kEndStride>
struct coalesced;
template <int kLast, int... Shape, int... Stride, int kEndShape, int kEndStride>
struct coalesced<kLast, seq<Shape...>, seq<Stride...>, kEndShape, kEndStride> {
  template <int... I>
  CUTE_HOST_DEVICE static constexpr auto layout(seq<I...>) {
    constexpr auto result = coalesced_modes<sizeof...(Shape)>(kLast, {Shape...}, {Stride...}, kEndShape, kEndStride);
    return layout_of_modes(seq<result.shape[I]...>{}, seq<result.stride[I]...>{});
  }
  CUTE_HOST_DEVICE static constexpr int count() {
    return coalesced_modes<sizeof...(Shape)>(kLast, {Shape...}, {Stride...}, kEndShape, kEndStride).count;
  }
};

template <int kLast, int... Shape, int... Stride, int kEndShape, int kEndStride>
CUTE_HOST_DEVICE constexpr auto bw_coalesce(tuple<C<Shape>...> const&, tuple<C<Stride>...> const&, C<kEndShape> const&,
                                            C<kEndStride> const&) {
  using Result = coalesced<kLast, seq<Shape...>, seq<Stride...>, kEndShape, kEndStride>;
  return decltype(Result::layout(make_seq<Result::count()>{})){};
}

// CuTe's own, which follows: the modes of a shape that is not static come to it.
template <class LeftShape, class LeftStride, class Shape, class Stride>
CUTE_HOST_DEVICE constexpr auto composition_impl(LeftShape const& left_shape, LeftStride const& left_stride,
                                                 Shape const& shape, Stride const& stride);

// The left layout's modes that a stride of the right one reaches, each as far
// as the right one's shape goes.
template <int N>
CUTE_HOST_DEVICE constexpr modes<N> composed_modes(int const (&shape)[N], int const (&stride)[N], int rest_shape,
                                                   int rest_stride) {
  modes<N> result;
  for (int i = 0; i + 1 < N; ++i) {
    int const magnitude = rest_stride < 0 ? -rest_stride : rest_stride;
    int const sign = rest_stride < 0 ? -1 : (rest_stride > 0 ? 1 : 0);
    if (rest_stride % shape[i] != 0 && rest_stride >= shape[i]) return {}; // does not divide
    int const next_shape = (shape[i] + magnitude - 1) / magnitude;
    int const next_stride = (magnitude + shape[i] - 1) / shape[i] * sign;
    if (next_shape != 1 && rest_shape != 1) {
      int const taken = next_shape < rest_shape ? next_shape : rest_shape;
      if (rest_shape % taken != 0) return {};
      result.shape[result.count] = taken;
      result.stride[result.count++] = rest_stride * stride[i];
      rest_shape /= taken;
    }
    rest_stride = next_stride;
  }
  if (result.count == 0 || rest_shape != 1) {
    result.shape[result.count] = rest_shape;
    result.stride[result.count++] = rest_stride * stride[N - 1];
  }
  return result;
}

template <class LeftShape, class LeftStride, int kShape, int kStride>
struct composed;
template <int... Shape, int... Stride, int kShape, int kStride>
struct composed<seq<Shape...>, seq<Stride...>, kShape, kStride> {
  template <int... I>
  CUTE_HOST_DEVICE static constexpr auto layout(seq<I...>) {
    constexpr auto result = composed_modes<sizeof...(Shape)>({Shape...}, {Stride...}, kShape, kStride);
    return layout_of_modes(seq<result.shape[I]...>{}, seq<result.stride[I]...>{});
  }
  CUTE_HOST_DEVICE static constexpr int count() {
    return composed_modes<sizeof...(Shape)>({Shape...}, {Stride...}, kShape, kStride).count;
  }
};

template <int... LeftShape, int... LeftStride, int kShape, int kStride>
CUTE_HOST_DEVICE constexpr auto composition_impl(tuple<C<LeftShape>...> const&, tuple<C<LeftStride>...> const&,
                                                 C<kShape> const&, C<kStride> const&) {
  if constexpr (kStride == 0) {
    return Layout<C<kShape>, C<0>>{};
  } else {
    using Result = composed<seq<LeftShape...>, seq<LeftStride...>, kShape, kStride>;
    static_assert(Result::count() > 0,
                  "the left layout's shape and the right "
                  "layout's do not divide each other");
    return decltype(Result::layout(make_seq<Result::count()>{})){};
  }
}

template <int... LeftShape, int... LeftStride, class... Shape, class... Stride>
CUTE_HOST_DEVICE constexpr auto composition_impl(tuple<C<LeftShape>...> const& left_shape,
                                                 tuple<C<LeftStride>...> const& left_stride,
                                                 tuple<Shape...> const& shape, tuple<Stride...> const& stride) {
  if constexpr (all_empty<Shape..., Stride...>) {
    return typename side_by_side<decltype(composition_impl(left_shape, left_stride, Shape{}, Stride{}))...>::type{};
  } else {
    return transform_layout(shape, stride, [&](auto const& mode_shape, auto const& mode_stride) {
      return composition_impl(left_shape, left_stride, mode_shape, mode_stride);
    });
  }
}

} // namespace detail
} // namespace cute

#include_next <cute/layout.hpp>
