// Calls of what the shadows of CUTLASS's headers define. Compiled with the shadows and with the originals, each gives a
// result of the same type and value: with arguments that the compiler knows, and with those of run time.
#pragma once

#include <cute/layout.hpp>

#include "cutlass/util/packed_stride.hpp"

namespace shadow_cases {

using namespace cute;

// --- what is recorded of a result ---

CUTE_HOST_DEVICE constexpr uint64_t mix(uint64_t hash) { return hash; }
template <class... Rest>
CUTE_HOST_DEVICE constexpr uint64_t mix(uint64_t hash, uint64_t number, Rest... rest) {
  return mix((hash ^ (number + 1)) * 1099511628211ull + (hash >> 29), rest...);
}

// A hash of a type's structure, since compilers spell one type in several ways.
template <class T>
struct TypeHash;
template <>
struct TypeHash<bool> {
  static constexpr uint64_t value = 1;
};
template <>
struct TypeHash<int> {
  static constexpr uint64_t value = 2;
};
template <>
struct TypeHash<unsigned> {
  static constexpr uint64_t value = 3;
};
template <>
struct TypeHash<long> {
  static constexpr uint64_t value = 4;
};
template <>
struct TypeHash<long long> {
  static constexpr uint64_t value = 5;
};
template <>
struct TypeHash<unsigned long> {
  static constexpr uint64_t value = 6;
};
template <>
struct TypeHash<unsigned long long> {
  static constexpr uint64_t value = 7;
};
template <>
struct TypeHash<Underscore> {
  static constexpr uint64_t value = 8;
};
template <auto v>
struct TypeHash<C<v>> {
  static constexpr uint64_t value = mix(9, TypeHash<remove_cv_t<decltype(v)>>::value, uint64_t(v));
};
template <class T, T v>
struct TypeHash<integral_constant<T, v>> {
  static constexpr uint64_t value = mix(10, TypeHash<T>::value, uint64_t(v));
};
template <class T, int... N>
struct TypeHash<ScaledBasis<T, N...>> {
  static constexpr uint64_t value = mix(11, TypeHash<T>::value, uint64_t(N)...);
};
template <class... T>
struct TypeHash<tuple<T...>> {
  static constexpr uint64_t value = mix(12, sizeof...(T), TypeHash<T>::value...);
};
template <class Shape, class Stride>
struct TypeHash<Layout<Shape, Stride>> {
  static constexpr uint64_t value = mix(13, TypeHash<Shape>::value, TypeHash<Stride>::value);
};

// The numbers that results come to: the number of the case, a hash of its type, its leaves.
template <int kCapacity>
struct Numbers {
  uint64_t value[kCapacity] = {};
  int count = 0;
  int cases = 0;

