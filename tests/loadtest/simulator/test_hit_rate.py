"""The hit-rate experiment: it counts as the store does, and finds what was promised."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest

from backends.cli import main
from loadtest.simulator.block_cache import BlockCache, DirectoryCache, Hits, best_hits, key_of, play
from loadtest.simulator.hit_rate import HitRateRun, requests_of, rows_of, targets_of
from loadtest.simulator.options import SimulationOptions
from mooncake_store.directory.core.eviction import POLICIES

TRACES = Path(__file__).parents[4] / "shared" / "traces"
SMALL = ["--traces", ".", "--trace", "conversation"]


def published(name: str) -> list[list[bytes]]:
    if not (TRACES / f"{name}_trace.jsonl").exists():
        pytest.skip(f"{name}_trace.jsonl is not in {TRACES.parent.name}/traces beside this tree")
    return requests_of(SimulationOptions(folder=TRACES), name)


def conversations(rng: random.Random, requests: int) -> list[list[bytes]]:
    """Chains that branch and grow, each request a walk from a root: never a hole in a chain."""
    chains: list[list[int]] = [[0]]
    made: list[list[bytes]] = []
    for _ in range(requests):
        known = rng.choice(chains[-30:])
        chain = known[: rng.randint(1, len(known))]
        chain += [rng.getrandbits(60) for _ in range(rng.randint(0, 5))]
        chains.append(chain[:20])
        made.append([key_of(block) for block in chains[-1]])
    return made


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_the_directory_and_the_order_alone_count_the_same(policy: str, seed: int) -> None:
    requests = conversations(random.Random(seed), 3_000)
    for blocks in (24, 150):
        alone, whole = BlockCache(blocks, policy), DirectoryCache(blocks, policy)
        for number, keys in enumerate(requests):
            assert alone.use(keys) == whole.use(keys), f"request {number} of {blocks} blocks"
        alone.check()
        whole.check()


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_a_published_trace_counts_the_same_through_the_directory(policy: str) -> None:
    requests = published("conversation")[:2_000]
    assert play(BlockCache(1_000, policy), requests) == play(
        DirectoryCache(1_000, policy), requests
    )


def brute_force(requests: list[list[bytes]], blocks: int) -> int:
    """Most hits over every choice of what to keep; for a handful of references only."""
    used = [key for keys in requests for key in keys]
    states: dict[frozenset[bytes], int] = {frozenset(): 0}
    for key in used:
        reached: dict[frozenset[bytes], int] = {}
        for kept, hits in states.items():
            found = hits + (key in kept)
            with_key = kept | {key}
            choices = [with_key] if len(with_key) <= blocks else [with_key - {k} for k in with_key]
            for choice in choices:
                reached[choice] = max(found, reached.get(choice, 0))
        states = reached
    return max(states.values())


def test_the_optimum_is_what_trying_everything_finds(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(40):
        requests = [[key_of(rng.randrange(6)) for _ in range(2)] for _ in range(8)]
        blocks = rng.randint(1, 4)
        assert best_hits(requests, blocks).hits == brute_force(requests, blocks)


def test_no_policy_beats_the_optimum_and_holes_are_no_hits(seed: int) -> None:
    requests = conversations(random.Random(seed), 1_500)
    for policy in POLICIES:
        found = play(BlockCache(60, policy), requests)
        assert found.hits + found.behind_holes <= best_hits(requests, 60).hits
        assert found.behind_holes == 0 or policy != "lru"


class Scripted(BlockCache):
    def use(self, keys: object) -> list[bool]:
        return [True, False, True, True]


def test_what_lies_behind_a_hole_is_counted_apart() -> None:
    keys = [key_of(n) for n in range(4)]
    assert play(Scripted(4, "lru"), [keys]) == Hits(references=4, hits=1, behind_holes=2)


@pytest.mark.long
def test_the_published_numbers_and_the_gain_are_reached_at_the_sizes_that_were_promised() -> None:
    runs: list[HitRateRun] = []
    for trace in ("conversation", "synthetic"):
        requests = published(trace)
        for blocks in (1_000, 5_859, 10_000, 30_000):
            for policy in POLICIES:
                result = play(BlockCache(blocks, policy), requests)
                runs.append(HitRateRun(trace, blocks, policy, result))
        distinct = len({key for keys in requests for key in keys})
        runs.append(HitRateRun(trace, None, "lru", play(BlockCache(distinct, "lru"), requests)))
    targets = targets_of(runs)
    assert len(targets) == 8
    assert all(target.is_met for target in targets), [t for t in targets if not t.is_met]


def test_rows_say_how_much_of_the_possible_gain_was_gained() -> None:
    runs = [
        HitRateRun("t", 10, "lru", Hits(100, 20, 0)),
        HitRateRun("t", 10, "density", Hits(100, 25, 1)),
        HitRateRun("t", 10, "optimum", Hits(100, 40, 0)),
        HitRateRun("t", None, "lru", Hits(100, 50, 0)),
    ]
    _, density, best, unlimited = rows_of(runs)
    assert (density["gain_points"], density["percent_of_possible_gain"]) == (5.0, 25.0)
    assert density["percent_of_unlimited"] == 50.0 and best["percent_of_possible_gain"] == 100.0
    assert unlimited["gain_points"] == 0.0 and unlimited["blocks"] is None


def run_command(given: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *given])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def small_folder(folder: Path) -> Path:
    source = Path(__file__).parents[2] / "data" / "conversation_turns.jsonl"
    (folder / "conversation_trace.jsonl").write_text(source.read_text())
    return folder


def test_the_command_prints_one_json_line_and_draws_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "hits.png"
    given = [
        "--experiment",
        "hit-rate",
        "--traces",
        str(small_folder(tmp_path)),
        "--json",
        "--trace",
        "conversation",
        "--blocks",
        "60",
        "--plot",
        str(picture),
    ]
    assert run_command(given) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["name"] == "hit-rate" and len(said["rows"]) == len(POLICIES) + 2
    assert {row["hits"] for row in said["rows"] if row["blocks"] is None} == {200}
    assert any(target["value"] is None and target["why"] for target in said["targets"])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_published_trace_may_lie_there_as_gzip(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = small_folder(tmp_path)
    for path in list(folder.iterdir()):
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert (
        run_command(
            [
                "--experiment",
                "hit-rate",
                "--traces",
                str(folder),
                "--json",
                "--trace",
                "conversation",
                "--blocks",
                "60",
            ]
        )
        == 0
    )
    said = json.loads(capsys.readouterr().out)
    assert {row["hits"] for row in said["rows"] if row["blocks"] is None} == {200}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--experiment", "hit-rate"], "--traces FOLDER"),
        (["--experiment", "hit-rate", "--traces", "nowhere"], "is not there; fetch it"),
        (["--experiment", "hit-rate", "--policy", "fifo", *SMALL], "no policy fifo; there are lru"),
        (["--experiment", "hit-rate", "--plot", "x.gif", *SMALL], "must end in"),
        (["--experiment", "best"], "hit-rate"),
        ([], "--experiment"),
    ],
)
def test_what_cannot_be_run_is_refused_with_a_reason(
    given: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MOONCAKE_TRACES", raising=False)
    assert run_command(given) == 2
    assert said in capsys.readouterr().err


def test_a_cache_smaller_than_a_request_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [
        "--experiment",
        "hit-rate",
        "--traces",
        str(small_folder(tmp_path)),
        "--blocks",
        "3",
        "--trace",
        "conversation",
    ]
    assert run_command(given) == 2
    assert "a request needs" in capsys.readouterr().err
