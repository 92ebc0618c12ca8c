"""Distil a teacher into a student: `mkd train` from a checkout, without installing it.

torchrun --nproc-per-node N pretrain_kd.py --teacher-hf A --student-hf B --data-path T
"""

from mkd.commands.train import main

if __name__ == "__main__":
    main()