  CUTE_HOST_DEVICE constexpr void put(uint64_t number) {
    if (count < kCapacity) value[count] = number;
    ++count;
  }
  template <class T>
  CUTE_HOST_DEVICE constexpr void operator()(char const*, T const& result) {
    put(1000000000ull + cases++);
    put(TypeHash<T>::value);
    leaves(result);
  }
  template <class T>
  CUTE_HOST_DEVICE constexpr void leaves(T const& leaf) {
    if constexpr (is_tuple<T>::value) {
      elements(leaf, make_index_sequence<tuple_size<T>::value>{});
    } else if constexpr (is_scaled_basis<T>::value) {
      leaves(leaf.value());
    } else {
      put(uint64_t(int64_t(leaf)));
    }
  }
  template <class Shape, class Stride>
  CUTE_HOST_DEVICE constexpr void leaves(Layout<Shape, Stride> const& layout) {
    leaves(layout.shape());
    leaves(layout.stride());
  }
  template <class T, size_t... I>
  CUTE_HOST_DEVICE constexpr void elements(T const& tuple, index_sequence<I...>) {
    (leaves(get<I>(tuple)), ...);
  }
};

// --- functions to map, search and fold with ---

struct Twice {
  template <class T>
  CUTE_HOST_DEVICE constexpr auto operator()(T const& t) const {
    return t + t;
  }
};
struct Plus {
  template <class... T>
  CUTE_HOST_DEVICE constexpr auto operator()(T const&... t) const {
    return (... + t);
  }
};
struct Minus {
  template <class T, class U>
  CUTE_HOST_DEVICE constexpr auto operator()(T const& t, U const& u) const {
    return t - u;
  }
};
struct AddTo {
  int sum;
  template <class... T>
  CUTE_HOST_DEVICE constexpr int operator()(T const&... t) const {
    return (sum + ... + int(t));
  }
};
struct IsTwo {
  template <class T>
  CUTE_HOST_DEVICE constexpr auto operator()(T const& t) const {
    return t == Int<2>{};
  }
};
struct IsTuple {
  template <class T>
  CUTE_HOST_DEVICE constexpr auto operator()(T const&) const {
    return is_tuple<T>{};
  }
};
struct Pair {
  template <class... T>
  CUTE_HOST_DEVICE constexpr auto operator()(T const&... t) const {
    return cute::make_tuple(t..., Int<7>{});
  }
};
struct Count {
  int* seen;
  template <class T>
  CUTE_HOST_DEVICE constexpr void operator()(T const& t) const {
    *seen = 10 * *seen + int(t);
  }
};

template <class F, class T>
CUTE_HOST_DEVICE constexpr int counted(T const& t, F const& each) {
  int seen = 0;
  each(t, Count{&seen});
  return seen;
}
struct ForEach {
  template <class T, class F>
  CUTE_HOST_DEVICE constexpr void operator()(T const& t, F const& f) const {
    for_each(t, f);
  }
};
struct ForEachLeaf {
  template <class T, class F>
  CUTE_HOST_DEVICE constexpr void operator()(T const& t, F const& f) const {
    for_each_leaf(t, f);
  }
};

#define CASE(...) record(#__VA_ARGS__, __VA_ARGS__)

// --- tuples and their algorithms: `two` and `big` have the values 2 and 2^33 + 1, be they static or not ---

template <class Record, class Two, class Big>
CUTE_HOST_DEVICE constexpr void tuple_cases(Record& record, Two two, Big big) {
  using _1 = Int<1>;
  using _2 = Int<2>;
  using _3 = Int<3>;
  auto const none = cute::make_tuple();
  auto const single = cute::make_tuple(two);
  auto const flat = cute::make_tuple(_1{}, two, _3{}, big);
  auto const small = cute::make_tuple(_3{}, two, _1{});
  auto const fixed = cute::make_tuple(_3{}, _2{}, _1{});
  auto const nested = cute::make_tuple(cute::make_tuple(_1{}, two), cute::make_tuple(_3{}, cute::make_tuple(two, _1{})),
                                       two, cute::make_tuple());
  auto const pairs = cute::make_tuple(cute::make_tuple(_1{}, two), cute::make_tuple(_3{}, big));
  auto const tree =
      cute::make_tuple(cute::make_tuple(_1{}, two),
                       cute::make_tuple(cute::make_tuple(_3{}, big), cute::make_tuple(Int<5>{}, Int<6>{})), Int<7>{});
  auto mutable_pair = cute::make_tuple(two, _3{});
  get<0>(mutable_pair) = two;

  CASE(flat);
  CASE(nested);
  CASE(mutable_pair);
  CASE(get<0>(flat));
  CASE(get<1>(flat));
  CASE(get<3>(flat));
  CASE(get<1>(get<1>(nested)));
  CASE(get<1, 1, 0>(nested));
  CASE(get<0>(cute::make_tuple(two, big)));
  CASE(Int<int(tuple_size<decltype(nested)>::value)>{});
  CASE(tuple_element_t<0, remove_cvref_t<decltype(nested)>>{});
  CASE(bool_constant<is_tuple<remove_cvref_t<decltype(nested)>>::value>{});
  CASE(bool_constant<is_tuple<remove_cvref_t<decltype(two)>>::value>{});
  CASE(bool_constant<is_tuple<seq<1, 2>>::value>{});
  CASE(bool_constant<is_integral<remove_cvref_t<decltype(nested)>>::value>{});
  CASE(find<_3>(small));
  CASE(find<tuple<_1>>(small));
  CASE(tuple_cat());
  CASE(tuple_cat(flat));
  CASE(tuple_cat(flat, none));
  CASE(tuple_cat(none, fixed, single));
  CASE(tuple_cat(flat, nested, single, fixed));
  CASE(tuple_cat(single, single, none, fixed, flat, single));
  CASE(tuple_cat(cute::make_tuple(_1{}), cute::make_tuple(_2{}, _3{}), none, fixed, fixed, fixed));
  CASE(flat == flat);
  CASE(fixed == small);
  CASE(fixed == flat);
  CASE(fixed == _1{});
  CASE(fixed != small);
  CASE(fixed != nested);
  CASE(single == cute::make_tuple(big));

  CASE(apply(flat, Plus{}));
  CASE(apply(fixed, Plus{}));
  CASE(apply(flat, AddTo{5}));
  CASE(apply(none, AddTo{5}));
  CASE(transform_apply(flat, Twice{}, Plus{}));
  CASE(transform_apply(fixed, Twice{}, Pair{}));
  CASE(transform_apply(fixed, small, Plus{}, Pair{}));
  CASE(transform_apply(fixed, fixed, Minus{}, Plus{}));
  CASE(transform_apply(fixed, small, fixed, Plus{}, Plus{}));
  CASE(transform_apply(two, Twice{}, Pair{}));
  CASE(transform_apply(two, big, Plus{}, Twice{}));
  CASE(transform_apply(two, big, two, Plus{}, Twice{}));
  CASE(counted(small, ForEach{}));
  CASE(counted(two, ForEach{}));
  CASE(counted(cute::make_tuple(cute::make_tuple(_1{}, two), _3{}), ForEachLeaf{}));
  CASE(counted(two, ForEachLeaf{}));
  CASE(transform(flat, Twice{}));
  CASE(transform(fixed, Twice{}));
  CASE(transform(none, Twice{}));
  CASE(transform(two, Twice{}));
  CASE(transform(fixed, AddTo{3}));
  CASE(transform(seq<4, 5>{}, Twice{}));
  CASE(transform(fixed, small, Plus{}));
  CASE(transform(fixed, fixed, Minus{}));
  CASE(transform(two, big, Plus{}));
  CASE(transform(fixed, small, fixed, Plus{}));
  CASE(transform(fixed, fixed, fixed, Plus{}));
  CASE(transform_leaf(nested, Twice{}));
  CASE(transform_leaf(two, Twice{}));
  CASE(transform_leaf(tree, tree, Plus{}));
  CASE(transform_leaf(two, big, Plus{}));
  CASE(find_if(nested, IsTuple{}));
  CASE(find_if(small, IsTuple{}));
  CASE(find_if(fixed, IsTwo{}));
  CASE(find_if(_2{}, IsTwo{}));
  CASE(find_if(_3{}, IsTwo{}));
  CASE(find(fixed, _1{}));
  CASE(find(fixed, Int<9>{}));
  CASE(any_of(flat, IsTwo{}));
  CASE(any_of(fixed, IsTwo{}));
  CASE(any_of(none, IsTwo{}));
  CASE(any_of(two, IsTwo{}));
  CASE(all_of(flat, IsTwo{}));
  CASE(all_of(fixed, IsTwo{}));
  CASE(all_of(none, IsTwo{}));
  CASE(all_of(two, IsTwo{}));
  CASE(none_of(flat, IsTwo{}));
  CASE(none_of(fixed, IsTwo{}));
  CASE(filter_tuple(flat, Pair{}));
  CASE(filter_tuple(fixed, Pair{}));
  CASE(filter_tuple(two, Pair{}));
  CASE(filter_tuple(fixed, small, Pair{}));
  CASE(filter_tuple(fixed, fixed, Pair{}));
  CASE(filter_tuple(fixed, small, fixed, Pair{}));
  CASE(fold(flat, _1{}, Plus{}));
  CASE(fold(fixed, Int<9>{}, Minus{}));
  CASE(fold(fixed, two, Minus{}));
  CASE(fold(none, two, Plus{}));
  CASE(fold(two, big, Minus{}));
  CASE(fold(fixed, none, [](auto const& done, auto const& element) { return append(done, element); }));
  CASE(fold_first(flat, Plus{}));
  CASE(fold_first(fixed, Minus{}));
  CASE(fold_first(two, Minus{}));
  CASE(front(nested));
  CASE(front(two));
  CASE(back(tree));
  CASE(back(flat));
  CASE(back(pairs));
  CASE(back(two));
  CASE(take<1, 3>(flat));
  CASE(take<1, 3>(cute::make_tuple(_1{}, _2{}, _3{})));
  CASE(take<0, 0>(flat));
  CASE(take<1, -1>(flat));
  CASE(take<0, -1>(two));
  CASE(select<2, 0, 0>(flat));
  CASE(select<2, 0>(fixed));
  CASE(wrap(two));
  CASE(wrap(flat));
  CASE(unwrap(two));
  CASE(unwrap(single));
  CASE(unwrap(cute::make_tuple(cute::make_tuple(cute::make_tuple(two)))));
  CASE(unwrap(flat));
  CASE(bool_constant<is_flat<remove_cvref_t<decltype(flat)>>::value>{});
  CASE(bool_constant<is_flat<remove_cvref_t<decltype(nested)>>::value>{});
  CASE(flatten_to_tuple(nested));
  CASE(flatten_to_tuple(flat));
  CASE(flatten_to_tuple(two));
  CASE(flatten_to_tuple(cute::make_tuple(cute::make_tuple(_1{}, cute::make_tuple(_2{})), _3{})));
  CASE(flatten(nested));
  CASE(flatten(two));
  CASE(unflatten(flat, cute::make_tuple(_1{}, cute::make_tuple(_1{}, cute::make_tuple(_1{})), _1{})));
  CASE(unflatten(fixed, cute::make_tuple(_1{}, cute::make_tuple(_1{}, cute::make_tuple(_1{})))));
  CASE(insert<0>(flat, two));
  CASE(insert<2>(fixed, _2{}));
  CASE(insert<3>(fixed, two));
  CASE(remove<0>(flat));
  CASE(remove<2>(fixed));
  CASE(replace<1>(flat, _3{}));
  CASE(replace<2>(fixed, two));
  CASE(replace<0>(two, big));
  CASE(replace_front(flat, two));
  CASE(replace_front(two, big));
  CASE(replace_back(flat, two));
  CASE(replace_back(two, big));
  CASE(tuple_repeat<3>(two));
  CASE(tuple_repeat<1>(_2{}));
  CASE(repeat<3>(two));
  CASE(repeat<1>(two));
  CASE(repeat_like(nested, two));
  CASE(repeat_like(nested, _3{}));
  CASE(repeat_like(two, _3{}));
  CASE(group<1, 3>(flat));
  CASE(group<1, -1>(fixed));
  CASE(group<0, -1>(fixed));
  CASE(group<0, -1>(two));
  CASE(append<6>(flat, two));
  CASE(append<4>(flat, two));
  CASE(append<3>(two, _1{}));
  CASE(append<1>(two, _1{}));
  CASE(append(flat, two));
  CASE(append(fixed, _2{}));
  CASE(append(two, big));
  CASE(prepend<6>(flat, two));
  CASE(prepend<3>(fixed, two));
  CASE(prepend<3>(two, _1{}));
  CASE(prepend(flat, two));
  CASE(prepend(two, big));
  CASE(iscan(flat, _1{}, Plus{}));
  CASE(iscan(fixed, two, Minus{}));
  CASE(escan(flat, _1{}, Plus{}));
  CASE(escan(fixed, _1{}, Plus{}));
  CASE(zip(pairs));
  CASE(zip(cute::make_tuple(fixed, fixed)));
  CASE(zip(flat));
  CASE(zip(two));
  CASE(zip(fixed, small));
  CASE(zip(fixed, fixed, small));
  CASE(zip(fixed, fixed, fixed));
  CASE(zip2_by(tree, cute::make_tuple(_1{}, cute::make_tuple(_1{}, _1{}))));
  CASE(zip2_by(cute::make_tuple(fixed, fixed), _1{}));
  CASE(zip2_by(cute::make_tuple(cute::make_tuple(_1{}, _2{}), cute::make_tuple(_3{}, _1{}), _2{}),
               cute::make_tuple(_1{}, _1{})));
  CASE(reverse(flat));
  CASE(reverse(fixed));
  CASE(reverse(two));

  // --- slices ---
  CASE(slice(X{}, flat));
  CASE(slice(cute::make_tuple(X{}, two, X{}, _1{}), flat));
  CASE(slice(cute::make_tuple(_1{}, X{}, _1{}), fixed));
  CASE(slice(cute::make_tuple(X{}, cute::make_tuple(_1{}, cute::make_tuple(X{}, two)), two, X{}), nested));
  CASE(slice(cute::make_tuple(two, cute::make_tuple(X{}, X{})), cute::make_tuple(two, pairs)));
  CASE(dice(cute::make_tuple(X{}, two, X{}, _1{}), flat));
  CASE(dice(cute::make_tuple(_1{}, X{}, _1{}), fixed));
  CASE(dice(cute::make_tuple(X{}, cute::make_tuple(_1{}, cute::make_tuple(X{}, two)), two, X{}), nested));
  CASE(dice(two, flat));
  CASE(dice(X{}, two));
  CASE(bool_constant<has_underscore<remove_cvref_t<decltype(nested)>>::value>{});
  CASE(bool_constant<has_underscore<tuple<_1, tuple<X, _2>>>::value>{});
  CASE(bool_constant<has_underscore<X>::value>{});
  CASE(bool_constant<all_underscore<tuple<X, tuple<X, _2>>>::value>{});
  CASE(bool_constant<all_underscore<tuple<X, tuple<X>>>::value>{});
  CASE(bool_constant<has_int1<tuple<_2, tuple<_3, _1>>>::value>{});
  CASE(bool_constant<has_int0<tuple<_2, tuple<_3, _1>>>::value>{});
  CASE(bool_constant<has_elem<seq<4, 5>, Int<5>>::value>{});
  CASE(bool_constant<all_elem<tuple<_1, tuple<_1>>, _1>::value>{});
  CASE(bool_constant<is_underscore<X>::value>{});
  CASE(bool_constant<is_underscore<Int<0>>::value>{});
  CASE(bool_constant<is_integral<X>::value>{});

  // --- types without reference and qualifiers ---
  CASE(remove_cvref_t<int const&>{});
  CASE(typename remove_cvref<tuple<_1> const&&>::type{});
  CASE(remove_cvref_t<int volatile>{});
}

// --- layouts ---

template <class Record, class Two>
CUTE_HOST_DEVICE constexpr void layout_cases(Record& record, Two two) {
  using _0 = Int<0>;
  using _1 = Int<1>;
  using _2 = Int<2>;
  using _4 = Int<4>;
  using _8 = Int<8>;
  using _16 = Int<16>;
  auto const vector = make_layout(two);
  auto const matrix = make_layout(make_shape(two, _8{}), make_stride(_8{}, _1{}));
  auto const fixed = make_layout(make_shape(_4{}, make_shape(_2{}, _8{})), make_stride(_16{}, make_stride(_1{}, _2{})));
  auto const mixed = make_layout(make_shape(_4{}, make_shape(two, _8{})), make_stride(_16{}, make_stride(_1{}, two)));
  auto const broadcast = make_layout(make_shape(_4{}, _8{}), make_stride(_0{}, _1{}));

  CASE(vector);
  CASE(mixed);
  CASE(shape(mixed));
  CASE(shape<1>(mixed));
  CASE(shape<1, 0>(fixed));
  CASE(shape<1>(make_shape(_4{}, two)));
  CASE(shape(make_shape(_4{}, _2{})));
  CASE(shape(two));
  CASE(stride<1>(mixed));
  CASE(rank(fixed));
  CASE(rank(mixed));
  CASE(rank(two));
  CASE(rank(make_shape(_4{}, two)));
  CASE(rank<1>(mixed));
  CASE(depth(mixed));
  CASE(size(mixed));
  CASE(size<1>(fixed));
  CASE(cosize(mixed));
  CASE(cosize(broadcast));
  CASE(fixed(3));
  CASE(fixed(two, two));
  CASE(mixed(make_coord(_1{}, two)));
  CASE(fixed(make_coord(_1{}, X{})));
  CASE(mixed(X{}, two));
  CASE(slice_and_offset(make_coord(X{}, two), mixed));
  CASE(slice_and_offset(make_coord(_2{}, X{}), fixed));
  CASE(fixed.get_hier_coord(two));
  CASE(fixed.get_flat_coord(two));
  CASE(idx2crd(two, make_shape(_4{}, make_shape(_2{}, _8{}))));
  CASE(crd2idx(make_coord(two, two), make_shape(_4{}, _8{})));
  CASE(fixed == fixed);
  CASE(layout<1>(mixed));
  CASE(select<1, 0>(mixed));
  CASE(take<0, 1>(mixed));
  CASE(group<0, 2>(mixed));
  CASE(flatten(mixed));
  CASE(append(mixed, vector));
  CASE(prepend<3>(fixed));
  CASE(replace<0>(fixed, vector));

  CASE(coalesce(vector));
  CASE(coalesce(matrix));
  CASE(coalesce(fixed));
  CASE(coalesce(mixed));
  CASE(coalesce(broadcast));
  CASE(coalesce(fixed, make_shape(_1{}, _1{})));
  CASE(coalesce(fixed, make_shape(_1{}, make_shape(_1{}, _1{}))));
  CASE(filter(broadcast));
  CASE(filter(fixed));
  CASE(filter_zeros(broadcast));
  CASE(composition(fixed, _8{}));
  CASE(composition(fixed, make_layout(_4{}, _2{})));
  CASE(composition(fixed, make_layout(_4{}, _0{})));
  CASE(composition(fixed, make_layout(make_shape(_4{}, _2{}), make_stride(_4{}, _1{}))));
  CASE(composition(fixed, make_layout(make_shape(_4{}, two), make_stride(_4{}, _1{}))));
  CASE(composition(mixed, make_layout(_4{})));
  CASE(composition(fixed, make_tile(_2{}, make_layout(_4{}, _2{}))));
  CASE(composition(fixed, make_tile(_2{}, X{})));
  CASE(composition(mixed, make_tile(_2{}, X{})));
  CASE(complement(fixed, Int<256>{}));
  CASE(complement(make_layout(_4{}, _2{}), _16{}));
  CASE(complement(make_layout(_4{}, _2{}), 8 * two));
  CASE(right_inverse(fixed));
  CASE(right_inverse(make_layout(make_shape(_4{}, _8{}), make_stride(_8{}, _1{}))));
  CASE(left_inverse(make_layout(make_shape(_4{}, _8{}), make_stride(_8{}, _1{}))));
  CASE(max_common_vector(fixed, make_layout(Int<64>{})));
  CASE(max_common_layout(fixed, make_layout(Int<64>{})));
  CASE(nullspace(broadcast));
  CASE(zip(make_layout(make_layout(_4{}, _1{}), make_layout(_4{}, _8{}))));
  CASE(logical_divide(fixed, make_layout(_8{})));
  CASE(logical_divide(fixed, make_tile(_2{}, _4{})));
  CASE(logical_divide(mixed, make_tile(_2{}, X{})));
  CASE(zipped_divide(fixed, make_tile(_2{}, _4{})));
  CASE(zipped_divide(matrix, make_tile(_1{}, _4{})));
  CASE(tiled_divide(fixed, make_tile(_2{}, _4{})));
  CASE(flat_divide(fixed, make_tile(_2{}, _4{})));
  CASE(tile_unzip(logical_divide(fixed, make_tile(_2{}, _4{})), make_tile(_2{}, _4{})));
  CASE(logical_product(fixed, make_layout(make_shape(_2{}, two))));
  CASE(logical_product(vector, make_layout(_4{})));
  CASE(zipped_product(make_layout(make_shape(_2{}, _4{})), make_tile(_2{}, _4{})));
  CASE(blocked_product(make_layout(make_shape(_2{}, _4{})), make_layout(make_shape(_4{}, _2{}))));
  CASE(raked_product(make_layout(make_shape(_2{}, _4{})), make_layout(make_shape(_4{}, _2{}))));
  CASE(tile_to_shape(make_layout(make_shape(_8{}, _4{})), make_shape(_16{}, _16{}), Step<_2, _1>{}));
  CASE(tile_to_shape(make_layout(make_shape(_2{}, _4{})), make_shape(4 * two, _16{})));
  CASE(upcast<2>(fixed));
  CASE(downcast<2>(fixed));
  CASE(recast_layout<uint16_t, uint32_t>(fixed));
  CASE(recast_layout<uint32_t, uint16_t>(make_layout(make_shape(_8{}, two), make_stride(_1{}, _8{}))));
  CASE(make_ordered_layout(make_shape(_4{}, _8{}, two), Step<_2, _1, _4>{}));
  CASE(make_layout_like(mixed));
  CASE(make_identity_layout(make_shape(_4{}, two)));
  CASE(compact_order(make_shape(_4{}, _8{}, two), Step<_2, _1, _4>{}));
  CASE(compact_row_major(make_shape(_4{}, two)));
  CASE(ceil_div(make_shape(_16{}, 8 * two), make_shape(_8{}, _4{})));
  CASE(inner_product(make_shape(_4{}, two), make_shape(_2{}, _8{})));
  CASE(product_each(make_shape(make_shape(_4{}, two), _2{})));
  CASE(shape_div(make_shape(_4{}, _8{}), _8{}));
  CASE(elem_less(make_shape(_4{}, two), make_shape(_8{}, _4{})));
  CASE(max(make_shape(_4{}, make_shape(two, _8{}))));
  CASE(congruent(fixed, mixed));
#include "shadow_layouts.h"
}

// --- packed strides of convolutions: (n, h, w, c), outermost first ---

template <class Record>
CUTE_HOST_DEVICE void packed_stride_cases(Record& record, int64_t n, int64_t h, int64_t w) {
  using namespace cutlass;
  using namespace cutlass::conv;
  using Pixels = Stride<int64_t, int64_t, int64_t>;
  cute::array<int64_t, 4> strides;
  strides[0] = n;
  strides[1] = h;
  strides[2] = w;
  strides[3] = 1;
  CASE(make_cute_packed_stride(Stride<Pixels, Int<1>>{}, strides, Operator::kFprop));
  CASE(make_cute_packed_stride(Stride<Pixels, Int<1>>{}, strides, Operator::kDgrad));
  CASE(make_cute_packed_stride(Stride<int64_t, Stride<Int<1>, int64_t, int64_t>>{}, strides, Operator::kFprop));
  CASE(make_cute_packed_stride(Stride<Int<1>, Pixels>{}, strides, Operator::kWgrad));
  CASE(make_cute_packed_stride(Stride<Int<1>, Pixels>{}, strides, Operator::kDgrad));
  CASE(make_cute_packed_stride(Stride<Int<1>, int64_t>{}, strides, Operator::kWgrad));
}

#undef CASE

}  // namespace shadow_cases
