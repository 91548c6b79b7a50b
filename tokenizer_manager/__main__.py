"""The tokenizer manager as a process of its own: `python -m engine.tokenizer_manager`, started by the supervisor."""

from ..launch.child.child import run_child

run_child(__package__)
