"""Pictures of the status page for its documentation, of a gateway that runs without keys.

    make serve ARGS="--openai-port 9000"
    python -m tests.tools.page_pictures --url http://127.0.0.1:9000 --folder docs

It asks for some answers about a few prompts meanwhile, so that there is something to see.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from PIL import Image

from tests.e2e.chromium import Tab, chromium, tab

COLOURS = 255  # of a picture: it looks the same, and is a third as large
READERS = 4
WORDS = [
    "house",
    "letter",
    "sister",
    "morning",
    "carriage",
    "window",
    "summer",
    "garden",
    "evening",
    "aunt",
]


@contextlib.contextmanager
def load(url: str) -> Iterator[None]:
    """Some readers of a few books each."""
    is_over = threading.Event()

    def read(number: int) -> None:
        chance = random.Random(number)
        books = [" ".join(random.Random(book).choices(WORDS, k=260)) for book in range(3)]
        while not is_over.wait(chance.uniform(0.1, 0.5)):
            question = f"{chance.choice(books)} {' '.join(chance.choices(WORDS, k=80))}"
            body = json.dumps({"prompt": question, "max_tokens": 48}).encode()
            with urllib.request.urlopen(f"{url}/v1/completions", body, timeout=60) as answer:
                answer.read()

    readers = [threading.Thread(target=read, args=(number,)) for number in range(READERS)]
    for each in readers:
        each.start()
    try:
        yield
    finally:
        is_over.set()
        for each in readers:
            each.join()


def save(shown: Tab, path: Path, is_whole: bool = False) -> None:
    picture = Image.open(io.BytesIO(shown.screenshot(is_whole))).convert("RGB")
    method = Image.Quantize.FASTOCTREE  # it keeps the colours that are rare
    picture = picture.quantize(COLOURS, method=method, dither=Image.Dither.NONE)
    picture.save(path, optimize=True)
    print(f"{path}: {picture.width} x {picture.height}, {path.stat().st_size:,} bytes")


def ask(shown: Tab) -> None:
    shown.click("#send")
    shown.wait("!running && (!$('result').hidden || !$('error').hidden)", "an answer")


def main(
    url: Annotated[str, typer.Option(help="Of the gateway.")] = "http://127.0.0.1:9000",
    folder: Annotated[Path, typer.Option(help="Where the pictures go.")] = Path("docs"),
) -> None:
    """Three pictures: light, dark, and of a telephone."""
    path = chromium()
    if path is None:
        raise SystemExit("chromium is not installed: apt-get install chromium")
    with tab(path) as shown:
        shown.look(1280, 900)
        with load(url):
            shown.open(f"{url}/")
            shown.wait("latest && latest.metrics && latest.metrics.recent.seconds > 8", "numbers")
            shown.click("#example")
            ask(shown)
            ask(shown)
            shown.value("$('prompt').blur()")
            open_one = "[...$('decisions').children].find((each) => each.decision.candidates.length"
            shown.value(f"{open_one} && each.decision.came).open = true")
            shown.value("scrollTo(0, 0)")
            save(shown, folder / "status-page.png", is_whole=True)
            shown.look(1280, 900, is_dark=True)
            save(shown, folder / "status-page-dark.png")
            shown.look(390, 844)
            save(shown, folder / "status-page-390.png")
        print(*shown.problems, sep="\n")


if __name__ == "__main__":
    typer.run(main)
