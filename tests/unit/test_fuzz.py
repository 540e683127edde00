"""Whatever the arguments of a public name are, nothing but a CutlassError comes out.

The calls and the values that spoil them are in `tests/helpers/fuzz_calls.py`. ATOMR_CUTLASS_TEST_FUZZ=N makes N times
as many calls, others at each run, and tries every value in the place of every argument.
"""

from __future__ import annotations

import inspect
import os
import types
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import atomr_cutlass as ac
import fake_cases
import fake_kernels
import fake_pack
import fuzz_calls
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import _core
from atomr_cutlass.arrays import operands
from atomr_cutlass.errors import CutlassError, DeviceUnavailableError, InvalidOperandError
from atomr_cutlass.generator.matrix import expand
from fuzz_calls import SPOILS, Call

MORE = int(os.environ.get("ATOMR_CUTLASS_TEST_FUZZ", "0"))

CALLS = fuzz_calls.calls()
NAMES = sorted({call.name for call in CALLS})
SPOILED = sorted({call.name for call in CALLS if call.parameters})
PLACES = [(call, name) for call in CALLS for name in call.parameters]

MADE = {"Explanation", "KernelInfo", "OpPlan", "Plan", "TuneRecord", "heuristics"}
"""What functions return, and nobody makes."""
ELSEWHERE = {"exit_for_restart", "quantization", "record", "tune"}
"""What ends the process or writes files, and a module: test_frozen.py and test_tune.py have what `record` and `tune`
refuse, test_quantization.py what functions of `quantization` do."""
REFUSED = {"BoundPlan", "CutlassMsg.Refit", "RefitMsg", "load_pack", "load_tuning", "recorded_requests", "supervise"}
"""What takes a GPU, a file or another process to be valid; so do messages with operands."""

