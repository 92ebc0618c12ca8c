"""Run `mkd plan` from a checkout, with the same flags: mkd/commands/plan.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mkd.commands.plan import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
