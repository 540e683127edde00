// CuTe lets structured bindings take a tuple apart under NVRTC, but not a constant one, as the epilogues' broadcasts
// do.
#pragma once

#include "cute/container/tuple.hpp"

namespace std {
template <class... T>
struct tuple_size<cute::tuple<T...> const> : tuple_size<cute::tuple<T...>> {};
template <size_t I, class... T>
struct tuple_element<I, cute::tuple<T...> const> {
  using type = typename tuple_element<I, cute::tuple<T...>>::type const;
};
}  // namespace std
