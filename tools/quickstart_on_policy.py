"""Run `mkd quickstart --on-policy` from a checkout, with the same flags: mkd/commands/quickstart.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mkd.commands.quickstart import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(["--on-policy", *sys.argv[1:]]))
