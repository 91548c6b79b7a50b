"""Commands and news between a scheduler and the I/O thread of a tier of its prefix cache: a disk, or a store.

    scheduler                                  I/O thread
    LookUp (tokens of a prompt)           ──►
                                          ◄──  Found: how many of its first pages the tier has
    LoadPages (the same, target pages)    ──►
                                          ◄──  Loaded: nothing will be written to the pages any more
    StorePages (tokens, source pages)     ──►
                                          ◄──  Stored: the pages are not read any more
    Forget                                ──►
                                          ◄──  Forgotten: nothing of this model will be found after a crash

A job is a number that the scheduler never uses twice; a `LookUp` and the `LoadPages` that follows it are one job. Each
`LookUp`, `LoadPages`, `StorePages` and `Forget` has exactly one answer, in any order; that of a load that is canceled,
and of a `Forget`, comes in a bounded time. Commands name pages by the tokens before and in them; the I/O thread makes
the keys. News are inputs of the scheduler, recorded and replayed as all others.
"""

from __future__ import annotations

from .message_base import Message, Record

# ---------------------------------------------------------------- scheduler -> I/O thread


class LookUp(Record, frozen=True):
    """Look for the pages at the beginning of a prompt; answered by `Found`.

    Attributes:
        job: see the module.
        namespace: of the prefix cache, see `namespace_of`.
        token_ids: [n * page_size] int32, the prompt from its first token, whole pages only.
    """

    job: int
    namespace: str
    token_ids: bytes


class LoadPages(Record, frozen=True):
    """Read pages of a prompt into pages of the KV pool, in order; answered by `Loaded`.

    Attributes:
        job, namespace: as in the `LookUp`.
        token_ids: [(first_page + n) * page_size] int32, the prompt from its first token to the end of the last page.
        first_page: index in the prompt of the first of `pages`.
        pages: [n] int32, of the KV pool.
        checkpoint: in a model with state layers the slot for the state after the last page; else 0.
    """

    job: int
    namespace: str
    token_ids: bytes
    first_page: int
    pages: bytes
    checkpoint: int = 0


class StorePages(Record, frozen=True):
    """Write pages of the KV pool to the disk; the fields are those of `LoadPages`; answered by `Stored`."""

    job: int
    namespace: str
    token_ids: bytes
    first_page: int
    pages: bytes
    checkpoint: int = 0


class CancelLoad(Record, frozen=True):
    """The pages of a `LoadPages` are not needed any more: stop soon, and answer with `Loaded` all the same."""

    job: int


class Forget(Record, frozen=True):
    """Drop all pages of this model that the disk has, also those that are being stored; answered by `Forgotten`.

    Attributes:
        job: the id of the `Call` that waits for it, which may be the number of another command, too; 0: none does.
    """

    job: int = 0


TierCommand = LookUp | LoadPages | StorePages | CancelLoad | Forget


# ---------------------------------------------------------------- I/O thread -> scheduler


class Found(Message, frozen=True):
    """The answer to a `LookUp`.

    Attributes:
        num_pages: pages of the prompt that can be loaded, from its first page on; 0: none, or not known yet. In a model
            with state layers the disk has the state after the last of them, too.
        num_bytes: of these pages.
        seconds_estimate: for reading them and the state, from the rates so far; 0.0: not known.
        state_bytes: of the state.
        error: why nothing could be looked up; "" if it could.
        used_bytes: all that the store holds; -1: not known.
    """

    job: int
    num_pages: int
    num_bytes: int = 0
    seconds_estimate: float = 0.0
    state_bytes: int = 0
    error: str = ""
    used_bytes: int = -1


class Loaded(Message, frozen=True):
    """A `LoadPages` has ended; nothing will be written to its pages any more.

    Attributes:
        num_pages: how many of them, from the first on, have their KV; with a checkpoint all and the state, or 0.
        error: why not all; "": the disk lost them, or the load was cancelled, or all were read.
        seconds: that it took.
        num_bytes: that were read, and undamaged.
    """

    job: int
    num_pages: int
    error: str = ""
    seconds: float = 0.0
    num_bytes: int = 0


class Stored(Message, frozen=True):
    """A `StorePages` has ended; its pages are not read any more.

    Attributes:
        num_pages: how many of them, from the first on, the disk has now.
        error: why not all, or not the state.
        seconds: that it took.
        num_bytes: that were written; what the disk has already is not written again.
        used_bytes: as in `Found`.
    """

    job: int
    num_pages: int
    error: str = ""
    seconds: float = 0.0
    num_bytes: int = 0
    used_bytes: int = -1


class Forgotten(Message, frozen=True):
    """A `Forget` has ended: a crash does not bring back what was forgotten; or an error says why it might.

    After an error the pages are forgotten before anything of the store is used again, unless the process ends before.
    """

    job: int
    error: str = ""


TierNews = Found | Loaded | Stored | Forgotten


class TierFigures(Record, frozen=True):
    """A scheduler's use of a tier now, and totals since its start.

    Attributes:
        waiting: requests that wait for an answer about their prompt, or for their pages.
        loading_pages: pages of the KV pool that are read from the disk, or may still be written to.
        leased_pages: pages that are locked while they are written to the disk.
        lookups, loaded_tokens, load_s, store_s: totals.
        timeouts, lookup_errors, load_errors, store_errors: answers that took too long, and commands that failed.
        loaded_bytes, stored_bytes: that were read and written, of KV and of states.
        used_bytes: all that the store holds, as its thread has said last; -1: not known.
    """

    waiting: int = 0
    loading_pages: int = 0
    leased_pages: int = 0
    lookups: int = 0
    loaded_tokens: int = 0
    load_s: float = 0.0
    store_s: float = 0.0
    timeouts: int = 0
    load_errors: int = 0
    store_errors: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    lookup_errors: int = 0
    used_bytes: int = -1
