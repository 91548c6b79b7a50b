"""`AccessLog`: one line for each finished request (`--log-requests`); never prompt text.

    request id=cmpl-3f2a endpoint=/v1/completions status=200 prompt=812 cached=768 output=64 ttft_ms=41 \
rate_tok_s=62.3 duration_ms=1052 finish=stop request_id=7d1c

`request_id` is the client's `X-Request-Id`, which proxies log as well, or one that the server made. With `--log-format
json` the names are keys; on a terminal the line has at most 110 columns, see `TerminalFormatter`. Requests that
generate nothing have id, endpoint, status and duration; GET requests, which probes and dashboards repeat all the time,
have no line.
"""

from __future__ import annotations

import logging
from http import HTTPStatus

from ..generation import Choice, Generation
from .exchange import Exchange
from .schema.values import show

logger = logging.getLogger(__name__)

_GENERATION = (
    "request id=%s endpoint=%s status=%d prompt=%d cached=%d output=%d ttft_ms=%s rate_tok_s=%s duration_ms=%.0f "
    "finish=%s request_id=%s"
)
_LESS_OF_ERRORS = ("endpoint", "rate_tok_s", "request_id", "cached", "duration_ms")
_LESS = ("status", *_LESS_OF_ERRORS)
"""Fields that a line on a terminal can lack, the first ones first: `id` names the API, `finish` implies the status."""


class NoAccessLog:
    """Logs nothing."""

    def ended(self, exchange: Exchange, ended_s: float) -> None:
        """A request has been answered, or its client has gone.

        Args:
            exchange: the request.
            ended_s: now, by the manager's clock.
        """


class AccessLog(NoAccessLog):
    """Logs every request but GETs."""

    def ended(self, exchange: Exchange, ended_s: float) -> None:
        if exchange.method in ("GET", "HEAD", "OPTIONS"):
            return
        duration_ms = (ended_s - exchange.started_s) * 1e3
        endpoint, generations = show_word(exchange.path), exchange.generations
        if not generations:
            logger.info(
                "request id=%s endpoint=%s status=%d duration_ms=%.0f",
                exchange.request_id,
                endpoint,
                exchange.status,
                duration_ms,
                extra={"less": ("duration_ms",)},
            )
            return
        choices = [choice for generation in generations for choice in generation.choices]
        prompts = [choice for generation in generations for choice in generation.prompt_choices]
        first_s = min(
            (each.first_token_s for each in choices if each.first_token_s is not None), default=None
        )
        logger.info(
            _GENERATION,
            generations[0].id,
            endpoint,
            exchange.status,
            sum(len(each.prompt_ids) for each in prompts),
            sum(each.usage.cached_tokens for each in prompts),
            sum(each.usage.completion_tokens for each in choices),
            None if first_s is None else round((first_s - generations[0].arrival_s) * 1e3),
            _rate(choices),
            duration_ms,
            _finish(generations),
            exchange.request_id,
            extra={"less": _LESS if exchange.status == HTTPStatus.OK else _LESS_OF_ERRORS},
        )


def show_word(text: str) -> str:
    """A client's text as a field of the log, quoted if a blank or control character could look like another field."""
    return text if text.isascii() and text.isprintable() and " " not in text else show(text)


def _rate(choices: list[Choice]) -> float | None:
    """Tokens per second of all choices together after their first ones; None with fewer than two tokens."""
    begun = [each for each in choices if each.first_token_s is not None and each.last_token_s is not None]
    if not begun:
        return None
    span_s = max(each.last_token_s or 0.0 for each in begun) - min(
        each.first_token_s or 0.0 for each in begun
    )
    num_later = sum(each.usage.completion_tokens - 1 for each in begun)
    return round(num_later / span_s, 1) if span_s > 0 and num_later > 0 else None


def _finish(generations: list[Generation]) -> str:
    """`stop`, `length`, `stop,length` for several choices, `error`, or `disconnect` if the client has gone."""
    if any(generation.failure is not None for generation in generations):
        return "error"
    choices = (choice for generation in generations for choice in generation.choices)
    reasons = {each.finish.kind.value if each.finish else "disconnect" for each in choices}
    return ",".join(sorted(reasons))
