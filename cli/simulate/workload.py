"""`WorkloadOptions`: the workload options of `engine simulate`, and which options each workload accepts."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from ...runtime.errors import ConfigError

if TYPE_CHECKING:
    from ...simulator.agent_workload import Agents
    from ...simulator.generated_workloads import Arrival
    from ...simulator.sim_request import Workload

WORKLOAD: Final = "Workload"
"""The title of these options in `--help`."""
GIVEN_LENGTHS: Final = "given lengths"
_DEFAULT_OUTPUT_LENS: Final = "100"
_MEDIANS: Final = frozenset({"prompt_len", "output_len"})
_MOMENTS: Final = frozenset({"rate", "burstiness"})
_OF_TRACES: Final = frozenset({"time_scale", "trace_block_size", "trace_time_unit"})
_GENERATED: Final = frozenset({"num_requests", "workload_seed"})
_AGENTS: Final = "agents"


def _workload(help_text: str) -> Any:
    return typer.Option(help=help_text, rich_help_panel=WORKLOAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """As given; None if not given. An option without an effect on its workload is an error."""

    num_requests: Annotated[
        int | None, _workload("Number of requests (default: 1000); at most this many of a trace.")
    ] = None
    rate: Annotated[
        float | None,
        _workload("Mean arrivals per second over all replicas (default: 10); inf: all at once."),
    ] = None
    burstiness: Annotated[
        float | None,
        _workload("1 (the default): Poisson arrivals; below 1: burstier; above 1: more even."),
    ] = None
    workload_seed: Annotated[int | None, _workload("Seed of lengths, prompts and arrivals (default: 0).")] = (
        None
    )
    prompt_len: Annotated[
        int | None,
        _workload(
            "Median length in tokens of questions (chat), documents (rag), items (batch), or tools' results (agents, "
            "with which all their lengths scale).",
        ),
    ] = None
    num_agents: Annotated[
        int | None, _workload("Agents at work at a time (default: 16); each waits for its answers.")
    ] = None
    output_len: Annotated[int | None, _workload("Median length of outputs, in tokens.")] = None
    prompt_lens: Annotated[str | None, _workload("Exact prompt lengths instead, repeated: 10,50,20.")] = None
    output_lens: Annotated[
        str | None, _workload("Exact output lengths for --prompt-lens, repeated (default: 100).")
    ] = None
    time_scale: Annotated[float | None, _workload("Divisor of the times of a trace; 2: twice the rate.")] = (
        None
    )
    trace_block_size: Annotated[
        int | None,
        _workload("Tokens per hash id of a trace (default: 512, as Mooncake's; 16 for Qwen's traces)."),
    ] = None
    trace_time_unit: Annotated[
        Literal["s", "ms", "us"] | None,
        _workload("Unit of the timestamps of a trace (default: ms for Mooncake's, s for others)."),
    ] = None

    def source(self, workload: str | None) -> str:
        """The source of the requests: `GIVEN_LENGTHS`, the name of a generated workload, or a path.

        Raises:
            ConfigError: there is no such workload, or it does not accept an option.
        """
        from ...simulator.generated_workloads import GENERATED
        from ...simulator.trace_files import kind_of

        if self.prompt_lens is not None:
            if workload is not None:
                raise ConfigError(
                    f"--workload {workload} and --prompt-lens are two workloads; leave one of them out"
                )
            return self._only(_GENERATED | _MOMENTS | {"prompt_lens", "output_lens"}, GIVEN_LENGTHS)
        name = workload or "chat"
        if name == _AGENTS:
            return self._only(
                _GENERATED | {"num_agents", "prompt_len"}, name, "an answer brings the next turn"
            )
        if name in GENERATED:
            # All items of a batch come at once.
            moments = frozenset[str]() if name == "batch" else _MOMENTS
            return self._only(_GENERATED | _MEDIANS | moments, name)
        path = Path(name).expanduser()
        if not path.exists():
            raise ConfigError(
                f"--workload is {name!r}, but it must be one of {', '.join([*GENERATED, _AGENTS])}, or a file"
            )
        if kind_of(path).is_timed:
            return self._only(_OF_TRACES | {"num_requests"}, name, "a trace has its own times and lengths")
        return self._only(_GENERATED | _MOMENTS, name, "conversations have their own lengths, and no times")

    def requests(self, source: str, max_model_len: int) -> Workload:
        """The requests; each call starts from the first one. `max_model_len`: of the engine; bounds agents' sessions.

        Raises:
            ConfigError: an invalid value, or a file that cannot be read.
        """
        from ...simulator.file_workloads import file_requests
        from ...simulator.generated_workloads import GENERATED, given_lengths, with_medians
        from ...simulator.trace_files import TraceOptions

        arrival = self._arrival()
        if self.prompt_lens is not None:
            output_lens = self.output_lens if self.output_lens is not None else _DEFAULT_OUTPUT_LENS
            return given_lengths(
                _lens("--prompt-lens", self.prompt_lens), _lens("--output-lens", output_lens), arrival
            )
        if source == _AGENTS:
            return replace(self._agents(), max_model_len=max_model_len).requests(arrival)
        if source in GENERATED:
            return with_medians(GENERATED[source], self.prompt_len, self.output_len).requests(arrival)
        options = TraceOptions(self.trace_block_size, self.trace_time_unit, self.time_scale)
        return file_requests(Path(source).expanduser(), arrival, options)

    def num_expected(self, source: str) -> int:
        """The number of requests; 0 if only the file says it."""
        is_file = source != GIVEN_LENGTHS and self.prompt_lens is None and Path(source).expanduser().exists()
        return self.num_requests or (0 if is_file else self._arrival().num_requests)

    def _agents(self) -> Agents:
        """The agents, with all lengths scaled so that the results of tools have the median of --prompt-len."""
        from ...simulator.agent_workload import RESULT, Agents

        agents = Agents() if self.num_agents is None else Agents(num_agents=self.num_agents)
        if self.prompt_len is None:
            return agents
        if self.prompt_len < 1:
            raise ConfigError(f"--prompt-len is {self.prompt_len}, but it must be at least 1")
        return replace(agents, scale=self.prompt_len / RESULT.median)

    def _arrival(self) -> Arrival:
        from ...simulator.generated_workloads import Arrival

        given = {
            "num_requests": self.num_requests,
            "rate": self.rate,
            "burstiness": self.burstiness,
            "seed": self.workload_seed,
        }
        return Arrival(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]

    def _only(self, known: frozenset[str], source: str, why: str = "") -> str:
        """`source`, if all given options are in `known`."""
        for field in fields(self):
            if field.name not in known and getattr(self, field.name) is not None:
                flag = f"--{field.name.replace('_', '-')}"
                if field.name == "output_lens":
                    why = "it goes with --prompt-lens"
                elif field.name in _OF_TRACES:
                    why = "only a trace has times"
                elif source == "batch":
                    why = "all its requests come at once"
                reason = f": {why}" if why else ""
                raise ConfigError(f"{flag} has no effect on the workload {source!r}{reason}; leave it out")
        return source


def _lens(flag: str, text: str) -> list[int]:
    try:
        return [int(item) for item in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag} is {text!r}, but it must be lengths, such as 10,50,20") from None
