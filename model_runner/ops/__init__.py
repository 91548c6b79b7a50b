"""The functions that layers call, their only access to kernels: `Ops`, and a contract for each op.

The ops are selected once at start (`op_selection`) and passed to the layers. A layer calls `ops.rms_norm` and does not
depend on its provider: sgl-kernel, Triton, our CPU library or plain torch. Each op is an attribute of `Ops`; its class
in one of these files is its contract, and every provider is tested against it.
"""
