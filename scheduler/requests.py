"""`Requests`: every request that is not finished, by where it is: waiting, in the middle of its prompt, or decoding."""

from __future__ import annotations

import numpy as np

from ..runtime.messages import Finish, GenerateRequest, Logprobs, TokenOutput
from .kv_memory import KVMemory
from .outputs import output_row
from .req import Req, ReqStatus
from .running_batch import RunningBatch
from .waiting_queue import QueueObserver, WaitingQueue


class Requests:
    """The sets of requests; each is in exactly one of the three.

    Attributes:
        by_id: all of them.
        waiting: without a row.
        partial: with a row, their prompts in the middle of their chunks.
        running: with a row, decoding.
    """

    __slots__ = ("_kv", "_num_arrivals", "by_id", "partial", "running", "waiting")

    def __init__(self, kv: KVMemory, observer: QueueObserver) -> None:
        self._kv = kv
        self._num_arrivals = 0
        self.by_id: dict[str, Req] = {}
        self.waiting = WaitingQueue(observer)
        self.partial: list[Req] = []
        self.running = RunningBatch()

    def __len__(self) -> int:
        return len(self.by_id)

    @property
    def with_row(self) -> list[Req]:
        """Those that hold memory."""
        return self.running.reqs + self.partial

    def receive(self, message: GenerateRequest, now_s: float) -> None:
        """Queue a request that was found to be sound."""
        self._num_arrivals += 1
        req = self.by_id[message.rid] = Req(message, self._num_arrivals, now_s)
        self.waiting.append(req)

    def put_back(self, req: Req, now_s: float) -> None:
        """Queue a request whose row and pages were taken. Call `forget_departed` afterwards."""
        req.num_retractions += 1
        req.prompt_logprobs = []  # if they are still to be sent, they will come again from the start
        req.enter(ReqStatus.RETRACTED, now_s)
        self.waiting.put_back(req)

    def finish(
        self,
        req: Req,
        finish: Finish,
        now_s: float,
        token_ids: bytes = b"",
        logprobs: Logprobs | None = None,
        *,
        keep: bool = True,
    ) -> TokenOutput:
        """Finish a request wherever it is, free all it has, and make its last row.

        The sampled token that ends it has no KV and never gets any. Call `forget_departed` afterwards.
        """
        if req.is_waiting:
            self.waiting.remove(req)
        else:
            self._kv.release(req, keep=keep)
        req.enter(ReqStatus.FINISHED, now_s)
        del self.by_id[req.rid]
        return output_row(req, token_ids, finish, logprobs)

    def forget_departed(self) -> None:
        """Take requests that finished or were retracted out of `partial` and `running`; once for many of them."""
        still_decode = [req.status is ReqStatus.DECODE for req in self.running.reqs]
        if not all(still_decode):
            self.running.keep(np.array(still_decode))
        self.partial = [req for req in self.partial if req.status is ReqStatus.PREFILL]
