"""``python -m stepwell`` is the command line."""

from __future__ import annotations

from stepwell.cli import main

if __name__ == "__main__":
    main()
