"""``python -m roost`` is the ``roost`` command."""

from __future__ import annotations

import sys

from roost.cli import main

if __name__ == "__main__":
    sys.exit(main())
