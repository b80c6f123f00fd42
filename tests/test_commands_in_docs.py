"""Commands that the documents show exist, with their options.

`mooncake ...` is parsed by its own command tree, `make ...` by the Makefile and then by the command
that it runs, `python -m ...` by the options that the module's source declares. Bodies of `curl`
are JSON, cluster files are read. Nothing is started; what keeps blocks from being run is listed.

Not here: running them (e2e/test_documented_commands.py); whether links lead somewhere
(test_links.py); commands of others (pip, docker, rsync).
"""

from __future__ import annotations

import ast
import itertools
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from backends.cli import EXAMPLES, command_of
from backends.cluster.cluster_file import parse
from tests.documented_blocks import COMMENT, FENCE, RUN_PAGES, blocks_of
from tests.test_links import OF_THE_PAST, tracked

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [page for page in tracked(".md") if not page.startswith(OF_THE_PAST)]
# Those that a new user types off.
PAGES = [
    page for page in DOCUMENTS if page.startswith(("README", "docs/quickstart", "docs/how-to/"))
]
INLINE = re.compile(r"`((?:\.venv/bin/)?(?:mooncake|make|python -m) [^`]*)`")
HERE_DOCUMENT = re.compile(r"<<'(\w+)'\n.*?^\1$", re.DOTALL | re.MULTILINE)
LEADING = {"exec", "sudo", "nice", "do", "then"}
VARIABLE = re.compile(r"([A-Z_]+)=(.*)", re.DOTALL)
PLACEHOLDER = "NAME"
README_LINES_MAX = 120
OURS = ("backends", "bench", "conductor", "loadtest", "mooncake_store", "tests", "tools")


class WrongCommand(Exception):
    """What is wrong with a command of a page."""


@cache
def commands() -> dict[str, Any]:
    table = (ROOT / "pyproject.toml").read_text().partition('"mooncake.commands"]\n')[2]
    pairs = re.findall(r'^(\w+) = "([\w.:]+)"$', table.partition("\n[")[0], re.MULTILINE)
    return {name: command_of(EntryPoint(name, value, "-")) for name, value in pairs}


def check_mooncake(words: Sequence[str], is_whole: bool) -> None:
    """`is_whole`: with all of its arguments, as who types it off the page would."""
    if words[:1] == ["--help"]:
        return
    if not words or words[0] not in commands():
        raise WrongCommand(f"there is no command {words[:1]}; known: {sorted(commands())}")
    command, rest = commands()[words[0]], list(words[1:])
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        if rest[0] not in command.commands:
            raise WrongCommand(f"{rest[0]} is none of {sorted(command.commands)}")
        command, rest = command.commands[rest[0]], rest[1:]
    if "--help" in rest:
        return
    known = {each for param in command.params for each in (*param.opts, *param.secondary_opts)}
    for word in rest:
        if word.startswith("--") and word.partition("=")[0] not in known:
            raise WrongCommand(f"{command.name} has no option {word}; known: {sorted(known)}")
    if is_whole:
        if hasattr(command, "commands"):
            raise WrongCommand(f"{command.name} wants one of {sorted(command.commands)}")
        try:
            command.make_context(command.name, rest)  # parses, and runs nothing
        except Exception as refused:
            what = getattr(refused, "format_message", refused.__str__)()
            raise WrongCommand(f"{shlex.join(words)}: {what}") from None


@cache
def recipes() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    target = ""
    for line in (ROOT / "Makefile").read_text().replace("\\\n", " ").splitlines():
        if head := re.match(r"([a-z-]+):(?! [A-Z]+ =)", line):
            target = head[1]
            found[target] = []
        elif line.startswith("\t") and target:
            found[target].append(line.strip().lstrip("@"))
        elif not line.strip():
            target = ""
    return found


