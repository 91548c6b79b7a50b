"""The scheduler as a process of its own: `python -m engine.scheduler`, started by the supervisor."""

import gc

from ..runtime.child.child import run_child
from ..runtime.openmp import shorten_spinning

gc.disable()  # until `main` has the model: to collect while torch is imported takes 0.1 s and finds nothing
shorten_spinning()  # before `process.py` imports torch
run_child(__package__)
