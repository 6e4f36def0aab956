"""What the guard of a learned policy did, as the host counts it: falls, returns and the share of steps in fallback.

The guard itself runs on the device (`engine/guard.py`) and says with every step whether a layer is in fallback.
Invariant: one layer of one decode step counts once, so `fallback_share` is over layers and steps alike.
"""

from collections.abc import Sequence

import numpy as np


class GuardWatch:
    """Counts over all decode steps since loading.

    Args:
        policy: name of the policy that is guarded.
        num_layers: MoE layers.
    """

    def __init__(self, policy: str, num_layers: int):
        self._policy = policy
        self._is_fallback = np.zeros(num_layers, bool)
        self._notes: list[str] = []
        self.num_layer_steps = 0
        self.num_fallback_steps = 0
        self.num_falls = 0
        self.num_returns = 0

    @property
    def fallback_share(self) -> float | None:
        return self.num_fallback_steps / self.num_layer_steps if self.num_layer_steps else None

    def add_step(self, is_fallback: Sequence[bool]) -> None:
        """One decode step: whether each layer was in fallback."""
        now = np.asarray(is_fallback, bool)
        self.num_layer_steps += len(now)
        self.num_fallback_steps += int(np.count_nonzero(now))
        changed = np.flatnonzero(now != self._is_fallback)
        for layer in changed:
            self._change(int(layer), bool(now[layer]))
        self._is_fallback = now

    def forget(self) -> None:
        """The expert memory starts anew, in which no layer is in fallback; what was counted stays."""
        self._is_fallback = np.zeros_like(self._is_fallback)

    def take_notes(self) -> list[str]:
        """What a person should know and was not told yet: the first fall and the first return."""
        notes, self._notes = self._notes, []
        return notes

    def _change(self, layer: int, has_fallen: bool) -> None:
        if has_fallen:
            self.num_falls += 1
            if self.num_falls == 1:
                self._notes.append(
                    f"layer {layer} falls back to decayed: under {self._policy} it read more than decayed would have "
                    "(said once; fallback_share in --json counts all layers and steps)"
                )
        else:
            self.num_returns += 1
            if self.num_returns == 1:
                self._notes.append(f"layer {layer} returns to {self._policy} (said once)")
