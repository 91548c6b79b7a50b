"""`attention_form_of`: recognizes attention modules: projections, head norms and rotary around external attention.

A module's code runs with probes for its linear layers, in float32, and an attention function that shows its queries,
keys and values. First the outputs of the projections are numbers that say where they come from: this gives the order
in which heads are stored, for separate and for fused projections. Then they are random: this shows the head norms and
the rotation, and that nothing else is computed.
"""

# Shapes: T tokens, Hq query heads, H KV heads, D head dim, R rotated dimensions of a head.

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...kernels.plain import rotate
from .calls import AttentionCall, Seen
from .norm_form import NormForm, norm_form_of
from .probe import (
    SCALES,
    Operations,
    Probe,
    has_other_weights,
    is_close,
    plain_linears,
    probed_copy,
    randomize,
)

if TYPE_CHECKING:
    from ....models.spec.model_spec import ModelSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionForm:
    """o(attention(factor * rotary(norm(q(x))), rotary(norm(k(x))), v(x))).

    Attributes:
        projections: the layers before attention; their outputs, one after the other, are numbered.
        rows: [Hq + 2H, D] int64: which of these outputs is which dimension of a head of q, k and v. Dimensions that are
            rotated together are R / 2 apart, so those of q and k may be in another order than in the module.
        dims: [D] int64, that order.
        out: the layer after attention.
        norms: of the heads of q and of k; None: there are none.
        rotary_dim: R; 0: nothing is rotated.
        factor: of the queries, before attention.
        scaling: of the scores, in attention.
        num_results: length of the tuple that the module returns; 0: it returns a tensor.
    """

    projections: list[nn.Linear]
    rows: Tensor
    dims: Tensor
    out: nn.Linear
    norms: tuple[nn.Module, nn.Module] | None
    norm_forms: tuple[NormForm, NormForm] | None
    rotary_dim: int
    factor: float
    scaling: float
    num_results: int = 0


@torch.inference_mode(False)
@torch.no_grad()
def attention_form_of(call: AttentionCall, spec: ModelSpec) -> AttentionForm | None:
    """The form of an attention module that is called in this way; None: it computes in another way."""
    try:
        return _Recognition(call, spec).form()
    except Exception:  # any type: it is the code of some module, and a probe may lack what it needs
        logger.debug("attention of %s is not recognized", type(call.module).__name__, exc_info=True)
        return None


