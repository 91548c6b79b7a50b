"""`reason_against`: the only function that decides whether a request can ever run.

The tokenizer manager and `LLM` call it before they submit a request, the scheduler when a request arrives. The
PrefillAdder does not call it, but admits every such request once no other request runs. Two checks with different
arithmetic could accept a request that then waits forever.
"""

from __future__ import annotations

from .text import counted
from .transport.message_base import Record


class Capacity(Record, frozen=True):
    """Limits of one scheduler.

    Attributes:
        max_model_len: positions of one sequence, prompt and output together.
        num_pages: pages of the KV pool that requests may use (the dummy page not counted).
        page_size: tokens per page.
        max_running_requests: rows of the request pool.
        vocab_size: token ids are below it.
        num_host_pages: pages of the host's KV pool, ids 0..num_host_pages-1; 0 without swapping and --kv-host-size.
        kv_token_bytes: keys and values of one token, all layers; 0 if unknown.
        num_adapter_slots: LoRA adapters that may run at the same time; 0 without adapters.
        num_checkpoints: states that the prefix cache may keep; 0: the model has no state layers, or nothing is cached.
        checkpoint_pages: pages from one of them within a prompt or an answer to the next; 0 without state layers.
        num_stages: pipeline stages of the runner: as many steps may be in flight. With more than 1 a request must not
            be in a step before the token of its last step is settled, because the first stage does not know it.
        num_encoder_rows: rows of images that the runner's buffer holds, a multiple of `encoder_tile_rows`; 0: the
            model takes no images.
        encoder_tile_rows: rows of each tile of an image, or, if an image is one tile of any size, of a block: its rows
            are in several of them. 0 without images.
        encoder_tile_parts: steps among which the work on a tile, or on each block of rows, can be divided.
        encoder_row_pixels: a row stands for so many pixels of an image in each direction, in models in which an image
            is one tile of any size; 0: all tiles are equal.
        has_rope_axes: tokens of images have positions on three axes, see `NewReq.rope`.
        images_are_whole: tokens of an image attend to all of it, so no chunk and no cached prefix ends within one.
    """

    max_model_len: int
    num_pages: int
    page_size: int
    max_running_requests: int
    vocab_size: int
    num_host_pages: int = 0
    kv_token_bytes: int = 0
    num_adapter_slots: int = 0
    num_checkpoints: int = 0
    checkpoint_pages: int = 0
    num_stages: int = 1
    num_encoder_rows: int = 0
    encoder_tile_rows: int = 0
    encoder_tile_parts: int = 1
    encoder_row_pixels: int = 0
    has_rope_axes: bool = False
    images_are_whole: bool = False

    @property
    def max_total_tokens(self) -> int:
        """KV slots that requests may use."""
        return self.num_pages * self.page_size


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` consecutive tokens."""
    return -(-num_tokens // page_size)


def max_new_tokens_for(prompt_len: int, capacity: Capacity) -> int:
    """The largest `max_new_tokens` with which a prompt of this length fits; 0 or less if none does.

    The last generated token is never fed back, so it needs a position but no KV slot.
    """
    by_context = capacity.max_model_len - prompt_len
    by_memory = capacity.max_total_tokens - prompt_len + 1
    return min(by_context, by_memory)


def longest_input(capacity: Capacity) -> int:
    """The most tokens of a pooling request."""
    return min(capacity.max_model_len, capacity.max_total_tokens)


def reason_against_pooling(prompt_len: int, capacity: Capacity) -> str | None:
    """The same for a pooling request, which computes its prompt only."""
    if prompt_len > capacity.max_model_len:
        return (
            f"the input has {counted(prompt_len, 'token')} and the model takes {capacity.max_model_len}; shorten it, "
            "send truncate_prompt_tokens, or raise --max-model-len if the model knows more positions"
        )
    if prompt_len > capacity.max_total_tokens:
        return (
            f"the input has {counted(prompt_len, 'token')} and the KV pool holds {capacity.max_total_tokens}; shorten "
            "it or raise --max-total-tokens"
        )
    return None


def reason_against(prompt_len: int, max_new_tokens: int, capacity: Capacity) -> str | None:
    """Reason why such a request can never run, with the arithmetic and a fix; None if it can."""
    prompt = counted(prompt_len, "token")
    most = max_new_tokens_for(prompt_len, capacity)
    if max_new_tokens <= most:
        return None
    if prompt_len >= capacity.max_model_len:
        return (
            f"the prompt has {prompt} and the context holds {capacity.max_model_len}, of which at least one "
            f"is for the answer; shorten the prompt or raise --max-model-len"
        )
    if most < 1:
        return (
            f"the prompt has {prompt} and the KV pool holds {capacity.max_total_tokens}; shorten the prompt "
            f"or raise --max-total-tokens"
        )
    total = prompt_len + max_new_tokens
    if total > capacity.max_model_len:
        return (
            f"the prompt has {prompt} and max_tokens is {max_new_tokens}: {total} in all, the context holds "
            f"{capacity.max_model_len}; shorten the prompt, lower max_tokens to {most} or raise --max-model-len"
        )
    return (
        f"the prompt has {prompt} and max_tokens is {max_new_tokens}: {counted(total - 1, 'KV slot')}, "
        f"the KV pool has {capacity.max_total_tokens}; shorten the prompt, lower max_tokens to {most} or raise "
        f"--max-total-tokens"
    )
