"""A folder of sources of TensorRT-LLM, made of what is recorded of it and of the stand-in."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from backends.doctor.contract.recorded import ApiClass, CallOrders, Contract
from backends.engine.trtllm.releases import V2
from tests.backends.engine.trtllm.stand_in import FAKES

FAKE = FAKES / "tensorrt_llm" / "_fake"
CONNECTOR, LAYOUT = "kv_cache_connector.py", "kv_cache_layout.py"
API_MODULE = "def api_module():\n    import sys\n    return sys.modules[__name__]\n"


def write_sources(folder: Path, contract: Contract, api_source: Any) -> Path:
    """`api_source`: the stand-in's function. Returns the package's folder."""
    package = folder / "tensorrt_llm"
    (package / "_torch").mkdir(parents=True)
    version = "1.4.0rc2" if contract.manager == V2 else "1.2.1"
    (package / "version.py").write_text(f'__version__ = "{version}"\n')
    by_file: dict[str, list[str]] = {}
    bodies: dict[str, dict[str, list[str]]] = {}  # file -> class -> its lines
    for piece in contract.pieces:
        file = piece.files[0 if contract.manager == V2 else -1]
        if not file.endswith((CONNECTOR, LAYOUT)):
            bodies.setdefault(file, {})[piece.name] = class_lines(piece)
        elif file not in by_file:
            by_file[file] = [self_contained(api_source(contract, Path(file).name))]
            by_file[file] += behaviour() if file.endswith(CONNECTOR) else []
    for steps in contract.steps:
        classes = bodies.setdefault(steps.files[0], {})
        classes.setdefault(steps.name, []).extend(step_lines(steps))
    for file, classes in bodies.items():
        by_file[file] = ["\n".join([f"class {name}:", *body]) for name, body in classes.items()]
    for file, parts in by_file.items():
        path = package / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n\n".join(["from __future__ import annotations", *parts]))
    return package


def self_contained(text: str) -> str:
    """Without imports of the stand-in: a checked module is run alone."""
    kept = textwrap.indent(without_imports((FAKE / "kept.py").read_text()), "    ")
    return f"import ctypes\n{without_imports(text)}\n\nclass kept:\n{kept}\n"


def behaviour() -> list[str]:
    output = (FAKE / "scheduler_output.py").read_text().partition("def api_module")[0]
    manager = (FAKE / "connector_manager.py").read_text()
    states = "from tensorrt_llm.bindings import LlmRequestState"
    return [states, API_MODULE, without_imports(output), without_imports(manager)]


def without_imports(text: str) -> str:
    unwanted = ("from __future__", "from tensorrt_llm")
    return "\n".join(line for line in text.splitlines() if not line.startswith(unwanted))


def class_lines(piece: ApiClass) -> list[str]:
    lines = [f"    {name}: object = None" for name in (*piece.fields, *piece.members)]
    arguments = {name: method.arguments for name, method in piece.methods.items()}
    arguments |= {name: ("self", *taken) for name, taken in piece.takes.items()}
    return lines + [f"    def {name}({', '.join(given)}): ..." for name, given in arguments.items()]


def step_lines(steps: CallOrders) -> list[str]:
    lines = []
    for method, calls in steps.orders.items():
        lines += [f"    def {method}(self):", *[f"        self.part.{name}()" for name in calls]]
    return lines
