"""The `mooncake` command: finds and runs the subcommands that packages register.

A subcommand is an entry point of the group `mooncake.commands` (pyproject.toml). The entry point
names a function or a typer app. So any package can add subcommands.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points, version
from typing import Annotated

import typer
from typer.core import TyperCommand, TyperGroup

from backends.extras import explained

GROUP = "mooncake.commands"
# Subcommand -> examples at the end of its --help.
EXAMPLES = {
    "init": (
        "mooncake init my-models",
        "mooncake init my-models --from-llmapi model.yaml --checkpoint /path/to/checkpoint",
    ),
    "model": ("mooncake model get smollm2-135m", "mooncake model import my-model.gguf"),
    "serve": (
        "mooncake serve --openai-port 9000",
        "mooncake serve --checkpoint /path/to/checkpoint --dtype bfloat16 --prefill 1 --decode 2",
        "mooncake serve --cluster cluster.yaml --host a",
    ),
    "status": ("mooncake status", "mooncake status --json"),
    "config": (
        "mooncake config diff",
        "mooncake config set conductor.ttft_slo_s=5 'decode_*.slots=16'",
    ),
    "doctor": ("mooncake doctor", "mooncake doctor --store-bytes 8G"),
    "cluster": ("mooncake cluster check", "mooncake cluster status"),
    "store": ("mooncake store stat", "mooncake store serve"),
    "keys": ("mooncake keys init keys --host a=10.77.0.1 --host b=10.77.0.2",),
    "tenants": (
        "mooncake tenants add api-keys.json acme --requests-per-minute 600",
        "mooncake tenants list api-keys.json",
    ),
    "replay": ("mooncake replay my_trace.jsonl --length-scale 0.25 --report a.html",),
    "report": ("mooncake report a.html b.html --out ab.html",),
    "simulate": ("mooncake simulate --experiment hit-rate --traces . --trace my",),
    "plan": (
        "mooncake plan --trace my_trace.jsonl --hardware H100 --model Llama-3-70B --slo-ttft 10 "
        "--slo-tbt 0.1",
    ),
    "profile": ("mooncake profile --out profile.json",),
}
FIRST = tuple(EXAMPLES)  # `mooncake --help` lists these first, and others in alphabetical order
HELP = "Serve large language models as Triton models, with a shared KVCache in between."


class Commands(TyperGroup):
    """The registered subcommands. Each is imported when it runs, or for `mooncake --help`."""

    def list_commands(self, ctx: typer.Context) -> list[str]:
        found = registered()
        known = [name for name in FIRST if name in found]
        return known + sorted(found.keys() - set(known))

    def get_command(self, ctx: typer.Context, cmd_name: str) -> TyperCommand | TyperGroup | None:
        entry = registered().get(cmd_name)
        if entry is None:
            if cmd_name in FIRST:
                ctx.fail(f"this installation has no `{cmd_name}` yet: run `make setup`")
            return None
        try:
            return command_of(entry)
        except (ImportError, AttributeError) as problem:
            reason = explained(problem) if isinstance(problem, ImportError) else ""
            moved = f"cannot be loaded ({entry.value}: {problem}): run `make setup` after an update"
            return unusable(cmd_name, reason or moved)


def registered() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def command_of(entry: EntryPoint) -> TyperCommand | TyperGroup:
    """The entry point's command. Raises ImportError or AttributeError if it cannot be loaded."""
    found = entry.load()
    if not isinstance(found, typer.Typer):
        function, found = found, typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        found.command(name=entry.name)(function)
    command = typer.main.get_command(found)
    command.name = entry.name
    reflow(command)
    if examples := EXAMPLES.get(entry.name):
        command.epilog = "\n\n".join(("Examples:", *examples))
    return command


def reflow(command: TyperCommand | TyperGroup) -> None:
    """Join the lines of each help paragraph, so that only the terminal's width breaks lines."""
    paragraphs = (command.help or "").split("\n\n")
    command.help = "\n\n".join(" ".join(each.split()) for each in paragraphs)
    for each in getattr(command, "commands", {}).values():
        reflow(each)


def unusable(name: str, reason: str) -> TyperCommand:
    """A subcommand that prints `reason` and exits with status 1, even if called with --help."""

    def fail() -> None:
        raise SystemExit(f"`mooncake {name}` {reason}")

    anything = {"ignore_unknown_options": True, "allow_extra_args": True}
    return TyperCommand(
        name,
        callback=fail,
        help=f"{reason[0].upper()}{reason[1:]}",
        add_help_option=False,
        context_settings=anything,
    )


app = typer.Typer(
    name="mooncake",
    cls=Commands,
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"mooncake-triton {version('mooncake-triton')}")
        raise typer.Exit


@app.callback()
def mooncake(
    wants_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


def restart_in_utf_8() -> None:
    """Restart this process in Python's UTF-8 mode if the locale's encoding is not UTF-8, because
    paths in config.pbtxt and in Triton's parameters are UTF-8 in every locale."""
    if sys.getfilesystemencoding() != "utf-8" and not sys.flags.utf8_mode and sys.executable:
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `mooncake ARGUMENTS` and exit. Without `arguments`, use those of this process."""
    if arguments is None:
        restart_in_utf_8()
    try:
        app(None if arguments is None else list(arguments), prog_name="mooncake")
    except ImportError as problem:  # from a module that the command imports while it runs
        if reason := explained(problem):
            raise SystemExit(f"this command {reason}") from None
        raise


if __name__ == "__main__":
    main()
