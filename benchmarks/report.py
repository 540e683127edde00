"""Tables and plots of the results of gemm_random.py: a page and its images. Needs matplotlib, no GPU and no PyTorch.

    python benchmarks/report.py benchmarks/results/2026-11-27-h100-random-*.json --out docs/performance

Rows of several files are put together; of a problem that more than one has, the first file's counts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from recorded import OTHERS, Recorded, Row, read
from shapes import CLASSES

if TYPE_CHECKING:
    from shapes import Shape

PAGE = "random-shapes.md"
RATIOS, ROOFLINE = "ratios.png", "roofline.png"

TENSOR_PEAK = {"NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12}
"""Dense bf16 and f16 operations a second, by the vendor's data sheets."""
MEMORY_PEAK = {"NVIDIA H200": 4.8e12, "NVIDIA H100 80GB HBM3": 3.35e12}
"""Bytes a second, by the same data sheets."""

BOUND_BYTES = 64e6
BOUND_ROWS = 16
BOUND_SECONDS, BOUND_SHARE = 3e-6, 4.0 / 4.8
"""The aim for bound weights of so many bytes and so few rows: a fixed time, and bytes at a share of the memory's peak,
which is 4.0 TB/s of an H200."""

BY_ROWS = ((64, "M to 64"), (511, "65 to 511"), (1 << 60, "512 and more"))
LAYOUTS = ("RCR", "RRR")
PEERS = MappingProxyType({"cuBLAS": "torch", "best of cuBLASLt": "lt"})
WORST = 12
DOTS = 100
"""An inch, of plots: they stay below 150 KB."""
NAME_PREFIX = "cutlass3x_sm90_tensorop_gemm_bf16_bf16_f32_bf16_bf16_"
"""The part of kernels' names that all of a table share."""


def limit_seconds(shape: Shape, gpu: str) -> float | None:
    """The least time of a 16-bit product by the vendor's rates: of the tensor cores, or of moving everything once."""
    if gpu not in TENSOR_PEAK:
        return None
    return max(shape.flops / TENSOR_PEAK[gpu], shape.bytes(2) / MEMORY_PEAK[gpu])


# ----------------------------------------------------------------------------------------------------------------------
# Figures


def percentile(values: Iterable[float], share: float) -> float:
    """The value below which this share of the values is."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def regret(row: Row) -> float:
    """How much longer the choice takes than the fastest eligible kernel; 0 where timings say that it is faster."""
    return max(0.0, row["us"] / row["tuned_us"] - 1)


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """The summary of one group of rows.

    Of each side the geometric mean and the 5th percentile of its time over ours; `tuned_to_lt`, the best of cuBLASLt's
    candidates over our fastest; the choice's regret, mean and 95th percentile; `of_limit`, the geometric mean of the
    vendor's limit over our time; and counts.
    """
    found: dict[str, Any] = {"count": len(rows)}
    for side in OTHERS:
        ratios = [row[f"{side}_ratio"] for row in rows if f"{side}_ratio" in row]
        if ratios:
            found[side] = round(statistics.geometric_mean(ratios), 3)
            found[f"{side}_p5"] = round(percentile(ratios, 0.05), 3)
            found[f"{side}_count"] = len(ratios)
    tuned = [row for row in rows if "tuned_us" in row]
    if tuned:
        regrets = [regret(row) for row in tuned]
        found |= {"regret": round(statistics.mean(regrets), 4), "regret_p95": round(percentile(regrets, 0.95), 4)}
    for name, side in (("tuned_to_lt", "tuned"), ("bound_to_torch", "bound")):
        against = "lt" if side == "tuned" else "torch"
        both = [
            row[f"{against}_us"] / row[f"{side}_us"] for row in rows if f"{side}_us" in row and f"{against}_us" in row
        ]
        if both:
            found[name] = round(statistics.geometric_mean(both), 3)
            found[f"{name}_p5"] = round(percentile(both, 0.05), 3)
            found[f"{name}_count"] = len(both)
    shares = [row["of_limit"] for row in rows if row.get("of_limit")]
    if shares:
        found["of_limit"] = round(statistics.geometric_mean(shares), 3)
    return found


def grouped(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """Rows by a key, in the order in which the keys come."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def summary(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The figures of each group, layout and alignment."""
    of = grouped(rows, lambda row: (row["group"], row["layout"], row["aligned"]))
    return [
        {"group": group, "layout": layout, "aligned": aligned, **figures(found)}
        for (group, layout, aligned), found in of.items()
    ]


