"""A `GraphDevice` without a GPU, as strict as one: it records operations with their tensors, not Python code.

A replay runs the recorded operators of torch again on the very tensors of the recording. What Python would do
differently the second time is not done, numbers of the host stay what they were, and results land where they landed
before: whoever depends on anything else gets yesterday's numbers, as with a CUDA graph. After a replay memory that no
later piece reads holds NaN, as if another recording had used it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from engine.model_runner.attention.backend import AttentionBackend, BatchLayout, StepAttention
from engine.model_runner.attention.torch_native import TorchNativeAttention

LOOKS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
}


class Operation:
    """One call of an operator."""

    def __init__(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.results = tree_flatten(result)[0]
        self.inputs = {_memory(each) for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)}
        self.is_new = [isinstance(each, Tensor) and _memory(each) not in self.inputs for each in self.results]

    def run(self) -> None:
        again = tree_flatten(self.func(*self.args, **self.kwargs))[0]
        for old, new, is_new in zip(self.results, again, self.is_new, strict=True):
            if is_new:
                assert (old.shape, old.dtype) == (new.shape, new.dtype), self.func
                old.copy_(new)
            elif isinstance(old, Tensor):
                assert _memory(old) == _memory(new), f"{self.func} went to other memory"


def _unused_after(operations: list[Operation], later: list[list[Operation]]) -> list[Tensor]:
    """Tensors made by a piece that no later piece reads: their memory may hold anything then, as in a graph's pool."""
    used = {memory for piece in later for operation in piece for memory in operation.inputs}
    return [
        tensor
        for operation in operations
        for tensor, is_new in zip(operation.results, operation.is_new, strict=True)
        if is_new and not tensor.is_mkldnn and tensor.is_floating_point() and _memory(tensor) not in used
    ]


def _memory(tensor: Tensor) -> int:
    return id(tensor) if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert func not in LOOKS, f"{func} looks at the device's memory, which no recording can"
        result = func(*args, **kwargs)
        self.operations.append(Operation(func, args, kwargs, result))
        return result


class RecordingDevice:
    """See the module.

    Attributes:
        num_captured, num_replayed: recordings made, and steps done by them.
        recordings: the operations of each.
    """

    def __init__(self) -> None:
        self.recordings: list[list[Operation]] = []
        self.num_captured = 0
        self.num_replayed = 0

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        (replay,) = self.capture_pieces(lambda _cut: run())
        return replay

    def capture_pieces(self, run: Callable[[Callable[[], None]], None]) -> list[Callable[[], None]]:
        run(lambda: None)  # the warm-up
        pieces: list[list[Operation]] = []
        with ExitStack() as recording:

            def cut() -> None:
                recording.close()
                pieces.append(recording.enter_context(_Recorder()).operations)

            cut()
            run(cut)
        self.num_captured += len(pieces)
        self.recordings += pieces
        return [
            partial(self._replay, operations, _unused_after(operations, pieces[n + 1 :]))
            for n, operations in enumerate(pieces)
        ]

    def _replay(self, operations: list[Operation], unused: list[Tensor]) -> None:
        self.num_replayed += 1
        for operation in operations:
            operation.run()
        for tensor in unused:
            tensor.fill_(torch.nan)

    def staging(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def upload(self, target: Tensor, staged: Tensor) -> Callable[[], None]:
        target.copy_(staged)
        return lambda: None

    def free_bytes(self) -> int:
        return 1 << 30


class RerunningDevice(RecordingDevice):
    """Runs the Python code of a recording again: for kernels that are no operators, as Triton's in its interpreter."""

    def capture_pieces(self, run: Callable[[Callable[[], None]], None]) -> list[Callable[[], None]]:
        cuts: list[None] = [None]
        run(lambda: cuts.append(None))
        self.num_captured += len(cuts)
        rerun = _Rerun(run)

        def replay(piece: int) -> None:
            self.num_replayed += 1
            rerun.go_on(is_first=piece == 0, is_last=piece == len(cuts) - 1)

        return [partial(replay, piece) for piece in range(len(cuts))]


class _Rerun:
    """A function that stops where it calls its argument, and goes on when it is told to, in a thread of its own."""

    def __init__(self, run: Callable[[Callable[[], None]], None]) -> None:
        self._run = run
        self._may_go_on, self._has_stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread()
        self._error: BaseException | None = None

    def go_on(self, *, is_first: bool, is_last: bool) -> None:
        if is_first:
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()
        else:
            self._may_go_on.release()
        assert self._has_stopped.acquire(timeout=60.0)
        if self._error is not None:
            raise self._error
        if is_last:
            self._thread.join(60.0)
            assert not self._thread.is_alive(), "it stops once more than when it was recorded"

    @torch.inference_mode()
    def _work(self) -> None:
        try:
            self._run(self._stop)
        except BaseException as error:
            self._error = error
        self._has_stopped.release()

    def _stop(self) -> None:
        self._has_stopped.release()
        assert self._may_go_on.acquire(timeout=60.0)


class TorchDecode:
    """The attention of a step in which everybody decodes, from tensors of the device only."""

    def __init__(self, backend: DeviceAttention, rows: Tensor, seq_lens: Tensor) -> None:
        self.backend = backend
        self.slots = backend.table.index_select(0, rows)  # [B, max_model_len]
        positions = torch.arange(self.slots.shape[1], device=rows.device)[None, :]
        self.seq_lens, self.positions = seq_lens, positions

    def forward(
        self, layer_id: int, q: Tensor, sinks: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        assert sinks is None and out is None
        spec, (k_pool, v_pool) = self.backend.spec, self.backend.pool.layer(layer_id)[:2]
        seen = self.positions < self.seq_lens[:, None]
        window = spec.window_of(layer_id)
        if window is not None:
            seen = seen & (self.positions >= self.seq_lens[:, None] - window)
        num, _, head_dim = q.shape
        by_request = (num, -1, spec.num_kv_heads, head_dim)
        k = k_pool.index_select(0, self.slots.flatten()).view(by_request)
        v = v_pool.index_select(0, self.slots.flatten()).view(by_request)
        k, v = (torch.where(seen[:, :, None, None], each, 0.0) for each in (k, v))
        q = q.view(num, spec.num_kv_heads, -1, head_dim)
        scores = torch.einsum("bhgd,bphd->bhgp", q.float(), k.float()) * spec.score_scale
        scores = torch.where(seen[:, None, None, :], scores, -torch.inf)
        return torch.einsum("bhgp,bphd->bhgd", scores.softmax(-1), v.float()).reshape(num, -1).to(q.dtype)


class DeviceAttention(AttentionBackend):
    """`CapturableAttention` for tests: torch's native one, and decodes from numbers on the device."""

    name: ClassVar[str] = "torch_decode"

    @staticmethod
    def reasons_against(spec: Any, device: Any, dtype: Any, kv_dtype: Any) -> list[str]:
        return []

    def __init__(self, spec: Any, kv_pool: Any, req_to_token: Tensor, buffers: Any) -> None:
        self.spec, self.pool, self.table = spec, kv_pool, req_to_token
        self.eager = TorchNativeAttention(spec, kv_pool, req_to_token, buffers)

    def plan_step(self, layout: BatchLayout) -> StepAttention:
        return self.eager.plan_step(layout)

    def capturable(self) -> DeviceAttention:
        return self

    def decode_step(self, rows: Tensor, seq_lens: Tensor) -> TorchDecode:
        return TorchDecode(self, rows, seq_lens)
