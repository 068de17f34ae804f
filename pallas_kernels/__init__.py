"""Device code: arrays in, arrays out, static configuration. No policy, no autodiff; never imports `rlk_jax`."""
