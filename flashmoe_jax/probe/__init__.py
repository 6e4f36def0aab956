"""What this machine can do, and how fast a model will run on it: `python -m flashmoe_jax.probe [DIR]`.

Measures the drive (`drive.py`), the memory, the expert kernel and the copy to the device (`compute.py`), from which and
from hit rates (`hit_rates.py`) it predicts tokens per second (`predict.py`) under memory budgets (`budgets.py`). Stands
above the engine, which knows nothing of it. Invariant: every rate is a median of rounds in which all that is compared
was measured in turn, and what could not be measured as meant is said in a note.
"""
