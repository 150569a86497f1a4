"""Entry point of the `stepfence` command; also `python -m scheduler_svc`."""

from __future__ import annotations

import sys

from scheduler_svc.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
