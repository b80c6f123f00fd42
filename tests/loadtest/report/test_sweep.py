"""Many runs: what differs, which is best, which no other beats, and the page that shows it."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import statistics
from pathlib import Path

import pytest

from backends.cli import main
from loadtest.report import sweep
from loadtest.report.page import rendered, write_page
from loadtest.report.pictures.lengths import goodput_of_runs
from loadtest.report.pictures.style import Picture
from loadtest.report.pictures.tradeoff import lengths_of_runs, parts_of
from loadtest.report.run_page import bare_page
from loadtest.report.sweep import RunPoint, best_of, different, lines, pareto
from loadtest.report.sweep_page import sweep_page
from loadtest.results.digest import RunDigest, digest_of, digests_from_bytes, digests_to_bytes
from loadtest.results.lengths import by_length
from loadtest.results.metrics import REJECTED, Slo
from loadtest.results.recording import Recording, RecordingError, to_bytes
from tests.loadtest.report.pages import ParsedPage
from tests.loadtest.report.runs import answered, full, recording, unserved

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>&\"' {{ 7*7 }}"


def run_of(speed: float, late: int, rejected: int, policy: str = "a", **more: object) -> Recording:
    """Of 20 requests some late (TTFT 3 s), some rejected, the rest in time (0.5 s)."""
    records = []
    for i in range(20):
        at_s = i / speed
        if i < rejected:
            times = {"due_s": at_s, "sent_s": at_s, "finished_s": at_s}
            refused = unserved(i, REJECTED, "ttft_slo")
            records.append(dataclasses.replace(refused, **times))
        else:
            first_s = at_s + (3.0 if i < rejected + late else 0.5)
            records.append(
                answered(
                    i,
                    sent_s=at_s,
                    due_s=at_s,
                    token_times_s=(first_s, first_s + 0.1),
                    finished_s=first_s + 0.1,
                    prompt_tokens=100 + 300 * (i % 2),
                )
            )
    settings = {"trace": "t.jsonl", "speed": speed, "policy": policy, **more}
    return recording(records, settings=settings, slo=Slo(1.0, 0.2))


RUNS = [
    digest_of(run_of(speed, late, rejected, policy), f"{policy} {speed:g}x")
    for policy, worse in (("a", 0), ("b", 4))
    for speed, late, rejected in ((1.0, 0, 0), (2.0, 1 + worse, 0), (4.0, 3 + worse, 2))
]


@pytest.fixture(scope="module")
def page() -> ParsedPage:
    return ParsedPage(rendered(sweep_page(RUNS)))


def test_the_table_has_what_was_counted_by_hand(page: ParsedPage) -> None:
    header = next(row for row in page.rows if row[0] == "run")
    for number, (late, rejected, speed) in enumerate(
        [(0, 0, 1.0), (1, 0, 2.0), (3, 2, 4.0), (0, 0, 1.0), (5, 0, 2.0), (7, 2, 4.0)], 1
    ):
        row = dict(zip(header, page.row(str(number)), strict=True))
        assert row["speed"] == str(speed) and row["policy"] == "ab"[number > 3]
        assert row["goodput"] == f"{(20 - late - rejected) / 20:.1%}"
        assert row["rejected"] == f"{rejected / 20:.1%}" and row["requests"] == "20"
        assert float(row["sent/s"]) == pytest.approx(speed, rel=0.001)


def test_the_best_is_the_most_goodput_of_those_that_serve_nearly_all(page: ParsedPage) -> None:
    assert best_of(RUNS) == 2  # 95 % at twice the speed; run 3 has more goodput, but serves 75 %
    assert best_of(RUNS, share=0.5) == 3 and best_of(RUNS, share=1.0) == 1
    assert page.row("2")[2] == "best"
    assert "run 2 (a 2x)" in page.words and "serve 90% within their limits" in page.words
    none_enough = [RUNS[2], RUNS[4], RUNS[5]]
    assert best_of(none_enough) == 1
    assert "as none serves 90%" in sweep.best_text(none_enough)


def test_pictures_say_their_points_in_words_and_are_not_empty(page: ParsedPage) -> None:
    assert len(page.alts) == 6 and page.drawn > 100
    (share,) = [alt for alt in page.alts if "limits, share" in alt]
    assert "run 1: 1, 100.0%" in share and "run 6: 4, 55.0%" in share
    (bars,) = [alt for alt in page.alts if "too late or slow" in alt]
    assert "run 3: within both 75.0%, too late or slow 15.0%, rejected 10.0%" in bars


def test_runs_that_differ_in_load_only_are_a_line() -> None:
    found = {
        line.label: [p.number for p in line.points] for line in lines(RUNS, sweep.LOAD, sweep.SHARE)
    }
    assert found == {"policy a": [1, 2, 3], "policy b": [4, 5, 6]}


def test_settings_that_differ_are_told_from_those_that_do_not() -> None:
    assert set(different(RUNS)) == {"speed", "policy"}
    assert sweep.same(RUNS)["trace"] == "t.jsonl"
    flags = [digest_of(run_of(1.0, 0, 0, flag=value)) for value in (True, 1)]
    assert set(different(flags)) == {"flag"}
    numbers = [digest_of(run_of(1.0, 0, 0, size=value)) for value in (2, 2.0)]
    assert different(numbers) == {}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("less_x", [True, False])
@pytest.mark.parametrize("less_y", [True, False])
def test_the_pareto_runs_are_what_no_point_beats(seed: int, less_x: bool, less_y: bool) -> None:
    rng = random.Random(seed)
    points = [RunPoint(n, rng.randrange(8), rng.randrange(8)) for n in range(rng.randrange(1, 30))]

    def is_beaten(one: RunPoint) -> bool:
        def at_least(a: float, b: float, less: bool) -> bool:
            return a <= b if less else a >= b

        return any(
            at_least(other.x, one.x, less_x)
            and at_least(other.y, one.y, less_y)
            and (other.x, other.y) != (one.x, one.y)
            for other in points
        )

    expected = {point.number for point in points if not is_beaten(point)}
    assert {point.number for point in pareto(points, less_x, less_y)} == expected


def test_cost_makes_goodput_a_node_the_measure() -> None:
    runs = [
        digest_of(run_of(4.0, late, 0, nodes=nodes), f"{nodes} nodes")
        for nodes, late in ((2, 2), (4, 0), (8, 0))
    ]
    assert sweep.cost_of(runs) == "nodes" and best_of(runs) == 1
    assert sweep.pareto_runs(runs) == {1, 2}
    text = ParsedPage(rendered(sweep_page(runs))).words
    assert "Goodput against nodes" in text and "most goodput a second and node" in text
    assert "all runs were sent the same load" in text


def test_a_run_that_does_not_say_its_cost_is_compared_and_the_reader_is_told() -> None:
    sizes: list[dict[str, object]] = [{"gpus": 8}, {"gpus": 16}, {"workers": 4}]
    runs = [digest_of(run_of(4.0, late, 0, **s)) for s, late in zip(sizes, (4, 2, 0), strict=True)]
    assert sweep.cost_of(runs) is None and best_of(runs) == 3 and 3 in sweep.pareto_runs(runs)
    assert "the most goodput a second of" in sweep.best_text(runs)
    (said,) = sweep.warnings_of(runs)
    assert said.startswith("1 of 3 runs do not report their gpus")

    both = [digest_of(run_of(4.0, 0, 0, workers=n, **s)) for n, s in enumerate(sizes[:2], 2)]
    other = digest_of(run_of(4.0, 0, 0, workers=1))
    assert sweep.cost_of([*both, other]) == "workers" and best_of([*both, other]) == 3
    assert sweep.warnings_of([*both, other]) == []

    unjudged = digest_of(recording([answered(0), answered(1)]))  # it cannot be best anyway
    assert sweep.cost_of([*runs[:2], unjudged]) == "gpus"


def test_buckets_of_other_widths_are_not_laid_under_one_heading() -> None:
    def run(tokens: list[int], ttft_s: float) -> Recording:
        sent = [
            answered(i, prompt_tokens=n, token_times_s=(i + ttft_s,)) for i, n in enumerate(tokens)
        ]
        return recording(sent, slo=Slo(1.0, 1.0))

    near, far = run([64, 100, 200], 0.5), run([64, 2**20], 2.0)
    assert by_length(near)[0].span == (64, 128) and by_length(far)[0].span == (64, 256)

    def said(picture: Picture) -> str:
        return ParsedPage(picture.svg).alts[0]

    digests = said(lengths_of_runs([digest_of(near), digest_of(far)]))
    assert digests.startswith("run 1: from 64 to 128 100%, from 128 to 256 100%; run 2: ")
    assert "run 2: from 64 to 256 0%, " in digests
    two = said(goodput_of_runs({"A": by_length(near), "B": by_length(far)}))
    assert two.startswith("A: from 64 to 128 100.0%, from 128 to 256 100.0%; B: from 64 to 256")
    same = said(lengths_of_runs([digest_of(near), digest_of(near)]))
    assert same == "run 1: from 64 100%, from 128 100%; run 2: from 64 100%, from 128 100%."


def test_parts_of_a_run_add_up() -> None:
    for run in RUNS:
        assert math.isclose(sum(parts_of(run).values()), 1.0)
    bare = digest_of(recording([answered(0), unserved(1, REJECTED, "x")]))
    assert parts_of(bare) == {"answered": 0.5, "rejected": 0.5, "failed": 0.0}


def test_digests_keep_every_number_and_foreign_bytes_are_refused() -> None:
    assert digests_from_bytes(digests_to_bytes(RUNS)) == RUNS
    for data in (b"AAAA", b"", digests_to_bytes(RUNS)[:-9], b"H4sIAAAAAAAC/4uuBQBDv6ajAgAAAA=="):
        with pytest.raises(RecordingError):
            digests_from_bytes(data)


def odd_runs() -> dict[str, list[RunDigest]]:
    empty = digest_of(recording([]), "empty")
    refused = digest_of(
        recording([unserved(i, REJECTED, "x") for i in range(5)], slo=Slo(1.0, 1.0))
    )
    no_level = digest_of(recording([answered(0), answered(1)]), "no level")
    nan = digest_of(recording([answered(0, token_times_s=(math.nan,)), answered(1)], slo=Slo(1.0)))
    hostile = digest_of(
        recording([answered(i) for i in range(3)], title=HOSTILE, settings={HOSTILE: HOSTILE}),
        HOSTILE,
    )
    return {
        "one": [RUNS[0]],
        "empty": [empty, empty],
        "refused": [refused, RUNS[0]],
        "no level": [no_level, no_level],
        "mixed": [no_level, RUNS[1], empty, refused],
        "nan": [nan, RUNS[0]],
        "hostile": [hostile, RUNS[0]],
        "many": RUNS * 10,
        "other levels": [RUNS[0], digest_of(recording([answered(0)], slo=Slo(9.0, 9.0)))],
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("one", "1 runs side by side"),
        ("empty", "2 of 2 runs have no request"),
        ("refused", "1 of 2 runs have no answer"),
        ("no level", "give --slo-ttft-s and --slo-tbt-s"),
        ("mixed", "2 of 4 runs have no service level"),
        ("nan", "2 runs side by side"),
        ("hostile", "alert(1)"),
        ("many", "20 more runs are in the table only"),
        ("other levels", "judged by different service levels"),
    ],
)
def test_odd_runs_have_a_page_that_says_what_is_odd(name: str, expected: str) -> None:
    html = rendered(sweep_page(odd_runs()[name]))
    page = ParsedPage(html)
    assert expected in page.words and "<img" not in html
    assert "nan" not in page.words.lower().split() and "inf" not in page.words.lower().split()
    assert page.scripts == ["application/x-mooncake-runs"]


def status_of(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["report", *arguments])
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("sweep")
    for speed, late in ((1.0, 0), (2.0, 5), (4.0, 15)):
        run = run_of(speed, late, 0)
        bare = bare_page(run, to_bytes(run).decode())  # pictures are not what is read
        write_page(bare, folder / f"run-{speed:g}.html")
    return [str(path) for path in sorted(folder.iterdir())]


@pytest.mark.slow
def test_many_pages_become_one_that_can_be_read_again(files, tmp_path: Path, capsys) -> None:
    out = tmp_path / "all.html"
    assert status_of(*files, "--out", str(out), "--json") == 0
    *text, line = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found["name"] == "sweep" and found["best"] == 1 and found["different"] == ["speed"]
    assert [run["label"] for run in found["runs"]] == ["run-1", "run-2", "run-4"]
    shares = [run["numbers"]["goodput_share"] for run in found["runs"]]
    assert shares == pytest.approx([1.0, 0.75, 0.25])
    assert any("run-2" in row and "75.0%" in row for row in text)
    assert status_of(str(out), files[0], "--json") == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [run["label"] for run in again["runs"]] == [
        "all: run-1",
        "all: run-2",
        "all: run-4",
        "run-1",
    ]
    assert status_of(*files, str(out), "--out", str(out)) == 0  # a glob names the page itself
    assert "it is not read" in capsys.readouterr().err


def test_all_runs_are_judged_by_the_limits_that_are_asked_for(files, tmp_path, capsys) -> None:
    assert status_of(*files, "--slo-ttft-s", "5", "--json") == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [run["numbers"]["goodput_share"] for run in found["runs"]] == [1.0, 1.0, 1.0]
    out = tmp_path / "all.html"
    assert status_of(*files, "--out", str(out)) == 0
    assert status_of(str(out), "--slo-ttft-s", "5") == 1
    assert "judged by TTFT <= 1 s and TBT <= 200 ms" in capsys.readouterr().err


def test_every_file_that_is_no_run_is_named_at_once(files, tmp_path, capsys) -> None:
    (tmp_path / "text.html").write_text("<html>")
    wrong = [str(tmp_path / "text.html"), str(tmp_path / "none.html"), str(tmp_path)]
    assert status_of(*files, *wrong) == 1
    said = capsys.readouterr()
    assert said.out == "" and "text.html: no report of a run" in said.err
    assert "none.html: No such file" in said.err and "a folder: name its pages" in said.err
    assert status_of(*files, "--by", "nonsense") == 1
    assert "settings that differ: speed" in capsys.readouterr().err


def test_goodput_is_drawn_against_what_is_asked_for(files, tmp_path) -> None:
    out = tmp_path / "all.html"
    assert status_of(*files, "--by", "speed", "--by", "ttft_p90_s", "--out", str(out)) == 0
    page = ParsedPage(out.read_text())
    assert "Goodput against speed" in page.words and "Goodput against ttft_p90_s" in page.words
    assert any("run 3: 4, 25.0%" in alt for alt in page.alts)


def test_a_page_is_written_whole_or_not_at_all(files, tmp_path, monkeypatch) -> None:
    out = tmp_path / "all.html"
    out.write_text("before")

    def broken(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", broken)
    assert status_of(*files, "--out", str(out)) == 1
    assert out.read_text() == "before" and list(tmp_path.iterdir()) == [out]


def test_numbers_of_a_digest_are_those_of_its_requests() -> None:
    run = full()
    digest = digest_of(run)
    ttfts_s = [r.ttft_s for r in run.requests if r.ttft_s is not None]
    assert digest.numbers.get("ttft_mean_s") == pytest.approx(statistics.mean(ttfts_s))
    assert digest.numbers.get("requests") == len(run.requests)
    assert sum(bucket.requests for bucket in digest.lengths) == len(run.requests)
