"""Losses that learn from judged answers; each is a term of the loss that takes the place of the cross entropy.

coefficients.py                  what they share: a coefficient for each token, and one pass over the head
preference.py                    chosen and rejected answers (DPO)
"""
