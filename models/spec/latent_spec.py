"""`LatentSpec`: latent attention (MLA), where a token's keys and values are projections of one small vector."""

from __future__ import annotations

from typing import Final

import msgspec

KV_UP: Final = "self_attn.kv_b_proj"
"""Keys and values from latents; held per head in the serving dtype, whatever the form of linear layers."""


class LatentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of latent attention (DeepSeek-V2, 2024).

    A token has one row in the KV pool for all heads: its normalized latent, then a key part that rotates. Per head,
    keys and values are `kv_b_proj` of the latent. Queries take in the keys' half of that matrix (the absorbed form), so
    attention reads the rows as they are: one KV head, the row as key, its first `kv_lora_rank` numbers as value.

    The `ModelSpec` of such a model describes attention over rows: `num_kv_heads` is 1, `head_dim` the row's size and
    `rotary_dim` the part that rotates, which is the last one of the row.
    """

    q_lora_rank: int | None  # size of the queries' own latent; None: queries are projected directly
    kv_lora_rank: int
    qk_nope_head_dim: int  # of a head's query: the part that does not rotate
    qk_rope_head_dim: int  # the part that does
    v_head_dim: int
    norm_eps: float = 1e-6  # of the norms of latents, whatever the other norms have

    @property
    def row_size(self) -> int:
        """Numbers of a token in the KV pool, per layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Size of a head's query and key before absorption."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim
