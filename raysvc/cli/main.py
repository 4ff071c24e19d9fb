"""The `raysvc` command; one file a subcommand."""

from __future__ import annotations

import typer

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

app = typer.Typer(
    name="raysvc",
    callback=before_the_command,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: rich costs more than all the rest of it
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(audit)
app.command()(demo)
app.command()(doctor)
app.command()(enrich)
app.command()(export)
app.command()(init)
app.command()(plan)
app.command()(ps)
app.command()(replay)
app.command()(report)
app.command()(serve)
app.command()(show)
app.command()(stop)
app.add_typer(cache, name="cache")
app.command()(tokenize)
app.command()(top)
app.command()(train)
app.command()(why)


def main() -> None:
    """Run the command line of this process."""
    app()
