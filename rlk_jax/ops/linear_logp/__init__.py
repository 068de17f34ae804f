"""linear_logp: log-probabilities of the taken tokens from hidden states and the LM head, without the logits.

api.py is the public function; options.py says what a call carries; implementations.py lists the ways to run it.
"""
