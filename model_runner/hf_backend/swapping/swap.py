"""`swap_modules`: puts the engine's kernels into a loaded model of transformers, where they compute the same.

What a module computes is found out by tests, not by names: its code runs in float32 with random values, and the result
is compared with the forms that the engine has kernels for (`norm_form`, `mlp_form`, `attention_form`). Then the new
module is compared with the old one on random input in the serving dtype. A module that differs stays as it is.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from ...ops.linear import LinearWithRows
from ...ops.rotation import HeadNorms
from .attention_form import AttentionForm, attention_form_of, halves_of
from .calls import AttentionCall, Calls, observe
from .mlp_form import MLPForm, mlp_form_of
from .modules import (
    MLP,
    Attention,
    Norm,
    PackedEmbedding,
    PackedHead,
    PackedLinear,
    RotaryTable,
    positions_and_key,
)
from .norm_form import NormForm, norm_form_of
from .probe import Operations, is_close

if TYPE_CHECKING:
    from ....models.spec.model_spec import ModelSpec
    from ...ops.ops import Ops

logger = logging.getLogger(__name__)

_TOLERANCE: Final = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Of a new module, relative to the largest value of the old one."""
_NUM_ROWS: Final = 3
_LEAST_POSITIONS: Final = 64


@torch.inference_mode()
def swap_modules(causal_lm: Any, decoder: Any, spec: ModelSpec, ops: Ops, max_model_len: int) -> Counter[str]:
    """Swap what is recognized; returns how many modules of each kind.

    Args:
        decoder: its attention is `Layers.look` of the argument `engine_check`, see `checked_decoder`.
        max_model_len: positions that need rotary angles.
    """
    _straighten(causal_lm)
    calls = observe(decoder, spec)
    swapper = _Swapper(causal_lm, spec, ops)
    swapper.rotary(calls, max_model_len)
    while calls.modules:  # without the calls so far, the replaced modules are freed
        swapper.attention(calls.by_module.pop(calls.modules.pop(0)))
    swapper.mlps()
    swapper.norms()
    swapper.head_and_embedding()
    swapper.linears()
    return swapper.counts


def _straighten(model: nn.Module) -> None:
    """Replace the layers of GPT-2 that store their weights transposed by linear layers."""
    from transformers.pytorch_utils import Conv1D

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is Conv1D:
                stored: Any = child
                inputs, outputs = stored.weight.shape
                linear = nn.Linear(inputs, outputs, device="meta")
                linear.weight = nn.Parameter(stored.weight.t().contiguous(), requires_grad=False)
                linear.bias = nn.Parameter(stored.bias, requires_grad=False)
                setattr(parent, name, linear)


