"""Distil a teacher into a student.

torchrun --nproc-per-node N pretrain_kd.py --teacher-hf A --student-hf B --data-path T
"""

import signal
import sys

from mkd.run.main import leave, main

if __name__ == "__main__":
    leave(main(sys.argv[1:], signals_afterwards=signal.SIG_IGN))
