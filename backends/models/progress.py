"""Shows the progress of a fetch: a bar on a terminal, and a line for each step otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import progress as bars
from rich.console import Console

Progress = Callable[[str, float], None]  # (step in words, share of it that is done, 0 to 1)


def no_progress(step: str, share: float) -> None:
    """Shows nothing."""


@contextmanager
def shown_progress(console: Console | None = None) -> Iterator[Progress]:
    """A `Progress` that shows itself on `console`, by default on stderr."""
    console = console or Console(stderr=True, highlight=False)
    if not console.is_terminal:
        steps: set[str] = set()

        def print_step(step: str, share: float) -> None:
            if step not in steps:
                console.print(step, markup=False, soft_wrap=True)
            steps.add(step)

        yield print_step
        return
    tasks: dict[str, bars.TaskID] = {}
    columns = (bars.TextColumn("{task.description}"), bars.BarColumn(), bars.TaskProgressColumn())
    with bars.Progress(*columns, console=console) as bar:

        def move_bar(step: str, share: float) -> None:
            if step not in tasks:
                tasks[step] = bar.add_task(step, total=1.0)
            bar.update(tasks[step], completed=share)

        yield move_bar
