"""Process of a tensor-parallel rank: `python -m engine.model_runner`, started by the supervisor."""

import gc

from ..launch.child.child import run_child
from ..launch.child.process_resources import shorten_spinning

gc.disable()  # as in the scheduler's process
shorten_spinning()  # before `process.py` imports torch
run_child(__package__)
