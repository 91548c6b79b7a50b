"""`engine simulate`: what a deployment would do under a workload, without a model and without its hardware."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, get_args

import typer

from ...runtime.config.config_fields import config_fields, find_setting
from ...runtime.config.config_sources import MergedConfig
from ...runtime.config.device_config import DispatchPolicyName
from ...runtime.config.engine_config import EngineConfig, SchedulePolicyName
from ...runtime.errors import ConfigError
from ..console import late_progress
from ..options import (
    CONTEXT_SETTINGS,
    ConfigFileOption,
    FlagValues,
    GroupedCommand,
    merge_options,
    takes_config_options,
    takes_settings,
)
from .workload import WORKLOAD, WorkloadOptions

if TYPE_CHECKING:
    from ...simulator.cost_model import CostModel
    from ...simulator.facts import DeviceFacts, ModelFacts
    from ...simulator.report import Report

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

_MODEL_FIELDS: Final = tuple(
    field.name
    for field in config_fields().values()
    if field.group == "model" and field.name != "max_model_len"
)
_POLICIES: Final = get_args(SchedulePolicyName)
_MACHINES, _OUTPUT = "Machines", "Output"


def _option(panel: str, help_text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel=panel, **more)


@app.command(cls=GroupedCommand, context_settings=CONTEXT_SETTINGS)
@takes_settings
@takes_config_options(("model", "cache", "scheduler"), exclude=_MODEL_FIELDS)
def simulate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A known name (see above), a folder, a .gguf file, or org/repo."
        ),
    ] = "llama-3.1-8b",
    config_file: ConfigFileOption = None,
    workload: Annotated[
        str | None,
        _option(
            WORKLOAD,
            "chat (the default), rag, batch, agents (which wait for their answers), or a file: a Mooncake, Qwen, Azure "
            "or BurstGPT trace; ShareGPT conversations, rows of messages, Alpaca rows.",
        ),
    ] = None,
    device: Annotated[
        str, _option(_MACHINES, "Device of the cost model: h200, h100, a100 or cpu-2.")
    ] = "h200",
    tp: Annotated[int, _option(_MACHINES, "Tensor parallel size of a replica.")] = 1,
    pp: Annotated[
        int,
        _option(
            _MACHINES, "Pipeline stages of a replica, with --tp devices each; equal parts of its layers."
        ),
    ] = 1,
    replicas: Annotated[int, _option(_MACHINES, "Replicas of the model.", "--replicas", "--dp")] = 1,
    prefill_replicas: Annotated[
        int,
        _option(
            _MACHINES, "Replicas that only prefill and transfer the KV to the others; 0: no disaggregation."
        ),
    ] = 0,
    dispatch_policy: Annotated[
        DispatchPolicyName,
        _option(
            _MACHINES, "Which replica gets a request, as with `engine serve --dp`, or which prefill replica."
        ),
    ] = "prefix-affinity",
    fit: Annotated[
        Path | None, _option(_MACHINES, "Decision log with step times that replace the data sheets.")
    ] = None,
    run_number: Annotated[
        int | None,
        _option(
            _MACHINES,
            "With --fit: number of the run, from 1, if the file has several (default: the last with results).",
            "--run",
            metavar="N",
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        _option(
            _MACHINES, "Value of a setting by its name, as in `engine replay`: --set page_size=64.", "--set"
        ),
    ] = None,
    compare: Annotated[
        str | None,
        _option(_OUTPUT, f"Policies to compare, one row each, with commas: {', '.join(_POLICIES)}."),
    ] = None,
    goodput: Annotated[
        str | None, _option(_OUTPUT, "Objectives in ms: 'ttft:500 tpot:50 e2el:30000'.")
    ] = None,
    json_file: Annotated[
        Path | None, _option(_OUTPUT, "File for all results as JSON.", "--json", metavar="FILE")
    ] = None,
    html_file: Annotated[
        Path | None,
        _option(_OUTPUT, "File for a page of pictures, without network.", "--html", metavar="FILE"),
    ] = None,
    *,
    settings: FlagValues,
    asked: WorkloadOptions,
) -> None:
    """Simulate the scheduler under a workload: no model, no GPU, a virtual clock.

    The scheduler is the one of `engine serve`; a cost model replaces the device. MODEL is smollm2-135m, llama-3.2-1b,
    llama-3.1-8b, qwen2.5-32b or llama-3.1-70b, or model files, of which only the configuration is read.

    Example: engine simulate --workload chat --rate 40 --num-requests 5000 --compare static,fcfs,lpm
    """
    from ...simulator.cluster import ClusterSettings
    from ...simulator.cluster import simulate as run
    from ...simulator.setup import context_note, replica_settings
    from ..bench.summary import parse_goodput
    from ..report_page import check_writable
    from .tables import idle_policies, page_of

    for file in (json_file, html_file):
        if file is not None:
            check_writable(file)
    source = asked.source(workload)
    merged = merge_options(_with_changes(settings, changes or []), config_file=config_file)
    facts, machine = _model_facts(model), _device_facts(device, tp)
    cost, note, warning = _cost_model(fit, run_number, facts, machine)
    objectives = parse_goodput(goodput)
    cluster = ClusterSettings(
        num_replicas=replicas,
        num_prefill=prefill_replicas,
        dispatch=dispatch_policy,
        transfer_token_s=facts.kv_token_bytes / machine.network_bandwidth,
    )
    cluster.check()
    if pp > 1 and prefill_replicas:
        raise ConfigError(
            f"--pp is {pp} and --prefill-replicas {prefill_replicas}, but engines with stages hand no KV over; leave "
            f"one of them out"
        )
    reports: list[Report] = []
    cut = ""
    started_s = time.process_time()
    num_expected = asked.num_expected(source)
    with late_progress() as progress:
        for policy, config in _policies(compare, merged):
            settled = replica_settings(config, facts, machine, pp)
            requests = asked.requests(source, settled.capacity.max_model_len)
            if not cut:
                cut = context_note(config, facts)

            def on_progress(done: int, policy: str = policy) -> None:
                progress(f"simulating {policy}", done, num_expected)

            reports.append(
                run(requests, settled, cost, cluster, slo_ms=objectives, name=policy, on_progress=on_progress)
            )
    spent_s = time.process_time() - started_s
    num_simulated = sum(report.num_requests for report in reports)
    note += f"; simulated in {spent_s:.1f} s, {spent_s / max(num_simulated, 1) * 1e6:.0f} us per request"
    each = f"{pp} stages of {machine.name}" if pp > 1 else machine.name
    title = f"{facts.name} on {replicas} x {each}, {source}"
    if cut and any(report.failures for report in reports):
        warning = f"{warning}\n{cut}".strip()
    _print(reports, title, note, warning, has_slo=bool(objectives))
    if json_file is not None:
        _write(json_file, reports)
    if html_file is not None:
        notes = [line for line in (*warning.splitlines(), idle_policies(reports), note) if line]
        page_of(title, reports, notes, has_slo=bool(objectives)).write(html_file)


def _with_changes(settings: FlagValues, changes: list[str]) -> FlagValues:
    """The settings with those of `--set`, which are given by name."""
    result = dict(settings)
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals:
            raise ConfigError(f"--set is {change!r}, but it must be NAME=VALUE, such as schedule_policy=lpm")
        setting = find_setting(key.strip())
        if setting.name not in settings:
            raise ConfigError(
                f"--set {setting.name} has no effect on a simulation; it takes settings of the groups cache and "
                f"scheduler, and max_model_len"
            )
        result[setting.name] = value.strip()
    return result


def _policies(compare: str | None, merged: MergedConfig) -> Iterator[tuple[str, EngineConfig]]:
    """Each policy to simulate, with the configuration that has it."""
    config = merged.config
    if compare is None:
        yield config.scheduler.schedule_policy, config
        return
    names = [name.strip() for name in compare.split(",") if name.strip()]
    for name in names:
        if name not in _POLICIES:
            raise ConfigError(f"--compare has {name!r}, but it must be policies of {', '.join(_POLICIES)}")
    if not names:
        raise ConfigError(f"--compare is {compare!r}, but it must be policies of {', '.join(_POLICIES)}")
    for name in names:
        policy: Any = name  # one of the Literal's values, checked above
        yield name, replace(config, scheduler=replace(config.scheduler, schedule_policy=policy))


def _model_facts(model: str) -> ModelFacts:
    from ...simulator.facts import MODELS, ModelFacts

    if model.lower() in MODELS:
        return MODELS[model.lower()]
    from ...models.hub.built_in.models import find_built_in
    from ...models.load_spec import load_spec
    from ...models.source import hub_name_of, resolve_source

    is_path = Path(model).expanduser().exists()
    if not (is_path or find_built_in(model) or hub_name_of(model)):
        raise ConfigError(
            f"there is no model {model!r}: it must be one of {', '.join(MODELS)}, a folder, a .gguf file or org/repo"
        )
    source = resolve_source(model, need_weights=False, need_tower=False)
    return ModelFacts.of(Path(model).name if is_path else source.name, load_spec(source))


def _device_facts(device: str, tp: int) -> DeviceFacts:
    from ...simulator.facts import DEVICES

    if device not in DEVICES:
        raise ConfigError(f"--device is {device!r}, but it must be one of {', '.join(DEVICES)}")
    if tp < 1:
        raise ConfigError(f"--tp is {tp}, but it must be at least 1")
    return DEVICES[device].times(tp)


def _cost_model(
    fit: Path | None, run_number: int | None, model: ModelFacts, device: DeviceFacts
) -> tuple[CostModel, str, str]:
    """The cost model, a line about it, and a warning; "" if there is none."""
    if fit is None:
        if run_number is not None:
            raise ConfigError(
                "--run chooses a run of a decision log; name the log with --fit, or leave --run out"
            )
        from ...simulator.cost_model import Roofline

        return Roofline(model, device), f"step times: roofline of the data sheets of {device.name}", ""
    from ...simulator.what_if import fit_log

    fitted = fit_log(fit, number=run_number)
    return fitted, f"step times: {fitted.quality.text()}", fitted.quality.warning()


def _print(reports: list[Report], title: str, note: str, warning: str, *, has_slo: bool) -> None:
    from ..console import output_console
    from .tables import note as print_note
    from .tables import print_comparison, print_report

    console = output_console()
    if len(reports) == 1:
        print_report(console, reports[0], title, has_slo=has_slo)
    else:
        print_comparison(console, reports, title, has_slo=has_slo)
    if warning:
        print_note(console, warning, style="bold red")
    print_note(console, note)


def _write(path: Path, reports: list[Report]) -> None:
    import msgspec

    from ..report_page import cannot_write

    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(reports), indent=2) + b"\n")
    except OSError as error:
        raise cannot_write(path, error) from None
