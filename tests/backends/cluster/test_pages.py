"""The pages for operators say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from backends.cluster.cluster_file import parse
from backends.cluster.command import app
from backends.cluster.section import FileSection
from tests.backends.cluster.fleet_text import THREE_HOSTS

DOCS = Path(__file__).parents[3] / "docs"
PAGES = ("fleet.md", "operations.md", "reference/cluster.md")
NAMED = ("hosts", "storage_nodes", "pools")  # whose keys are names


def test_the_reference_has_every_key_that_the_file_may_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: set[str] = set()
    close = FileSection.close

    def noted(self: FileSection) -> None:
        asked.update(self.path_of(key) for key in self._read)
        close(self)

    monkeypatch.setattr(FileSection, "close", noted)
    parse(THREE_HOSTS + "", "cluster.yaml")
    parse(THREE_HOSTS.replace("b: 1}, grpc", "b: 1}, elastic: {least: 1}, grpc"))
    page = (DOCS / "reference" / "cluster.md").read_text()
    table = " ".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    known = set(re.findall(r"`([\w.*]+)`", table))
    for path in asked:
        parts = path.split(".")
        if parts[0] in NAMED and len(parts) > 1:
            parts[1] = "*"
        if (
            parts[0] == "pools"
            and parts[2:]
            and parts[2] not in ("role", "workers", "grpc_port", "elastic")
        ):
            continue  # a parameter of config.pbtxt
        name = ".".join(parts)
        is_section = any(other.startswith(name + ".") for other in known)
        assert name in known or is_section or f"{name}.*" in known, name


def test_the_reference_has_the_defaults_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: dict[str, int] = {}
    number = FileSection.number

    def noted(self: FileSection, key: str, default: int, least: int, most: int) -> int:
        if not {"storage_nodes", "pools"} & set(self.path.split(".")):  # there: by a number
            read[self.path_of(key)] = default
        return number(self, key, default, least, most)

    monkeypatch.setattr(FileSection, "number", noted)
    parse(THREE_HOSTS)
    page = (DOCS / "reference" / "cluster.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
    assert {"directories.ttl_s", "frontends.metrics_port", "etcd.peer_port"} <= set(read)
    for name, default in read.items():
        row = next(row for row in rows if f"`{name}`" in row[1])
        position = re.findall(r"`([\w.*]+)`", row[1]).index(name)
        assert row[2].split(",")[position].strip() == str(default), name


def test_the_file_on_the_page_is_right_and_its_hosts_can_be_told_apart() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (DOCS / "fleet.md").read_text(), re.DOTALL)
    whole, hosts = blocks
    found = parse(whole)
    assert list(found.hosts) == ["a", "b", "c"] and len(found.workers) == 4
    inside = re.sub(r"hosts:\n(  \w: .*\n)+", hosts, whole, count=1)
    assert [host.identity for host in parse(inside).hosts.values()] == ["a", "b", "c"]


def options(command: str) -> set[str]:
    group = typer.main.get_command(app)
    for word in command.split(" "):
        group = group.commands[word]  # type: ignore[attr-defined]
    return {option for parameter in group.params for option in parameter.opts}


def test_every_command_on_the_pages_exists_with_its_options() -> None:
    seen = 0
    for page in PAGES:
        for line in (DOCS / page).read_text().splitlines():
            for words in re.findall(r"mooncake cluster ([^`#]*)", line):
                name = re.match(r"render [a-z]+|check|status|drain|render$", words)
                if name is None or name[0] == "render":
                    continue
                assert set(re.findall(r"--[a-z-]+", words)) <= options(name[0]) | {
                    "--program",
                    "--folder",
                    "--user",
                }, line
                seen += 1
    assert seen > 10
