"""Every mistake that Draftree names, as one tree. Knows no HTTP status and imports nothing.

    DraftreeError
    ├── BadSetting       a setting has a value that cannot work
    ├── BadRequest       a request has a value that cannot be honoured
    ├── ModelNotFound    there is no model where one was looked for
    ├── CheckpointError  a model is there, but its files are not what they should be
    ├── OutOfPages       the KV cache is full; the scheduler preempts and tries again
    └── RankLost         a rank of a tensor-parallel verifier is gone or silent

Each text is one sentence for the person who can mend it. All of them survive pickling, since they cross processes.
"""

from __future__ import annotations


class DraftreeError(Exception):
    """The root: whoever catches this has caught every mistake that is not a fault of Draftree's own."""


class BadSetting(DraftreeError):
    """``allowed`` completes the sentence "… must be …"."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        super().__init__(name, value, allowed)
        self.name = name
        self.value = value
        self.allowed = allowed

    def __str__(self) -> str:
        return f"{self.name} is {self.value!r}, but must be {self.allowed}."


class BadRequest(DraftreeError):
    """``allowed`` completes the sentence "… must be …". The field is named as the client wrote it."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(field, value, allowed)
        self.field = field
        self.value = value
        self.allowed = allowed

    def __str__(self) -> str:
        return f"{self.field} is {self.value!r}, but must be {self.allowed}."


class ModelNotFound(DraftreeError):
    """Neither a folder, nor a GGUF file, nor anything that could be fetched."""


class CheckpointError(DraftreeError):
    """A file that cannot be read, or a tensor that is missing, unexpected or of the wrong shape."""


class OutOfPages(DraftreeError):
    """Raised before anything was changed."""


class RankLost(DraftreeError):
    """The ranks left cannot go on without it: the whole verifier has to be replaced."""
