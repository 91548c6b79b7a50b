"""How many requests run, and how many checkpoints there are, by the size of what state layers keep."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from engine.launch.resolve.resolve import resolve
from engine.models.spec.sizes import checkpoint_share, num_checkpoints, row_states_bytes, slot_bytes
from engine.models.spec.state_spec import DeltaSpec, StateSpec
from engine.models.weight_files.weight_memory import weight_bytes
from engine.runtime.config.engine_config import EngineConfig

from .test_resolve import GIB, HOST, SPEC, config, pool_of

LAYERS = tuple(layer % 4 != 3 for layer in range(SPEC.num_layers))
SHORT = msgspec.structs.replace(SPEC, state=StateSpec(layers=LAYERS, conv_size=576, conv_taps=3))
DELTA = DeltaSpec(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128)
LARGE = msgspec.structs.replace(
    SPEC, state=StateSpec(layers=LAYERS, conv_size=DELTA.conv_size, conv_taps=4, delta=DELTA)
)
TOKEN_BYTES = LARGE.kv_bytes_per_token(2)
SMALL_HOST = dataclasses.replace(HOST, mem_available_bytes=8 * GIB)


def running_of(config: EngineConfig) -> int:
    assert isinstance(config.scheduler.max_running_requests, int)
    return config.scheduler.max_running_requests


@pytest.mark.parametrize("settings", [{}, {"speculative": "ngram"}], ids=str)
def test_states_of_running_requests_take_a_quarter_of_what_weights_leave(settings):
    """With drafts, the states after each of them, too."""
    resolved = resolve(config(**settings), LARGE, SMALL_HOST)
    most, drafts = running_of(resolved.config), resolved.config.scheduler.speculative_num_draft_tokens
    left = SMALL_HOST.mem_available_bytes - weight_bytes(LARGE, 2)
    one = slot_bytes(LARGE, "bfloat16") * (1 + (drafts if settings else 0))

    assert most * one <= left / 4 < (most + 1) * one
    assert most < running_of(resolve(config(**settings), SPEC, SMALL_HOST).config)
    assert "their states take a quarter of the memory" in resolved.notes["max_running_requests"]


def test_small_states_and_a_given_number_are_no_limit():
    usual = running_of(resolve(config(), SPEC, SMALL_HOST).config)
    assert running_of(resolve(config(), SHORT, SMALL_HOST).config) == usual
    assert running_of(resolve(config(max_running_requests=48, max_model_len=1024), LARGE, HOST).config) == 48


def test_states_are_planned_beside_the_pool():
    # With so many positions memory is the only bound of the pool.
    spec = msgspec.structs.replace(LARGE, max_position_embeddings=1 << 20)
    settings = {"max_model_len": 1 << 18, "mem_fraction": 0.4}
    fewer, more = (
        pool_of(resolve(config(max_running_requests=n, **settings), spec, HOST).config) for n in (8, 72)
    )
    states = row_states_bytes(spec, "bfloat16", 72, 0) - row_states_bytes(spec, "bfloat16", 8, 0)
    share = checkpoint_share(spec, "bfloat16", TOKEN_BYTES)
    less = (fewer - more) * TOKEN_BYTES * (1 + share)
    assert 0.75 * 0.4 * states < less < 0.4 * states  # a token takes memory for attention, too


@pytest.mark.parametrize(
    ("spec", "token_bytes", "share"),
    [
        (SPEC, TOKEN_BYTES, 0.0),
        (SHORT, TOKEN_BYTES, 0.1),
        (LARGE, 1 << 16, slot_bytes(LARGE, "bfloat16") / (4096 << 16)),
        (LARGE, 64, 0.5),
    ],
)
def test_large_states_have_a_larger_share_for_checkpoints(spec, token_bytes, share):
    assert checkpoint_share(spec, "bfloat16", token_bytes) == pytest.approx(share)
    pages, page_size = 4096, 16
    found = num_checkpoints(spec, "bfloat16", token_bytes, pages, page_size)
    if spec.state is None:
        assert found == 0
        return
    slots = share * pages * page_size * token_bytes / slot_bytes(spec, "bfloat16")
    assert found == max(1, min(pages, int(slots)))
