"""The memory of a step.

activations.py       the memory of a micro-batch
mixer_bytes.py       what a gated delta net keeps of a token
head.py              rows of a block of the fused head
head_memory.py       the memory of heads and loss
sampling_memory.py   the memory of what layers keep while the student samples
memory.py            the peak memory of every pipeline rank
device_memory.py     memory of a GPU that torch does not allocate
"""
