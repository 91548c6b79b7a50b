"""What counts as a norm and as a feed-forward block that the engine's kernels compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model_runner.hf_backend.swapping.attention_form import attention_form_of
from engine.model_runner.hf_backend.swapping.calls import AttentionCall
from engine.model_runner.hf_backend.swapping.mlp_form import mlp_form_of
from engine.model_runner.hf_backend.swapping.norm_form import norm_form_of
from engine.models.spec.model_spec import ModelSpec

SIZE = 24


class FakeNorm(nn.Module):
    """As a norm of transformers, with any arithmetic."""

    def __init__(self, compute: Callable[[Tensor, Tensor], Tensor], weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.variance_epsilon = 1e-5
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x.float(), self.weight).to(x.dtype)


def rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


@pytest.mark.parametrize(
    ("compute", "kind", "offset"),
    [
        (lambda x, w: rms(x) * w, "rms", 0.0),
        (lambda x, w: rms(x) * (1 + w), "rms", 1.0),
        (lambda x, w: F.layer_norm(x, (SIZE,), w, None, 1e-5), "layer", 0.0),
        (lambda x, w: F.layer_norm(x, (SIZE,), 1 + w, None, 1e-5), "layer", 1.0),
    ],
)
def test_norms_are_known_by_what_they_compute(compute, kind, offset):
    form = norm_form_of(FakeNorm(compute, torch.ones(SIZE)))  # weights of 1 say nothing
    assert form is not None
    assert (form.kind, form.offset, form.eps, form.size, form.has_bias) == (kind, offset, 1e-5, SIZE, False)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x, w: x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-5) * w,  # eps after the root
        lambda x, w: rms(x) * w.square(),
        lambda x, w: rms(x.clamp(-20, 20)) * w,
        lambda x, w: rms(x) * w * 1.01,
        lambda x, w: x * w,
        lambda x, w: F.layer_norm(x, (SIZE,), w, None, 1e-3),
        lambda x, w: (rms(x) * w)[..., :-1],
    ],
)
def test_what_differs_is_not_a_norm(compute):
    assert norm_form_of(FakeNorm(compute, torch.ones(SIZE))) is None


def test_weights_of_two_dimensions_and_modules_that_fail_are_not_norms():
    def fails(x: Tensor, w: Tensor) -> Tensor:
        raise RuntimeError("not for you")

    assert norm_form_of(FakeNorm(lambda x, w: rms(x) * w, torch.ones(2, SIZE))) is None
    assert norm_form_of(FakeNorm(fails, torch.ones(SIZE))) is None
    assert norm_form_of(nn.Linear(SIZE, SIZE)) is None


def test_a_norm_with_a_buffer_stays():
    scale = torch.ones(9, 1)  # later positions may have another
    module = FakeNorm(lambda x, w: rms(x) * w * scale[: x.shape[1]], torch.ones(SIZE))
    module.register_buffer("scale", scale)
    assert norm_form_of(module) is None


def test_a_layer_norm_has_its_bias():
    form = norm_form_of(nn.LayerNorm(SIZE, eps=1e-6))
    assert form is not None
    assert (form.kind, form.eps, form.has_weight, form.has_bias) == ("layer", 1e-6, True, True)


class FakeMLP(nn.Module):
    """Up to three linear layers, and any arithmetic between them."""

    def __init__(self, compute: Callable[..., Tensor], *inner: int, down: int = 40) -> None:
        super().__init__()
        for number, outputs in enumerate(inner):
            setattr(self, f"in{number}", nn.Linear(SIZE, outputs, bias=number == 0))
        self.down = nn.Linear(down, SIZE)
        self.compute = compute
        self.num = len(inner)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(
            self.compute(*(getattr(self, f"in{number}")(x) for number in range(self.num)))
        )
        return out


@pytest.mark.parametrize(
    ("compute", "inner", "activation", "is_gated", "order"),
    [
        (lambda a, b: F.silu(a) * b, (40, 40), "silu", True, (0, 1)),
        (lambda a, b: a * F.silu(b), (40, 40), "silu", True, (1, 0)),
        (lambda a, b: F.gelu(a) * b, (40, 40), "gelu", True, (0, 1)),
        (lambda a, b: F.gelu(a, approximate="tanh") * b, (40, 40), "gelu_tanh", True, (0, 1)),
        (lambda a: F.silu(a[..., :40]) * a[..., 40:], (80,), "silu", True, (0,)),
        (F.relu, (40,), "relu", False, (0,)),
        (F.gelu, (40,), "gelu", False, (0,)),
    ],
)
def test_blocks_are_known_by_what_they_compute(compute, inner, activation, is_gated, order):
    module = FakeMLP(compute, *inner)
    form = mlp_form_of(module)
    assert form is not None
    assert (form.activation, form.is_gated, form.down) == (activation, is_gated, module.down)
    assert form.gate_up == [getattr(module, f"in{number}") for number in order]


@pytest.mark.parametrize(
    ("compute", "inner"),
    [
        (lambda a, b: F.silu(a).clamp(max=7) * b, (40, 40)),
        (lambda a, b: F.silu(a) * (b + 1), (40, 40)),
        (lambda a, b: torch.sigmoid(1.702 * a) * a * b, (40, 40)),
        (lambda a: F.relu(a).square(), (40,)),
        (lambda a: F.silu(a[..., 40:]) * a[..., :40], (80,)),  # the ups first
        (lambda a: F.silu(a[..., ::2]) * a[..., 1::2], (80,)),
        (lambda a, b: F.silu(1e5 * torch.tanh(a / 1e5)) * b, (40, 40)),  # a bend beyond the sizes tried
    ],
)
def test_blocks_that_differ_stay(compute, inner):
    assert mlp_form_of(FakeMLP(compute, *inner)) is None


def test_blocks_with_more_in_them_stay():
    class Scaled(FakeMLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    class Weighted(FakeMLP):
        def __init__(self) -> None:
            super().__init__(F.relu, 40)
            self.gate = nn.Parameter(torch.ones(1))

    assert mlp_form_of(Scaled(F.relu, 40)) is None
    assert mlp_form_of(Weighted()) is None


SPEC = ModelSpec(
    model_type="llama",
    vocab_size=8,
    hidden_size=SIZE,
    intermediate_size=40,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-6,
    rope_theta=10_000.0,
    max_position_embeddings=64,
    tie_word_embeddings=True,
    torch_dtype="float32",
)


class FakeAttention(nn.Module):
    """Attention as in transformers, without rotary, and any arithmetic before it."""

    def __init__(self, compute: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> None:
        super().__init__()
        self.q = nn.Linear(SIZE, 32)
        self.k = nn.Linear(SIZE, 16)
        self.v = nn.Linear(SIZE, 16)
        self.o = nn.Linear(32, SIZE)
        self.compute = compute

    def forward(self, hidden_states: Tensor, engine_check: Any = None, **options: Any) -> Tensor:
        heads = [linear(hidden_states).unflatten(-1, (-1, 8)) for linear in (self.q, self.k, self.v)]
        q, k, v = (x.transpose(1, 2) for x in self.compute(*heads, **options))
        out: Tensor = self.o(engine_check.look(self, q, k, v, None, {"scaling": 0.5})[0].flatten(2))
        return out


@pytest.mark.parametrize(
    ("compute", "options", "is_known"),
    [
        (lambda q, k, v: (q, k, v), {}, True),
        (lambda q, k, v, mask: (q, k, v), {"mask": torch.zeros(1, 1, 5, 5)}, True),
        (lambda q, k, v, scale: (q * scale, k, v), {"scale": torch.ones(1, 5, 1, 1)}, False),  # more later
        (lambda q, k, v, first: (q, k, v + first), {"first": torch.zeros(1, 5, 2, 8)}, False),
        (
            lambda q, k, v, ids: (q * (ids // 8192 + 1)[..., None, None], k, v),
            {"ids": torch.arange(5)},
            False,
        ),
        (lambda q, k, v: (q, k.clamp(-1e4, 1e4), v), {}, False),
        (lambda q, k, v: (q, k, F.dropout(v, 1e-3, training=True)), {}, False),
        (lambda q, k, v: (q.mul_(2), k, v), {}, False),
        (lambda q, k, v: (q, k, v.roll(1, 1)), {}, False),
    ],
)
def test_attention_is_known_by_what_it_computes(compute, options, is_known):
    call = AttentionCall(FakeAttention(compute), (torch.randn(1, 5, SIZE),), options)
    form = attention_form_of(call, SPEC)
    assert (form is not None) == is_known
    if form is not None:
        assert (form.rotary_dim, form.factor, form.scaling) == (0, 1.0, 0.5)
