"""Adapters that put the ops into other JAX trainers. Each trainer has a package, which imports it."""