budget = settings(
    max_examples=max(1, MORE) * 3000,
    derandomize=not MORE,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


_CALLS_OF = {name: st.sampled_from([call for call in CALLS if call.name == name]) for name in SPOILED}
_SPOILS = st.sampled_from(list(SPOILS))


@st.composite
def spoiled_calls(draw: st.DrawFn) -> tuple[Call, dict[str, str]]:
    """A call, and what one or two of its arguments are spoiled with; every name is drawn as often as any other."""
    call = draw(_CALLS_OF[draw(st.sampled_from(SPOILED))])
    return call, draw(st.dictionaries(st.sampled_from(call.parameters), _SPOILS, min_size=1, max_size=2))


@budget
@given(spoiled_calls())
def test_nothing_but_a_cutlass_error_comes_out(drawn: tuple[Call, dict[str, str]]) -> None:
    call, spoils = drawn
    assert fuzz_calls.outcome(call, spoils) == "", call.name


@pytest.mark.slow
@pytest.mark.skipif(not MORE, reason="a quarter of a million calls: ATOMR_CUTLASS_TEST_FUZZ=1 has them made")
@pytest.mark.parametrize("name", NAMES)
def test_every_value_in_the_place_of_every_argument(name: str) -> None:
    raised = {
        outcome
        for call, place in PLACES
        if call.name == name
        for spoil in SPOILS
        if (outcome := fuzz_calls.outcome(call, {place: spoil}))
    }
    assert raised == set()


@pytest.mark.parametrize("call", CALLS, ids=[f"{call.name} {number}" for number, call in enumerate(CALLS)])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_calls_are_valid_until_they_are_spoiled(call: Call) -> None:
    """Or they would be refused before they came to the argument that is spoiled."""
    try:
        call.run({})
    except DeviceUnavailableError:
        pass  # as valid as can be without a GPU
    except CutlassError:
        assert call.name in REFUSED or "operands" in call.parameters


def test_every_public_name_is_called() -> None:
    called = {name.partition(".")[0] for name in NAMES}
    assert set(ac.__all__) - called == MADE | ELSEWHERE
    functions = {name for name in ac.epilogue.__all__ if isinstance(getattr(ac.epilogue, name), types.FunctionType)}
    assert functions <= {name.partition(".")[2] for name in NAMES if name.startswith("epilogue.")}
    for kind in (ac.EvtBuilder, ac.PlanCache, ac.HeuristicCache, ac.CutlassActor):
        methods = {
            name
            for name, method in vars(kind).items()
            if inspect.isfunction(method) and not name.startswith("_") and len(inspect.signature(method).parameters) > 1
        }
        assert methods <= {name.partition(".")[2] for name in NAMES if name.startswith(f"{kind.__name__}.")}


# ----------------------------------------------------------------------------------------------------------------------
# What wrong arguments are told
# ----------------------------------------------------------------------------------------------------------------------

X = np.ones((4, 4), np.float32)
C = np.ones((4, 4), np.float32)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: ac.gemm(None, X), "a is None; expected an array"),
        (lambda: ac.gemm(X, None), "b is None; expected an array"),
        (lambda: ac.gated_gemm(None, X), "a is None; expected an array"),
        (lambda: ac.grouped_gemm(X, None), "b is None; expected an array, or a list of them"),
        (lambda: ac.conv2d(None, X), "x is None; expected an array"),
        (lambda: ac.conv2d_wgrad(X, None, (4, 1, 1, 4)), "x is None; expected an array"),
        (lambda: ac.MatmulRequest(X, None, m=4, n=4, k=4), "b is None; expected an array"),
        (lambda: ac.gemm(X, X, backend=X), "backend is a ndarray; expected a name"),
        (lambda: ac.gemm(X, X, precision=["tf32"]), r"precision is \['tf32'\]; expected a name"),
        (lambda: ac.gemm(X, X, fast_accum=1), "fast_accum is 1; expected True or False"),
        (lambda: ac.gemm(X, X, out_dtype="f32"), "out_dtype is 'f32'; expected a CutlassDtype"),
        (lambda: ac.gemm(X, X, alpha=10**400), "alpha is an integer of 1329 bits; expected a number of a double"),
        (lambda: ac.gemm(X, X, alpha=X), "alpha is a ndarray; expected a number"),
        (lambda: ac.quantize(X, scaling=X), "scaling is a ndarray; expected a name"),
        (lambda: ac.plan(fuzz_calls.gemm_request(), X), "device is a ndarray; expected the index of a GPU"),
        (lambda: ac.is_supported_for("f32", ac.SmArch.SM80), "dtype is 'f32'; expected a CutlassDtype"),
        (lambda: ac.SmArch("sm_90"), "SmArch has no 'sm_90'; valid: 'sm_80', "),
        (lambda: ac.CutlassDtype(X), "CutlassDtype is given a ndarray; valid: 'f64', "),
        (lambda: ac.SmArch.parse(90), "arch is 90; expected a name such as '90a'"),
        (lambda: ac.PlanCache(4).get([1]), r"key is \[1\]; expected a PlanKey"),
        (lambda: ac.GemmEpilogue(alpha="2"), "alpha is a str; expected a number"),
        (lambda: ac.load_pack(5), "path is 5; expected the path of a pack"),
        (lambda: ac.kernels(filter=5), "filter is 5; expected a name"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(call: Any, says: str) -> None:
    with pytest.raises(InvalidOperandError, match=says):
        call()


@pytest.mark.parametrize("stream", [-1, 2**64, True, "0", object()])
def test_streams_are_handles(stream: Any) -> None:
    with pytest.raises(InvalidOperandError, match="stream is "):
        operands.stream_handle(stream)


@pytest.mark.parametrize("backend", ["auto", "reference", "prebuilt"])
def test_extents_are_those_that_kernels_count(backend: str) -> None:
    long = _core.Operand(4096, (2**31, 4), None, (2, 32), operands.CUDA, 0)
    flat = _core.Operand(4096, (4, 4), None, (2, 32), operands.CUDA, 0)
    with pytest.raises(InvalidOperandError, match=r"a has shape \(2147483648, 4\); kernels count to 2\^31 - 1"):
        ac.gemm(long, flat, backend=backend)
    with pytest.raises(InvalidOperandError, match=r"m is 2147483648; expected an integer from 0 to 2\^31 - 1"):
        ac.GemmShape(2**31, 4, 4)


def test_a_scale_that_leaves_nothing_of_c_is_refused() -> None:
    with pytest.raises(InvalidOperandError, match=r"scale_d is 0\.0 and beta 1\.0: .* leave c and beta out"):
        ac.gemm(X, X, C, beta=1.0, scale_d=0.0)
    image, filters = X.reshape(1, 4, 1, 4), X.reshape(4, 1, 1, 4)
    with pytest.raises(InvalidOperandError, match="their product is 0, with which c would not be read"):
        ac.conv2d(image, filters, image, beta=1.0, scale_d=0.0)


# ----------------------------------------------------------------------------------------------------------------------
# On a fake GPU
# ----------------------------------------------------------------------------------------------------------------------

CASES_FILE = "fuzz_cases.py"


@pytest.fixture(scope="module")
def on_a_fake_gpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The error that each case raised, as text; empty where it passed."""
    folder = tmp_path_factory.mktemp("fake")
    cells = [k for k in expand("full", [ac.SmArch.SM80]) if k.op == "gemm" and k.math == "ieee" and k.d is D.F32]
    pack = fake_kernels.make_pack(folder / "pack.so", cells, error=700)
    return fake_cases.outcome(CASES_FILE, fake_pack.make_driver(folder / "driver"), [pack])


@pytest.mark.parametrize("case", fake_cases.names(CASES_FILE))
def test_nothing_else_comes_out_with_a_gpu(case: str, on_a_fake_gpu: dict[str, str]) -> None:
    assert on_a_fake_gpu[case] == ""
