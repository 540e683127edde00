"""Numbers that note what is computed of them."""

import math
import operator

import pytest

from atomr_cutlass import _core
from atomr_cutlass.arrays import symbols
from atomr_cutlass.arrays.symbols import Untraceable

VIEW = _core.Operand(256, (6, 4), (4, 1), (2, 32), 2, 0)


def guards(trace: symbols.Trace) -> list[int]:
    """The values that the program is for, in order."""
    return [value for name, *_, value in trace.program if name == "guard"]


def test_what_is_computed_is_noted_once_and_guards_nothing() -> None:
    array = object()
    with symbols.tracing([(array, 0)]) as trace:
        m, n = trace.view(array, VIEW).shape
        for _ in range(2):
            assert symbols.plain(-(-(m * n + 1) // 8) % 3) == 1
            assert symbols.plain(symbols.gcd(m, n, 16)) == 2
            assert symbols.plain(math.prod((m, n))) == 24
        assert isinstance(m, int)
        assert isinstance(m / n, float)
    assert guards(trace) == []
    assert len(trace.program) == len(set(trace.program))


@pytest.mark.parametrize(
    "use", [operator.index, int, float, hash, str, "{:d}".format, range, lambda extent: [0] * extent, round]
)
def test_a_number_that_is_used_as_an_integer_guards_its_value(use: object) -> None:
    array = object()
    with symbols.tracing([(array, 0)]) as trace:
        use(trace.view(array, VIEW).shape[0])  # type: ignore[operator]
    assert guards(trace) == [6]


def test_a_decision_is_guarded_once_and_not_after_the_end() -> None:
    array = object()
    with symbols.tracing([(array, 0)]) as trace:
        m, n = trace.view(array, VIEW).shape
        assert m > n
        assert n < m
        assert m != n
        assert 4 in (m, n)
        assert m
        assert max(m, n) is m
    assert guards(trace) == [1, 0, 0, 1, 0, 0]
    assert m > 5
    assert guards(trace) == [1, 0, 0, 1, 0, 0]


def test_a_view_of_other_extents_keeps_the_numbers() -> None:
    from atomr_cutlass.arrays.layouts import permuted

    array = object()
    with symbols.tracing([(array, 0)]) as trace:
        turned = permuted(trace.view(array, VIEW), (1, 0))
        assert list(map(symbols.plain, turned.shape)) == [4, 6]
        assert symbols.plain_view(turned).strides == (1, 4)
    assert guards(trace) == []


def test_what_the_inputs_do_not_tell_is_refused() -> None:
    array = object()
    with symbols.tracing([(array, 0)]) as trace:
        with pytest.raises(Untraceable):
            trace.view(object(), VIEW)
        with pytest.raises(Untraceable):
            trace.view(array, VIEW).shape[0] * 2**62
        with pytest.raises(Untraceable):
            symbols.refuse()
    symbols.refuse()


def test_an_array_that_is_given_twice_lies_as_one() -> None:
    array = object()
    with symbols.tracing([(array, 0), (array, 4)]) as trace:
        m = trace.view(array, VIEW).shape[0]
        assert trace.view(array, VIEW).shape[0] is not m
    assert [step[0] for step in trace.program if step[0] != "guard"] == ["input"] * 8 + ["=="] * 4
    assert guards(trace) == [1] * 4
