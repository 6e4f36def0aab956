"""Errors that a user can cause and mend.

Every message is one line: what was given, what is allowed, what to do next. The command line prints it after
`error:` and exits with status 2; anything that is not a FlashMoEError is a bug of ours.
"""


class FlashMoEError(ValueError):
    """Base of every error that the caller can mend."""


class ConfigError(FlashMoEError):
    """A model config or an option that is not supported, or that contradicts itself."""


class CheckpointError(FlashMoEError):
    """A checkpoint or model directory that is missing, incomplete, of another format or of another shape."""


class DamagedRecordError(CheckpointError):
    """Bytes read from a store differ from the checksum written at conversion."""


class BudgetError(FlashMoEError):
    """A memory budget that is too small, larger than memory, or that has no effect here."""


class PromptError(FlashMoEError):
    """A prompt that is empty, too long, or cannot be encoded."""
