"""Where a model is that was asked for by name: a folder, a GGUF file or, if it is neither, the Hugging Face hub.

Knows paths and names. Knows nothing of what lies there.
"""

from __future__ import annotations

import re
from pathlib import Path

from verifier.errors import ModelNotFound
from verifier.paths import written_path

HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve_model(name: str) -> Path:
    """The folder or GGUF file of a model, given its path or its id on the Hugging Face hub (downloaded if need be).

    Raises:
        ModelNotFound: no such path, and no such model on the hub, or no way to reach it.
        BadSetting: a path at which nobody can look.
    """
    path = written_path("model", name)
    if (path.suffix == ".gguf" and path.is_file()) or (path / "config.json").is_file():
        return path
    if path.exists():
        raise ModelNotFound(f"{name} is neither a folder with a config.json nor a GGUF file.")
    if path.suffix == ".gguf" or not HUB_ID.fullmatch(name):
        raise ModelNotFound(f"There is no folder or GGUF file {name}.")
    return _from_hub(name)


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        # Subfolders hold the same weights in other formats.
        return Path(snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns="*/*"))
    except GatedRepoError as error:
        why = "its authors ask you to accept a licence on the hub first, and to set HF_TOKEN"
        raise ModelNotFound(f"{name} may not be downloaded: {why}.") from error
    except RepositoryNotFoundError as error:
        raise ModelNotFound(f"There is no folder {name}, and no such model on the Hugging Face hub.") from error
    except LocalEntryNotFoundError as error:
        raise ModelNotFound(f"There is no folder {name}, and the Hugging Face hub cannot be reached.") from error
    except OSError as error:
        said = str(error).splitlines() or [type(error).__name__]
        raise ModelNotFound(f"{name} could not be downloaded from the Hugging Face hub: {said[0]}") from error
