"""The ops over logits that are in memory already: logp, ratio_kl and grpo_loss.

All three compute log-probabilities alike and differ in what they do with them. api.py has the public functions.
"""
