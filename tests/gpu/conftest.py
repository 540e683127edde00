"""Frameworks, each imported where a test asks for it; a test whose framework is absent skips.

With ATOMR_CUTLASS_TEST_JIT set, every kernel that a plan would take from the table is compiled at run time instead, of
the very same key: the suite is that of the run-time compiler then.
"""

import dataclasses
import importlib
import os
import sys
import warnings
from collections.abc import Generator, Iterator
from types import ModuleType
from typing import Any

import pytest

import atomr_cutlass as ac
from atomr_cutlass.ops.gemm.kernels import GemmCandidate
from atomr_cutlass.ops.gemm.problem import GemmProblem
from atomr_cutlass.pipeline.call import kept_plans

COMPILED = "ATOMR_CUTLASS_TEST_JIT" in os.environ

if COMPILED:
    module: Any = sys.modules["atomr_cutlass.ops.gemm.plans"]
    module.prebuilt_from_candidate = module.from_candidate

    def compiled(problem: GemmProblem, candidate: GemmCandidate, *options: Any, **named: Any) -> ac.Plan:
        """The plan of a candidate, its kernel compiled."""
        candidate = dataclasses.replace(candidate, info=None)
        made: ac.Plan = module.prebuilt_from_candidate(problem, candidate, *options, **named)
        return made

    module.from_candidate = compiled  # before the tests import it

# The errors of CUDA once a kernel has faulted: every later call on the context fails, whatever test makes it.
_FATAL = ("illegal memory access", "misaligned address", "illegal instruction", "unspecified launch failure")
LOST = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """Lets tests of a small table use the kernels that it has: what is said of slow ones has tests of its own."""
    config.addinivalue_line("filterwarnings", "ignore:.* is used, which by the model takes :RuntimeWarning")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Skips a test that needs a cell of the default preset, with the cell, where a smaller preset is installed.

    After a fault nothing more can be learnt in this process: tools/gpu_pass.py runs what is left in another.
    """
    lost = item.session.stash.get(LOST, "")
    if lost:
        pytest.fail(f"not run: the GPU's context was lost in {lost}", pytrace=False)
    try:
        yield
    except ac.KernelNotFoundError as error:
        from gpu_matrices import has_default_preset

        if has_default_preset():
            raise
        pytest.skip(str(error))
    except Exception as error:
        if isinstance(error, ac.ContextPoisonedError) or any(text in str(error) for text in _FATAL):
            item.session.stash[LOST] = item.name
        raise


@pytest.fixture(autouse=True)
def _policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of the table say so where it lacks a kernel; those of the compiler ask for it."""
    monkeypatch.setenv("ATOMR_CUTLASS_JIT", "auto" if COMPILED else "off")


def _framework(name: str) -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except ImportError as error:
            pytest.skip(f"{name} is not installed: {error}")


@pytest.fixture(scope="session")
def torch() -> ModuleType:
    """PyTorch with a GPU."""
    module = _framework("torch")
    if not module.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    return module


@pytest.fixture(scope="session")
def cupy() -> ModuleType:
    """CuPy."""
    return _framework("cupy")


@pytest.fixture(scope="session")
def jax() -> ModuleType:
    """JAX with a GPU; it would take most of the memory for itself if it were not told otherwise."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    module = _framework("jax")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            module.devices("gpu")
        except RuntimeError as error:
            pytest.skip(f"this JAX has no GPU: {error}")
    return module


@pytest.fixture
def without_kept() -> Iterator[None]:
    """Plans that other tests have made are not found, and those of this one are not kept."""
    kept_plans.clear()
    yield
    kept_plans.clear()
