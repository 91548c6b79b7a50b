"""The scheduler process: decisions, memory accounting, and the model runner of rank 0."""

from __future__ import annotations

import gc
import time

import msgspec

from ..model_runner.load import load_model_runner
from ..runtime.child import Child
from ..runtime.config import EngineConfig
from ..runtime.feasibility import Capacity
from ..runtime.ipc import Inbox, Outbox
from ..runtime.messages import SchedulerInput
from ..runtime.model_files.model_spec import ModelSpec
from .event_loop import EventLoop
from .scheduler import Scheduler
from .step_log import StepLog


def main(child: Child) -> None:
    """Load the model, then schedule until the supervisor says stop."""
    settings = child.settings
    config, spec = settings.config, settings.spec
    decoder: msgspec.msgpack.Decoder[SchedulerInput] = msgspec.msgpack.Decoder(SchedulerInput)
    inbox = Inbox(settings.endpoints.scheduler, decoder, wake=child)
    outbox = Outbox(settings.endpoints.detokenizer)

    started_s = time.monotonic()
    capacity = capacity_of(config, spec)
    runner = load_model_runner(config.model, config.cache, settings.source, spec, capacity)
    scheduler = Scheduler(config.scheduler, config.cache, capacity, frozenset(spec.eos_token_ids))
    # What exists now stays; the collector need not look at it again in the middle of a step.
    gc.collect()
    gc.freeze()

    step_log = StepLog(config.log.log_interval)
    loop = EventLoop(scheduler, runner, inbox, outbox, child, step_log)
    child.ready(capacity=capacity, load_s=f"{time.monotonic() - started_s:.2f}")
    loop.run()


def capacity_of(config: EngineConfig, spec: ModelSpec) -> Capacity:
    """What a scheduler with this resolved configuration can hold."""
    max_model_len, max_total_tokens = config.model.max_model_len, config.cache.max_total_tokens
    max_running_requests = config.scheduler.max_running_requests
    assert isinstance(max_model_len, int), "the configuration is not resolved"
    assert isinstance(max_total_tokens, int), "the configuration is not resolved"
    assert isinstance(max_running_requests, int), "the configuration is not resolved"
    return Capacity(
        max_model_len=max_model_len,
        num_pages=max_total_tokens // config.cache.page_size,
        page_size=config.cache.page_size,
        max_running_requests=max_running_requests,
        vocab_size=spec.vocab_size,
    )
