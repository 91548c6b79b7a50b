"""`python supervised_engine.py JSON`: an engine under a real supervisor, for tests.

The argument has `server`, fields of `ServerConfig`, and either `behaviors` of fake processes and `tp`, or `model`, a
folder with which scheduler and detokenizer are the real ones and the tokenizer manager is `fake_client`.
`an_hour_after` names a note and a child: once both are there, the supervisor's clock goes an hour ahead.

Prints one JSON line when ready and one at the end, and leaves with the supervisor's exit code.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from engine.launch.child.control import Role
from engine.models.load_spec import load_spec
from engine.models.source import ModelSource
from engine.models.spec.model_spec import ModelSpec
from engine.runtime.config.device_config import ParallelConfig
from engine.runtime.config.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.runtime.config.server_config import LogConfig, ServerConfig
from engine.runtime.logs import configure_logging
from engine.supervisor import recovery
from engine.supervisor.supervisor import PROCESS_MODULES, EngineReady, Supervisor

FAKE_SPEC = ModelSpec(
    model_type="llama",
    vocab_size=100,
    hidden_size=8,
    intermediate_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    max_position_embeddings=64,
    tie_word_embeddings=True,
    torch_dtype="float32",
)


def tell(values: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def on_ready(ready: EngineReady) -> None:
    tell({"url": ready.url, "num_pages": ready.capacity.num_pages, "details": ready.details})


def fake_supervisor(behaviors: str, server: ServerConfig, tp: int) -> Supervisor:
    config = EngineConfig(
        model=ModelConfig(served_model_name=behaviors), server=server, parallel=ParallelConfig(tp=tp)
    )
    # Children import from where this process does: this folder, where `fake_room` is, is on its path.
    modules = dict.fromkeys(Role, "fake_room")
    listener = socket.create_server(("127.0.0.1", 0))

    def before_serving() -> None:
        assert not (Path(os.environ["TMPDIR"]) / "life-0").exists(), "the tokenizer manager serves already"
        listener.close()

    return Supervisor(
        config,
        ModelSource("hf", "/nowhere", "fake"),
        FAKE_SPEC,
        on_ready,
        modules,
        listener_fd=listener.fileno(),
        before_serving=before_serving,
    )


def real_supervisor(folder: str, server: ServerConfig) -> Supervisor:
    config = EngineConfig(
        model=ModelConfig(
            model=folder,
            max_model_len=512,
            dtype="float32",
            load_format="dummy",
            device="cpu",
            num_threads=1,
            seed=1,
        ),
        cache=CacheConfig(max_total_tokens=1024, mem_fraction=0.5, swap_space=0.0),
        # Slow, so that an abort comes before the end on any machine.
        scheduler=SchedulerConfig(
            max_running_requests=4, chunked_prefill_size=64, overlap=False, chaos="slow=0.02"
        ),
        server=server,
    )
    source = ModelSource("hf", folder, "tiny")
    modules = {**PROCESS_MODULES, Role.TOKENIZER_MANAGER: "fake_client"}
    return Supervisor(config, source, load_spec(source), on_ready, modules)


def go_an_hour_ahead(note: str, child: str) -> None:
    """Time-outs of the start without waiting for them, when the other children are where the test wants them."""
    true_clock, ready = time.monotonic, set[str]()

    def listen(record: logging.LogRecord) -> bool:
        if str(record.msg).startswith("child ready"):
            ready.update(map(str, record.args or ()))
        return True

    def clock() -> float:
        is_late = child in ready and (Path(os.environ["TMPDIR"]) / note).exists()
        return true_clock() + 3600.0 * is_late

    child_watch = logging.getLogger("engine.supervisor.child_watch")
    child_watch.setLevel(logging.DEBUG)
    child_watch.addFilter(listen)
    time.monotonic = clock


def main() -> None:
    arguments: dict[str, Any] = json.loads(sys.argv[1])
    configure_logging(LogConfig(), "supervisor")
    if "an_hour_after" in arguments:
        go_an_hour_ahead(*arguments["an_hour_after"])
    server = ServerConfig(**arguments["server"])
    recovery.STANDBY_AFTER_S = 0.0  # type: ignore[misc]
    if "model" in arguments:
        supervisor = real_supervisor(arguments["model"], server)
    else:
        supervisor = fake_supervisor(arguments["behaviors"], server, arguments["tp"])
    outcome = supervisor.run()
    tell(outcome._asdict())
    sys.exit(outcome.exit_code)


main()
