"""`StateSpec`: the layers of a decoder that keep a state of fixed size instead of keys and values."""

from __future__ import annotations

import math

import msgspec


class StateSpec(msgspec.Struct, frozen=True, kw_only=True):
    """State layers: what they keep of a request is one slot, which is exact at the request's last computed token only.

    Attributes:
        layers: one for each layer of the model: whether it keeps a state. The others attend to keys and values.
        conv_size: channels of the short convolution of a state layer.
        conv_taps: tokens that the convolution reads; the state has its inputs for the last `conv_taps - 1` tokens.
        conv_bias: the convolution and the projections around it have biases.
    """

    layers: tuple[bool, ...]
    conv_size: int
    conv_taps: int
    conv_bias: bool = False

    @property
    def num_layers(self) -> int:
        """State layers of the model."""
        return sum(self.layers)

    @property
    def conv_shape(self) -> tuple[int, int]:
        """Numbers that a layer's convolution keeps of a request, in the dtype of the model."""
        return self.conv_taps - 1, self.conv_size

    def slot_bytes(self, dtype_bytes: int) -> int:
        """Memory of one slot, all state layers."""
        return self.num_layers * math.prod(self.conv_shape) * dtype_bytes
