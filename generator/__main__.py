"""`python -m generator`: list the cells of a selection, or write the sources that the build compiles."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from .archs import SmArch
from .costs import costs, shown, total
from .emit import emit
from .headers import HeadersError
from .matrix import OPS, PRESETS
from .selection import Selection
from .tree_table import left_out
from .trees import NAMED


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; 0 on success, 2 when the selection is wrong."""
    parser = argparse.ArgumentParser(prog="python -m generator", description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--list", action="store_true", help="print each cell and what it costs, and the total")
    action.add_argument("--emit", type=Path, metavar="DIR", help="write sources, table and kernels.cmake below DIR")
    parser.add_argument("--json", action="store_true", help="with --list: print JSON with every field of the keys")
    parser.add_argument("--preset", default="default", help=", ".join(PRESETS))
    parser.add_argument(
        "--archs", default="80;90a", help=f"compile targets, ;-separated ({';'.join(a.target for a in SmArch)})"
    )
    parser.add_argument("--ptx", default="", help="targets that carry PTX as well, ;-separated")
    parser.add_argument("--ops", default="", help=f"operations, ;-separated ({', '.join(OPS)}); all when empty")
    parser.add_argument("--dtypes", default="", help="element types of A, ;-separated; all when empty")
    parser.add_argument("--kernels", default="", help="name patterns, comma-separated, * between ordered substrings")
    parser.add_argument("--filter-file", default="", help="file of regular expressions, one a line")
    parser.add_argument("--exclude", default="", help="name patterns to leave out, comma-separated")
    parser.add_argument(
        "--epilogues", default="", help=f"trees to add, ;-separated: {', '.join(NAMED)}, or files of trees"
    )
    parser.add_argument("--keys", default="", help="file of keys, a JSON object a line: exactly those")
    parser.add_argument("--budget-cells", default="", help="with tuned choices as --keys: as many cells at most")
    parser.add_argument("--budget-mb", default="", help="with tuned choices too: so many MB of GPU code at most")
    parser.add_argument("--cutlass", type=Path, help="folder of CUTLASS's headers, where not of the pinned version")
    arguments = parser.parse_args(argv)
    selection = Selection(
        preset=arguments.preset,
        archs=arguments.archs,
        ptx=arguments.ptx,
        ops=arguments.ops,
        dtypes=arguments.dtypes,
        kernels=arguments.kernels,
        filter_file=arguments.filter_file,
        exclude=arguments.exclude,
        keys_file=arguments.keys,
        epilogues=arguments.epilogues,
        budget_cells=arguments.budget_cells,
        budget_mb=arguments.budget_mb,
    )
    try:
        for key in selection.skipped():
            print(f"generator: {key.name} is of {key.arch.target}, and left out", file=sys.stderr)
        if arguments.emit:
            keys = emit(selection, arguments.emit, arguments.cutlass)
        else:
            keys = selection.keys()
            if arguments.json:
                known = {key.name: asdict(costs()[key.name]) for key in keys if key.name in costs()}
                kernels = [{"name": key.name, **key.to_dict()} for key in keys]
                print(json.dumps({"kernels": kernels, "costs": known}, indent=1))
                return 0
            for key in keys:
                print(f"{key.name}  {shown(key)}")
            for line in () if selection.keys_file else left_out(selection.preset, selection.arch_list()):
                print(line)
    except (ValueError, HeadersError) as error:
        print(f"generator: {error}", file=sys.stderr)
        return 2
    chosen = f"keys of {selection.keys_file}" if selection.keys_file else f"preset {selection.preset}"
    print(f"{len(keys)} cells ({chosen}, archs {selection.archs or 'of the keys'}): {total(keys)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
