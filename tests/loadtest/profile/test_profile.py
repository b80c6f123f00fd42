"""What `mooncake profile` makes of its times, and the file; measuring is in tests/e2e."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from conductor.estimates.estimates import (
    DecodeEstimate,
    DecodeSample,
    PrefillEstimate,
    PrefillSample,
)
from loadtest.client.protocol import GenerateRequest, ServerError, TokenEvent
from loadtest.client.server import addresses_of
from loadtest.harness.benchmark import together_tbt_s
from loadtest.harness.server import PROJECT
from loadtest.profile import command
from loadtest.profile.command import path_of, second_workers, settings_of
from loadtest.profile.measure import (
    STEPS,
    Measure,
    Prefill,
    Room,
    SecondWorkers,
    Together,
    burst_means,
    samples_of,
    serving_of,
    sharing_of,
    split,
)
from loadtest.profile.profile import BurstMeans, Profile, Serving, Sharing
from loadtest.replay.prompts import TokenSource

PREFILL = PrefillEstimate(0.01, 1e-4, 1e-7)
DECODE = DecodeEstimate(0.004, 3e-4, 2e-7)


def profile() -> Profile:
    prefills = [(64, 0), (512, 0), (2048, 0), (256, 4096)]
    decodes = [(1, 80), (4, 2048), (16, 8192)]
    return Profile(
        "a machine",
        {"threads": "1"},
        [PrefillSample(new, prefix, PREFILL.seconds(new, prefix)) for new, prefix in prefills],
        [DecodeSample(n, context, DECODE.step_s(n, context)) for n, context in decodes],
        Serving(0.01, 2e-6),
        Sharing(1.5, 1.25),
        BurstMeans((64, 512), 16, 0.1, 0.03, 0.004),
    )


def test_a_profile_is_one_line_with_what_was_measured_and_what_was_fitted() -> None:
    text = profile().to_json()
    found = json.loads(text)
    assert "\n" not in text and found["version"] == 4
    assert (found["machine"], found["settings"]) == ("a machine", {"threads": "1"})
    assert found["prefill"]["coefficients"] == pytest.approx(PREFILL.coefficients)
    assert found["prefill"]["samples"][3] == [256, 4096, PREFILL.seconds(256, 4096)]
    assert found["decode"]["samples"][0] == [1, 80, DECODE.step_s(1, 80)]
    assert found["serving"] == {"base_s": 0.01, "per_cached_token_s": 2e-6, "handover_s": 0.0}
    assert found["burst"]["prompt_tokens"] == [64, 512]
    assert found["sources"] == {"node_bytes_per_s": 0.0, "node_path": "", "ssd_bytes_per_s": 0.0}
    assert found["sharing"] == {
        "prefill": 1.5,
        "decode": 1.25,
        "second_prefill": 1.0,
        "second_decode": 1.0,
    }


def test_a_profile_is_read_as_it_was_written() -> None:
    assert Profile.from_json(profile().to_json()) == profile()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "no profile"),
        ("[" * 100_000, "no profile"),
        ("{}", "no profile"),
        ('{"version": 2}', "version 2"),
        (profile().to_json().replace('"serving"', '"serves"'), "'serving'"),
        ("", "Expecting value"),
    ],
)
def test_what_is_no_profile_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Profile.from_json(text)


def transfers(**read_bytes: int) -> str:
    return "".join(
        f'mooncake_transfer_bytes_total{{direction="{direction}",model="{model}",'
        f'transport="{transport}"}} {size}\n'
        for transport, size in read_bytes.items()
        for direction, model in (("read", "prefill_0"), ("write", "prefill_0"), ("read", "other"))
    )


def test_the_path_of_a_fetch_is_the_transport_that_moved_it() -> None:
    before = transfers(nixl=10, tcp=5, mapped=7)
    assert path_of(before, transfers(nixl=90, tcp=6, mapped=999), "prefill_0") == "nixl"
    assert path_of(before, transfers(nixl=10, tcp=50, mapped=999), "prefill_0") == "tcp"
    assert path_of(before, transfers(nixl=10, tcp=5, mapped=999), "prefill_0") == "mapped"


def test_a_burst_is_the_means_of_what_clients_met() -> None:
    answers = [(0.0, [0.1, 0.2, 0.21, 0.22]), (0.1, [0.4, 0.45, 0.45, 0.51])]
    found = burst_means([64, 512], answers)
    assert (found.prompt_tokens, found.output_tokens) == ((64, 512), 4)
    assert found.ttft_s == pytest.approx(0.2)
    assert found.first_interval_s == pytest.approx(0.075)
    assert found.step_s == pytest.approx(0.02), "tokens that come late and together cancel out"
    assert burst_means([64], []) == BurstMeans()


def test_the_fit_of_exact_samples_is_the_formula_that_made_them() -> None:
    found = profile()
    assert found.prefill.estimate.coefficients == pytest.approx(PREFILL.coefficients)
    assert found.decode.estimate.coefficients == pytest.approx(DECODE.coefficients)
    assert found.prefill.error_max < 1e-6


def test_a_long_prompt_pays_the_fixed_part_once_a_step() -> None:
    step = PrefillEstimate(0.01, 1e-4, 1e-7)
    lengths = [(64, 0), (512, 0), (512, 1024), (4096, 0), (1000, 2048)]

    def seconds(new: int, prefix: int) -> float:
        starts = range(prefix, prefix + new, 512)
        return sum(step.seconds(min(512, prefix + new - at), at) for at in starts)

    samples = [PrefillSample(*length, seconds(*length)) for length in lengths]
    found = Profile(
        "m", {"chunk_tokens": "512"}, samples, profile().decode_samples, Serving(0.0, 0.0)
    )
    assert found.prefill.estimate.coefficients == pytest.approx(step.coefficients, rel=1e-3)
    assert found.prompt_s(4096, 0) == pytest.approx(seconds(4096, 0), rel=1e-3)


class FailingClient:
    """Refuses every stream."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        raise ServerError("unavailable", "no worker")
        yield


