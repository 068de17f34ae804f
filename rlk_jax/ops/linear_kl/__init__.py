"""linear_kl: the divergence of a student from a frozen teacher, from the hidden states and the heads of both.

api.py is the public function; options.py says what a call carries; divergence.py has the formulas; implementations.py
lists the ways to run it.
"""
