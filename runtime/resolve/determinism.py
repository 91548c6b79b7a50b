"""`check_deterministic`: refuse what cannot keep the promise of `--deterministic`.

The promise: with the same weights on the same machine, a request's tokens and log-probabilities are the same to the
last bit alone or among others, whatever is cached, wherever its prompt is cut, and after it lost its place and was
computed again. (A request that draws must bring a seed, or the engine have one, to draw the same tokens again.)

It holds because every operation then computes a token from the tokens before it in one fixed order. Our CPU kernels do:
products are one chain of additions for each output (blocks of 4 or 8 bits then in one way for any number of tokens),
norms, activations and rotary see one token, attention reads keys in blocks that begin at fixed positions, and the
sampler looks at one row. So drafts change nothing, either. What other libraries compute may be cut otherwise for
another number of tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..config.engine_config import EngineConfig
    from ..model_files.model_spec import ModelSpec


def check_deterministic(config: EngineConfig, spec: ModelSpec) -> None:
    """Check a resolved configuration; whether the kernels can run here, the runner knows (`fixed_order`).

    Raises:
        ConfigError: it asks for `--deterministic` and for something whose bits depend on the batch; names all of it.
    """
    if not config.kernels.deterministic:
        return
    model, found = config.model, []
    if model.device != "cpu":
        found.append(f"device is {model.device}, whose kernels promise no order of sums; use --device cpu")
    if model.dtype != "bfloat16":
        found.append(
            f"dtype is {model.dtype}, whose products are oneDNN's, cut by the number of tokens; use --dtype bfloat16"
        )
    if model.model_impl == "transformers":
        found.append(
            f"{spec.model_type} is computed by transformers, with torch's products; use --model-impl engine"
        )
    if config.parallel.tp > 1:
        found.append(
            f"tp is {config.parallel.tp}, and sums over ranks are cut by the number of tokens; use --tp 1"
        )
    if config.kernels.attention_backend not in (None, "native"):
        found.append(
            f"attention_backend is {config.kernels.attention_backend}, and only native's blocks begin at fixed "
            "positions; leave --attention-backend away"
        )
    if found:
        raise ConfigError(f"deterministic is on, but {'; and '.join(found)}; or leave --deterministic away")