def check_make(words: Sequence[str], is_whole: bool) -> None:
    text = (ROOT / "Makefile").read_text()
    variables = dict(re.findall(r"^(\w+) = (.*)$", text, re.MULTILINE))
    given = dict(found.groups() for word in words if (found := VARIABLE.fullmatch(word)))
    for name in given:
        if f"$({name})" not in text:
            raise WrongCommand(f"the Makefile reads no variable {name}")
    for target in [word for word in words if not VARIABLE.fullmatch(word)]:
        if target not in recipes():
            raise WrongCommand(f"there is no target {target}; known: {sorted(recipes())}")
        if given.get("ARGS") and not any("$(ARGS)" in line for line in recipes()[target]):
            raise WrongCommand(f"`make {target}` passes no ARGS on")
        for line in recipes()[target]:
            if "$(ARGS)" in line:
                line = line.replace("$(ARGS)", given.get("ARGS", "")).replace("$(BIN)/", "")
                line = re.sub(r"\$\((\w+)\)", lambda each: variables.get(each[1], "1"), line)
                check(shlex.split(re.sub(r"\$\((\w+)\)", "1", line)), is_whole)


def check_module(words: Sequence[str]) -> None:
    name, options = words[0], [word for word in words[1:] if word.startswith("--")]
    if name.split(".")[0] not in OURS or name.endswith(PLACEHOLDER):
        return
    path = ROOT / Path(*name.split("."))
    files = (
        [path / "__main__.py", *path.glob("*.py")] if path.is_dir() else [path.with_suffix(".py")]
    )
    if not files[0].exists():
        raise WrongCommand(f"there is no {name} that runs")
    known = {"--help"} | {option for file in files for option in declared(file)}
    for option in options:
        if option.partition("=")[0] not in known:
            raise WrongCommand(f"{name} has no option {option}; known: {sorted(known)}")


