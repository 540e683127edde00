"""Frameworks, each imported where a test asks for it; a test whose framework is absent skips."""

import importlib
import os
import warnings
from collections.abc import Generator
from types import ModuleType

import pytest

import atomr_cutlass as ac

# What CUDA says once a kernel has faulted: every later call on the context fails, whatever test makes it.
_FATAL = ("illegal memory access", "misaligned address", "illegal instruction", "unspecified launch failure")
LOST = pytest.StashKey[str]()


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
