"""`python -m engine`: the same as the command `engine`, also where scripts are not on the path."""

from __future__ import annotations

from .cli.main import main

if __name__ == "__main__":
    main()
