"""Our connector when things end early, come late, or take long: nothing wrong is read or kept."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import msgspec
import pytest

from backends.engine.connected import messages as m
from backends.engine.trtllm.scheduler import TrtllmScheduler
from mooncake_store.block_keys import chain_seed
from tests.backends.engine.connected.connected import Make, expected, filled, prompt_of, step_until
from tests.backends.engine.connected.gate import Gate
from tests.backends.engine.connected.gate import gate as gate  # a fixture
from tests.backends.engine.connected.listening import WAIT_S

pytestmark = pytest.mark.usefixtures("trtllm")


def test_a_slow_rank_holds_up_what_is_called_saved(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, ranks={1})
    engine, prompt = make(tensor_parallel_size=2), prompt_of(40)
    pages = engine.stage("a", prompt)
    request = engine.submit(1, prompt, 1)
    step_until(engine, lambda: request.finish_reason)
    assert gate.is_reached.wait(WAIT_S)
    step_until(engine, lambda: engine.executor.connectors._saved_by[1])  # one rank is done
    assert engine.saving == {1}
    assert not [what for what in engine.heard.all if what[0] == "saved"]
    gate.is_open.set()
    engine.executor.run_until_idle()
    engine.heard.wait_for("saved", "a", 40)
    engine.unstage("a", pages)


def test_a_save_waits_for_the_forward_pass(make: Make) -> None:
    """The stream is held up: a page that is read too early would have old bytes."""
    engine, prompt = make(disable_overlap_scheduler=False), prompt_of(40)
    pages = engine.stage("a", prompt)
    may_go = threading.Event()
    engine.executor.stream.run(lambda: may_go.wait(WAIT_S))
    request = engine.submit(1, prompt, 1)
    engine.executor.step()  # launched; the overlap scheduler does not wait for it
    assert ("saved", "a", 40) not in engine.heard.all
    may_go.set()
    engine.executor.run_until_idle()
    engine.heard.wait_for("saved", "a", 40)
    store: dict[bytes, bytes] = {}
    engine.keep(prompt, pages, store)
    engine.unstage("a", pages)
    assert engine.output(request) == expected(engine, prompt, 1)
    assert store == filled(make(), prompt)


def test_pages_that_are_taken_away_without_a_word_are_saved_before_they_are_written(
    make: Make, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some versions do not call request_finished for a cancelled request."""
    prompt, other = prompt_of(40), prompt_of(48, 2)
    engine = make(cache={"max_tokens": 60, "enable_block_reuse": False})
    monkeypatch.setattr(engine.executor, "aborts_are_told", False)
    pages = engine.stage("a", prompt)
    request = engine.submit(1, prompt, 4)
    step_until(engine, lambda: request.generated)
    engine.executor.abort(request)
    step_until(engine, lambda: request.finish_reason)
    assert engine.all_free and gate.is_reached.wait(WAIT_S)
    second = engine.submit(2, other, 4)
    going = threading.Thread(target=engine.executor.run_until_idle)
    going.start()
    gate.is_open.set()
    going.join(WAIT_S)
    assert engine.output(second) == expected(engine, other, 4)
    engine.heard.wait_for("saved", "a", 40)
    store: dict[bytes, bytes] = {}
    engine.keep(prompt, pages, store)
    assert store == filled(make(), prompt)
    engine.unstage("a", pages)
    assert not engine.executor.connectors.scheduler._scheduler._table.taken


def test_a_request_that_is_missing_in_a_step_is_waited_for_once() -> None:
    scheduler = TrtllmScheduler(16, 4, lambda message: None)
    prompt = prompt_of(64)
    scheduler.on_message(m.Stage.of("a", prompt, 16, b"0" * 16, "", [0, 1, 2, 3], 0))
    scheduler.match(Asked(prompt), 0)
    assert scheduler.orders([Computed(list(range(16)), 0, 32)], []).fences == []
    assert scheduler.orders([], [Computed([], 32, 16)]).fences == []
    assert scheduler.orders([], []).fences == [7]
    assert scheduler.orders([], []).fences == []
    assert scheduler.orders([], [Computed([], 48, 16)]).saves, "it was only left out"
    assert scheduler.finished(Asked(prompt)) is True
    assert scheduler.orders([], []).fences == [], "its pages are pinned until all is saved"


