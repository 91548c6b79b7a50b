"""Verdicts on runs whose true difference is known."""

import io

import msgspec
import pytest
from rich.console import Console

from engine import ConfigError
from engine.cli import main as cli
from engine.cli.bench.compare import compare, differences, setting_differences
from engine.cli.bench.result_file import SCHEMA, ResultFile, read_results, write_results
from engine.cli.bench.summary import summarize
from engine.cli.bench.tables import print_comparison, print_summary


def by_name(comparisons):
    return {comparison.metric.name: comparison for comparison in comparisons}


def test_equal_systems_are_not_different(make_run):
    found = by_name(compare([make_run(seed=1)], [make_run(seed=2)]))

    assert not found["TTFT mean"].different
    assert "not different" in found["TPOT mean"].verdict()


def test_a_slower_system_is_found_worse_by_about_its_slowness(make_run):
    found = by_name(compare([make_run(seed=1)], [make_run(slowness=1.3, seed=2)]))

    assert found["TTFT mean"].different
    assert found["TTFT mean"].ratio == pytest.approx(1.3, rel=0.05)
    assert "worse" in found["TTFT mean"].verdict()
    assert not found["TTFT mean"].between_runs


def test_three_runs_a_side_give_an_interval_between_runs(make_run):
    a = [make_run(seed=seed) for seed in range(3)]
    b = [make_run(slowness=0.5, seed=seed) for seed in range(3, 6)]
    found = by_name(compare(a, b))["TPOT mean"]

    assert found.between_runs
    assert found.low < 0.5 < found.high
    assert "better" in found.verdict()


def test_intervals_hold_the_truth_about_as_often_as_they_say(make_run):
    held = sum(
        not by_name(
            compare(
                [make_run(seed=2 * i, num_requests=30)], [make_run(seed=2 * i + 1, num_requests=30)], seed=i
            )
        )["TTFT mean"].different
        for i in range(40)
    )
    assert held >= 33  # 95 % of 40 is 38; fewer than 33 would happen once in ten thousand


def test_different_workloads_are_pointed_out(make_run):
    a, b = make_run(), msgspec.structs.replace(make_run(), client={"seed": 1})

    assert setting_differences(a, b) == ["seed: 0 / 1"]


def test_a_warm_prefix_cache_is_pointed_out(make_run):
    cold, warm = make_run(), make_run()
    warm = msgspec.structs.replace(warm, summary=msgspec.structs.replace(warm.summary, cached_share=0.979))

    assert differences([cold], [cold]) == []
    assert differences([cold, cold], [warm]) == [
        "prompt tokens from the prefix cache: 0%, 0% / 98%; --flush-cache empties it before each run"
    ]
    assert differences([cold, warm], [cold, warm]) != [], (
        "runs that --append added found the first one's prompts"
    )


def test_result_files_round_trip_and_collect_runs(tmp_path, make_run, capsys):
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    write_results(a, make_run(seed=0), append=True)
    write_results(a, make_run(seed=1), append=True)
    write_results(b, make_run(seed=2), append=False)

    print_comparison(a, b)

    assert [len(read_results(path).runs) for path in (a, b)] == [2, 1]
    assert "TTFT mean" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content", [None, b"{", b"{}", msgspec.json.encode(ResultFile("other/9", [])), b"[1]"]
)
def test_foreign_files_are_refused(tmp_path, content):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(ConfigError, match=r"x\.json"):
        read_results(path)


def test_a_file_without_runs_is_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_bytes(msgspec.json.encode(ResultFile(SCHEMA, [])))

    with pytest.raises(ConfigError, match="holds no run"):
        read_results(path)


def test_a_run_with_a_block_without_a_token_has_no_interval_of_its_blocks(make_run, recwarn):
    run = make_run()
    steady = (
        msgspec.structs.replace(run.summary.steady, block_tok_s=[30.0, 0.0]) if run.summary.steady else None
    )
    assert steady is not None
    short = msgspec.structs.replace(run, summary=msgspec.structs.replace(run.summary, steady=steady))
    found = by_name(compare([short], [short]))
    assert "output tok/s (steady)" not in found
    assert "TTFT mean" in found
    assert list(recwarn) == []


def test_two_results_side_by_side_as_a_page(capsys, make_run, tmp_path):
    for name, slowness in (("old", 1.3), ("new", 1.0)):
        for seed, rate in enumerate(("1.0", "2.0", "inf")):
            run = msgspec.structs.replace(make_run(slowness, seed), client={"request_rate": rate})
            write_results(tmp_path / f"{name}.json", run, append=seed > 0)
    page = tmp_path / "page.html"
    command = [
        "bench",
        "compare",
        str(tmp_path / "old.json"),
        str(tmp_path / "new.json"),
        "--html",
        str(page),
    ]
    assert cli.run(command) == 0
    text = page.read_text()
    assert "old against new" in text and "A: old" in text and "B: new" in text
    assert "TPOT mean: B is" in text and "better" in text
    assert "Throughput over the offered rate" in text
    assert cli.run([*command[:-1], "/nope/page.html"]) == 2
    assert "cannot write /nope/page.html: No such file or directory" in capsys.readouterr().err


def test_a_run_without_a_success_says_why_and_nothing_else(make_record, make_load_run):
    console = Console(file=io.StringIO(), width=80)
    record = make_record()
    record.error = "the API key is wrong"
    print_summary(console, summarize(make_load_run([record]), {}), "m at http://x")
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "m at http://x: none of 1 request succeeded",
        "failed 1x: the API key is wrong",
    ]