def test_streams_that_fail_are_not_waited_for() -> None:
    async def begin() -> None:
        measure = Measure(FailingClient(), ("prefill_0", "decode_0"), TokenSource(2_048))
        begun = asyncio.Event()
        with pytest.raises(ServerError, match="no worker"):
            await measure._ask(TokenSource(2_048).fresh(1, 8), 4, begun)
        assert begun.is_set()

    asyncio.run(begin())


def test_where_no_stream_fits_nothing_is_measured_together() -> None:
    room = Room(context_tokens_max=256, block_tokens=64, slots=8, kv_pages=64)
    measure = Measure(FailingClient(), ("prefill_0", "decode_0"), TokenSource(2_048))
    assert asyncio.run(measure.together(room, SecondWorkers(), 3, lambda: None)) == []
    assert sharing_of([]) == Sharing(1.0, 1.0)


def test_the_settings_of_our_own_server_are_its_pages_and_those_of_its_repository(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page = 'mooncake_pages_max{model="decode_0"} 512\n'
    monkeypatch.setattr(command, "fetch_page", lambda url: page)
    nowhere = addresses_of("127.0.0.1:1")
    found = settings_of(nowhere, PROJECT / "model_repository", "decode_0")
    assert found["block_tokens"] == "64" and found["kv_pages"] == "512"
    assert found["engine"] == "torch"
    assert "store_node" not in found, "it says nothing of the engine"


def test_a_server_of_others_says_only_how_much_memory_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page = 'mooncake_pages_max{model="decode_0"} 512\n'
    monkeypatch.setattr(command, "fetch_page", lambda url: page)
    server = addresses_of("127.0.0.1:1")
    assert settings_of(server, None, "decode_0") == {"kv_pages": "512"}
    with pytest.raises(ServerError, match="knows no worker decode_9"):
        settings_of(server, None, "decode_9")


def test_a_step_is_the_time_between_tokens_while_all_streams_run() -> None:
    early = [n * 0.01 for n in range(STEPS)]  # a step of 10 ms
    late = [0.1 + n * 0.01 for n in range(STEPS)]
    assert together_tbt_s([early, late], STEPS // 3) == pytest.approx(0.01)


def test_streams_that_hardly_ran_together_are_no_sample() -> None:
    early = [n * 0.01 for n in range(STEPS)]
    late = [early[-1] - 0.02 + n * 0.01 for n in range(STEPS)]
    assert together_tbt_s([early, late], STEPS // 3) is None


def test_a_sample_is_the_median_of_its_rounds_and_one_hiccup_does_not_bend_it() -> None:
    rounds = [Prefill(64, 0, seconds, seconds + 0.01, 0.03) for seconds in (0.02, 0.9, 0.021)]
    assert samples_of(rounds) == [PrefillSample(64, 0, 0.021)]


def test_serving_is_what_ttft_has_on_top_of_the_prefill() -> None:
    found = serving_of(
        [
            Prefill(64, 0, 0.02, 0.03, 0.02),
            Prefill(512, 0, 0.1, 0.11, 0.024),
            Prefill(64, 1000, 0.02, 0.032, 0.025),
        ],
        step_s=0.004,
    )
    assert found.handover_s == pytest.approx(0.020)
    assert found.base_s == pytest.approx(0.01)
    assert found.per_cached_token_s == pytest.approx(2e-6)


def test_points_that_the_workers_cannot_hold_are_left_out() -> None:
    room = Room(context_tokens_max=1024, block_tokens=64, slots=8, kv_pages=64)
    assert room.takes_prefill(512, 511) and not room.takes_prefill(512, 512)
    assert room.takes_decode(8, 256) and not room.takes_decode(9, 64)
    assert not room.takes_decode(8, 512), "8 streams of 9 pages are more than three quarters"


def test_intervals_are_told_apart_by_whether_a_prompt_was_computed() -> None:
    stream = [0.0, 1.0, 2.0, 3.0, 5.0, 7.0, 8.0]  # the first interval is the hand-over
    alone, beside = split([stream], [(2.9, 7.1)])
    assert alone == [1.0] and beside == [2.0, 2.0], "[2, 3] and [7, 8] are neither"


def test_sharing_is_how_much_longer_steps_take_and_never_less_than_one() -> None:
    rounds = [Together([1.0], [1.5], [0.1, 0.1], [0.2]) for _ in range(3)]
    assert sharing_of(rounds) == Sharing(1.5, pytest.approx(2.0))
    assert sharing_of([Together([1.0], [0.9], [0.1], [])]) == Sharing(1.0, 1.0)
    second = Together([1.0], [1.0], [0.1], [0.1], [1.25], [0.05])
    assert sharing_of([second]) == Sharing(1.0, 1.0, 1.25, 1.0)


def test_the_second_worker_of_a_role_is_another_than_the_measured_one() -> None:
    page = "".join(
        f'mooncake_{series}{{model="{model}"}} 1\n'
        for series, model in (
            ("queue_tokens", "prefill_0"),
            ("queue_tokens", "prefill_2"),
            ("queue_tokens", "prefill_1"),
            ("context_tokens", "decode_0"),
        )
    )
    assert second_workers(page, ("prefill_0", "decode_0")) == SecondWorkers("prefill_1", "")
    assert second_workers(page, ("prefill_1", "decode_9")) == SecondWorkers("prefill_0", "decode_0")


class WorkersOfTheirOwnPace:
    """Answers at once, and says that prefill took as many seconds as there were prompts at once."""

    def __init__(self) -> None:
        self.under_way = 0
        self.asked: list[tuple[str, str]] = []

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        pins = request.parameters
        self.asked.append((str(pins["prefill_worker"]), str(pins["decode_worker"])))
        self.under_way += 1
        for number in range(request.max_tokens):
            await asyncio.sleep(0)
            decision = {"prefill_s": float(self.under_way)} if number == 0 else {}
            yield TokenEvent(float(number), (1,), decision=decision)
        self.under_way -= 1


def test_prompts_of_two_prefill_workers_are_sent_at_the_same_time() -> None:
    client = WorkersOfTheirOwnPace()
    measure = Measure(client, ("prefill_0", "decode_0"), TokenSource(2_048))
    seconds = asyncio.run(measure._beside_prefill("prefill_1", 8))
    assert {prefill for prefill, _ in client.asked} == {"prefill_0", "prefill_1"}
    assert max(seconds) == 2.0
    assert asyncio.run(measure._beside_prefill("", 8)) == []