class _Swapper:
    """Swaps the modules of one model.

    Attributes:
        counts: swapped modules of each kind.
    """

    def __init__(self, causal_lm: Any, spec: ModelSpec, ops: Ops) -> None:
        self.counts: Counter[str] = Counter()
        self._model = causal_lm
        self._spec = spec
        self._ops = ops
        self._dtype: torch.dtype = causal_lm.dtype
        self._tabled: list[Any] = []  # results of replaced rotary modules
        self._generator = torch.Generator().manual_seed(2)

    # ------------------------------------------------------------ whole blocks

    def rotary(self, calls: Calls, max_model_len: int) -> None:
        """Replace modules whose result depends on positions alone by a table."""
        for module, seen in calls.rotary.items():
            try:
                tables = self._tables(module, seen, max(max_model_len, _LEAST_POSITIONS))
            except Exception:  # any type: it is the code of some module
                logger.debug("%s is not recognized", type(module).__name__, exc_info=True)
                continue
            if tables is not None:
                self._replace(module, RotaryTable(self._ops, tables), "rotary")
                self._tabled += [result for _, _, result in seen]

    def _tables(
        self, module: nn.Module, seen: list[tuple[tuple[Any, ...], dict[str, Any], Any]], num_positions: int
    ) -> dict[tuple[Any, ...], list[Tensor]] | None:
        tables: dict[tuple[Any, ...], list[Tensor]] = {}
        every = torch.arange(num_positions)
        some = torch.randperm(num_positions, generator=self._generator)[:_LEAST_POSITIONS]
        for args, kwargs, _ in seen:
            old, key = positions_and_key(args, kwargs)

            def compute(positions: Tensor, factor: float) -> tuple[Tensor, Tensor]:
                def new(value: Any) -> Any:
                    if value is old:  # noqa: B023
                        return positions.unsqueeze(0)
                    return value * factor if isinstance(value, Tensor) else value

                cos, sin = module(*map(new, args), **{k: new(v) for k, v in kwargs.items()})  # noqa: B023
                return cos, sin

            cos, sin = compute(every, 1.0)
            again = compute(some, -2.0)
            halves = halves_of((cos, sin))
            if halves is None or not all(
                torch.equal(table[0, some], part[0]) for table, part in zip((cos, sin), again, strict=True)
            ):
                return None
            half_cos, half_sin = halves
            own_cos = torch.cat((half_cos, half_cos), dim=-1)
            plain_cos = own_cos if torch.equal(own_cos, cos[0]) else cos[0].contiguous()
            own_sin = torch.cat((-half_sin, half_sin), dim=-1)
            tables[key] = [plain_cos, sin[0].contiguous(), own_cos, own_sin]
        return tables

    def attention(self, call: AttentionCall) -> None:
        """Replace an attention module."""
        form = attention_form_of(call, self._spec)
        if form is None:
            return
        if form.rotary_dim and not any(call.angles() is each for each in self._tabled):
            return
        made = self._attention(form, call.module)
        if made is not None:
            self._replace(call.module, made, "attention")

    def _attention(self, form: AttentionForm, module: Any) -> Attention | None:
        spec = self._spec
        if not self._are_served([*form.projections, form.out]):
            return None
        factor = form.factor * form.scaling * spec.head_dim**0.5
        weight = torch.cat([linear.weight for linear in form.projections])[form.rows.flatten()]
        bias = _stacked_bias(form.projections)
        bias = None if bias is None else bias[form.rows.flatten()]
        num_q = spec.num_heads * spec.head_dim
        norms = None
        if form.norms is not None and form.norm_forms is not None:
            q_weight, k_weight = (
                norm_form.weight_of(norm)[form.dims]
                for norm, norm_form in zip(form.norms, form.norm_forms, strict=True)
            )
            q_eps, k_eps = (each.eps for each in form.norm_forms)
            if q_eps != k_eps:
                return None
            weights = [(q_weight * factor).contiguous(), k_weight.contiguous()]
            if all(torch.equal(each.to(self._dtype).float(), each) for each in weights):
                weights = [each.to(self._dtype) for each in weights]
            norms = HeadNorms(weights[0], weights[1], q_eps)
        elif abs(factor - 1.0) > 1e-6:
            # Exact in bfloat16 for powers of two only.
            scaled = (weight[:num_q].float() * factor).to(self._dtype)
            if self._dtype != torch.float32 and not torch.equal(
                scaled.float() / factor, weight[:num_q].float()
            ):
                return None
            weight[:num_q] = scaled
            if bias is not None:
                bias[:num_q] = (bias[:num_q].float() * factor).to(self._dtype)
        return Attention(
            self._ops,
            module.layer_idx,
            qkv=self._ops.pack_linear(weight),
            bias=bias,
            norms=norms,
            rotary_dim=form.rotary_dim,
            head_dim=spec.head_dim,
            out=self._packed(form.out),
            num_results=form.num_results,
        )

    def mlps(self) -> None:
        """Replace feed-forward blocks."""
        for module in self._modules():
            form = mlp_form_of(module)
            if form is None or not self._are_served([*form.gate_up, form.down]):
                continue
            made = self._mlp(form)
            if self._is_equal(module, made, form.gate_up[0].in_features):
                self._replace(module, made, "mlp")

    def _mlp(self, form: MLPForm) -> MLP:
        weight = self._ops.pack_linear(torch.cat([linear.weight for linear in form.gate_up]))
        make = MLP.gated if form.is_gated else MLP.ungated
        return make(self._ops, weight, _stacked_bias(form.gate_up), form.activation, self._packed(form.down))

    # ------------------------------------------------------------ single modules

    def norms(self) -> None:
        """Replace norms."""
        for module in self._modules():
            form = norm_form_of(module)
            if form is None:
                continue
            made = self._norm(form, module)
            if made is not None and self._is_equal(module, made, form.size):
                self._replace(module, made, "norm")

    def _norm(self, form: NormForm, module: nn.Module) -> Norm | None:
        """None: there is no kernel for its parameters."""
        weight, bias = form.weight_of(module), form.bias_of(module)
        stored = [parameter.dtype for parameter in module.parameters()] or [self._dtype]
        if form.kind == "layer":
            if form.offset or set(stored) != {self._dtype}:  # the kernel's weight has the serving dtype
                return None
            weight = weight.to(self._dtype)
        elif bias is not None:
            return None
        elif not form.offset:
            weight = weight.to(stored[0])
        return Norm(
            self._ops,
            form.kind,
            weight.contiguous(),
            None if bias is None else bias.to(self._dtype),
            form.eps,
        )

    def head_and_embedding(self) -> None:
        """Replace the output head, and the embedding, which may share its weight."""
        head = self._model.get_output_embeddings()
        embedding = self._model.get_input_embeddings()
        table = embedding.weight if isinstance(embedding, nn.Embedding) else None
        packed: Any = None
        if type(head) is nn.Linear:
            shape = (head.out_features, head.in_features)
            made = PackedHead(self._ops.pack_linear(head.weight), _bias_of(head), shape)
            if self._is_equal(head, made, head.in_features):
                if table is not None and head.weight.data_ptr() == table.data_ptr():
                    packed = made.packed
                self._replace(head, made, "head")
        if table is None:
            return
        source = packed if isinstance(packed, LinearWithRows) else table.detach()
        ids = torch.randint(table.shape[0], (1, _NUM_ROWS), generator=self._generator)
        operations = Operations()
        with operations:
            expected = embedding(ids)
        if operations.others(("embedding",)):  # as a choice by token
            return
        named = [
            float(value)
            for name, value in {**vars(embedding), **dict(embedding.named_buffers())}.items()
            if "scale" in name
            and (isinstance(value, float) or (isinstance(value, Tensor) and not value.ndim))
        ]
        rounded = [torch.tensor(scale, dtype=self._dtype).item() for scale in named]
        for scale in (None, *rounded, *named):
            new = PackedEmbedding(self._ops, source, scale)
            if torch.equal(new(ids), expected):
                self._replace(embedding, new, "embedding")
                return

    def linears(self) -> None:
        """Replace the linear layers and tables that are left."""
        for module in self._modules():
            if (
                type(module) is nn.Embedding
                and module.weight.dtype == self._dtype
                and module.max_norm is None
            ):
                self._replace(module, PackedEmbedding(self._ops, module.weight.detach(), None), "table")
            if type(module) is nn.Linear and self._are_served([module]):
                made = self._packed(module)
                if self._is_equal(module, made, module.in_features):
                    self._replace(module, made, "linear")

    def _packed(self, linear: nn.Linear) -> PackedLinear:
        shape = (linear.out_features, linear.in_features)
        return PackedLinear(self._ops.pack_linear(linear.weight.detach()), _bias_of(linear), shape)

    # ------------------------------------------------------------ tests and replacement

    def _modules(self) -> Iterator[nn.Module]:
        """The modules of the model at this time. Only those to come are kept: a replaced one is freed at once."""
        left = [*self._model.modules()][::-1]
        while left:
            yield left.pop()

    def _are_served(self, linears: Iterable[nn.Linear]) -> bool:
        """Whether weights have the serving dtype; some models keep a few in float32."""
        return all(linear.weight.dtype == self._dtype for linear in linears)

    def _is_equal(self, old: nn.Module, new: nn.Module, size: int) -> bool:
        """Whether two modules compute the same from random input [1, 3, size] in the serving dtype."""
        x = torch.randn(1, _NUM_ROWS, size, generator=self._generator).to(self._dtype)
        try:
            expected = old(x)
        except Exception:  # any type: it is the code of some module
            return False
        return is_close(new(x), expected, _TOLERANCE[self._dtype])

    def _replace(self, old: nn.Module, new: nn.Module, kind: str) -> None:
        places = [
            (parent, name)
            for parent in self._model.modules()
            for name, child in parent.named_children()
            if child is old
        ]
        for parent, name in places:
            setattr(parent, name, new)
        self.counts[kind] += 1


def _bias_of(linear: nn.Linear) -> Tensor | None:
    bias: Tensor | None = linear.bias
    return None if bias is None else bias.detach()


def _stacked_bias(linears: Iterable[nn.Linear]) -> Tensor | None:
    """The biases of layers, one after the other; zeros for those without; None: none has any."""
    pairs = [(linear, _bias_of(linear)) for linear in linears]
    if all(bias is None for _, bias in pairs):
        return None
    return torch.cat(
        [linear.weight.new_zeros(linear.out_features) if bias is None else bias for linear, bias in pairs]
    )


def summary(counts: Mapping[str, int]) -> str:
    """For the log."""
    return ", ".join(f"{number} {kind}" for kind, number in sorted(counts.items())) or "nothing"
