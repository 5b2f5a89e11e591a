"""The engine's named errors.

Layer: service. Each is raised with one clear sentence. A `ConfigError` ends the start of an engine before it
serves; an `IntegrityError` means that accounting broke, and the core that raised it must not go on.
"""


class ConfigError(Exception):
    """The engine cannot be built as asked."""


class CheckpointError(ConfigError):
    """The model files are missing, damaged, incomplete or of a kind this engine does not run."""


class IntegrityError(Exception):
    """An invariant of the scheduler or of a memory pool does not hold."""
