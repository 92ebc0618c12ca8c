"""Cut a student out of a teacher. The flags are in mkd/commands/make_student.py."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mkd.commands.make_student import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
