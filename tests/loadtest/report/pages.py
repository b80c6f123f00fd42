"""A page as a test reads it."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "br", "link"}


class ParsedPage(HTMLParser):
    """Fails on tags that do not close; collects what a test wants to know."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.scripts: list[str | None] = []
        self.alts: list[str] = []
        self.text: list[str] = []
        self.addresses: list[str] = []
        self.rows: list[list[str]] = []  # of all tables
        self.drawn: int = 0  # marks of the pictures: paths and uses
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append(found.get("type"))
        if tag == "svg":
            assert found["role"] == "img"
            self.alts.append(found["aria-label"] or "")
        self.drawn += tag in ("path", "use")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        for name in ("src", "href", "xlink:href"):
            self.addresses += [found[name] or ""] if name in found else []
        assert not any(name.startswith("on") for name in found), found

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text.append(data)
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())

    def row(self, first: str) -> list[str]:
        """The one row of all tables that begins with this cell."""
        (found,) = [row for row in self.rows if row and row[0] == first]
        return found
