"""The engine: an inference engine for large language models, with API, scheduler, models and kernels.

The repository root is this package. Public names are imported on first use, so that `import engine` and the command
line cost milliseconds, not the seconds that torch takes. Nothing is imported relatively when this file is loaded: test
runners also load it under the name of the checkout's folder.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .offline.llm import LLM as LLM
    from .runtime.config.engine_config import EngineConfig as EngineConfig
    from .runtime.errors import ConfigError as ConfigError
    from .runtime.errors import EngineDeadError as EngineDeadError
    from .runtime.errors import EngineError as EngineError
    from .runtime.errors import RequestError as RequestError
    from .runtime.installation import __version__ as __version__
    from .runtime.sampling_params import SamplingParams as SamplingParams

_HOME_OF = {
    "LLM": ".offline.llm",
    "EngineConfig": ".runtime.config.engine_config",
    "ConfigError": ".runtime.errors",
    "EngineDeadError": ".runtime.errors",
    "EngineError": ".runtime.errors",
    "RequestError": ".runtime.errors",
    "SamplingParams": ".runtime.sampling_params",
    "__version__": ".runtime.installation",
}

__all__ = [
    "LLM",
    "ConfigError",
    "EngineConfig",
    "EngineDeadError",
    "EngineError",
    "RequestError",
    "SamplingParams",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name], __name__), name)
