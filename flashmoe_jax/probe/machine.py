"""What the measurements were made on. All sizes are bytes."""

from typing import Any

import jax

from flashmoe_jax.engine.memory import available_bytes, cgroup_limit_bytes, total_bytes
from flashmoe_jax.native.streams import num_cores


def describe_machine() -> dict[str, Any]:
    """Cores that this process may use, memory, its limits, and the device."""
    device = jax.devices()[0]
    return {
        "cores": num_cores(),
        "memory_total_bytes": total_bytes(),
        "memory_available_bytes": available_bytes(),
        "cgroup_limit_bytes": cgroup_limit_bytes(),
        "device": device.device_kind if device.platform != "cpu" else "cpu",
    }
