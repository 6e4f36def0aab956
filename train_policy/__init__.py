"""Eviction policies from recorded traces. `python -m train_policy --help` lists what can be done."""