def declared(file: Path) -> Iterator[str]:
    """Options in the source: written out, or parameters of the function that typer is given."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and str(node.value).startswith("--"):
            yield from str(node.value).split("/")
        if isinstance(node, ast.FunctionDef) and node.name == "main":
            for argument in (*node.args.args, *node.args.kwonlyargs):
                yield "--" + argument.arg.replace("_", "-")


def check(words: Sequence[str], is_whole: bool = True) -> bool:
    """Whether it is a command of ours. WrongCommand, if there is none like it."""
    words = list(words)
    while words and (words[0] in LEADING or VARIABLE.fullmatch(words[0])):
        words.pop(0)
    if words[:1] == ["ip"] and words[1:3] == ["netns", "exec"]:
        words = words[4:]
    if not words:
        return False
    program = words[0].rpartition("/")[2]
    if program == "mooncake":
        check_mooncake(words[1:], is_whole)
    elif program == "make":
        check_make(words[1:], is_whole)
    elif re.fullmatch(r"python[\d.]*", program) and words[1:2] == ["-m"]:
        check_module(words[2:])
    elif program == "curl":
        check_body(words)
        return False
    else:
        return False
    return True


def check_body(words: Sequence[str]) -> None:
    for flag, body in itertools.pairwise(words):
        if flag in ("-d", "--data") and body.startswith("{"):
            try:
                json.loads(body)
            except ValueError as error:
                raise WrongCommand(f"the body {body} is no JSON: {error}") from None


def commands_of(block: str) -> Iterator[list[str]]:
    """The single commands of lines of a shell, without comments and without here-documents."""
    text = COMMENT.sub("", HERE_DOCUMENT.sub("", block).replace("\\\n", " "))
    lexer = shlex.shlex(text, posix=True, punctuation_chars="();&|\n")
    lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t\r", "", True
    words: list[str] = []
    for word in lexer:
        if set(word) <= set("();&|\n"):
            yield words
            words = []
        else:
            words.append(word)
    yield words


def shown(page: str) -> Iterator[tuple[list[str], bool]]:
    """Every command of a page, and whether it stands in a block, so that people type all of it."""
    for block in blocks_of(page):
        if block.kind == "sh":
            for words in commands_of(block.text):
                yield words, True
    for command in INLINE.findall(FENCE.sub("", (ROOT / page).read_text())):
        if "..." not in command:
            yield shlex.split(" ".join(command.split())), False


@pytest.mark.parametrize("page", DOCUMENTS)
def test_every_command_of_a_page_exists_with_its_options(page: str) -> None:
    ours = 0
    for words, is_whole in shown(page):
        try:
            ours += check(words, is_whole)
        except WrongCommand as wrong:
            pytest.fail(f"{page}: `{shlex.join(words)}`: {wrong}")
    assert ours or page not in PAGES, f"{page} shows no command of ours"


def test_the_pages_of_a_new_user_are_among_them() -> None:
    assert {"README.md", "docs/quickstart.md", "docs/how-to/read-a-rejection.md"} <= set(PAGES)
    assert (ROOT / "README.md").read_text().count("\n") <= README_LINES_MAX


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_in_the_help_of_a_command_are_right(name: str) -> None:
    for example in EXAMPLES[name]:
        assert example.startswith(f"mooncake {name}") and check(shlex.split(example))


def test_cluster_files_of_the_pages_are_right() -> None:
    found = [
        block.text
        for page in PAGES
        for block in blocks_of(page)
        if block.kind == "yaml" and "hosts:" in block.text
    ]
    assert found, "the quick start shows one"
    for text in found:
        assert parse(text).workers


# All that readers of the README and the quick start type without that a test has typed it before.
NOT_RUN = {
    ("README.md", "make test"): "the tests themselves",
    (
        "docs/quickstart.md",
        "python3 -m venv ~/mooncake-env && . ~/mooncake-env/bin/activate",
    ): "downloads 400 MB; the wheel has tests of its own",
    ("docs/quickstart.md", "make vllm"): "installs 3.5 GB",
    ("docs/quickstart.md", "mooncake init my-models"): "needs a GPU",
    (
        "docs/quickstart.md",
        "docker build -f deploy/Dockerfile.trtllm -t mooncake-trtllm .",
    ): "needs a GPU",
    (
        "docs/quickstart.md",
        "mooncake serve --cluster cluster.yaml --host a --openai-port 9000 "
        "--api-keys api-keys.json",
    ): "needs two machines",
    ("docs/quickstart.md", "mooncake serve --cluster cluster.yaml --host b"): "needs two machines",
    ("docs/quickstart.md", "mooncake cluster status"): "needs two machines",
}


def test_what_no_test_runs_of_readme_and_quick_start_is_listed_here_with_its_reason() -> None:
    blocks = [block for page in RUN_PAGES for block in blocks_of(page)]
    marked = [block for block in blocks if block.not_run]
    assert {(block.page, block.first_command): block.not_run for block in marked} == NOT_RUN
    assert len(marked) == len(NOT_RUN)
    # Commands in a block of another kind, or a mark that stands before none, would slip through.
    assert {block.kind for block in blocks} <= {"sh", "yaml", "text"}
    text = "".join((ROOT / page).read_text() for page in RUN_PAGES)
    assert text.count("not run:") == len(marked)
    assert text.count("```") == 2 * len(blocks)


def test_a_block_knows_its_line_its_section_why_it_is_not_run_and_whether_it_serves() -> None:
    page = (
        "# Title\n\n## A\n\n<!-- not run: no GPU -->\n```sh\nmooncake init m  # lays it down\n"
        "mooncake serve --model-repository m\n```\n\n## B\n\n```sh\nmake serve ARGS=1\nls\n```\n"
    )
    first, second = blocks_of("page.md", page)
    assert (first.line, first.section, first.not_run, first.is_server) == (7, "A", "no GPU", True)
    assert first.first_command == "mooncake init m"
    assert (second.line, second.section, second.not_run, second.is_server) == (14, "B", "", False)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("mooncake server", "no command"),
        ("mooncake serve --port 1", "no option --port"),
        ("mooncake config sit a=b", "sit is none of"),
        ("mooncake config", "wants one of"),
        ("mooncake replay --speed 2", "trace"),
        ("mooncake serve --prefill 0", "0"),
        ("make serf", "no target serf"),
        ('make serve ARGS="--http-prot 9000"', "no option --http-prot"),
        ("make serve ARG=1", "no variable ARG"),
        ("python -m bench.reused", "no bench.reused"),
        (".venv/bin/python -m bench.reuse --no-such", "no option --no-such"),
        ("echo a && .venv/bin/mooncake status --twice", "no option --twice"),
        ("curl -d '{\"a\": }' b", "no JSON"),
    ],
)
def test_what_does_not_exist_is_found(line: str, said: str) -> None:
    with pytest.raises(WrongCommand, match=re.escape(said)):
        for words in commands_of(line):
            check(words)


def test_a_block_is_cut_into_its_commands() -> None:
    block = (
        "A=1 make serve  # a comment\ncat > f <<'EOF'\nmooncake nothing\nEOF\na | b && c \\\n  d\n"
    )
    found = [words for words in commands_of(block) if words]
    assert found == [["A=1", "make", "serve"], ["cat", ">", "f"], ["a"], ["b"], ["c", "d"]]
