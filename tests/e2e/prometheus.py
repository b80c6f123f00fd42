"""Debian's Prometheus for a test: its own port and data, with the configuration of deploy/."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from loadtest.harness.server import free_addresses
from tests.dashboards import PROMETHEUS
from tests.e2e.server import Server, wait_until

BINARY = shutil.which("prometheus")


@dataclass(frozen=True, slots=True)
class Sample:
    labels: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class PrometheusApi:
    url: str

    def get(self, path: str, **parameters: str) -> Any:
        asked = f"{self.url}{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(asked, timeout=10.0) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error

    def query(self, expr: str) -> list[Sample]:
        """What `expr` is now."""
        found = self.get("/api/v1/query", query=expr)
        assert found["resultType"] == "vector", (expr, found["resultType"])
        return [Sample(each["metric"], float(each["value"][1])) for each in found["result"]]

    def value(self, expr: str) -> float:
        """0 without one."""
        return sum(sample.value for sample in self.query(expr))

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5.0) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def targets(self) -> list[str]:
        return [target["health"] for target in self.get("/api/v1/targets")["activeTargets"]]

    def rules(self) -> dict[str, dict[str, Any]]:
        groups = self.get("/api/v1/rules")["groups"]
        return {rule["name"]: rule for group in groups for rule in group["rules"]}


def scraping(server: Server, folder: Path) -> Iterator[PrometheusApi]:
    """For fixtures: it asks this server every second, and is stopped by its process id."""
    assert BINARY
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(PROMETHEUS / each) for each in config["rule_files"]]
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [server.addresses.metrics]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    api = PrometheusApi(f"http://{free_addresses().http}")
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                BINARY,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={api.url.removeprefix('http://')}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until(lambda: process.poll() is not None or api.is_ready(), "Prometheus to be ready")
        assert process.poll() is None, (folder / "prometheus.log").read_text()
        wait_until(lambda: api.targets() == ["up"], "the metrics page to be scraped")
        yield api
    finally:
        process.terminate()
        process.wait(30.0)