class _Recognition:
    def __init__(self, call: AttentionCall, spec: ModelSpec) -> None:
        self._call = call
        self._num_q, self._num_kv, self._head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self._num_tokens = call.hidden_states().shape[1]
        self._linears = plain_linears(call.module)
        self._norms = {
            child: form
            for child in call.module.children()
            if child not in self._linears and (form := norm_form_of(child)) is not None
        }
        angles = call.angles()
        self._half_cos, self._half_sin, self._angles = _random_angles(angles)

    def form(self) -> AttentionForm | None:
        if has_other_weights(self._call.module, [*self._linears, *self._norms]):
            return None
        if len(self._norms) not in (0, 2) or not all(map(self._is_head_norm, self._norms.values())):
            return None
        stored = self._as_stored()
        if stored is None:
            return None
        for form in self._variants(stored):
            results = [self._num_results(form, scale) for scale in SCALES]
            num_results = results[0]
            if num_results is not None and len(set(results)) == 1:
                return replace(form, num_results=num_results)
        return None

    def _is_head_norm(self, form: NormForm) -> bool:
        return form.kind == "rms" and form.size == self._head_dim and not form.has_bias

    # ------------------------------------------------------------ where the heads are stored

    def _as_stored(self) -> AttentionForm | None:
        """The form without norms and rotation."""
        starts: dict[nn.Linear, int] = {}
        stop = 1
        for linear in self._linears:
            starts[linear] = stop
            stop += linear.out_features
        if stop >= 1 << 24:  # larger numbers are not exact in float32
            return None

        def number(linear: nn.Linear) -> Probe:
            own = torch.arange(starts[linear], starts[linear] + linear.out_features).float()
            return Probe(linear.out_features, lambda x: own.expand(*x.shape[:-1], -1).clone())

        probes: dict[Any, Any] = {linear: number(linear) for linear in self._linears}
        copied = probed_copy(self._call.module, probes | {norm: nn.Identity() for norm in self._norms})
        unturned = (
            None
            if self._angles is None
            else (torch.ones_like(self._angles[0]), torch.zeros_like(self._angles[1]))
        )
        seen, x = Seen(), self._random_hidden(1.0)
        self._call.run(copied, x, unturned, seen)
        before = [linear for linear, probe in probes.items() if _was_given(probe, x)]
        after = [linear for linear in probes if linear not in before]
        if seen.has_sinks:
            return None
        numbers = (self._num_q, self._num_kv, self._num_kv)
        for found, count in zip((seen.query, seen.key, seen.value), numbers, strict=True):
            shape = (self._num_tokens, count, self._head_dim)
            if found.shape != shape or not torch.equal(found, found[:1].expand(shape)):
                return None
        factor = _factor_of(seen.query[0], [starts[linear] for linear in before])
        codes = torch.cat((seen.query[0] / factor, seen.key[0], seen.value[0]))
        whole = codes.round().long()
        if len(after) != 1 or not is_close(codes, whole, 1e-6) or whole.unique().numel() != whole.numel():
            return None
        rows, offset = torch.full_like(whole, -1), 0
        for linear in before:
            mine = (whole >= starts[linear]) & (whole < starts[linear] + linear.out_features)
            rows[mine] = whole[mine] - starts[linear] + offset
            offset += linear.out_features
        if bool((rows < 0).any()) or rows.numel() != offset:
            return None
        scaling = self._head_dim**-0.5 if seen.scaling is None else float(seen.scaling)
        dims = torch.arange(self._head_dim)
        return AttentionForm(before, rows, dims, after[0], None, None, 0, factor, scaling)

    # ------------------------------------------------------------ what is computed with them

    def _variants(self, stored: AttentionForm) -> Iterator[AttentionForm]:
        """All forms that a module may have that stores its heads in this way."""
        norms: list[Any] = [tuple(self._norms), tuple(self._norms)[::-1]] if self._norms else [None]
        rotary_dims = [0] if self._half_cos is None else [2 * self._half_cos.shape[-1], 0]
        for pair in norms:
            forms = None if pair is None else (self._norms[pair[0]], self._norms[pair[1]])
            for rotary_dim in rotary_dims:
                for dims in _orders(self._head_dim, rotary_dim):
                    rows = stored.rows.clone()
                    rows[: -self._num_kv] = rows[: -self._num_kv, dims]
                    yield replace(
                        stored, rows=rows, dims=dims, norms=pair, norm_forms=forms, rotary_dim=rotary_dim
                    )

    def _num_results(self, form: AttentionForm, scale: float) -> int | None:
        """None: the module does not compute what the form says, at this size of numbers."""
        probes: dict[Any, Any] = {linear: Probe(linear.out_features) for linear in self._linears}
        for probe in probes.values():
            probe.begin(scale)
        norms = {norm: probed_copy(norm, {}) for norm in self._norms}
        randomize(parameter for norm in norms.values() for parameter in norm.parameters())
        copied = probed_copy(self._call.module, probes | norms)
        seen, hidden, operations = Seen(), self._random_hidden(scale), Operations()
        with operations:
            result = self._call.run(copied, hidden, self._angles, seen)
        if len(seen.modules) != 1 or operations.others():
            return None
        outputs = torch.cat([probes[linear].outputs[0][0] for linear in form.projections], dim=-1)
        stacked = outputs[:, form.rows.flatten()].view(self._num_tokens, -1, self._head_dim)
        query, key, value = stacked.split((self._num_q, self._num_kv, self._num_kv), dim=1)
        if form.norms is not None and form.norm_forms is not None:
            query, key = (
                norm_form.compute(x, norm_form.weight_of(norms[norm])[form.dims], None)
                for x, norm, norm_form in zip((query, key), form.norms, form.norm_forms, strict=True)
            )
        if form.rotary_dim:
            assert self._half_cos is not None and self._half_sin is not None
            cos = torch.cat((self._half_cos, self._half_cos), dim=-1).unsqueeze(1)
            sin = torch.cat((-self._half_sin, self._half_sin), dim=-1).unsqueeze(1)
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        expected = query * form.factor, key, value
        found = seen.query[..., form.dims], seen.key[..., form.dims], seen.value
        if not all(is_close(*pair) for pair in zip(found, expected, strict=True)):
            return None
        last = probes[form.out]
        first, *rest = result if isinstance(result, tuple) else (result,)
        if not _was_given(last, seen.out.flatten(2)) or not torch.equal(first, last.outputs[0]):
            return None
        if any(each is not None for each in rest):
            return None
        return len(result) if isinstance(result, tuple) else 0

    def _random_hidden(self, scale: float) -> Tensor:
        return torch.randn(1, self._num_tokens, self._call.hidden_states().shape[-1]) * scale


