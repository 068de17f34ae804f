"""Adapters that put the ops into other JAX trainers. Each trainer has a module, which imports it."""
