"""Faults for `triage.py --plant MODULE:FUNCTION`: context managers, entered by its children before a model is loaded.

A fault is in the preferred provider of an operator only, so switching that one off helps.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

Op = Callable[..., Any]


@contextmanager
def _in_ops(**changes: Callable[[Op], Op]) -> Iterator[None]:
    from engine.model_runner import load, op_selection

    original = op_selection.select_ops

    def select(*args: Any, **kwargs: Any) -> Any:
        ops = original(*args, **kwargs)
        preferred = {choice.op for choice in ops.choices if choice.provider != "torch"}
        changed: dict[str, Any] = {
            op: change(getattr(ops, op)) for op, change in changes.items() if op in preferred
        }
        return dataclasses.replace(ops, **changed)

    with mock.patch.object(load, "select_ops", select):
        yield


def _doubled(op: Op) -> Op:
    def call(*args: Any) -> Any:
        result = op(*args)
        return (result[0] * 2, *result[1:]) if isinstance(result, tuple) else result * 2

    return call


def _aborting(_op: Op) -> Op:
    return lambda *_args: os.abort()


def _hanging(_op: Op) -> Op:
    return lambda *_args: threading.Event().wait()


def wrong(_told: Any) -> Any:
    return _in_ops(add_rms_norm=_doubled)


def two_wrong(_told: Any) -> Any:
    return _in_ops(add_rms_norm=_doubled, rotate_and_store=_doubled)


def crash(_told: Any) -> Any:
    return _in_ops(add_rms_norm=_aborting)


def hang(_told: Any) -> Any:
    return _in_ops(add_rms_norm=_hanging)


@contextmanager
def broken_base(_told: Any) -> Iterator[None]:
    """Weights arrive wrong, whatever computes with them."""
    from engine.model_runner import load, op_selection

    original = op_selection.select_ops

    def select(*args: Any, **kwargs: Any) -> Any:
        ops = original(*args, **kwargs)
        return dataclasses.replace(ops, pack_linear=lambda weight: ops.pack_linear(weight * 0.5))

    with mock.patch.object(load, "select_ops", select):
        yield


def wrong_overlap(told: Any) -> Any:
    """The operators are right, and the answers are wrong with overlap."""
    return _in_ops() if "overlap" in told["off"] or told.get("compare") else broken_base(told)
