"""How a transfer is split over paths, when a path cools down, and when it is used again."""

from __future__ import annotations

import random

from mooncake_store.transports.paths.nic_paths import (
    ALLOWANCE_S_MIN,
    COOL_DOWN_S,
    COOL_DOWN_S_MAX,
    PART_BYTES_MAX,
    PART_BYTES_MIN,
    PARTS_PER_PATH_MAX,
    NicCounters,
    NicPath,
    cut,
    may_abandon,
    next_path,
    part_bytes_for,
)


def path(name: str = "p", **more: object) -> NicPath:
    return NicPath(name, NicCounters(), **more)  # type: ignore[arg-type]


def test_every_byte_is_in_one_part_and_in_order(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(500):
        lengths = [chance.choice((0, 1, 64, chance.randint(1, 9000))) for _ in range(20)]
        part_bytes = chance.choice((1, 64, 1000, 10**6))
        if part_bytes == 1:
            lengths = [min(length, 70) for length in lengths]
        parts = cut(lengths, part_bytes)
        assert all(parts) and all(sum(p.length_bytes for p in part) <= part_bytes for part in parts)
        reached = [0] * len(lengths)
        for piece in (piece for part in parts for piece in part):
            assert reached[piece.span] == piece.start_bytes and piece.length_bytes > 0
            reached[piece.span] += piece.length_bytes
        assert reached == lengths
        order = [(piece.span, piece.start_bytes) for part in parts for piece in part]
        assert order == sorted(order)


def test_equal_spans_stay_equal_unless_they_are_larger_than_a_part() -> None:
    parts = cut([100] * 7, 250)
    assert [[piece.length_bytes for piece in part] for part in parts] == [
        [100, 100],
        [100, 100],
        [100, 100],
        [100],
    ]


def test_parts_are_neither_too_small_to_be_worth_it_nor_too_large_to_be_moved_again() -> None:
    assert part_bytes_for(4096, 2) == PART_BYTES_MIN
    assert part_bytes_for(4 * 2**20, 2) == 2**20
    assert part_bytes_for(10**9, 2) == PART_BYTES_MAX
    assert part_bytes_for(10**9, 0) == PART_BYTES_MAX


def test_the_path_with_the_least_to_do_gets_the_next_part() -> None:
    paths = [path("a"), path("b")]
    assert next_path(paths, [0, 0]) == 0
    assert next_path(paths, [1, 0]) == 1
    paths[0].began(100)  # of another call
    assert next_path(paths, [0, 0]) == 1
    assert next_path(paths, [PARTS_PER_PATH_MAX] * 2) is None


def test_a_path_that_left_a_part_in_flight_comes_last_until_a_transfer_completes() -> None:
    paths = [path("a"), path("b")]
    paths[1].moved(4096, False, 0.1, now_s=1.0)
    assert next_path(paths, [0, 0]) == 0  # it has moved less
    paths[0].timed_out(2.0)
    assert next_path(paths, [0, 0]) == 1
    assert next_path(paths, [0, 1]) == 0  # the other one has a part already
    paths[0].moved(0, False, 0.1, now_s=3.0)
    assert next_path(paths, [0, 0]) == 0


def test_a_path_in_cool_down_is_a_last_resort() -> None:
    paths = [path("a"), path("b")]
    paths[0].failed(1.0)
    assert next_path(paths, [0, 1]) == 1
    paths[1].abandoned(1.0)
    assert next_path(paths, [0, 0]) is None
    assert next_path(paths, [0, 0], is_last_resort=True) == 0


def test_a_part_is_given_up_only_when_another_path_has_answered_meanwhile() -> None:
    stuck, other = path("a"), path("b")
    assert not may_abandon(stuck, [other], posted_s=10.0)  # the node may be frozen
    other.moved(4096, True, 0.1, now_s=9.9)
    assert not may_abandon(stuck, [other], posted_s=10.0)
    other.moved(4096, True, 0.1, now_s=10.1)
    assert may_abandon(stuck, [other], posted_s=10.0)
    other.failed(11.0)
    assert not may_abandon(stuck, [other], posted_s=10.0)
    assert not may_abandon(stuck, [], posted_s=10.0)


def test_rdma_is_never_given_up_because_the_card_may_write_later() -> None:
    stuck, other = path("a", has_rdma=True), path("b")
    other.moved(4096, True, 0.1, now_s=10.1)
    assert not may_abandon(stuck, [other], posted_s=10.0)


def test_a_slow_path_gets_more_time_and_never_more_than_half_of_what_is_left() -> None:
    slow, fast = path(bytes_per_s=1e6), path(bytes_per_s=1e9)
    size = 1_000_000
    assert fast.allowance_s(size, 100.0) < 2.0 < slow.allowance_s(size, 100.0) < 10.0
    assert slow.allowance_s(size, 4.0) == 2.0
    assert slow.allowance_s(size, 0.1) == ALLOWANCE_S_MIN


def test_a_path_under_any_history_keeps_its_numbers(seed: int) -> None:
    """Under way is what was begun and has not ended; a rest ends only by a probe that worked, the
    pauses between probes grow up to their limit, and the card's counters agree."""
    chance = random.Random(seed)
    counters = NicCounters()
    paths = [NicPath(f"p{i}", counters) for i in range(3)]
    posted: list[tuple[NicPath, int]] = []
    cool_downs = moved = 0
    now_s = 0.0
    for _ in range(3_000):
        now_s += chance.random()
        each = chance.choice(paths)
        was_cooling_down, before_s = each.is_cooling_down, each.pause_s
        match chance.choice(("begin", "end", "fail", "give_up", "probe", "heal")):
            case "begin":
                posted.append((each, size := chance.randint(1, 10**6)))
                each.began(size)
            case "end" if posted:
                each, size = posted.pop(chance.randrange(len(posted)))
                was_cooling_down = each.is_cooling_down
                each.ended(size)
                each.moved(size, chance.random() < 0.5, chance.random(), now_s)
                moved += size
                assert each.is_cooling_down == was_cooling_down and each.answered_s == now_s
            case "fail":
                each.failed(now_s)
                assert each.is_cooling_down
            case "give_up":
                each.abandoned(now_s)
                assert each.is_cooling_down
            case "probe" if each.is_cooling_down:
                each.probe_failed(now_s)
                assert each.pause_s == min(2 * before_s, COOL_DOWN_S_MAX)
                assert each.probe_s == now_s + each.pause_s
            case "heal":
                each.probe_worked(now_s)
                assert not each.is_cooling_down
        if each.is_cooling_down and not was_cooling_down:
            cool_downs += 1
            assert each.probe_s == now_s + COOL_DOWN_S
        for one in paths:
            assert one.under_way_bytes == sum(size for owner, size in posted if owner is one)
        assert counters.cooling_down == sum(one.is_cooling_down for one in paths)
    assert counters.cool_downs == cool_downs
    assert counters.read_bytes + counters.write_bytes == moved


def test_a_part_that_fails_on_a_forgotten_path_is_not_counted_as_cooling_down() -> None:
    """A call goes on over the paths that it began with, while the node begins anew."""
    for cooled_down_before in (False, True):
        for heals in (False, True):
            gone = path()
            if cooled_down_before:
                gone.failed(1.0)
            gone.forget()
            assert gone.counters.cooling_down == 0
            gone.abandoned(2.0)
            assert gone.is_cooling_down, "the call itself avoids it"
            assert gone.counters.cooling_down == 0
            if heals:
                gone.probe_worked(3.0)
            found = gone.counters.cooling_down, gone.counters.cool_downs
            assert found == (0, 1 + cooled_down_before)
