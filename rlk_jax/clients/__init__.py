"""The ops inside the JAX trainers of others: a module for each, which imports its trainer."""
