"""The optional extras of this package, and error texts that name the extra of a missing module."""

from __future__ import annotations

from importlib.util import find_spec

PACKAGE = "mooncake-triton"
# Extra -> the modules of this extra that our code imports.
MODULES = {
    "bundled": ("pytriton",),
    "gateway": ("fastapi", "uvicorn"),
    "guided": ("llguidance",),
    "locust": ("gevent", "geventhttpclient", "locust"),
    "nixl": ("nixl_cu13",),
    "report": ("matplotlib",),
    "torch": ("torch",),
    "tracing": ("opentelemetry.exporter.otlp.proto.grpc", "opentelemetry.sdk"),
    "trtllm": ("tensorrt_llm",),
    "vllm": ("vllm",),
}


def install_line(extra: str) -> str:
    return f"pip install '{PACKAGE}[{extra}]'"


def explained(problem: ImportError) -> str:
    """Text about the missing module and how to install its extra; "" if no extra has the module."""
    lacking = (problem.name or "").partition(".")[0]
    for extra, modules in MODULES.items():
        if lacking in {module.partition(".")[0] for module in modules}:
            return f"needs {lacking}, which is not installed: {install_line(extra)}"
    return ""


def require(extra: str, what: str) -> None:
    """Exit with a message if a module of `extra` is missing. `what`: the feature that needs it."""
    if lacking := missing(extra):
        raise SystemExit(f"{what} needs {lacking}, which is not installed: {install_line(extra)}")


def missing(extra: str) -> str:
    """The first package of `extra` that is not installed; "" if all packages are installed."""
    lacking = (module for module in MODULES[extra] if not _is_there(module))
    return next(lacking, "").partition(".")[0]


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the module's parent package is missing
        return False
