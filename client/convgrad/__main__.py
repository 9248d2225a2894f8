"""``python -m convgrad`` is the command ``convgrad``."""

from __future__ import annotations

import sys

from convgrad.cli import main

sys.exit(main())
