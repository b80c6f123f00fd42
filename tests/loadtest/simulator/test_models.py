"""The models under a simulated cluster: GPUs, network, jitter, the log of steps."""

from __future__ import annotations

import random

import numpy as np
import pytest

from loadtest.simulator.cluster.clock import VirtualClock
from loadtest.simulator.cluster.gpu import MeasuredWorker, Roofline, calibrate, prompt_s
from loadtest.simulator.cluster.network import Network
from loadtest.simulator.cluster.steps import Jitter, StepLog, longest_tenth_s

FIGURE_14 = {8_192: 1.0, 16_384: 2.0, 32_768: 4.5, 65_536: 10.5, 131_072: 27.5}  # tokens: s


def test_the_roofline_is_near_the_papers_prefill_times_and_decode_step() -> None:
    gpu = Roofline()
    for tokens, seconds in FIGURE_14.items():
        assert prompt_s(gpu, 0, tokens, 2_048) == pytest.approx(seconds, rel=0.16), tokens
    assert gpu.token_bytes == 320 * 1024
    assert gpu.decode_s(1, 12_000.0) == pytest.approx(0.029, rel=0.05)


def test_chunks_of_any_size_take_the_time_of_the_whole_prompt() -> None:
    gpu = Roofline()
    whole_s = gpu.prefill_s([(0, 65_536)])
    for chunk in (512, 2_048, 8_192):
        assert prompt_s(gpu, 0, 65_536, chunk) == pytest.approx(whole_s, rel=1e-6)
    assert gpu.prefill_s([(60_000, 1)]) > gpu.prefill_s([(0, 1)]), "the prefix is read"


def test_a_worker_that_measures_itself_finds_the_model() -> None:
    gpu = Roofline()
    fits = calibrate(gpu, 2_048)
    assert fits.prefill.error_max < 0.1 and fits.decode.error_max < 1e-6
    table = MeasuredWorker(
        fits.prefill.estimate.coefficients,
        fits.decode.estimate.coefficients,
        gpu.token_bytes,
        gpu.pages_bytes,
    )
    for spans in ([(0, 2_048)], [(8_192, 2_048)], [(0, 512), (4_096, 1_536)]):
        assert table.prefill_s(spans) == pytest.approx(gpu.prefill_s(spans), rel=0.1)
    assert table.decode_s(8, 96_000.0) == pytest.approx(gpu.decode_s(8, 96_000.0))
    assert table.mixed_s([(0, 512)], 4, 9_000.0) > table.decode_s(4, 9_000.0)
    assert gpu.mixed_s([(0, 512)], 4, 9_000.0) > gpu.decode_s(4, 9_000.0)
    assert gpu.mixed_s([(0, 512)], 0, 0.0) == gpu.prefill_s([(0, 512)])


def sent(sends: list[tuple[float, str, str, int, float]]) -> list[float]:
    """When each (at, from, to, bytes, paced_s) has arrived, over links of 100 B/s."""
    clock, ends = VirtualClock(), [0.0] * len(sends)
    network = Network(clock, 100.0, 0.0)
    for number, (at_s, sender, receiver, size_bytes, paced_s) in enumerate(sends):

        def done(number: int = number) -> None:
            ends[number] = clock.now_s

        clock.at(at_s, network.send, sender, receiver, size_bytes, done, paced_s)
    clock.run()
    network.check()
    return ends


def test_transfers_share_the_senders_and_the_receivers_link() -> None:
    assert sent([(0, "a", "b", 100, 0)]) == [1.0]
    assert sent([(0, "a", "b", 100, 0), (0, "a", "c", 100, 0)]) == [2.0, 2.0]
    assert sent([(0, "a", "c", 100, 0), (0, "b", "c", 100, 0)]) == [2.0, 2.0]
    assert sent([(0, "a", "b", 100, 0), (0, "b", "a", 100, 0)]) == [1.0, 1.0], "full duplex"
    # The second one has half until the first is done, then all.
    assert sent([(0, "a", "b", 100, 0), (0.5, "a", "c", 100, 0)]) == pytest.approx([1.5, 2.0])


def test_a_paced_transfer_takes_its_pace_and_leaves_the_rest() -> None:
    ends = sent([(0, "a", "b", 40, 2.0), (0, "a", "c", 80, 0)])
    assert ends == pytest.approx([2.0, 1.0])
    assert sent([(0, "a", "b", 400, 2.0)]) == pytest.approx([4.0]), "faster than the link"


def test_no_link_ever_carries_more_than_it_can(seed: int) -> None:
    rng = random.Random(seed)
    sends = [
        (rng.uniform(0, 5), sender, receiver, rng.randint(1, 300), rng.choice([0.0, 0.0, 3.0]))
        for sender, receiver in (rng.sample("abcde", 2) for _ in range(60))
    ]
    ends = sent(sends)
    for node in "abcde":
        for side in (1, 2):
            through = [
                (send, end) for send, end in zip(sends, ends, strict=True) if send[side] == node
            ]
            first = min(send[0] for send, _ in through)
            last = max(end for _, end in through)
            # Paced ones may take up to a tenth more than is left to the others together.
            assert sum(send[3] for send, _ in through) <= 1.5 * 100 * (last - first) + 1e-6


def test_jitter_belongs_to_the_number_of_the_step_and_stays_in_its_bounds() -> None:
    once, parts = Jitter(0.05, 3, 1), Jitter(0.05, 3, 1)
    whole = once.factors(0, 10_000)
    assert np.array_equal(whole[7_000:7_010], parts.factors(7_000, 10))
    assert whole.min() >= 0.95 and whole.max() <= 1.05 and abs(whole.mean() - 1) < 0.002
    assert not np.array_equal(whole[:50], Jitter(0.05, 4, 1).factors(0, 50))


def test_the_log_forgets_what_was_planned_and_keeps_what_was_done() -> None:
    log = StepLog()
    log.append(np.arange(3_000.0))
    log.cut(5)
    log.append(np.ones(2))
    assert log.slice(3, 7).tolist() == [3.0, 4.0, 1.0, 1.0]
    assert longest_tenth_s(np.arange(20.0)) == 18.5
    assert longest_tenth_s(np.array([7.0])) == 7.0 and longest_tenth_s(np.zeros(0)) == 0.0
