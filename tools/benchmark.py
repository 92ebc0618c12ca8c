"""Measure mkd and its peers: time, peak memory and errors, as ratios, with a PASS or FAIL line each.

python tools/benchmark.py logits --shape 8192,151936
torchrun --nproc-per-node 2 tools/benchmark.py head
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.benchmarks.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
