"""What every op is built from. Nothing in this package knows an op."""
