"""What `mooncake serve` puts into the environment of Triton."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.launcher import environment, launch


@pytest.mark.parametrize(
    ("folder", "given", "expected"),
    [
        ("/opt/python/lib", "/cuda/compat", "/opt/python/lib:/triton.libs:/cuda/compat"),
        ("/opt/python/lib", "", "/opt/python/lib:/triton.libs"),
        ("/usr/lib/x86_64-linux-gnu", "/cuda/compat", "/triton.libs:/cuda/compat"),
        ("/usr/lib64", "", "/triton.libs"),
        ("/lib", "/cuda/compat", "/triton.libs:/cuda/compat"),
    ],
)
def test_folders_of_the_linker_s_own_do_not_come_before_an_image_s(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: str, given: str, expected: str
) -> None:
    monkeypatch.setattr(environment, "libpython_folder", lambda: Path(folder))
    monkeypatch.setattr(environment.sysconfig, "get_config_var", lambda name: "x86_64-linux-gnu")
    monkeypatch.setenv("LD_LIBRARY_PATH", given)
    triton = environment.TritonInstall(tmp_path, tmp_path, tmp_path, (Path("/triton.libs"),))
    launcher = launch.Launcher(launch.ServeOptions(tmp_path, state_dir=tmp_path / "state"))
    try:
        assert launcher._environment(triton)["LD_LIBRARY_PATH"] == expected
    finally:
        launcher.stop()


def test_metrics_listen_on_loopback_unless_told_otherwise(tmp_path: Path) -> None:
    public = launch.ServeOptions(tmp_path, address="0.0.0.0")
    assert public.metrics_address == "127.0.0.1"
    launcher = launch.Launcher(launch.ServeOptions(tmp_path, address="0.0.0.0"))
    try:
        launcher._server, launcher._staged, launcher._env = tmp_path, tmp_path, {}
        assert launcher.plan.frontend is not None
        launcher.frontend = launcher._frontend(launcher.plan.frontend)
        plan = launcher._triton_command(
            launcher.frontend, launch.Endpoints("0.0.0.0:1", "127.0.0.1:2", "0.0.0.0:3")
        )
        assert "--metrics-address=127.0.0.1" in plan.arguments
        assert {"--http-address=0.0.0.0", "--grpc-address=0.0.0.0"} <= set(plan.arguments)
    finally:
        launcher.stop()


def test_a_folder_that_cannot_be_made_is_refused_with_the_option_for_another(
    tmp_path: Path,
) -> None:
    environment.make_writable(tmp_path / "a" / "b", "--state-dir")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/self/new")):
        with pytest.raises(
            environment.EnvironmentProblem, match=r"cannot be written .*--state-dir"
        ):
            environment.make_writable(folder, "--state-dir")
    for name in ("a space", "it's", "$HOME", "(1)"):
        with pytest.raises(environment.EnvironmentProblem, match=r"by a shell.*--state-dir"):
            environment.make_writable(tmp_path / name, "--state-dir")
        assert not (tmp_path / name).exists()
    environment.make_writable(tmp_path / "mün-chen_1.0,b+c@d=e:f%", "--state-dir")
