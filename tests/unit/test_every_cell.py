"""The walks of the GPU tests over every cell: each has something to compute, and leaves a record."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import every_cell
import fake_table
from atomr_cutlass import SmArch
from atomr_cutlass.arrays.layouts import MatrixSpec
from atomr_cutlass.generator import records
from atomr_cutlass.generator.dtypes import CutlassDtype
from atomr_cutlass.generator.epilogue.common import COMMON_ACTIVATIONS, COMMON_ROWS, form_of
from atomr_cutlass.generator.epilogue.lower import has_tree, is_common, is_gated
from atomr_cutlass.generator.key import KernelKey
from atomr_cutlass.generator.matrix import expand
from atomr_cutlass.ops.conv2d.problem import DGRAD, FPROP, WGRAD
from atomr_cutlass.ops.gemm.problem import GemmProblem
from atomr_cutlass.pipeline import devices, select, verification
from atomr_cutlass.pipeline.operation import planned_operations

H200 = fake_table.H200


def test_they_go_over_every_cell_that_a_hopper_gpu_runs() -> None:
    ops = {key.op for key in expand("full", every_cell.ARCHS)}
    assert {*every_cell.keys(*ops)} >= {*expand("full", every_cell.ARCHS)}
    assert ops == {"gemm", "gemv", "grouped_gemm", FPROP, DGRAD, WGRAD, "cast", "quantize", "dequantize", "transpose"}


def test_every_convolution_has_problems() -> None:
    for key in every_cell.keys(FPROP, DGRAD, WGRAD, want=every_cell.is_plain):
        assert len(every_cell.conv_problems(key, H200)) == 3, key.name


@pytest.mark.parametrize("arch", SmArch)
def test_every_tree_has_a_request_that_validates_it(arch: SmArch) -> None:
    """The candidate that is launched for it has the kernel, and the tree as the kernel is asked for it."""
    device = devices.imagined(arch)
    for key in expand("full", [arch]):
        if has_tree(key.epilogue) and not is_gated(key.epilogue) and not key.scale_type:
            operation = planned_operations()[key.op]
            for epilogue in every_cell.epilogues(key):
                request, candidate = operation.sample(key, epilogue, device)
                assert (candidate.key, request.tree is None) == (key, False)
                problem = getattr(candidate.formulation, "problem", candidate.formulation)
                assert getattr(problem, "epilogue", epilogue) == epilogue


def test_every_tree_is_launched() -> None:
    """Each of a common kernel's activations, and what else it may be told."""
    found = [key for key in every_cell.keys("gemm", "grouped_gemm", FPROP, DGRAD) if not every_cell.is_plain(key)]
    for key in found:
        told = every_cell.epilogues(key)
        assert told, key.name
        if is_common(key.epilogue):
            forms = [form_of(epilogue) for epilogue in told]
            assert {form.told // 4 for form in forms if form} == set(range(len(COMMON_ACTIVATIONS)))
            assert {form.told % 4 for form in forms if form} == set(COMMON_ROWS.values())
            assert any(form.source is not None for form in forms if form) == (key.op != "grouped_gemm")


def _matrix(rows: int, columns: int, dtype: CutlassDtype, layout: str) -> MatrixSpec:
    return MatrixSpec((rows, columns), (columns, 1) if layout == "r" else (1, rows), dtype, 256)


def test_every_gemm_cell_serves_the_shapes_it_is_launched_on() -> None:
    for key in every_cell.keys("gemm", want=every_cell.is_plain):
        shapes = every_cell.gemm_shapes(key)
        assert len({*shapes}) == 3, key.name
        for m, n, k in shapes:
            a, b = _matrix(m, k, key.a, key.layout_a), _matrix(k, n, key.b, key.layout_b)
            problem = GemmProblem(
                a, b, None, _matrix(m, n, key.d, key.layout_d), key.math, 0, epilogue=key.epilogue,
                scale_granularity=key.scale_granularity, scale_type=key.scale_type,
            )  # fmt: skip
            assert select.candidate_of(every_cell.search(key, problem, H200), key).key is key


def _key(arch: SmArch) -> KernelKey:
    return next(key for key in every_cell.keys("gemm") if key.arch is arch)


@pytest.mark.parametrize(("arch", "how"), [(SmArch.SM90A, verification.RUNS), (SmArch.SM80, verification.RUNS_AS_PTX)])
def test_what_was_right_leaves_a_record(
    arch: SmArch, how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(devices, "get", lambda _index=0: H200)
    monkeypatch.setattr(devices, "driver", lambda: "580.1")
    key = _key(arch)
    source, cutlass = verification.identity(key)
    row = replace(fake_table.row(key, ptx=True), content=f"{source} {cutlass} nvcc 13.0.88")
    path = tmp_path / "records.jsonl"
    every_cell.right(key, row, "numbers")
    assert not path.exists()
    monkeypatch.setenv(every_cell.RECORDS, str(path))
    every_cell.right(key, row, "numbers")
    every_cell.right(key, row, "numbers")
    first, second = (records.of_raw(json.loads(line)) for line in path.read_text().splitlines())
    assert first == second
    assert (first.kernel, first.how, first.compiler, first.on) == (key.name, how, "nvcc 13.0.88", H200.name)
    told = verification.verification(key, known=verification.by_kernel(records.merged([first, second])))
    assert [record.how for record in told.records] == [how]
    assert told.changed == ()


def test_cells_that_have_not_been_compiled_can_be_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "get", lambda _index=0: H200)
    monkeypatch.setattr(every_cell, "COMPILED", True)
    monkeypatch.setattr(every_cell.kernels, "ready", lambda key, _device: key.arch is SmArch.SM80)
    monkeypatch.setenv("ATOMR_CUTLASS_TEST_JIT", "ready")
    assert every_cell.row_of(_key(SmArch.SM80)) is None
    with pytest.raises(pytest.skip.Exception, match="has not been compiled yet"):
        every_cell.row_of(_key(SmArch.SM90A))
    monkeypatch.setenv("ATOMR_CUTLASS_TEST_JIT", "1")
    assert every_cell.row_of(_key(SmArch.SM90A)) is None
