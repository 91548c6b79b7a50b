"""The proving process, `python -m engine.grammar`. `ProofWorker` starts it."""

from .process import main

main()
