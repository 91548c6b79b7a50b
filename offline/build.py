"""`start_engine`: assembles scheduler, model runner and detokenizer on an `EngineThread`."""

from __future__ import annotations

import gc
import os
import shlex
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..detokenizer.manager import Detokenizer
from ..launch.child.process_resources import shorten_spinning
from ..launch.resolve.memory_budget import capacity_of
from ..launch.resolve.nvidia_gpus import DEVICE_ORDER
from ..launch.resolve.prepare import Prepared
from ..runtime.errors import ConfigError
from ..runtime.messages import Call, LoadAdapter, SchedulerInput
from ..runtime.transport.kv_tiers import TierNews
from .engine import EngineParts, EngineThread

if TYPE_CHECKING:
    from ..models.tokenizer.tokenizer import Tokenizer


def start_engine(prepared: Prepared, tokenizer: Tokenizer, *, on_step: Callable[[str], None]) -> EngineThread:
    """Load the model on a new engine thread; returns when it can generate.

    Args:
        prepared: the resolved configuration and the model's files.
        tokenizer: of the model; shared with the engine thread.
        on_step: called with the name of each step, on the engine thread.

    Raises:
        ConfigError: the weights are incomplete, damaged, or of another architecture, or the decision log cannot be
            written; or the configuration has several ranks, which need processes.
    """
    config, spec = prepared.config, prepared.spec
    if config.scheduler.disaggregation_mode != "null":
        raise ConfigError(
            f"disaggregation_mode is {config.scheduler.disaggregation_mode}, but an engine inside this process talks "
            "to no other engine; start `engine serve`"
        )
    if config.parallel.dp > 1:
        raise ConfigError(
            f"dp is {config.parallel.dp}, but an engine inside this process is one replica; start `engine serve "
            f"{shlex.quote(config.model.model)} --dp {config.parallel.dp}` and use its HTTP API"
        )
    for name, size in (("tp", config.parallel.tp), ("pp", config.parallel.pp)):
        if size > 1:
            raise ConfigError(
                f"{name} is {size}, but an engine inside this process has one rank; start `engine serve "
                f"{shlex.quote(config.model.model)} --{name} {size}` and use its HTTP API"
            )

    if config.log.decision_log is not None:
        from ..scheduler.journal.log_writer import check_log_file

        check_log_file(config.log.decision_log)  # loading the weights takes seconds

    from ..scheduler.kv_stores.open_tier import check_tier, open_tier

    tier = check_tier(config.cache)  # before the weights are loaded

    def build(send: Callable[[SchedulerInput], None]) -> EngineParts:
        from ..model_runner.kernels.cpu.build import compile_ahead

        compile_ahead(config.model.device, on_step)
        on_step("import torch")
        shorten_spinning()
        os.environ.update(DEVICE_ORDER)  # read by CUDA when the first GPU is used
        from ..model_runner.load import load_model_runner
        from ..scheduler.grammar.grammar_builder import make_grammars
        from ..scheduler.journal.recorder import make_recorder
        from ..scheduler.pipeline import Pipeline
        from ..scheduler.preemption.chaos import with_chaos
        from ..scheduler.scheduler import Scheduler

        on_step("load weights")
        runner = load_model_runner(config, prepared.source, spec, capacity_of(config, spec))
        capacity, eos_token_ids = runner.capacity, frozenset(spec.eos_token_ids)
        grammars = make_grammars(lambda: tokenizer, capacity.vocab_size, spec.eos_token_ids)
        mover = None
        scheduler = Scheduler(config.scheduler, config.cache, capacity, eos_token_ids, matchers=grammars)
        gc.collect()  # loading leaves garbage in cycles; collect it before the first request
        recorder = make_recorder(
            config, capacity, eos_token_ids, scheduler, wall_s=time.time(), now_s=time.monotonic()
        )
        overlap = config.scheduler.overlap
        assert overlap != "auto"
        faulty = with_chaos(runner, config.scheduler, capacity.page_size)
        pipeline = Pipeline(
            scheduler,
            faulty,
            recorder,
            time.monotonic,
            overlap=overlap,
            grammars=grammars,
            adapters=None if runner.adapters is None else runner.adapters.store,
        )
        if tier is not None:
            mover = open_tier(
                tier,
                config,
                prepared.source,
                spec,
                runner,
                lambda: _News(send),
                None,
                scheduler,
            )
        try:
            if mover is not None:
                mover.wait_until_open()  # a script asks at once, and only once
            for adapter in prepared.adapters:
                pipeline.handle(Call(0, LoadAdapter(adapter.store_id, adapter.spec)))
            pipeline.finish_reads()
        except BaseException:
            if mover is not None:
                mover.close()
            raise
        return EngineParts(
            scheduler,
            pipeline,
            Detokenizer(tokenizer),
            capacity,
            recorder,
            mover,
            config.server.drain_timeout,
        )

    return EngineThread(build)


class _News:
    """The way of a tier's answers into the engine thread's inbox."""

    def __init__(self, send: Callable[[SchedulerInput], None]) -> None:
        self._send = send

    def send(self, message: TierNews) -> None:
        self._send(message)

    def close(self) -> None:
        """Nothing is open."""
