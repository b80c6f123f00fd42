"""An engine that hangs: its worker leaves, requests go on elsewhere, its process starts again. One
that fails leaves nothing behind at the other worker.

The workers run a model.py of the test's own (hanging_model.py), whose engine stands still in the
middle of a step; all the rest of the process goes on, reports included.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.e2e.server import Answer, Server, running, wait_until
from tests.e2e.server_processes import processes_of, stub_of

pytestmark = pytest.mark.long  # tests/backends/workers/test_hung_worker.py is its quick form

MODEL = Path(__file__).with_name("hanging_model.py")
TOKENS = 1_000  # of an answer whose engine hangs: it must not be there before that
WORKERS = ("prefill_0", "prefill_1", "decode_0", "decode_1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hanging")


@pytest.fixture(scope="module")
def server(folder: Path, state_dir: Path) -> Iterator[Server]:
    for server in running(folder / "serve", state_dir, {}):
        take_test_models(server, folder)
        yield server


def take_test_models(server: Server, folder: Path) -> None:
    """A process of a worker that starts from now on has the test's model; so all start anew."""
    staged = server.state_dir / f"backends-{server.addresses.http.rpartition(':')[2]}"
    for role in ("prefill", "decode"):
        text = MODEL.read_text().replace("{folder}", str(folder))
        (staged / role / "model.py").write_text(text)
    before = {worker: stub_of(server, worker).pid for worker in WORKERS}
    for worker in WORKERS:
        server.edit(worker, "lease_s", "31")
    for worker, pid in before.items():

        def is_new(worker: str = worker, old: int = pid) -> bool:
            stubs = processes_of(server, f"/{worker}/1/model.py")  # two while it reloads
            return old not in {each.pid for each in stubs} and serves(server, worker)

        wait_until(is_new, f"{worker} to run the test's model", 60.0)


def asked(server: Server, prompt: list[int], **further: object) -> Answer:
    return server.ask(input_ids=prompt, end_id=-1, return_decision=True, **further)


def hung_process(server: Server, folder: Path, worker: str) -> psutil.Process:
    """From now on this worker's engine stands still."""
    process = stub_of(server, worker)
    (folder / worker).write_text("hang")
    return process


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def serves(server: Server, worker: str) -> bool:
    answer = server.ask(
        input_ids=[40, 41, 42],
        max_tokens=2,
        end_id=-1,
        return_decision=True,
        parameters={f"{worker.split('_')[0]}_worker": worker},
    )
    return not answer.error


def test_a_stream_goes_on_elsewhere_when_its_decode_engine_hangs(
    server: Server, folder: Path
) -> None:
    prompt = [70 + 13 * n % 1700 for n in range(150)]
    alone = asked(server, prompt, max_tokens=TOKENS)
    stream = server.stream(
        input_ids=prompt, max_tokens=TOKENS, end_id=-1, return_decision=True, stream=True
    )
    answer = stream.begun(20)
    worker = answer.decision["decode"]
    process = hung_process(server, folder, worker)
    rest = stream.all()
    assert not rest.error, rest.error
    assert answer.output_ids + rest.output_ids == alone.output_ids
    wait_until(lambda: has_ended(process), f"the process of {worker} to end", 60.0)
    (folder / worker).unlink()
    wait_until(lambda: serves(server, worker), f"{worker} to serve again", 90.0)
    wait_until(server.is_idle, "pages, slots and leases to be free")


def test_prompts_go_on_elsewhere_when_their_prefill_engine_hangs(
    server: Server, folder: Path
) -> None:
    worker = "prefill_0"
    process = hung_process(server, folder, worker)
    with ThreadPoolExecutor(8) as pool:  # so many at once that both prefill workers get some
        prompts = [[90 + number + 17 * n % 1700 for n in range(400)] for number in range(8)]
        pending = [pool.submit(asked, server, prompt, max_tokens=4) for prompt in prompts]
        answers = [future.result() for future in pending]
    assert not [answer.error for answer in answers if answer.error]
    wait_until(lambda: has_ended(process), f"the process of {worker} to end", 60.0)
    (folder / worker).unlink()
    wait_until(lambda: serves(server, worker), f"{worker} to serve again", 90.0)
    wait_until(server.is_idle, "pages, slots and leases to be free")


def test_a_prefill_that_fails_leaves_no_place_reserved_at_the_decode_worker(
    server: Server, folder: Path
) -> None:
    prompt = [110 + 19 * n % 1700 for n in range(1200)]  # three chunks; the first is announced
    for number in (0, 1):
        (folder / f"prefill_{number}").write_text("fail")
    answer = asked(server, prompt, max_tokens=4)
    assert "the test wants it so" in answer.error
    wait_until(server.is_idle, "the reserved pages, long before lease_s", 10.0)
    for number in (0, 1):
        (folder / f"prefill_{number}").unlink()
    # Until a worker with which a call failed has reported again, it is not called.
    wait_until(lambda: not asked(server, prompt, max_tokens=4).error, "both to serve again", 10.0)
