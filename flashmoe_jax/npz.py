"""Reading `.npz` files that a user names: whole and sound, or one clear error. Knows no contents."""

import os
import zipfile
import zlib
from collections.abc import Collection

import numpy as np

from flashmoe_jax.errors import ConfigError


def read_npz(path: str | os.PathLike[str], *, skip: Collection[str] = ()) -> dict[str, np.ndarray]:
    """All arrays of a file but those in `skip`.

    Raises:
        FileNotFoundError: no such file.
        ConfigError: anything else that keeps it from being read; the message gives the reason alone.
    """
    try:
        # Opened here, as numpy leaves the file open when it turns out to be no zip archive.
        with open(path, "rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ConfigError("it is not a zip archive")
            with archive:
                return {name: archive[name] for name in archive.files if name not in skip}
    except FileNotFoundError:
        raise
    # What numpy and zipfile raise for a file that is empty, cut short, of another kind, or damaged.
    except (OSError, EOFError, ValueError, TypeError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigError(f"{error}".split("\n")[0] or type(error).__name__) from None
