"""Subcommands of `rlk` that belong to no other package: `doctor` and `build-cuda`."""
