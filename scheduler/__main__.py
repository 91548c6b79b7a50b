"""The scheduler as a process of its own: `python -m engine.scheduler`, started by the supervisor."""

from ..runtime.child import run_child
from ..runtime.openmp import let_waiting_threads_sleep

let_waiting_threads_sleep()  # before `process.py` imports torch
run_child(__package__)