def by_rows(row: Row) -> str:
    """The class of a row by M."""
    return next(name for most, name in BY_ROWS if row["shape"][0] <= most)


def aim_seconds(row: Row, gpu: str) -> float:
    """The most seconds that a product with bound weights is to take on a GPU of `MEMORY_PEAK`."""
    _, n, k, _ = row["shape"]
    return BOUND_SECONDS + 2 * n * k / (BOUND_SHARE * MEMORY_PEAK[gpu])


# ----------------------------------------------------------------------------------------------------------------------
# The page


def table(head: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """A table in Markdown; an empty one is no text."""
    body = ["| " + " | ".join(map(str, line)) + " |" for line in lines]
    if not body:
        return ""
    return "\n".join(["| " + " | ".join(head) + " |", "|" + " --- |" * len(head), *body]) + "\n"


def _pair(found: Mapping[str, Any], name: str) -> str:
    """Mean and percentile of a ratio; and of how many shapes, where it is not all."""
    if name not in found:
        return ""
    count = found[f"{name}_count"]
    of = f", {count} shapes" if count < found["count"] else ""
    return f"{found[name]:.2f} ({found[f'{name}_p5']:.2f}{of})"


def _share(found: Mapping[str, Any], name: str) -> str:
    return f"{100 * found[name]:.1f} %" if name in found else ""


def _size(row: Row) -> str:
    m, n, k, batch = row["shape"]
    return f"{batch} of {m}x{n}x{k}" if batch > 1 else f"{m}x{n}x{k}"


def class_table(rows: Sequence[Row]) -> str:
    """Ratios of aligned problems by class and layouts."""
    head = (
        "class", "layouts", "shapes", "cuBLAS", "best of cuBLASLt", "cuBLAS, weights bound",
        "best of cuBLASLt, our fastest", "of the limit",
    )  # fmt: skip
    lines = (
        (
            of["group"], of["layout"], of["count"], _pair(of, "torch"), _pair(of, "lt"), _pair(of, "bound_to_torch"),
            _pair(of, "tuned_to_lt"), f"{of.get('of_limit', 0):.2f}",
        )
        for of in summary(_by_class(row for row in rows if row["aligned"]))
    )  # fmt: skip
    return table(head, lines)


def ragged_table(rows: Sequence[Row]) -> str:
    """Ratios of misaligned problems by class and by what is no multiple of 8."""
    head = ("class", "K a multiple of 8", "shapes", *(f"{layout}: {side}" for layout in LAYOUTS for side in PEERS))
    of_k = grouped(
        _by_class(row for row in rows if not row["aligned"]), lambda row: (row["group"], row["shape"][2] % 8 == 0)
    )
    lines = []
    for (group, multiple), of in of_k.items():
        found = {layout: figures(some) for layout, some in grouped(of, lambda row: row["layout"]).items()}
        cells = (_pair(found.get(layout, {}), side) for layout in LAYOUTS for side in PEERS.values())
        lines.append((group, "yes" if multiple else "no", max(each["count"] for each in found.values()), *cells))
    return table(head, sorted(lines, key=lambda line: line[1]))


def _by_class(rows: Iterable[Row]) -> list[Row]:
    """Rows in the order of the classes."""
    order = list(CLASSES)
    return sorted(rows, key=lambda row: (order.index(row["group"]), row["layout"]))


def regret_table(rows: Sequence[Row]) -> str:
    """The choice against our fastest kernel."""
    tuned = [row for row in rows if "tuned_us" in row]
    groups = [*grouped(tuned, lambda row: (row["group"], row["layout"])).items(), (("all", ""), tuned)]
    figured = [(key, figures(of)) for key, of in groups if of]
    lines = ((*key, of["count"], _share(of, "regret"), _share(of, "regret_p95")) for key, of in figured)
    return table(("class", "layouts", "shapes", "mean", "95th percentile"), lines)


def triton_table(rows: Sequence[Row]) -> str:
    """Problems that Triton compiled."""
    found = [row for row in rows if "triton_us" in row]
    head = ("class", "layouts", "M x N x K", "ours, us", "cuBLAS", "Triton")
    return table(
        head, ((row["group"], row["layout"], _size(row), row["us"], row["torch_us"], row["triton_us"]) for row in found)
    )


def bound_table(rows: Sequence[Row], gpu: str) -> str:
    """Bound weights that are large, with few rows, beside what they are to take at most; nothing of unknown GPUs."""
    found = [
        row for row in (rows if gpu in MEMORY_PEAK else ())
        if "bound_us" in row and row["shape"][0] <= BOUND_ROWS and 2 * row["shape"][1] * row["shape"][2] >= BOUND_BYTES
    ]  # fmt: skip
    lines = []
    for layout, of in grouped(found, lambda row: row["layout"]).items():
        excess = sorted(row["bound_us"] * 1e-6 / aim_seconds(row, gpu) for row in of)
        within = sum(ratio <= 1 for ratio in excess)
        lines.append((layout, len(of), within, *(f"{ratio:.2f}" for ratio in (
            excess[0], statistics.median(excess), excess[-1]))))  # fmt: skip
    return table(("layouts", "shapes", "within", "least", "median", "most"), lines)


def suite_table(rows: Sequence[Row]) -> str:
    """Layers of models, by rows; of few rows with bound weights too."""
    found = grouped(rows, lambda row: (row["group"].split()[0], row["layout"]))
    columns = [(name, title, side) for _, name in BY_ROWS for title, side in PEERS.items()]
    columns.insert(len(PEERS), (BY_ROWS[0][1], "cuBLAS, weights bound", "bound_to_torch"))
    lines = []
    for (model, layout), of in found.items():
        by = {name: figures(some) for name, some in grouped(of, by_rows).items()}
        lines.append((model, layout, len(of), *(_pair(by.get(name, {}), side) for name, _, side in columns)))
    return table(("model", "layouts", "shapes", *(f"{name}: {title}" for name, title, _ in columns)), lines)


def worst_table(rows: Sequence[Row]) -> str:
    """The aligned problems where cuBLAS is furthest ahead."""
    order = sorted((row for row in rows if row["aligned"]), key=lambda row: row["torch_ratio"])[:WORST]
    head = ("class", "layouts", "M x N x K", "ours, us", "cuBLAS", "ratio", "our fastest", "kernel")
    return table(
        head,
        (
            (row["group"], row["layout"], _size(row), row["us"], row["torch_us"], f"{row['torch_ratio']:.2f}",
             row.get("tuned_us", ""), f"`{row['kernel'][0].removeprefix(NAME_PREFIX)}`")
            for row in order
        ),
    )  # fmt: skip


def facts(recorded: Recorded) -> str:
    """Lines that name the machine, the software and the date of the figures."""
    machine = recorded.files[0]["machine"]
    rates = [rate / 1e12 for rate in recorded.read_rates]
    clocks = [row["clock_mhz"] for row in recorded.rows if "clock_mhz" in row]
    watts = [row["watts"] for row in recorded.rows if "watts" in row]
    seeds = sorted({(int(seed), use) for of in recorded.files for seed, use in of.get("seeds", {}).items()})
    days = sorted({of["date"][:10] for of in recorded.files})
    commits = sorted({of["machine"]["commit"][:7] for of in recorded.files if of["machine"]["commit"]})
    problems = f"{len(recorded.rows)} problems"
    if seeds:
        problems += f", those drawn of the seeds {', '.join(f'{seed} ({use})' for seed, use in seeds)}"
    words = [
        f"{recorded.gpu}, driver {machine['driver']}, PyTorch {machine.get('torch', 'unknown')},",
        f"{' and '.join(days)}, commit {', '.join(commits)}, {machine['table']} kernels.",
        f"{problems}.",
        f"Reading alone reached {min(rates):.2f} to {max(rates):.2f} TB/s in these runs.",
    ]
    if clocks:
        words.append(f"While it computed ours, the GPU's clock was {min(clocks)} to {max(clocks)} MHz (median")
        words.append(f"{statistics.median(clocks):.0f}), its power {min(watts):.0f} to {max(watts):.0f} W.")
    return textwrap.fill(" ".join(words), 120)


def page(recorded: Recorded, names: Sequence[str]) -> str:
    """The page, of files by these names."""
    drawn = [row for row in recorded.rows if row["seed"]]
    layers = [row for row in recorded.rows if not row["seed"]]
    sections: list[tuple[str, str, str]] = [
        ("By class", CLASS_TEXT, class_table(drawn)),
        ("Ragged problems", RAGGED_TEXT, ragged_table(drawn)),
        ("Bound weights", bound_text(recorded.gpu), bound_table(recorded.rows, recorded.gpu)),
        ("Regret of the choice", REGRET_TEXT, regret_table(recorded.rows)),
        ("Triton", TRITON_TEXT, triton_table(recorded.rows)),
        ("Layers of models", SUITE_TEXT, suite_table(layers)),
        ("Furthest behind", WORST_TEXT, worst_table(recorded.rows)),
    ]
    parts = [f"# GEMM on shapes drawn at random\n\n{INTRODUCTION}\n\n{facts(recorded)}\n"]
    parts.append(f"![Time of cuBLAS over ours, by operations]({RATIOS})\n\n![Rates beside the roofs]({ROOFLINE})\n")
    parts += [f"## {title}\n\n{text}\n\n{shown}" for title, text, shown in sections if shown]
    parts.append("## Results\n\n" + "\n".join(f"- `benchmarks/results/{name}`" for name in names) + "\n")
    return "\n".join(parts)


INTRODUCTION = """\
<!-- Written by benchmarks/report.py: change that, or the results, and run it again. -->

bf16, D row-major; ratios are times of others over ours, so that above 1 we are faster: the geometric mean, and in
parentheses the 5th percentile. How it is measured, and how shapes are drawn, is in
[Performance](../performance.md#how-it-is-measured) and `benchmarks/shapes.py`."""
CLASS_TEXT = """\
Problems whose N and K are multiples of 8, so that rows begin at multiples of 16 bytes. Times of cuBLAS, as
`torch.matmul` calls it, and of the fastest of all candidates that cuBLASLt's heuristic names, over those of the kernel
that the selection takes; of cuBLAS over ours with the weights bound to the plan (up to 128 rows); of the best of
cuBLASLt over the fastest of all our eligible kernels with their launch options. The fastest was found by other timings
than those shown. `of the limit` is the time that the vendor's rates of arithmetic and memory allow, over ours."""
RAGGED_TEXT = """\
Problems whose N or K is no multiple of 8. Where that is N alone, only the rows of D (and of a row-major B) begin
elsewhere; otherwise those of A do, which TMA cannot read."""
REGRET_TEXT = """\
How much longer the kernel that the selection takes, as it launches it, takes than the fastest of all eligible ones
with every swizzle, raster order and number of slices."""
TRITON_TEXT = "`torch.compile` with max-autotune, of Triton's products alone; microseconds."
SUITE_TEXT = (
    "The projections of `MODELS` in `benchmarks/shapes.py`, with numbers of rows that are powers of two and others."
)
WORST_TEXT = "Aligned problems with the least ratios."


def bound_text(gpu: str) -> str:
    """What the table of bound weights shows, with the aim's rate on a GPU."""
    rate = BOUND_SHARE * MEMORY_PEAK.get(gpu, 0) / 1e12
    return textwrap.fill(
        "Weights of 64 MB and more with at most 16 rows, bound, in a chain of launches: how many take at most 3 us and "
        f"bytes over {rate:.2f} TB/s ({100 * BOUND_SHARE:.0f}% of the memory's peak, as 4.0 TB/s are of an H200's), "
        "and multiples of that time.",
        120,
    )


# ----------------------------------------------------------------------------------------------------------------------
# Plots


def intensity(row: Row) -> float:
    """Operations for each byte of A, B and D in 16 bits."""
    m, n, k, _ = row["shape"]
    return m * n * k / (m * k + k * n + m * n)


def operations(row: Row) -> float:
    """Multiplications and additions."""
    m, n, k, batch = row["shape"]
    return 2.0 * m * n * k * batch


def _family(row: Row) -> str:
    return str(row["group"]) if row["seed"] else "layers of models"


def plots(recorded: Recorded, folder: Path) -> Iterator[Path]:
    """Draws both plots; their paths."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    def axes_of() -> tuple[Any, Any]:
        figure = Figure(figsize=(8, 4.2), layout="constrained")
        return figure, figure.subplots()

    families = grouped(recorded.rows, _family)
    colours = dict(zip(families, colormaps["tab20"].colors, strict=False))

    figure, axes = axes_of()
    for name, of in families.items():
        for aligned, marker in ((True, "o"), (False, "x")):
            some = [row for row in of if row["aligned"] is aligned]
            label = name if aligned else None
            axes.scatter(
                [operations(row) for row in some], [row["torch_ratio"] for row in some],
                s=7, marker=marker, color=colours[name], label=label, linewidths=0.8, alpha=0.8,
            )  # fmt: skip
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="operations", ylabel="time of cuBLAS / ours (crosses: misaligned)")
    ticks = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5)
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    ratios = [row["torch_ratio"] for row in recorded.rows]
    axes.set_ylim(min(ratios) / 1.05, max(ratios) * 1.05)
    axes.legend(fontsize=7, ncols=2)
    yield _saved(figure, folder / RATIOS)

    figure, axes = axes_of()
    for name, of in families.items():
        axes.scatter(
            [intensity(row) for row in of], [operations(row) / row["us"] / 1e6 for row in of],
            s=9, color=colours[name], label=name, alpha=0.8, linewidths=0,
        )  # fmt: skip
    axes.scatter(
        [intensity(row) for row in recorded.rows], [operations(row) / row["torch_us"] / 1e6 for row in recorded.rows],
        s=4, marker="_", color="black", label="cuBLAS", alpha=0.5, linewidths=0.6,
    )  # fmt: skip
    reach = sorted(intensity(row) for row in recorded.rows)
    roofs = (
        ("limit", MEMORY_PEAK.get(recorded.gpu), "-"),
        ("reading as measured", statistics.median(recorded.read_rates), "--"),
    )
    tensor = TENSOR_PEAK.get(recorded.gpu)
    for name, memory, line in roofs:
        if memory is None or tensor is None:
            continue
        corners = [reach[0], tensor / memory, max(reach[-1], tensor / memory)]
        axes.plot(
            corners,
            [min(memory * intensity, tensor) / 1e12 for intensity in corners],
            line,
            color="black",
            label=name,
            linewidth=0.9,
        )
    axes.set(xscale="log", yscale="log", xlabel="operations for each byte", ylabel="TFLOP/s")
    axes.legend(fontsize=7, ncols=2)
    yield _saved(figure, folder / ROOFLINE)


def _saved(figure: Any, path: Path) -> Path:
    """Writes a plot, the same bytes for the same rows."""
    figure.savefig(path, dpi=DOTS, metadata={"Software": None}, pil_kwargs={"optimize": True})
    return path


def main() -> int:
    """Writes the page and its images; 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=Path, nargs="+", help="JSON files of gemm_random.py")
    parser.add_argument("--out", type=Path, required=True, help="folder of the page and its images")
    parser.add_argument("--no-plots", action="store_true", help="the page alone")
    arguments = parser.parse_args()
    recorded = read(arguments.results)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / PAGE).write_text(page(recorded, [path.name for path in arguments.results]), encoding="utf-8")
    for path in () if arguments.no_plots else plots(recorded, arguments.out):
        print(f"{path}: {path.stat().st_size >> 10} KB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
