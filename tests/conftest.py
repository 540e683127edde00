"""Markers that depend on the machine. Collecting imports no framework and starts no driver unless a test needs one."""

import pytest

SANITIZER = "sanitizer: a small case of each kernel family, for compute-sanitizer; imports no framework"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", SANITIZER)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips the GPU tests, with the reason, where there is no GPU."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu or config.option.collectonly:
        return
    from atomr_cutlass.pipeline import devices

    reason = devices.problem()
    for item in on_gpu:
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
        # What frameworks say about themselves is not this package's failure.
        for category in ("UserWarning", "FutureWarning", "DeprecationWarning"):
            item.add_marker(pytest.mark.filterwarnings(f"default::{category}"))
