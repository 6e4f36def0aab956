"""Page-locks host memory for copies to an NVIDIA GPU, through the driver's own library.

A copy from pageable memory goes through a buffer of the driver's and keeps the host waiting. JAX offers pinned arrays,
but none whose memory a read may be aimed at; so the block is the store's, and the driver is told of it. Best effort:
without the library, or where the limit on locked memory is too low, the memory stays as it is.
"""

import ctypes
import functools
import logging

_SUCCESS = 0
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: pinned for every context, JAX's own among them

_log = logging.getLogger(__name__)


def pin_memory(address: int, num_bytes: int) -> bool:
    """Pins `[address, address + num_bytes)` for the life of its mapping; returns whether that worked."""
    driver = _driver()
    if driver is None:
        return False
    result = driver.cuMemHostRegister_v2(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _PORTABLE)
    if result != _SUCCESS:
        _log.info("host memory is not pinned: the driver answers %d", result)
    return result == _SUCCESS


@functools.cache
def _driver() -> ctypes.CDLL | None:
    """The driver with the first device's primary context current in this thread; None where there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        calls = (
            lambda: driver.cuInit(0),
            lambda: driver.cuDeviceGet(ctypes.byref(device), 0),
            lambda: driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
            lambda: driver.cuCtxSetCurrent(context),
        )
        return driver if all(call() == _SUCCESS for call in calls) else None
    except (OSError, AttributeError):
        return None
