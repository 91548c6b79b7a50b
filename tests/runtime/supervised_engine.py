"""`python supervised_engine.py BEHAVIOURS SERVER_CONFIG`: an engine of fake rooms under a real supervisor.

Prints one JSON line when ready and one at the end, and leaves with the supervisor's exit code.
"""

from __future__ import annotations

import json
import sys

from engine.runtime.config import EngineConfig, LogConfig, ModelConfig, ServerConfig
from engine.runtime.control import Role
from engine.runtime.logs import configure_logging
from engine.runtime.model_files.model_spec import ModelSpec
from engine.runtime.model_files.source import ModelSource
from engine.runtime.supervisor import EngineReady, Supervisor

SPEC = ModelSpec(
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


def main() -> None:
    behaviours, server = sys.argv[1:]
    configure_logging(LogConfig(), "supervisor")
    # Children import from where this process does: this folder, where `fake_room` is, is on its path.
    config = EngineConfig(
        model=ModelConfig(served_model_name=behaviours), server=ServerConfig(**json.loads(server))
    )
    rooms = dict.fromkeys(Role, "fake_room")
    source = ModelSource("hf", "/nowhere", "fake")
    outcome = Supervisor(config, source, SPEC, on_ready, rooms).run()
    tell(outcome._asdict())
    sys.exit(outcome.exit_code)


main()
