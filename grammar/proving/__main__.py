"""The proving process, `python -m engine.grammar.proving`. `ProofWorker` starts it."""

from .process import main

main()
