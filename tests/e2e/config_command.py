"""`mooncake config` against a server of the tests."""

from __future__ import annotations

from typer.testing import CliRunner

from backends.model_settings.command import app
from tests.e2e.server import Server


def run_config(server: Server, command: str, *arguments: str) -> tuple[int, str]:
    """Its exit status, and what it says."""
    repository, url = str(server.repository), server.addresses.metrics_url
    result = CliRunner().invoke(
        app, [command, *arguments, "--model-repository", repository, "--metrics-url", url]
    )
    return result.exit_code, " ".join(result.output.split())
