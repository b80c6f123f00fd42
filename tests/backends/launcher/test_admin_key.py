"""What of Triton asks for the admin key, and who gets to read it."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.launcher.triton_arguments import RESTRICTED_APIS, AdminKey, open_api_problems


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "admin-key"


def test_the_key_is_in_a_file_of_the_operator_s_alone(path: Path) -> None:
    path.write_text("of a launch that was killed")
    path.chmod(0o644)
    key = AdminKey(path)
    key.write()
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(path.read_text()) >= 32
    key.remove()
    assert not path.exists()
    key.remove()


def test_each_launch_has_another_key_and_removes_only_its_own(path: Path) -> None:
    first, second = AdminKey(path), AdminKey(path)
    first.write()
    text = path.read_text()
    second.remove()
    assert path.read_text() == text, "a launch that was refused leaves the other's alone"
    second.write()
    assert path.read_text() != text


def test_dangerous_apis_ask_for_it_on_both_ports_unless_the_operator_opens_them(path: Path) -> None:
    key = AdminKey(path)
    key.write()
    rule = f"shared-memory,model-repository,trace,logging:mooncake-admin-key={path.read_text()}"
    assert key.for_clients(()) == [
        f"--http-restricted-api={rule}",
        f"--grpc-restricted-protocol={rule}",
    ]
    some = key.for_clients(("trace", "logging"))
    assert all("=shared-memory,model-repository:" in argument for argument in some)
    assert key.for_clients(RESTRICTED_APIS) == []
    (worker,) = key.for_worker()
    assert "statistics" in worker and "inference" not in worker and "health" not in worker


def test_an_api_that_does_not_exist_is_refused_by_name() -> None:
    (problem,) = open_api_problems(["trace", "tracing"])
    assert "--open-api tracing" in problem and "shared-memory" in problem
