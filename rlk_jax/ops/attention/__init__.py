"""attention: causal attention over the slots of a KV cache. api.py has the public function."""
