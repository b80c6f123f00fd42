"""When a pipeline group is whole, and what ends that. Pure: time is a number."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backends.errors import ConfigError
from backends.workers.pipeline.group import BEGIN_AGAIN_S, SILENT_S, PipelineGroup, refuse_mistakes
from mooncake_store.records.membership import WorkerInfo

STAGES = 3


def stage(number: int, incarnation: str = "one", group: str = "g0") -> WorkerInfo:
    return WorkerInfo(
        worker_id=f"{group}-{number}",
        incarnation=incarnation,
        role="prefill",
        node_id="s0",
        fingerprint="f",
        description="",
        inbox=f"ipc://{group}-{number}",
        block_tokens=16,
        block_bytes=1024,
        context_tokens_max=1000,
        pages_max=64,
        slots_max=8,
        prefill_coefficients=(),
        decode_coefficients=(),
        transfer_bytes_per_s={},
        transfer_latency_s={},
        pipeline_group=group,
        pipeline_stage=number,
        pipeline_stages=STAGES,
    )


ALL = [stage(number) for number in range(STAGES)]


def whole_group(now_s: float = 0.0) -> PipelineGroup:
    group = PipelineGroup(ALL[0])
    group.update_registered(ALL)
    assert group.to_begin(now_s)
    for number in range(1, STAGES):
        assert not group.is_whole
        group.beat(number, "one", group.epoch, now_s)
    assert group.is_whole
    return group


def test_no_epoch_begins_while_a_stage_is_not_registered() -> None:
    group = PipelineGroup(ALL[0])
    group.update_registered([*ALL[:2], stage(2, group="another")])
    assert not group.to_begin(0.0)
    assert "waits for stage 1, 2" in group.missing()


def test_stages_hear_again_of_an_epoch_until_all_of_them_are_in_it() -> None:
    group = PipelineGroup(ALL[0])
    group.update_registered(ALL)
    assert group.to_begin(0.0)
    epoch = group.epoch
    assert not group.to_begin(BEGIN_AGAIN_S / 2)
    group.beat(1, "one", epoch, 0.5)
    assert group.to_begin(BEGIN_AGAIN_S * 1.5)
    assert group.epoch == epoch, "hearing of it again is no new one"
    assert "waits for stage 2" in group.missing()
    group.beat(2, "one", epoch, 1.6)
    assert group.is_whole
    assert not group.to_begin(100.0)


@pytest.mark.parametrize("lost", ["silence", "another incarnation", "deregistered", "lost place"])
def test_a_lost_stage_ends_the_epoch_and_the_next_one_is_another(lost: str) -> None:
    group = whole_group()
    epoch, now_s = group.epoch, SILENT_S + 0.1
    if lost == "silence":
        group.beat(2, "one", epoch, now_s)
        reason = group.silence(now_s)
        assert "stage 1 has sent no beat" in reason
    elif lost == "another incarnation":
        reason = group.update_registered([ALL[0], stage(1, "two"), ALL[2]])
    elif lost == "deregistered":
        reason = group.update_registered([ALL[0], ALL[2]])
    else:
        reason = group.beat(1, "one", "", now_s)
    assert reason
    assert not group.is_whole
    group.update_registered(ALL)
    assert group.to_begin(now_s)
    assert group.epoch not in ("", epoch)


def test_beats_of_an_earlier_incarnation_or_epoch_complete_no_group() -> None:
    group = PipelineGroup(ALL[0])
    group.update_registered(ALL)
    assert group.to_begin(0.0)
    group.beat(1, "one", group.epoch, 0.0)
    group.beat(2, "zero", group.epoch, 0.0)
    group.beat(2, "one", "an earlier epoch", 0.0)
    assert not group.is_whole


def test_a_stage_that_spoke_too_long_ago_does_not_count_as_there() -> None:
    group = PipelineGroup(ALL[0])
    group.update_registered(ALL)
    assert group.to_begin(0.0)
    group.beat(1, "one", group.epoch, 0.0)
    group.beat(2, "one", group.epoch, SILENT_S + 1)
    assert not group.is_whole
    group.beat(1, "one", group.epoch, SILENT_S + 1.1)
    assert group.is_whole


def test_stages_that_differ_are_left_out_and_refused_at_their_first_load_only() -> None:
    other = replace(ALL[1], pages_max=32, pipeline_stages=2)
    group = PipelineGroup(ALL[0])
    group.update_registered([ALL[0], other, ALL[2]])
    assert not group.to_begin(0.0)
    with pytest.raises(ConfigError, match=r"2 mistake(?s:.*)pipeline_stages is 2(?s:.*)kv_bytes"):
        refuse_mistakes(other, [ALL[0]])
    refuse_mistakes(other, [ALL[0], replace(other, incarnation="before")])  # while it reloads
    refuse_mistakes(other, [stage(0, group="another")])
