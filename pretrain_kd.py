"""Distil a teacher into a student: `mkd train` from a checkout, without installing it.

python pretrain_kd.py --nproc-per-node N --teacher-hf A --student-hf B --data-path T

Without --nproc-per-node it is one process, or one of those that torchrun starts.
"""

import sys

from mkd.commands.train import main

if __name__ == "__main__":
    sys.exit(main(processes=1))
