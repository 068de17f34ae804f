"""Device code: arrays in, arrays out, static configuration. No policy, no validation, no autodiff; never imports
`rlk_jax`.
"""
