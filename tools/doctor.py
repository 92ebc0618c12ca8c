"""Run `mkd doctor` from a checkout, with the same flags: mkd/commands/doctor.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mkd.commands.doctor import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
