"""The `raysvc` command; one file a subcommand."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand

from raysvc.cli.audit import audit
from raysvc.cli.cache import app as cache
from raysvc.cli.common import before_the_command
from raysvc.cli.demo import demo
from raysvc.cli.doctor import doctor
from raysvc.cli.enrich import enrich
from raysvc.cli.export import export
from raysvc.cli.init import init
from raysvc.cli.plan import plan
from raysvc.cli.ps import ps
from raysvc.cli.replay import replay
from raysvc.cli.report import report
from raysvc.cli.serve import serve
from raysvc.cli.show import show
from raysvc.cli.stop import stop
from raysvc.cli.tokenize import tokenize
from raysvc.cli.top import top
from raysvc.cli.train import train
from raysvc.cli.why import why

ELSEWHERE = ("--html", "--output", "-o")  # names of --out elsewhere


class Command(TyperCommand):
    """A command that tells who writes `--html`, or another tool's name for it, that it is `--out` here."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words of a command.

        Raises:
            UsageError: an option is not known.
        """
        known = {name for one in self.params for name in one.opts}
        for name in (word.partition("=")[0] for word in args):
            if name in ELSEWHERE and name not in known and "--out" in known:
                ctx.fail(f"No such option: {name}; write --out PATH.")
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="raysvc",
    callback=before_the_command,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: rich costs more than all the rest of it
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS = (
    audit,
    demo,
    doctor,
    enrich,
    export,
    init,
    plan,
    ps,
    replay,
    report,
    serve,
    show,
    stop,
    tokenize,
    top,
    train,
    why,
)
for each in COMMANDS:
    app.command(cls=Command)(each)
app.add_typer(cache, name="cache")


def main() -> None:
    """Run the command line of this process."""
    app()
