"""The errors of requests with grammars that are not proved: too slow, too large, or the prover cannot try them now."""

from __future__ import annotations

import math

from ...runtime.errors import RequestError
from ...runtime.grammar_use import GrammarSpec
from ..backend import GrammarError


def too_slow(spec: GrammarSpec, timeout_s: float) -> GrammarError:
    """The grammar itself took the whole time limit."""
    return GrammarError(
        f"the grammar has {len(spec.text):,} characters and took longer than {timeout_s:g} s to compile; simplify it, "
        f"or start the server with a higher --grammar-timeout",
        "schema_too_complex",
    )


def too_large(spec: GrammarSpec) -> GrammarError:
    """The grammar itself took the whole memory of its process."""
    return GrammarError(
        f"the grammar has {len(spec.text):,} characters and takes too much memory to compile; simplify it",
        "schema_too_complex",
    )


def queue_full(text: str, timeout_s: float) -> RequestError:
    """429 for a grammar that other grammars leave no room or no time; after the time limit, those have ended."""
    return RequestError(
        f"{text}; try again later", code="queue_full", status=429, retry_after_s=math.ceil(timeout_s)
    )


def unavailable(reason: str) -> RequestError:
    """503: no new grammar can be proved at present."""
    return RequestError(
        f"new grammars cannot be compiled now: {reason}; try again later",
        code="grammar_unavailable",
        status=503,
    )


def copy_of(error: GrammarError) -> GrammarError:
    """The same error, to be raised: a raised exception keeps its traceback, and with it the frames of a request."""
    return GrammarError(error.message, error.code)
