"""Losses that learn from judged answers: terms that take the place of the cross entropy.

coefficients.py                  what they share: a coefficient for each token, and one pass over the head
preference.py                    chosen and rejected answers (DPO)
policy_gradient.py               rewards of sampled answers (GRPO)
"""
