"""`python -m tests.chaos_serve --seconds 600 --seed 1`; the last line is one JSON object.

Exit status 0: every promise was kept. 1: one was broken, as the report says. 2: it could not be
tried here.

Not here: anything but the frame.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

from bench.harness.fleet import ServedFleet, why_no_namespaces
from bench.harness.processes import Look
from loadtest.harness.server import CannotMeasure
from tests.chaos_serve.answers import undisturbed_run
from tests.chaos_serve.fault_injector import KINDS, FaultInjector
from tests.chaos_serve.streams import PROMPT_S, PROMPTS_MAX, PROMPTS_MIN, SteadyStreams, prompts
from tests.chaos_serve.verdict import ChaosReport, Rest, judge, judge_growth, shown

REST_S_MAX = 15.0  # connections and threads end a moment after their requests


def say(line: str) -> None:
    print(line, flush=True)


def look_at(fleet: ServedFleet) -> Rest:
    looks = {}
    for host, each in fleet.hosts.items():
        for name, process in each.named():
            try:
                memory, now_s = process.memory_info().rss, time.perf_counter()
                looks[f"{host}: {name}"] = Look(
                    now_s, memory, process.num_threads(), process.num_fds()
                )
            except psutil.NoSuchProcess:
                continue
    return {name: look for name, look in looks.items() if not name.endswith(": ")}


def at_rest(fleet: ServedFleet, seed: int, before: Rest) -> Rest:
    """Looks until nothing is too much, for REST_S_MAX at most."""
    give_up_s = time.monotonic() + REST_S_MAX
    while True:
        looks, verdict = look_at(fleet), ChaosReport(seed, 0.0)
        judge_growth(verdict, before, looks)
        if not verdict.broken or time.monotonic() > give_up_s:
            return looks
        time.sleep(0.5)  # poll


def descriptors_of(fleet: ServedFleet, name: str) -> str:
    """What a process has open, by kind, for whoever looks for what it does not close."""
    host, _, named = name.partition(": ")
    found: Counter[str] = Counter()
    for process in fleet.hosts[host].processes(named):
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found[os.readlink(link).partition(":[")[0]] += 1
        for each in process.net_connections("tcp"):
            peer = f"{each.raddr.ip}:{each.raddr.port}" if each.raddr else "nobody"
            found[f"{each.status} {peer}"] += 1
    return ", ".join(f"{kind} {count}" for kind, count in found.most_common(12))


def left_behind(pids: set[int]) -> list[str]:
    """What launchers with these process ids left in shared memory."""
    return sorted(path.name for pid in pids for path in Path("/dev/shm").glob(f"mooncake-{pid}-*"))


def run(seconds: float, seed: int, folder: Path, kinds: tuple[str, ...] = KINDS) -> ChaosReport:
    """`folder`: for the cluster file, its state and the logs of all hosts."""
    report = ChaosReport(seed, seconds)
    count = int(min(PROMPTS_MAX, max(PROMPTS_MIN, seconds / PROMPT_S)))
    asked = prompts(seed, count)
    say("starting three hosts ...")
    with ServedFleet(folder) as fleet:
        say("ready; the undisturbed run ...")
        answers = undisturbed_run(asked, fleet.frontends)
        before, own = look_at(fleet), len(os.listdir("/proc/self/fd"))
        streams = SteadyStreams(asked, fleet.frontends, seed)
        injector = FaultInjector(fleet, seed, kinds)
        began_s = time.monotonic()
        streams.start()
        try:
            injector.run(seconds, lambda what: say(f"{time.monotonic() - began_s:6.1f} s {what}"))
        finally:
            streams.stop()
        say("all streams have ended")
        judge(report, streams.ended, injector.injected, answers)
        after = at_rest(fleet, seed, before)
        judge_growth(report, before, after)
        for name, look in after.items():
            if look.descriptors > before.get(name, look).descriptors + 10:
                say(f"{name}, {look.descriptors} descriptors: {descriptors_of(fleet, name)}")
        for host, status in fleet.stop().items():
            if status:
                report.broken.append(f"{host} ended with {status}:\n{fleet.hosts[host].tail()}")
        if left := left_behind(fleet.launcher_pids):
            report.broken.append(f"left in /dev/shm: {', '.join(left)}")
    if (grown := len(os.listdir("/proc/self/fd")) - own) > 0:
        report.broken.append(f"this process has {grown} more descriptors than at the start")
    return report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos_serve")
    parser.add_argument("--seconds", type=float, default=600.0, help="of faults (%(default)s)")
    parser.add_argument("--seed", type=int, default=secrets.randbits(31), help="(random)")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=KINDS,
        default=KINDS,
        metavar="KIND",
        help="fault with these only: " + ", ".join(KINDS),
    )
    parser.add_argument("--folder", type=Path, help="keep logs and state in there (nowhere)")
    options = parser.parse_args()
    if why := why_no_namespaces():
        say(f"cannot be tried here: {why}")
        return 2
    say(f"seed {options.seed}, {options.seconds:g} s")
    try:
        with tempfile.TemporaryDirectory(prefix="mooncake-chaos-") as own:
            folder = options.folder or Path(own)
            folder.mkdir(parents=True, exist_ok=True)
            report = run(options.seconds, options.seed, folder, tuple(options.only))
    except CannotMeasure as error:
        say(f"cannot be tried here: {error}")
        return 2
    say(shown(report))
    say(report.to_json())
    return 1 if report.broken else 0


if __name__ == "__main__":
    sys.exit(main())
