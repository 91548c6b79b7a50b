"""The scheduler process, `python -m engine.scheduler`. The supervisor starts it."""

import gc

from ..launch.child.child import run_child
from ..launch.child.process_resources import shorten_spinning

gc.disable()  # until `main` has the model: a collection while torch is imported takes 0.1 s and frees nothing
shorten_spinning()  # before `process.py` imports torch
run_child(__package__)
