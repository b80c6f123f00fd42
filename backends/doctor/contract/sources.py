"""Classes of a package as its source files show them. Nothing is imported or run.

TensorRT-LLM can only be imported beside a GPU. Its sources can be read everywhere, also those of a
release that is not installed.

Not here: what they must have (recorded.py), whether they have it (comparison.py).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from backends.doctor.contract.recorded import Method

PACKAGE = "tensorrt_llm"
Function = ast.FunctionDef | ast.AsyncFunctionDef


class SourcesMissing(Exception):
    """A folder has no sources of TensorRT-LLM, or not in Python."""


@dataclass(frozen=True, slots=True)
class ClassFacts:
    """One class, with what it inherits from classes of the same file."""

    methods: dict[str, Method] = field(default_factory=dict)
    fields: dict[str, bool] = field(default_factory=dict)  # in order; True: it has a default
    attributes: frozenset[str] = frozenset()  # set in methods
    bodies: dict[str, Function] = field(default_factory=dict)

    @property
    def members(self) -> set[str]:
        return {*self.methods, *self.fields, *self.attributes}


class Sources:
    def __init__(self, folder: Path) -> None:
        """`folder`: the package, or the folder that has it. Raises SourcesMissing."""
        folder = folder.expanduser().resolve()
        inside = folder / PACKAGE
        self.folder = inside if inside.is_dir() else folder
        self._read: dict[Path, dict[str, ClassFacts]] = {}
        if self.folder.name != PACKAGE or not any(self.folder.rglob("*.py")):
            raise SourcesMissing(f"{folder} has no folder {PACKAGE} with Python files")

    @property
    def version(self) -> str:
        """As the sources have it, or an empty string."""
        path = self.folder / "version.py"
        for node in ast.walk(ast.parse(path.read_text("utf-8"))) if path.is_file() else ():
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
                return str(getattr(node.value, "value", ""))
        return ""

    def file(self, candidates: Sequence[str]) -> Path | None:
        """The first of these files of the package that there is."""
        paths = (self.folder / name for name in candidates)
        return next((path for path in paths if path.is_file()), None)

    def classes(self, path: Path) -> dict[str, ClassFacts]:
        """Raises SourcesMissing if the file is not Python."""
        if path not in self._read:
            try:
                self._read[path] = read_classes(path.read_text("utf-8"))
            except (SyntaxError, ValueError) as error:
                raise SourcesMissing(f"{path} cannot be read: {error}") from None
        return self._read[path]


def read_classes(text: str) -> dict[str, ClassFacts]:
    nodes = {each.name: each for each in ast.parse(text).body if isinstance(each, ast.ClassDef)}
    found: dict[str, ClassFacts] = {}

    def facts(name: str) -> ClassFacts:
        if name not in found:
            found[name] = ClassFacts()  # a class that derives from itself ends here
            own = class_facts(nodes[name])
            bases = [ast.unparse(base).split(".")[-1] for base in nodes[name].bases]
            for base in filter(nodes.__contains__, bases):
                own = merged(facts(base), own)
            found[name] = own
        return found[name]

    return {name: facts(name) for name in nodes}


def merged(base: ClassFacts, own: ClassFacts) -> ClassFacts:
    return ClassFacts(
        base.methods | own.methods,
        base.fields | own.fields,
        base.attributes | own.attributes,
        base.bodies | own.bodies,
    )


def class_facts(node: ast.ClassDef) -> ClassFacts:
    bodies = {each.name: each for each in node.body if isinstance(each, Function)}
    fields: dict[str, bool] = {}
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            fields[each.target.id] = each.value is not None
        elif isinstance(each, ast.Assign):  # members of an enumeration
            fields |= {name.id: True for name in each.targets if isinstance(name, ast.Name)}
    attributes = {
        each.attr
        for body in bodies.values()
        for each in ast.walk(body)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }
    methods = {name: method_facts(body) for name, body in bodies.items()}
    return ClassFacts(methods, fields, frozenset(attributes), bodies)


def method_facts(node: Function) -> Method:
    given = node.args
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    decorators = {ast.unparse(each).split(".")[-1] for each in node.decorator_list}
    return Method(tuple(each.arg for each in named), "abstractmethod" in decorators)


def calls_in(body: Function, of: Sequence[str]) -> Iterator[str]:
    """Names of called methods among `of`, as they stand in the text, without repetitions in a
    row."""
    found = [
        (each.lineno, each.col_offset, each.func.attr)
        for each in ast.walk(body)
        if isinstance(each, ast.Call)
        and isinstance(each.func, ast.Attribute)
        and each.func.attr in of
    ]
    last = ""
    for _, _, name in sorted(found):
        if name != last:
            yield name
        last = name
