"""What facts about a host and a running system mean, and that every finding says what to do."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from backends.doctor.host_facts import HostFacts, PackageFacts, read_host, shm_huge
from backends.doctor.judgement import (
    BROKEN,
    NOTE,
    OK,
    WARNING,
    Finding,
    host_findings,
    skew_findings,
    unmet,
)
from backends.doctor.running_check import FirstTokenTimed, RunningFacts, running_findings
from backends.doctor.transfer_probe import ProbedWay
from backends.metrics.status.view import parse
from backends.model_settings.running_system import LOADED, REFUSED, EditState, RunningSettings
from mooncake_store.process.process_memory import pid_space

GIB = 2**30
WELL = HostFacts(
    python=(3, 11, 7),
    packages=(PackageFacts("torch", "2.13.0+cpu", "torch>=2.6", True),),
    triton="/somewhere/tritonserver",
    torch="2.13.0+cpu",
    devices={"prefill_0": "cpu"},
    shm_bytes=8 * GIB,
    shm_free_bytes=8 * GIB,
    shm_needed_bytes=2 * GIB,
    memory_free_bytes=16 * GIB,
    files_max=65536,
    locked_bytes_max=2**16,
    cores=8,
    threads=4,
    is_clock_synchronised=True,
    shm_huge="advise",
)
WAYS = [ProbedWay("mapped", 2e10, 5e-6), ProbedWay("nixl", 6e9, 4e-5), ProbedWay("tcp", 2e9, 6e-5)]
SETTINGS = RunningSettings("r", {}, {}, [], ["s0"], models={"prefill_0": EditState("d", LOADED)})
RUNNING = RunningFacts(
    SETTINGS,
    {"conductor": True},
    parse("", 0.0),
    0.3,
    {"prefill_0": {"s0": 9e9, "s1": 3e9}},
    FirstTokenTimed(0.02),
)


def states(facts: HostFacts, ways: list[ProbedWay] = WAYS) -> dict[str, Finding]:
    """The findings that are not ok, by subject."""
    found = {each.subject: each for each in host_findings(facts, ways) if each.state != OK}
    assert all(each.remedy for each in found.values()), "a finding says what to do"
    return found


def test_a_host_that_is_well_has_nothing_to_say_but_ok() -> None:
    assert states(WELL) == {}
    assert {each.state for each in running_findings(RUNNING)} == {OK}


@pytest.mark.parametrize(
    ("facts", "subject", "state"),
    [
        (replace(WELL, python=(3, 9, 1)), "python", BROKEN),
        (replace(WELL, python=(3, 14, 0)), "python", BROKEN),
        (replace(WELL, triton_problem="no tritonserver"), "triton", BROKEN),
        (replace(WELL, torch_cuda="13.0"), "torch build", WARNING),
        (replace(WELL, gpus=2), "torch build", WARNING),
        (replace(WELL, torch=""), "torch", BROKEN),
        (replace(WELL, devices={"prefill_0": "cuda:1"}), "device", BROKEN),
        (replace(WELL, shm_bytes=64 * 2**20), "/dev/shm", WARNING),
        (replace(WELL, memory_free_bytes=GIB), "memory", WARNING),
        (replace(WELL, files_max=1024), "open files", NOTE),
        (replace(WELL, files_max=64), "open files", BROKEN),
        (replace(WELL, has_rdma=True), "locked memory", BROKEN),
        (replace(WELL, threads=16), "cores", NOTE),
        (replace(WELL, numa_nodes=2), "NUMA", NOTE),
        (replace(WELL, is_clock_synchronised=False), "clock", NOTE),
        (replace(WELL, native_problem="no C compiler"), "compiled code", WARNING),
    ],
)
def test_one_thing_that_is_wrong_is_one_finding(facts: HostFacts, subject: str, state: str) -> None:
    found = states(facts)
    assert list(found) == [subject] and found[subject].state == state


def test_triton_beside_a_gateway_is_open_to_web_pages_unless_it_refuses_keyless_requests() -> None:
    beside = replace(RUNNING, settings=replace(SETTINGS, http="h:8000", openai="h:9000"))
    (found,) = [each for each in running_findings(beside) if each.state != OK]
    assert (found.subject, found.state) == ("web pages", WARNING) and "h:8000" in found.what
    refuses = replace(beside, request=FirstTokenTimed(problem="forbidden: with keys only"))
    assert {each.subject for each in running_findings(refuses) if each.state != OK} == {"request"}
    for alone in (replace(SETTINGS, http="h:8000"), replace(SETTINGS, openai="h:9000")):
        found_alone = running_findings(replace(RUNNING, settings=alone))
        assert {each.state for each in found_alone} == {OK}


def test_small_pages_matter_where_a_card_locks_them() -> None:
    assert states(replace(WELL, shm_huge="")) == {}
    with_gpu = replace(WELL, shm_huge="", gpus=1, torch_cuda="13.0", devices={"decode_0": "cuda"})
    (found,) = states(with_gpu).values()
    assert (found.subject, found.state) == ("huge pages", NOTE) and "524288 pages" in found.what


@pytest.mark.parametrize(
    ("options", "huge"),
    [
        ("rw,relatime,size=4g", ""),
        ("rw,huge=advise", "advise"),
        ("rw,huge=never,size=4g", ""),
        ("rw,huge=within_size", "within_size"),
    ],
)
def test_the_last_mount_says_which_pages_there_are(tmp_path: Path, options: str, huge: str) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "tmpfs /dev/shm tmpfs rw,huge=always 0 0\nproc /proc proc rw 0 0\n"
        f"tmpfs /dev/shm tmpfs {options} 0 0\ntmpfs /mnt tmpfs rw,huge=always 0 0\n"
    )
    assert shm_huge(mounts) == huge


def test_what_suits_a_gpu_is_no_finding() -> None:
    facts = replace(WELL, gpus=1, torch_cuda="13.0", devices={"decode_0": "cuda"})
    assert states(facts) == {}
    assert states(replace(WELL, torch="", devices={})) == {}, "no worker has the engine torch"


@pytest.mark.parametrize(
    ("requirement", "version", "wrong"),
    [
        ("numpy>=1.26,<2", "2.1.0", "<2"),
        ("numpy>=1.26,<2", "1.26.4", ""),
        ("torch>=2.6", "2.5.9", ">=2.6"),
        ("torch>=2.6", "2.13.0+cpu", ""),
        ("torch>=2.6", "2.6", ""),
        ("pytriton==0.7.0", "0.7", ""),
        ("pytriton==0.7.0", "0.7.1", "==0.7.0"),
        ("tritonclient[grpc,http]>=2.51", "2.50.1", ">=2.51"),
        ("typer>=0.12", "0.9", ">=0.12"),
        ("pyzmq", "1", ""),
        ("a>=1", "", ""),
    ],
)
def test_a_version_is_compared_by_its_numbers(requirement: str, version: str, wrong: str) -> None:
    name = requirement.split(">")[0].split("=")[0].split("[")[0]
    assert unmet(PackageFacts(name, version, requirement)) == wrong


def test_a_package_that_lacks_or_is_too_old_is_broken_and_a_missing_extra_a_note() -> None:
    packages = (
        PackageFacts("pyzmq", "", "pyzmq>=25"),
        PackageFacts("nixl", "0.9", "nixl>=1.0"),
        PackageFacts("nvidia-pytriton", "", "nvidia-pytriton==0.7.0", True),
    )
    found = states(replace(WELL, packages=packages))
    assert {name: each.state for name, each in found.items()} == {
        "pyzmq": BROKEN,
        "nixl": BROKEN,
        "nvidia-pytriton": NOTE,
    }
    assert found["nixl"].remedy == "pip install 'nixl>=1.0'"


def test_a_path_that_fails_or_is_slow_is_told_from_one_that_is_well() -> None:
    ways = [ProbedWay("mapped", 1e8, 1e-3), ProbedWay("nixl", problem="no plugin"), WAYS[2]]
    found = states(WELL, ways)
    assert (
        found["path mapped"].state == WARNING and "computing a prefix" in found["path mapped"].what
    )
    assert found["path nixl"].state == WARNING and "no plugin" in found["path nixl"].what
    found = states(WELL, [ProbedWay("nixl", 2.1e9, 1e-5), WAYS[2]])
    assert found["path nixl"].state == NOTE and "ptrace_scope" in found["path nixl"].remedy
    found = states(WELL, [ProbedWay("tcp", problem="refused")])
    assert found["path tcp"].state == BROKEN


def test_only_a_skew_that_whole_seconds_can_tell_is_one() -> None:
    assert list(skew_findings("a", 1.4)) == list(skew_findings("a", -1.4)) == []
    (ahead,), (behind,) = skew_findings("a", 30.0), skew_findings("b", -5.0)
    assert "30 s ahead of" in ahead.what and "5 s behind" in behind.what


def test_what_a_running_system_says_of_itself_is_heard() -> None:
    page = parse(
        'mooncake_worker_unreached{worker="decode_0"} 1\nmooncake_nixl_agents_given_up_total 2\n',
        0.0,
    )
    settings = replace(SETTINGS, models={"prefill_0": EditState("d", REFUSED, "threads is 0")})
    facts = RunningFacts(
        settings,
        {"conductor": True, "decode_0": False},
        page,
        0.0,
        {"prefill_0": {"s1": 5e7}},
        FirstTokenTimed(problem="status 400: rejected"),
    )
    found = {each.subject: each for each in running_findings(facts)}
    assert {name: each.state for name, each in found.items()} == {
        "models": BROKEN,
        "settings": WARNING,
        "worker": BROKEN,
        "nixl": WARNING,
        "path": WARNING,
        "request": BROKEN,
    }
    assert "threads is 0" in found["settings"].what and "decode_0" in found["models"].what
    slow = replace(RUNNING, request=FirstTokenTimed(7.5))
    assert [each.what for each in running_findings(slow) if each.state == WARNING] == [
        "first token after 7.50 s"
    ]
    closed = replace(RUNNING, request=FirstTokenTimed(problem="status 400: forbidden: no key"))
    assert [
        (each.subject, each.state) for each in running_findings(closed) if each.state != OK
    ] == [("request", NOTE)]
    storage_only = replace(RUNNING, request=None)
    assert "request" not in {each.subject for each in running_findings(storage_only)}


def test_the_facts_of_this_host_are_those_of_this_process() -> None:
    facts = read_host({"prefill_0": "cpu"}, 4, GIB)
    assert facts.python[0] == 3 and facts.files_max > 0 and facts.cores >= 1
    assert 0 < facts.shm_free_bytes <= facts.shm_bytes
    by_name = {each.name: each for each in facts.packages}
    import torch

    assert facts.torch == by_name["torch"].version == torch.__version__
    assert facts.torch_cuda == (torch.version.cuda or "")
    assert not unmet(by_name["numpy"]) and not unmet(by_name["nixl-cu13"])


def test_the_memory_of_a_running_system_is_one_line_with_each_kind() -> None:
    processes = {"workers": [os.getpid()], "launcher": [2**22 + 1]}
    settings = replace(SETTINGS, processes=processes, pid_space=pid_space())
    found = list(running_findings(replace(RUNNING, settings=settings)))
    (memory,) = (each for each in found if each.subject == "memory")
    line = r"all processes hold ([\d,]+) MiB \(sum of PSS\): workers ([\d,]+), launcher 0"
    said = re.fullmatch(line, memory.what)
    assert memory.state == OK and said is not None and said[1] == said[2]


def test_the_memory_of_processes_on_another_host_is_not_read() -> None:
    settings = replace(SETTINGS, processes={"workers": [os.getpid()]}, pid_space="another 1")
    found = running_findings(replace(RUNNING, settings=settings))
    assert "memory" not in {each.subject for each in found}
