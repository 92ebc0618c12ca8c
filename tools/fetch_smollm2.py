"""Fetch SmolLM2-135M-Instruct as a Hugging Face folder: mkd/quickstart/fetch_smollm2.py.

python tools/fetch_smollm2.py DIR
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mkd.quickstart.fetch_smollm2 import fetch_smollm2  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out_dir", type=Path, help="folder to write")
    print(fetch_smollm2(parser.parse_args().out_dir))


if __name__ == "__main__":
    main()
