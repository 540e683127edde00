"""The command line `atomr-cutlass`: what is installed, which kernel a request gets, and one request to see it work.

Exit status: 0, 1 when something failed, 2 when the usage or an input is wrong.
"""

from __future__ import annotations

from typing import Any

import typer
import typer.core

from ..errors import CutlassError, InvalidOperandError
from ..generator.variables import ENVIRONMENT, plain
from .cache import cache_app
from .installed import info_command, list_command
from .output import complain
from .packs import build_command, epilogue_command, pack_app
from .requests import demo_command, explain_command, run_command
from .tune import tune_command


class _Commands(typer.core.TyperGroup):
    """Turns the package's errors into one line and an exit status."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except CutlassError as error:
            complain(str(error))
            raise typer.Exit(2 if isinstance(error, InvalidOperandError) else 1) from error
        except MemoryError as error:
            complain("the operands do not fit into memory")
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=_Commands,
    help="CUTLASS kernels as a Python package.",
    # \b: typer does not rewrap the lines.
    epilog="\b\nVariables of the environment:\n"
    + "\n".join(f"  {variable.name}: {plain(variable.meaning)}" for variable in ENVIRONMENT),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.command("info")(info_command)
app.command("list")(list_command)
app.command("explain")(explain_command)
app.command("run")(run_command)
app.command("demo")(demo_command)
app.command("tune")(tune_command)
app.command("build")(build_command)
app.command("epilogue")(epilogue_command)
app.add_typer(pack_app, name="pack", help="Packs of either form: list, verify, diff, and merge those of cubins.")
app.add_typer(cache_app, name="cache", help="The kernels that were compiled at run time and are kept on disk.")
