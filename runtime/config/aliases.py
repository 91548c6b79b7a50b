"""`Alias`: another engine's name for one of our settings, where both mean the same.

It stands in the setting's annotation, `Annotated[int, "help", Alias("max_num_seqs")]`, and is taken wherever the
setting's own name is: flag, YAML file, `LLM(...)`. A name whose meaning differs is no alias, however close: vLLM's
`gpu_memory_utilization` and SGLang's `mem_fraction_static` are shares of the whole memory, weights included, and
`mem_fraction` is a share of what the weights leave.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Alias:
    """Another name of a setting.

    Attributes:
        name: as a field's, with underscores.
        switch: for a name that is on or off where the setting is not: what true, and maybe false, stands for; None for
            a name that takes the setting's own values.
    """

    name: str
    switch: Mapping[bool, object] | None = None
