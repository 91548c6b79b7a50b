"""`Comparer`: runs an engine eagerly and compares each operator with torch's on copies of the same inputs.

    with Comparer(folder) as comparer:
        engine = golden.engine_of(home, "cuda", record_steps=False)
        golden.answer(engine, requests)
    comparer.differences            # the first one of each operator: where, shapes, strides, largest error

After a difference the run goes on with torch's result, so that one run names every wrong operator. Before each call its
name is written to `current_op`: after a crash or a hang that is the operator. The inputs of the first wrong call of
each operator are saved as `wrong-<op>.pt`, and can be computed again anywhere, in Triton's interpreter without a GPU:

    TRITON_INTERPRET=1 python3 benchmarks/gpu/path.py benchmarks.gpu.first_difference build/gpu-triage/wrong-rms_norm.pt
"""

from __future__ import annotations

import copy
import dataclasses
import io
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Self
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from benchmarks.gpu.tensor_difference import Slots, cloned, difference_of
from engine.model_runner import assembly, load
from engine.model_runner.attention.backend import AttentionBackend, BatchLayout, StepAttention
from engine.model_runner.attention.selection import BACKENDS
from engine.model_runner.attention.torch_native import TorchNativeAttention
from engine.model_runner.memory.io_buffers import InputBuffers
from engine.model_runner.memory.kv_pool import KVPool
from engine.model_runner.op_selection import PROVIDERS
from engine.model_runner.ops.experts import ExpertSource
from engine.model_runner.sampling import sampler
from engine.model_runner.sampling.torch_backend import TorchSamplerBackend

CURRENT: Final = "current_op"
"""The file with the name of the last call."""
MAX_SAVED_BYTES: Final = 50 << 20
_FUNCTIONS: Final = (
    *("rms_norm", "add_rms_norm", "silu_and_mul", "gelu_and_mul", "gelu_erf_and_mul", "layer_norm"),
    *("add_layer_norm", "activate", "rotate_and_store", "route", "scale", "add", "add_gated", "take_rows"),
    *("soft_cap", "to_float32", "mul_sigmoid", "clamped_swiglu"),
)
"""Operators that are functions of tensors; besides them experts, attention and sampler are compared."""


class Difference(NamedTuple):
    """The first wrong call of an operator; `reason`: the largest error, and where."""

    op: str
    provider: str
    where: str
    inputs: str
    reason: str
    saved: str

    def __str__(self) -> str:
        return f"{self.op} ({self.provider}), {self.where}: {self.reason}; inputs {self.inputs}"


class Comparer:
    """See the module.

    Attributes:
        differences: by operator, in the order of their first wrong calls.
        num_calls: how many calls were compared.
    """

    def __init__(self, folder: Path, report: Callable[[Difference], None] = print) -> None:
        """`folder`: for `current_op` and saved calls; `report` gets each difference at once."""
        folder.mkdir(parents=True, exist_ok=True)
        self.differences: dict[str, Difference] = {}
        self.num_calls = 0
        self._folder, self._report = folder, report
        self._saved_bytes = 0
        self._where = "before the first step"
        self._patches = ExitStack()

    def __enter__(self) -> Self:
        for owner, name, replaced in (
            (load, "select_ops", self._select_ops),
            (assembly, "select_backend", self._select_backend),
            (sampler, "select_sampler_backend", self._select_sampler),
        ):
            original = getattr(owner, name)
            self._patches.enter_context(mock.patch.object(owner, name, _bind(replaced, original)))
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._patches.close()

    def place(self, where: str) -> None:
        """Name the place in the step; operators report it."""
        self._where = where

    def call(
        self,
        op: str,
        provider: str,
        both: Sequence[Callable[..., Any]],
        args: Sequence[Any],
        written: Callable[..., list[Any]] = lambda *_args: [],
        compared: Callable[..., Any] = lambda result, *_args: result,
        saved: Any = None,
    ) -> Any:
        """The result of the first of two functions, or that of the second one if they differ.

        Args:
            both: the provider's function, and torch's.
            args: of the call; it may overwrite them.
            written: memory that the call writes besides its result, from the arguments.
            compared: the part of the result that is compared, from it and the arguments.
            saved: in place of the arguments in the saved file.
        """
        ours, theirs = both
        inputs = _form(args)
        copies, kept = cloned(args), None if op in self.differences else cloned((args, saved))
        (self._folder / CURRENT).write_text(f"{op} ({provider}), {self._where}: {inputs}")
        result = ours(*args)
        expected = theirs(*copies)
        self.num_calls += 1
        outs, wanted = (
            (compared(each, *of), written(*of)) for each, of in ((result, args), (expected, copies))
        )
        reason = difference_of(outs, wanted)
        if not reason:
            return result
        if kept is not None:
            file = self._save(op, provider, kept)
            self.differences[op] = Difference(op, provider, self._where, inputs, reason, file)
            self._report(self.differences[op])
        for target, source in zip(written(*args), written(*copies), strict=True):
            target.copy_(source)
        return expected

    def _save(self, op: str, provider: str, kept: tuple[Any, Any]) -> str:
        args, instead = kept
        call = _on_cpu({"op": op, "provider": provider, "args": args if instead is None else instead})
        data = io.BytesIO()
        try:
            torch.save(call, data)
        except Exception as error:  # the difference is worth more than the file
            print(f"the inputs cannot be saved: {error}", flush=True)
            return ""
        if self._saved_bytes + data.tell() > MAX_SAVED_BYTES:
            return ""
        self._saved_bytes += data.tell()
        path = self._folder / f"wrong-{op}.pt"
        path.write_bytes(data.getvalue())
        return path.name

    # ------------------------------------------------------------ what is compared

    def _select_ops(self, original: Callable[..., Any], target: Any, *args: Any, **kwargs: Any) -> Any:
        ops = original(target, *args, **kwargs)
        providers = {choice.op: choice.provider for choice in ops.choices}
        changed: dict[str, Any] = {}
        for op in _FUNCTIONS:
            if providers[op] != "torch":
                both = getattr(ops, op), PROVIDERS[op][-1].load(target)
                changed[op] = _ComparedOp(self, op, providers[op], both)
        if providers["pack_experts"] != "torch":
            both = ops.pack_experts, PROVIDERS["pack_experts"][-1].load(target)
            changed["pack_experts"] = _ComparedExperts(self, providers["pack_experts"], both).pack
        return dataclasses.replace(ops, **changed)

    def _select_backend(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kind = original(*args, **kwargs)

        def make(*parts: Any) -> _ComparedAttention:
            return _ComparedAttention(self, kind(*parts), TorchNativeAttention(*parts), parts)

        return make

    def _select_sampler(self, original: Callable[..., Any], counts: Any, *args: Any, **kwargs: Any) -> Any:
        return _ComparedSampler(self, original(counts, *args, **kwargs), counts)


def _bind(replaced: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: replaced(original, *args, **kwargs)


class _ComparedOp:
    """One of `_FUNCTIONS`."""

    def __init__(self, comparer: Comparer, op: str, provider: str, both: tuple[Any, Any]) -> None:
        self._comparer, self._op, self._provider, self._both = comparer, op, provider, both

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        both = [partial(each, **kwargs) for each in self._both]
        written = _stored if self._op == "rotate_and_store" else lambda *_args: []
        compared = _chosen if self._op == "route" else lambda result, *_args: result
        return self._comparer.call(self._op, self._provider, both, args, written, compared)


def _stored(_qkv: Tensor, _norms: Any, store: Any) -> list[Any]:
    """The slots of the step's tokens."""
    if store.kv is None:
        return []
    return [Slots(each, store.out_cache_loc) for each in (store.kv.k, store.kv.v)]


def _chosen(result: tuple[Tensor, Tensor], logits: Tensor, *_args: Any) -> tuple[Tensor, Tensor]:
    """Shares, and the logits of the chosen experts: of equal ones any may be chosen."""
    shares, ids = result
    return shares, logits.gather(1, ids)


class _Source:
    """An `ExpertSource` that can be read twice."""

    def __init__(self, source: ExpertSource) -> None:
        self.clamp, self.activation = source.clamp, source.activation
        self.scales_inputs, self.gated = source.scales_inputs, source.gated
        self.is_adapted = source.is_adapted
        self._stacked, self._biases = source.stacked(), source.biases()

    def stacked(self) -> Any:
        return cloned(self._stacked)

    def biases(self) -> Any:
        return cloned(self._biases)

    def linears(self) -> Any:
        raise NotImplementedError("triton and torch pack stacked weights")


class _ComparedExperts:
    """The experts of a layer."""

    def __init__(self, comparer: Comparer, provider: str, both: tuple[Any, Any]) -> None:
        self._comparer, self._provider, self._pack = comparer, provider, both

    def pack(self, source: ExpertSource) -> Any:
        if self._provider != "triton":  # others read the weights of each expert
            return self._pack[0](source)
        twice: ExpertSource = _Source(source)  # the type checker reports a missing member
        both = self._pack[0](twice), self._pack[1](twice)

        def compute(*args: Tensor) -> Tensor:
            saved = twice, args
            result: Tensor = self._comparer.call("pack_experts", self._provider, both, args, saved=saved)
            return result

        return compute


class _ComparedAttention:
    """An `AttentionBackend` of two, which plan and compute each step; none can be recorded."""

    def __init__(
        self, comparer: Comparer, ours: Any, theirs: AttentionBackend, parts: tuple[Any, ...]
    ) -> None:
        self.name = ours.name
        self._comparer, self._ours, self._theirs, self._parts = comparer, ours, theirs, parts

    @property
    def gathered_token_bytes(self) -> int:
        return self._theirs.gathered_token_bytes

    def capturable(self) -> None:
        return None

    def repeatable(self) -> None:
        return None

    def plan_step(self, layout: BatchLayout) -> StepAttention:
        self._comparer.place("before the first attention of a step")
        return _ComparedStep(self, self._ours.plan_step(layout), self._theirs.plan_step(layout), layout)


class _ComparedStep:
    def __init__(self, backend: _ComparedAttention, ours: Any, theirs: Any, layout: BatchLayout) -> None:
        self._backend, self._both, self._layout = backend, (ours, theirs), layout

    def forward(
        self, layer_id: int, q: Tensor, sinks: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        backend, comparer = self._backend, self._backend._comparer
        lens = f"{len(self._layout.rows)} requests, {self._layout.num_extends} extends"
        comparer.place(f"layer {layer_id}, {lens}")
        both = [partial(each.forward, layer_id, sinks=sinks) for each in self._both]
        spec, pool, table, _buffers = backend._parts
        kv = pool.layer(layer_id)
        saved = spec, pool.page_size, (kv.k, kv.v), table, self._layout, layer_id, q, sinks
        result: Tensor = comparer.call("attention", backend.name, both, (q,), saved=saved)
        comparer.place(f"after the attention of layer {layer_id}, {lens}")
        return result if out is None else out.copy_(result)


class _ComparedSampler:
    """A sampler backend, nothing of which is recorded."""

    recorded_bytes = ()

    def __init__(self, comparer: Comparer, ours: Any, counts: Any) -> None:
        self._comparer, self._ours, self._counts = comparer, ours, counts
        self._name = type(ours).__name__.removesuffix("SamplerBackend").lower()

    def capturable(self) -> None:
        return None

    def _torch(self) -> TorchSamplerBackend:
        """Torch's backend with counts of its own, because sampled tokens are counted."""
        counts = copy.copy(self._counts)
        counts.in_output = counts.in_output.clone()
        return TorchSamplerBackend(counts)

    def sample(self, logits: Tensor, batch: Any) -> Any:
        theirs = self._torch()
        both = partial(self._ours.sample, batch=batch), lambda logits: theirs.sample(logits.float(), batch)
        saved = logits, batch, self._counts.in_prompt, self._counts.in_output
        return self._comparer.call("sample", self._name, both, (logits,), saved=saved)

    def logprobs(self, logits: Tensor, indices: Any, token_ids: Tensor, top_k: int) -> Any:
        theirs = self._torch()

        def ours_of(logits: Tensor, token_ids: Tensor) -> Any:
            return self._ours.logprobs(logits, indices, token_ids, top_k)

        def theirs_of(logits: Tensor, token_ids: Tensor) -> Any:
            return theirs.logprobs(logits.float(), indices, token_ids, top_k)

        def compared(result: Any, *_args: Any) -> list[Tensor]:  # of equal logits any token may come first
            return [each for each in result if isinstance(each, Tensor) and each.is_floating_point()]

        both, args = (ours_of, theirs_of), (logits, token_ids)
        return self._comparer.call("logprobs", self._name, both, args, compared=compared)


def _on_cpu(value: Any) -> Any:
    """The same with all tensors on the CPU, also those of weights."""

    def move(each: Any) -> Any:
        if isinstance(each, Tensor):
            return each.cpu()
        if isinstance(each, _Source):
            moved = copy.copy(each)
            vars(moved).update(_on_cpu(vars(each)))
            return moved
        return each

    return tree_map(move, value)


def _form(args: Any) -> str:
    """Shapes, strides and dtypes."""
    tensors = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
    return ", ".join(
        f"{list(t.shape)}/{list(t.stride())} {str(t.dtype).removeprefix('torch.')}" for t in tensors
    )


# ---------------------------------------------------------------- a saved call


def replay(file: Path) -> str:
    """Compute a saved call again on the CPU: the difference, or empty.

    The file holds objects of the engine (step layouts, batches), so torch.load may run what is in it: only for files
    that `triage.py` wrote.
    """
    call = torch.load(file, map_location="cpu", weights_only=False)
    op, name, args = call["op"], call["provider"], call["args"]
    buffers = InputBuffers(torch.device("cpu"))
    if op == "attention":
        spec, page_size, (k, v), table, layout, layer_id, q, sinks = args
        pool = KVPool(
            num_layers=spec.num_layers,
            num_pages=len(k) // page_size - 1,
            page_size=page_size,
            num_kv_heads=k.shape[1],
            head_dim=k.shape[2],
            dtype=k.dtype,
            device=buffers.device,
        )
        pool.k[layer_id].copy_(k)
        pool.v[layer_id].copy_(v)
        kinds = [next(kind for kind in BACKENDS if kind.name == each) for each in (name, "torch_native")]
        found, expected = (
            kind(spec, pool, table, buffers).plan_step(layout).forward(layer_id, q.clone(), sinks)
            for kind in kinds
        )
        return difference_of(found, expected)
    if op in ("sample", "logprobs"):
        raise SystemExit(
            f"{file}: the sampler's calls are looked at by hand: logits, batch and counts are in it"
        )
    ours, theirs = (next(each for each in PROVIDERS[op] if each.name == by) for by in (name, "torch"))
    nothing: Any = None
    both = ours.load(nothing), theirs.load(nothing)
    if op == "pack_experts":
        source, args = args
        both = both[0](source), both[1](source)
    comparer = Comparer(file.parent / "replay")
    _ComparedOp(comparer, op, name, both)(*args)
    return str(comparer.differences.get(op, ""))


if __name__ == "__main__":
    print(replay(Path(sys.argv[1])) or "no difference here")
