"""`/api/tags`, `/api/ps`, `/api/show`, `/api/version`, `/`, and the endpoints that answer 501."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Final

from msgspec import UNSET

from ....models.weight_files.weight_memory import num_parameters, weight_bytes
from ....runtime.errors import RequestError
from ..exchange import Exchange
from ..framing import line
from ..schema.values import convert
from ..services import Engine, ServerFacts
from .convert import CONTENT_TYPE
from .wire import (
    OWN_NAMES,
    PULL_POLICY,
    SHOW_POLICY,
    ModelDetails,
    OllamaPullRequest,
    OllamaShowRequest,
    PullBody,
    RunningBody,
    RunningModel,
    ShowBody,
    TaggedModel,
    TagsBody,
    VersionBody,
)

_GREETING: Final = b"Ollama is running"
"""Clients look for this text."""
_VERSION: Final = "0.14.1"
"""The release of Ollama with the endpoints that are served here, `/v1/responses` and `/v1/messages` too. Clients refuse
servers with a lower version than the first that has what they use."""
_NEVER: Final = "9999-12-31T23:59:59Z"
OTHER_MODELS: Final = "this server serves one model, which is chosen when it starts"
_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


async def greeting(exchange: Exchange, engine: Engine) -> None:
    """Says that a server is there."""
    await exchange.send_bytes(_GREETING, b"text/plain; charset=utf-8")


async def tags(exchange: Exchange, engine: Engine) -> None:
    """The list of models, which has one."""
    name = engine.served_model
    await exchange.send_json(
        TagsBody(
            [
                TaggedModel(
                    name=name,
                    model=name,
                    modified_at=_modified_at(engine),
                    size=_size(engine),
                    digest=_digest(engine),
                    details=_details(engine),
                )
            ]
        )
    )


async def running(exchange: Exchange, engine: Engine) -> None:
    """The loaded models."""
    name, size = engine.served_model, _size(engine)
    await exchange.send_json(
        RunningBody(
            [
                RunningModel(
                    name=name,
                    model=name,
                    size=size,
                    size_vram=0 if engine.config.model.device == "cpu" else size,
                    digest=_digest(engine),
                    details=_details(engine),
                    expires_at=_NEVER,
                    context_length=engine.manager.capacity.max_model_len,
                )
            ]
        )
    )


async def show(exchange: Exchange, engine: Engine) -> None:
    """Facts about the model, and what it can do."""
    body = await engine.read_object(exchange)
    warnings = SHOW_POLICY.check(body, strict=engine.config.server.strict)
    request = convert(body, OllamaShowRequest)
    engine.check_model(request.model or request.name)
    spec = engine.spec
    family = spec.model_type
    await exchange.send_json(
        ShowBody(
            modelfile=f"FROM {engine.served_model}\n",
            parameters=_parameters(engine),
            template="" if engine.renderer is None else engine.renderer.template.source,
            details=_details(engine),
            model_info={
                "general.architecture": family,
                "general.basename": engine.served_model,
                "general.parameter_count": num_parameters(spec),
                f"{family}.context_length": engine.manager.capacity.max_model_len,
                f"{family}.embedding_length": spec.hidden_size,
                f"{family}.block_count": spec.num_layers,
                f"{family}.attention.head_count": spec.num_heads,
                f"{family}.attention.head_count_kv": spec.num_kv_heads,
            },
            capabilities=_capabilities(engine),
            modified_at=_modified_at(engine),
            warnings=warnings or UNSET,
        )
    )


async def pull(exchange: Exchange, engine: Engine) -> None:
    """Says that the served model is there, under every name that requests may have: clients pull before they ask."""
    body = await engine.read_object(exchange)
    warnings = PULL_POLICY.check(body, strict=engine.config.server.strict)
    request = convert(body, OllamaPullRequest)
    try:
        engine.check_model(request.model or request.name)
    except RequestError as error:
        raise _not_available("/api/pull", f"{OTHER_MODELS}; {error.message}") from None
    done = PullBody(warnings=warnings or UNSET)
    if request.stream is False:
        await exchange.send_json(done)
    else:
        await exchange.send_bytes(line(done), CONTENT_TYPE)


async def ollama_version(exchange: Exchange, engine: Engine) -> None:
    """The version of Ollama's API; that of the engine is in `/version`."""
    await exchange.send_json(VersionBody(_VERSION))


def unavailable(path: str, why: str, api: str) -> Callable[[Exchange, Engine], Awaitable[None]]:
    """A handler of a route of another server that answers 501."""

    async def answer(exchange: Exchange, engine: Engine) -> None:
        raise _not_available(path, why)

    answer.__name__ = api + "".join("_" if not each.isalnum() else each for each in path)
    return answer


def _not_available(path: str, why: str) -> RequestError:
    return RequestError(f"{path} is not available here: {why}", code="not_implemented", status=501)


def _parameters(facts: ServerFacts) -> str:
    """The sampling defaults of the model's files under Ollama's names, one a line."""
    values = facts.sampling_defaults.values()
    return "\n".join(f"{OWN_NAMES.get(name, name):<24} {value:g}" for name, value in values.items())


def _capabilities(engine: Engine) -> list[str]:
    formats = engine.planner.formats
    return [
        "completion",
        *(["vision"] if engine.images.are_seen else []),
        *(["tools"] if engine.renderer is not None and formats.tools is not None else []),
        *(["thinking"] if formats.reasoning is not None else []),
    ]


def _details(facts: ServerFacts) -> ModelDetails:
    spec = facts.spec
    quantization = spec.quantization
    level = str(facts.config.model.dtype) if quantization is None else quantization.method
    types = {} if quantization is None else quantization.types
    if types:  # of a GGUF file: the format of most modules
        level = Counter(types.values()).most_common(1)[0][0]
    return ModelDetails(
        format="gguf" if types or str(facts.config.model.model).endswith(".gguf") else "safetensors",
        family=spec.model_type,
        families=[spec.model_type],
        parameter_size=_short(num_parameters(spec)),
        quantization_level=level,
    )


def _short(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 1_000_000_000 else f"{count / 1e6:.0f}M"


def _size(facts: ServerFacts) -> int:
    """Bytes of the weights: quantized, or in the serving dtype."""
    return weight_bytes(facts.spec, _BYTES.get(str(facts.config.model.dtype), 2))


def _digest(facts: ServerFacts) -> str:
    """Tells models apart; it is no digest of the weights."""
    return hashlib.sha256(f"{facts.served_model} {facts.spec!r}".encode()).hexdigest()


def _modified_at(facts: ServerFacts) -> str:
    return datetime.fromtimestamp(facts.created_s, UTC).isoformat().replace("+00:00", "Z")
