"""The check of an epilogue at its first use: a kernel that computes something else is refused, and stays refused."""

import pytest

import atomr_cutlass as ac
from atomr_cutlass.epilogue import absolute, relu, validate
from atomr_cutlass.errors import UnsupportedError
from atomr_cutlass.generator.epilogue import lower
from atomr_cutlass.generator.families import base

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("torch")]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("ATOMR_CUTLASS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(validate, "_known", {})
    monkeypatch.delenv(validate.VARIABLE, raising=False)
    monkeypatch.setenv("ATOMR_CUTLASS_JIT", "auto")


def _miscompile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels have another operation than their tree."""
    right = lower.lower
    monkeypatch.setattr(
        base, "lower", lambda *given, **more: right(*given, **more).replace("ops::relu(", "ops::absolute(")
    )


def _operands(torch):
    return (torch.randn(64, 64, device="cuda", dtype=torch.float16) for _ in range(2))


def test_a_wrong_kernel_is_refused_and_remembered(monkeypatch: pytest.MonkeyPatch, torch) -> None:
    a, b = _operands(torch)

    def call():
        # No other test has this constant: the kernel in this process stays wrong.
        return ac.gemm(a, b, epilogue=lambda acc: relu(acc) + 0.015625)

    _miscompile(monkeypatch)
    with (
        pytest.warns(RuntimeWarning, match="first use of an epilogue gave wrong results"),
        pytest.raises(UnsupportedError, match=r"computes its epilogue wrongly on .*: out"),
    ):
        call()
    with pytest.raises(UnsupportedError, match="computes its epilogue wrongly"):
        call()
    # Another process: what is known comes from the disk.
    monkeypatch.setattr(validate, "_known", {})
    monkeypatch.setattr(validate, "_differences", lambda *_: pytest.fail("looked again"))
    with pytest.raises(UnsupportedError, match="computes its epilogue wrongly"):
        call()
    monkeypatch.setenv(validate.VARIABLE, "off")
    torch.testing.assert_close(call(), (a.float() @ b.float()).abs().half() + 0.015625, rtol=1e-2, atol=1e-2)


def test_a_right_kernel_is_looked_at_once(monkeypatch: pytest.MonkeyPatch, torch) -> None:
    a, b = _operands(torch)
    looked = []
    right = validate._differences
    monkeypatch.setattr(validate, "_differences", lambda *given: looked.append(1) or right(*given))
    for factor in (1.0, 2.0):
        got = ac.gemm(a * factor, b, epilogue=lambda acc: absolute(acc) - 0.03125)
        torch.testing.assert_close(got, (a * factor @ b).abs() - 0.03125, rtol=1e-2, atol=1e-2)
    monkeypatch.setattr(validate, "_known", {})
    ac.gemm(a[:32], b, epilogue=lambda acc: absolute(acc) - 0.03125)
    assert looked == [1]


def test_a_capture_is_not_disturbed(torch) -> None:
    """A plan that was made before a capture began is launched in it, check or no check."""
    a, b = _operands(torch)
    tree = ac.EvtBuilder().activation("relu").scale(0.5).build()
    out = torch.empty(64, 64, device="cuda", dtype=torch.float16)
    ac.gemm(a, b, epilogue=tree, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ac.gemm(a, b, epilogue=tree, out=out)
    a.normal_()
    graph.replay()
    torch.testing.assert_close(out, torch.relu(a @ b) * 0.5, rtol=1e-2, atol=1e-2)