@pytest.mark.parametrize("is_overlapping", [False, True])
@pytest.mark.parametrize("phase", ["waiting", "chunk", "generating", "saving"])
def test_an_aborted_request_leaves_nothing_behind(
    make: Make, phase: str, is_overlapping: bool
) -> None:
    prompt = prompt_of(100)
    store = filled(make(), prompt[:50])
    engine = make(
        enable_chunked_prefill=True,
        max_num_tokens=16,
        max_batch_size=1,
        disable_overlap_scheduler=not is_overlapping,
    )
    pages = engine.stage("a", prompt, store, loaded_tokens=48, more_tokens=20)
    if phase == "waiting":
        blocker = engine.submit(9, prompt_of(10, 3), 3)
        engine.executor.step()
    request = engine.submit(1, prompt, 20)
    if phase in ("waiting", "chunk"):
        engine.executor.step()
    else:
        step_until(engine, lambda: request.generated >= 2)
    if phase == "saving":  # the order is out, its pages are pinned
        engine.heard.wait_until(lambda: bool(engine.heard.all), "that anything is saved")
    engine.executor.abort(request)
    engine.executor.run_until_idle()
    assert request.finish_reason == "cancelled"
    assert request.is_allocated == (phase != "waiting")
    if phase == "waiting":
        assert engine.output(blocker) == expected(engine, prompt_of(10, 3), 3)
    engine.unstage("a", pages)
    assert engine.all_free
    again = engine.generate(2, prompt, 3)
    assert engine.output(again) == expected(engine, prompt, 3), "its own pages are good as well"


class Asked:
    """A request as the scheduler sees it."""

    request_id = 7
    cache_salt_id: int | None = None

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def get_tokens(self, beam: int) -> list[int]:
        return list(self.tokens)


class Computed:
    def __init__(self, blocks: list[int], position: int, scheduled: int) -> None:
        self.request_id, self.new_block_ids = 7, blocks
        self.computed_position, self.num_scheduled_tokens = position, scheduled


def test_a_promised_load_is_ordered_even_if_the_stage_was_taken_back() -> None:
    sent: list[m.ToWorker] = []
    scheduler = TrtllmScheduler(16, 4, sent.append)
    prompt = prompt_of(40)
    scheduler.on_message(m.Stage.of("a", prompt, 16, b"0" * 16, "", [0, 1, 2], 32))
    assert scheduler.match(Asked(prompt), 0) == 32
    scheduler.on_message(m.Unstage("a"))
    assert m.Unstaged("a", 0) not in sent
    scheduler.allocated(Asked(prompt), list(range(10)))
    orders = scheduler.orders([Computed(list(range(10)), 0, 8)], [])
    assert [move.block_ids for move in orders.loads] == [list(range(8))]
    assert orders.saves == [], "its pages are somebody else's soon"
    assert sent[-1] == m.Unstaged("a", 1)
    assert scheduler.finished(Asked(prompt)) is False
    scheduler.check()


def test_a_position_with_or_without_the_loaded_tokens_means_the_same() -> None:
    for position in (0, 32):
        scheduler = TrtllmScheduler(16, 4, lambda message: None)
        prompt = prompt_of(64)
        scheduler.on_message(m.Stage.of("a", prompt, 16, b"0" * 16, "", [0, 1, 2, 3], 32))
        assert scheduler.match(Asked(prompt), 0) == 32
        scheduler.allocated(Asked(prompt), list(range(16)))
        orders = scheduler.orders([Computed(list(range(16)), position, 16)], [])
        (save,) = orders.saves
        assert (save.first_page, len(save.block_ids)) == (8, 4)


def test_a_prompt_that_goes_backwards_is_an_error() -> None:
    scheduler = TrtllmScheduler(16, 4, lambda message: None)
    prompt = prompt_of(64)
    scheduler.on_message(m.Stage.of("a", prompt, 16, b"0" * 16, "", [0, 1, 2, 3], 0))
    scheduler.match(Asked(prompt), 0)
    scheduler.orders([Computed(list(range(16)), 0, 32)], [])
    with pytest.raises(RuntimeError, match="should have computed up to 32"):
        scheduler.orders([], [Computed([], 16, 16)])


def test_pages_that_come_in_parts_are_an_error() -> None:
    scheduler = TrtllmScheduler(16, 4, lambda message: None)
    prompt = prompt_of(64)
    scheduler.on_message(m.Stage.of("a", prompt, 16, b"0" * 16, "", [0, 1, 2, 3], 32))
    scheduler.match(Asked(prompt), 0)
    with pytest.raises(RuntimeError, match="V2, but V1 was asked for"):
        scheduler.allocated(Asked(prompt), list(range(15)))


def test_a_step_without_metadata_of_its_own_copies_nothing(make: Make) -> None:
    """Some versions leave the old metadata bound, some ask for the metadata of nothing."""
    engine, prompt = make(disable_overlap_scheduler=True), prompt_of(40)
    pages = engine.stage("a", prompt)
    engine.generate(1, prompt, 1)  # until its saves are over
    (worker,) = engine.executor.connectors.workers
    assert worker.get_connector_meta().saves
    worker.start_load_kv(engine.executor.stream)
    worker.wait_for_save(engine.executor.stream)
    assert not +worker._copies._saving and not worker._copies._next_saves
    meta = engine.executor.connectors.scheduler.build_connector_meta(None)
    assert (meta.loads, meta.saves) == ([], [])
    engine.unstage("a", pages)


