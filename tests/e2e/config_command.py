"""`mooncake config` and `mooncake doctor` against a server of the tests."""

from __future__ import annotations

import typer
from typer.testing import CliRunner

from backends.doctor.command import doctor
from backends.model_settings.command import app
from tests.e2e.server import Server


def run_config(server: Server, command: str, *arguments: str) -> tuple[int, str]:
    """Its exit status, and what it says."""
    repository, url = str(server.repository), server.addresses.metrics_url
    result = CliRunner().invoke(
        app, [command, *arguments, "--model-repository", repository, "--metrics-url", url]
    )
    return result.exit_code, " ".join(result.output.split())


def run_doctor(server: Server, *arguments: str) -> tuple[int, str]:
    """The same of `mooncake doctor`."""
    made = typer.Typer()
    made.command()(doctor)
    repository, url = str(server.repository), server.addresses.metrics_url
    more = ["--model-repository", repository, "--metrics-url", url]
    result = CliRunner().invoke(made, [*arguments, *more])
    return result.exit_code, result.output
