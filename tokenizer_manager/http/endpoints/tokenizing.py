"""`POST /tokenize` and `POST /detokenize`: text to token ids, and back."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from ....models.tokenizer.tokenizer import Tokenizer
from ....runtime.errors import RequestError
from ...conversation.conversation import Conversation
from ...prompt_encoder import NO_BOS, second_bos
from ..exchange import Exchange
from ..openai.messages import checked_template_variables, template_messages
from ..openai.tools import tools_of
from ..schema.field_policy import FieldPolicy
from ..schema.values import Body, convert, refused
from ..services import Engine
from .wire import (
    DetokenizeRequest,
    PinRequest,
    TextBody,
    TokenizeRequest,
    TokenPiece,
    TokensBody,
)

_TOKENIZE_POLICY: Final = FieldPolicy(TokenizeRequest, {"parse_special": (True,)})
_DETOKENIZE_POLICY: Final = FieldPolicy(DetokenizeRequest, {})


async def tokenize(exchange: Exchange, engine: Engine) -> None:
    """Token ids of a prompt or of a rendered chat, with the tokenized text."""
    made = await engine.read(exchange, lambda body: _read(body, engine))
    request = made.request
    async with exchange.abort_on_disconnect():
        if request.content is not None:
            await exchange.send_json(await _pieces(engine, request.content, request, made.warnings))
            return
        if made.messages is not None:
            plan = await engine.plan_chat(
                rendered_conversation(
                    request,
                    made.messages,
                    made.warnings,
                    add_generation_prompt=request.add_generation_prompt is not False,
                )
            )
            placed = await engine.placed(plan, "messages")
            engine.images.release(placed.media)
            text, ids = placed.text, placed.ids
            add_special_tokens, param = bool(request.add_special_tokens), "messages"
        else:
            text, ids = request.prompt or "", None
            add_special_tokens, param = request.add_special_tokens is not False, "prompt"
        if ids is None:
            [ids] = await engine.encoder.encode([text], add_special_tokens=add_special_tokens, param=param)
        warnings = made.warnings + _left_out_warnings(await engine.encoder.left_out(text, ids))
        if add_special_tokens:
            warnings += second_bos(engine.tokenizer, [text], [ids], param, NO_BOS)
        await exchange.send_json(
            _EncodedTokensBody(
                tokens=msgspec.Raw(await engine.encoder.json_of(ids)),
                count=len(ids),
                max_model_len=engine.manager.capacity.max_model_len,
                prompt=text,
                warnings=warnings or UNSET,
            )
        )


async def _pieces(
    engine: Engine, content: str, request: TokenizeRequest, warnings: list[str]
) -> TokensBody | _EncodedTokensBody:
    [ids] = await engine.encoder.encode(
        [content], add_special_tokens=bool(request.add_special), param="content"
    )
    warnings = warnings + _left_out_warnings(await engine.encoder.left_out(content, ids))
    if not request.with_pieces:
        encoded = msgspec.Raw(await engine.encoder.json_of(ids))
        return _EncodedTokensBody(tokens=encoded, warnings=warnings or UNSET)
    if len(ids) > (limit := engine.manager.capacity.max_model_len):
        raise refused(
            "content", f"has {len(ids)} tokens, but with_pieces takes {limit}, those of a prompt; send less"
        )
    pieces: list[int | TokenPiece] = [TokenPiece(each, _piece(engine.tokenizer, each)) for each in ids]
    return TokensBody(tokens=pieces, warnings=warnings or UNSET)


def _piece(tokenizer: Tokenizer, token_id: int) -> str | list[int]:
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def _left_out_warnings(left_out: dict[str, int]) -> list[str]:
    if not left_out:
        return []
    names = ", ".join(f"U+{ord(char):04X} ({count} times)" for char, count in left_out.items())
    return [f"the model's vocabulary has no token for these characters, they are left out: {names}"]


class _EncodedTokensBody(msgspec.Struct, kw_only=True):
    """`TokensBody` with ids that are JSON already: millions of them are encoded off the event loop."""

    tokens: msgspec.Raw
    count: int | UnsetType = UNSET
    max_model_len: int | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


assert _EncodedTokensBody.__struct_fields__ == TokensBody.__struct_fields__


class _Checked(NamedTuple):
    """A checked body; `messages` is None for a prompt."""

    request: TokenizeRequest
    messages: list[dict[str, Any]] | None
    warnings: list[str]


def _read(body: Body, engine: Engine) -> _Checked:
    strict = engine.config.server.strict
    warnings = _TOKENIZE_POLICY.check(body, strict=strict)
    request = convert(body, TokenizeRequest)
    engine.check_model(request.model)
    if not request.messages and (request.prompt, request.content) != (None, None):
        request.messages = None  # an empty list asks for nothing
    if not request.content and (request.prompt, request.messages) != (None, None):
        request.content = None
    if [request.prompt, request.messages, request.content].count(None) != 2:
        raise RequestError(
            "prompt, messages and content are forms of the input; send exactly one",
            param="prompt",
            code="invalid_value",
        )
    if request.messages is None:
        return _Checked(request, None, warnings)
    messages, more_warnings = template_messages(
        request.messages, strict=strict, limits=engine.config.limits, sees_images=engine.images.are_seen
    )
    return _Checked(request, messages, warnings + more_warnings)


async def detokenize(exchange: Exchange, engine: Engine) -> None:
    """Text of token ids."""
    body = await engine.read_object(exchange)
    warnings = _DETOKENIZE_POLICY.check(body, strict=engine.config.server.strict)
    request = convert(body, DetokenizeRequest)
    engine.check_model(request.model)
    limit = engine.manager.capacity.max_model_len
    if len(request.tokens) > limit:
        raise RequestError(
            f"tokens has {len(request.tokens)} ids, but a text of this model has at most {limit}; send fewer at once",
            param="tokens",
            code="invalid_value",
        )
    text = await engine.encoder.decode(
        request.tokens, skip_special_tokens=bool(request.skip_special_tokens), param="tokens"
    )
    await exchange.send_json(TextBody(text=text, prompt=text, content=text, warnings=warnings or UNSET))


def rendered_conversation(
    request: TokenizeRequest | PinRequest,
    messages: list[dict[str, Any]],
    warnings: list[str],
    *,
    add_generation_prompt: bool,
) -> Conversation:
    """The conversation of a request that is only rendered; `warnings` get those about its tools.

    Raises:
        RequestError: a tool is invalid.
    """
    return Conversation(
        messages=messages,
        tools=tools_of(request.tools or (), "tools", warnings),
        variables=checked_template_variables(request.chat_template_kwargs),
        add_generation_prompt=add_generation_prompt,
    )
