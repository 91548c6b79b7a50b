"""The tokens of stored responses: the prompt of the next turn begins with those that were computed and generated.

`Response.tokens` is int32: the number of its parent's tokens with which it begins, then the others, those of the
prompt before those of the answer. So a chain takes the space of its longest prompt.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from ...generation import Generation
from ...state.responses import Response


def ids_of_chain(chain: Sequence[Response]) -> array[int]:
    """The tokens of the prompt and the answer of the last response, the root first; none if they are not kept."""
    ids = array("i")
    for response in chain:
        own = array("i", response.tokens)
        ids = ids[: own[0]] + own[1:] if own else array("i")
    return ids


def tokens_of(generation: Generation) -> bytes:
    """The tokens of a response at its end; b"" with images, whose tokens stand for pixels."""
    request, [choice] = generation.request, generation.choices
    if request.media:
        return b""
    ids, earlier = choice.prompt_ids + choice.answer_ids, request.earlier_ids
    num_shared = len(earlier)
    if ids[:num_shared] != earlier:
        num_shared = next(i for i in range(num_shared) if ids[i : i + 1] != earlier[i : i + 1])
    return (array("i", [num_shared]) + ids[num_shared:]).tobytes()