def test_a_salt_that_only_shows_as_a_number_is_recognised() -> None:
    for salt_id, matched in ((lambda salt: len(salt), 32), (None, 0)):
        scheduler = TrtllmScheduler(16, 4, lambda message: None, salt_id)
        prompt = prompt_of(40)
        scheduler.on_message(m.Stage.of("a", prompt, 16, b"0" * 16, "tenant", [0, 1, 2], 32))
        for number in (7, 0, None):
            request = Asked(prompt)
            request.cache_salt_id = number
            assert scheduler.match(request, 0) == 0
        request.cache_salt_id = len("tenant")
        assert scheduler.match(request, 0) == matched


@pytest.mark.parametrize(
    "attribute", ["lora_task_id", "multimodal_hashes", "cache_salt_id", "cache_salt"]
)
def test_requests_whose_kv_depends_on_more_than_tokens_match_nothing(attribute: str) -> None:
    scheduler = TrtllmScheduler(16, 4, lambda message: None)
    prompt = prompt_of(40)
    scheduler.on_message(m.Stage.of("a", prompt, 16, b"0" * 16, "", [0, 1, 2], 32))
    request = Asked(prompt)
    values = {"multimodal_hashes": [[1]], "cache_salt": "other"}
    setattr(request, attribute, values.get(attribute, 3))
    assert scheduler.match(request, 0) == 0


def test_a_shutdown_in_the_middle_of_a_save_ends_all_threads(make: Make, gate: Gate) -> None:
    before = set(threading.enumerate())
    engine, prompt = make(), prompt_of(40)
    engine.stage("a", prompt)
    engine.executor.start()
    request = engine.submit(1, prompt, 1)
    assert gate.is_reached.wait(WAIT_S)
    engine.executor.shutdown()
    gate.is_open.set()
    engine.close()
    assert engine.output(request) == expected(engine, prompt, 1)
    left = [each for each in set(threading.enumerate()) - before if each.is_alive()]
    for each in left:
        each.join(WAIT_S)
    assert not [each.name for each in left if each.is_alive()]


def test_five_hundred_requests_leave_nothing_behind(make: Make) -> None:
    engine = make(pool_pages=12, enable_chunked_prefill=True, max_num_tokens=32)
    threads = threading.active_count()
    prompts = [prompt_of(20 + number % 25, number % 40) for number in range(500)]
    wanted = {n: expected(engine, prompts[n], 2) for n in range(40)}
    for start in range(0, 500, 4):
        group = range(start, start + 4)
        pages = {n: engine.stage(str(n), prompts[n]) for n in group if n % 4}
        requests = {n: engine.submit(n, prompts[n], 2) for n in group}
        engine.executor.step()
        engine.executor.abort(requests[start + 1])
        engine.executor.run_until_idle()
        for n, own in pages.items():
            engine.unstage(str(n), own)
        for n in group:
            if n < 40 and n != start + 1:
                assert engine.output(requests[n]) == wanted[n]
    assert engine.all_free and threading.active_count() == threads
    scheduler = engine.executor.connectors.scheduler._scheduler
    scheduler.check()
    assert not scheduler._table.entries and not scheduler._table.taken and not scheduler._due
    for worker in engine.executor.connectors.workers:
        copies = worker._copies
        assert not (+copies._saving or copies._finished or copies._draining or +copies._ended)
    assert not engine.host._saved and not engine.host._waiting


def test_nothing_is_saved_behind_what_its_worker_will_complete() -> None:
    """One token more may fill a page of a block that is complete by then."""
    prompt = prompt_of(95)
    stage = m.Stage.of("a", prompt, 32, chain_seed("print"), "", [0, 4096, 8192], 0)
    scheduler = TrtllmScheduler(32, 16, lambda message: None)
    assert not scheduler.add_checked(msgspec.structs.replace(stage, saved_tokens_max=80))
    request = SimpleNamespace(request_id=1, get_tokens=lambda beam: prompt, cache_salt=None)
    assert scheduler.match(request, 0) == 0
    scheduler.allocated(request, list(range(7)))
    step = SimpleNamespace(
        request_id=1, new_block_ids=list(range(7)), computed_position=0, num_scheduled_tokens=95
    )
    (move,) = scheduler.orders([step], []).saves
    assert move.block_ids == list(range(5))
    step.new_block_ids, step.computed_position, step.num_scheduled_tokens = [], 95, 1
    assert scheduler.orders([], [step]).saves == []
