"""Losses of judged answers, which take the place of the cross entropy.

pair_losses/          settings and formulas of losses of preference pairs: one file a loss
reward_settings.py    settings of rewards
preferences.py        preference pairs as a kind of run: checks, loss card, metrics
grpo.py               rewards of sampled answers as a kind of run
coefficients.py       what both losses share: a coefficient for each token, and one pass over the head
pair_term.py          the loss of any pair loss
policy_gradient.py    the loss of rewards
"""
