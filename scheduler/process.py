"""The scheduler process: decisions, memory accounting, and the model runner of rank 0."""

from __future__ import annotations

import gc
import time

import msgspec

from ..model_runner.load import load_model_runner
from ..runtime.child import Child
from ..runtime.feasibility import capacity_of
from ..runtime.ipc import Inbox, Outbox
from ..runtime.messages import SchedulerInput
from .event_loop import EventLoop
from .recorder import make_recorder
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
    eos_token_ids = frozenset(spec.eos_token_ids)
    scheduler = Scheduler(config.scheduler, config.cache, capacity, eos_token_ids)
    # Before the weights: a log that cannot be written is known at once, and not after minutes of loading.
    recorder = make_recorder(
        config, capacity, eos_token_ids, scheduler, wall_s=time.time(), now_s=time.monotonic()
    )
    runner = load_model_runner(config.model, config.cache, settings.source, spec, capacity)
    # What exists now stays; the collector need not look at it again in the middle of a step.
    gc.collect()
    gc.freeze()
    gc.enable()

    step_log = StepLog(config.log.log_interval)
    overlap = config.scheduler.overlap
    assert overlap != "auto", "the configuration is not resolved"
    loop = EventLoop(scheduler, runner, inbox, outbox, child, step_log, recorder=recorder, overlap=overlap)
    child.ready(capacity=capacity, load_s=f"{time.monotonic() - started_s:.2f}")
    loop.run()
