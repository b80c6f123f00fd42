"""The blocks of a document that people type off: the commands, and what they write into files.

`<!-- not run: REASON -->` in the line above a block keeps test_documented_commands.py from
running it. Not here: whether commands exist (test_commands_in_docs.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUN_PAGES = ("README.md", "docs/quickstart.md")
FENCE = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?```(?P<kind>\w*)\n(?P<text>.*?)^```",
    re.DOTALL | re.MULTILINE,
)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
COMMENT = re.compile(r"(?:^|\s+)# .*$", re.MULTILINE)  # of a shell
SERVE = re.compile(r"^(?:\.venv/bin/)?(?:make|mooncake) serve\b.*\Z", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    page: str
    section: str
    line: int  # of its first command, as an editor counts
    kind: str  # sh, yaml, ...
    text: str
    not_run: str  # the reason; "": a test runs it

    @property
    def is_server(self) -> bool:
        """Its last command serves until Ctrl-C."""
        return self.kind == "sh" and SERVE.search(self.text.strip()) is not None

    @property
    def first_command(self) -> str:
        return self.text.partition("\n")[0].partition("  # ")[0].strip()

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str, text: str | None = None) -> Iterator[Block]:
    """In their order; `text`: of the page, where it is not on the disk."""
    text = (ROOT / page).read_text() if text is None else text
    headings = [(found.start(), found[1]) for found in HEADING.finditer(text)]
    for found in FENCE.finditer(text):
        above = [name for start, name in headings if start < found.start()]
        yield Block(
            page,
            above[-1] if above else "",
            text.count("\n", 0, found.start("text")) + 1,
            found["kind"],
            found["text"],
            found["reason"] or "",
        )
