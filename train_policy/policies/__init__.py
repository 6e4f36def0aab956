"""Eviction policies that only a replay runs: compiled loops over one layer's steps, and the optima.

What the engine runs too is in `flashmoe_jax/policy`.
"""
