"""The loss of a teacher whose top-k log-probabilities are stored.

topk_statistics.py    row statistics of the k + 1 buckets, their merge over ranks, the gradient
topk.py               the loss of logits that are split over the vocabulary
topk_select.py        the most probable ids of a teacher, which the export writes
"""