def _was_given(probe: Probe, x: Tensor) -> bool:
    """Whether a probe was called once, with this input."""
    return len(probe.inputs) == 1 and probe.inputs[0].shape == x.shape and torch.equal(probe.inputs[0], x)


def _factor_of(query: Tensor, starts: list[int]) -> float:
    """The factor of numbers that are consecutive without it, and start with one of `starts`; else 1."""
    least, most = float(query.min()), float(query.max())
    step = (most - least) / max(query.numel() - 1, 1)
    if step <= 0:
        return 1.0
    return step if any(abs(least / step - start) < 1e-2 for start in starts) else 1.0


def _orders(head_dim: int, rotary_dim: int) -> Iterator[Tensor]:
    """The orders of a head's dimensions to try: as stored, and with neighbors, which some models rotate together, R / 2
    apart.
    """
    yield torch.arange(head_dim)
    if rotary_dim:
        dims = torch.arange(head_dim)
        yield torch.cat((dims[0:rotary_dim:2], dims[1:rotary_dim:2], dims[rotary_dim:]))


def halves_of(angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor] | None:
    """cos and sin of each frequency once: [1, T, R] -> [T, R / 2]; None: they are stored in another way."""
    for start, stop, step in ((0, angles[0].shape[-1] // 2, 1), (0, None, 2)):
        firsts = [part[0, :, start:stop:step] for part in angles]
        offset = 1 if step == 2 else angles[0].shape[-1] // 2
        seconds = [part[0, :, offset::step] for part in angles]
        if all(torch.equal(*pair) for pair in zip(firsts, seconds, strict=True)):
            return firsts[0], firsts[1]
    return None


def _random_angles(
    angles: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor | None, Tensor | None, tuple[Tensor, Tensor] | None]:
    """Random cos and sin of each frequency, [T, R / 2], and in the form of the module's; None: it is not given any."""
    if angles is None or halves_of(angles) is None:
        return None, None, None
    _, num_tokens, rotary_dim = angles[0].shape
    half = rotary_dim // 2
    random = torch.rand(num_tokens, half) * 6.28
    cos, sin = random.cos(), random.sin()
    first = angles[0][0].float()
    together: Callable[[Tensor], Tensor] = lambda x: x.repeat_interleave(2, dim=-1)  # noqa: E731
    if torch.equal(first[:, :half], first[:, half:]):
        together = lambda x: torch.cat((x, x), dim=-1)  # noqa: E731
    return cos, sin, (together(cos)[None], together(sin)[None])
