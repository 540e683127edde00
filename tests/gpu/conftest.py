"""Frameworks, each imported where a test asks for it; a test whose framework is absent skips."""

import importlib
import os
import warnings
from types import ModuleType

import pytest


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
    # References are computed in float64; nothing here may depend on these, but a default must not make them loose.
    module.backends.cuda.matmul.allow_tf32 = False
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
