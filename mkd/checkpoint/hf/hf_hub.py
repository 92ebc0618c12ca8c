"""The folder of a model: one on this machine, or one that is downloaded from the Hugging Face hub.

It starts without torch and without the hub's library, so that a folder that does not exist is refused at
once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mkd.config.data_files import HUB_ID
from mkd.config.not_paths import why_no_path
from mkd.errors import CheckpointError, first_line
from mkd.plan.models.model_shape import ADAPTER_FILE, adapter_error

HUB_WEIGHTS = ("model*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
HUB_PATTERNS = (*HUB_WEIGHTS, "README.md", "LICENSE*")  # the last two say what may be done with the model
REACHED = ("ReadError", "ReadTimeout", "RemoteProtocolError")
"""Names of network errors after a connection. The hub's versions use several libraries with these names."""

EXAMPLE_ID = "Qwen/Qwen2.5-0.5B"


def resolve_hf(directory_or_id: str | Path, patterns: Sequence[str] = HUB_PATTERNS) -> Path:
    """Return a local model folder unchanged; download anything else as a hub id (`org/name`).

    Downloads go to the hub's cache. Raises `CheckpointError` if it is neither.
    """
    name = str(directory_or_id)
    folder = _local_folder(name)
    if folder is not None:
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except (OSError, ValueError) as error:  # network, cache and "no such model"; not a valid id
        raise _no_model(name, error) from error


def config_folder(directory_or_id: str | Path) -> Path:
    """Return the folder of a model's config.json, the only file that is downloaded for a hub id.

    Raises `CheckpointError` as `resolve_hf`, and for a hub model without config.json.
    """
    name = str(directory_or_id)
    folder = _local_folder(name)
    if folder is not None:
        return folder
    folder = _download(name, "config.json")
    if folder is not None:
        return folder
    if _download(name, ADAPTER_FILE) is not None:
        raise adapter_error(name, f"the hub has its {ADAPTER_FILE}, and no config.json")
    raise CheckpointError(
        f"the model {name} of the Hugging Face hub has no config.json",
        "mkd reads the sizes of a model there. A repository of GGUF files, for example, has none",
        "name a repository with config.json and *.safetensors files, such as the one that it was made from",
        code="hf-weights-missing",
    )


def _download(name: str, file: str) -> Path | None:
    """Return the folder of a file of a hub model; None if the model has no such file.

    Before the download the hub is asked once, because on a machine without network its library would try
    again for more than a minute. If the hub is late or busy, the library may try again.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import RemoteEntryNotFoundError

    with suppress(OSError, ValueError):  # not in the cache
        return Path(hf_hub_download(name, file, local_files_only=True)).parent
    try:
        try:
            get_hf_file_metadata(hf_hub_url(name, file))
        except Exception as error:
            if not _is_late(error):
                raise
        return Path(hf_hub_download(name, file)).parent
    except RemoteEntryNotFoundError:
        return None
    except Exception as error:  # each network library has its own classes of errors
        raise _no_model(name, error) from error


def _is_late(error: Exception) -> bool:
    """Return True if the hub was reached, but has not answered in time or is busy."""
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        return error.response.status_code == 429 or error.response.status_code >= 500
    return type(error).__name__ in REACHED


def _local_folder(name: str) -> Path | None:
    """Return the folder of this name; None if there is none, and the name may be that of a hub model."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        require_readable(folder)
        return folder
    if folder.exists() or not HUB_ID.fullmatch(name):
        raise _no_folder(name)
    return None


def require_readable(folder: Path) -> None:
    """Raise CheckpointError if this user may not read a folder, or a file of the model in it."""
    locked = [] if os.access(folder, os.R_OK | os.X_OK) else [folder]
    locked = locked or [one for one in _files_of_model(folder) if not os.access(one, os.R_OK)]
    if locked:
        more = f" and {len(locked) - 1} more" if len(locked) > 1 else ""
        raise CheckpointError(
            f"{locked[0]}{more}: permission denied",
            "this user may not read it",
            "change its permissions or its owner, or copy the model",
            code="inputs-unreadable",
        )


def _files_of_model(folder: Path) -> list[Path]:
    return sorted(path for pattern in HUB_WEIGHTS for path in folder.glob(pattern) if path.is_file())


def _no_folder(name: str) -> CheckpointError:
    """Return the error for a path without a folder."""
    is_file = Path(name).expanduser().exists()
    what = f"{name} is a file, not a folder" if is_file else f"the folder {name} does not exist"
    why = "a model is a folder with config.json and *.safetensors files"
    do = f"check the path; a model of the Hugging Face hub is named by its id, such as {EXAMPLE_ID}"
    why, do = why_no_path(name) or (why, do)
    return CheckpointError(what, why, do, code="hf-model-not-found")


def _no_model(name: str, error: Exception) -> CheckpointError:
    """Return the error for a name that may be a folder or a hub id, and is neither."""
    from huggingface_hub.errors import HFValidationError

    if isinstance(error, HFValidationError):
        return _no_folder(name)
    what = f"there is no folder {name}, and no model of this name could be downloaded"
    do = "check the name; without a network, name a folder with the model's files"
    return CheckpointError(what, _reason(error), do, code="hf-model-not-found")


def _reason(error: Exception) -> str:
    """Return what the hub's answer means."""
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return "the hub gives it only to people who have accepted its terms there and log in (hf auth login)"
    if isinstance(error, RepositoryNotFoundError):
        return "the Hugging Face hub has none, or it is private and you are not logged in (hf auth login)"
    if isinstance(error, LocalEntryNotFoundError):
        return "the Hugging Face hub cannot be reached, and the model is not in its cache"
    return f"the Hugging Face hub cannot be asked: {first_line(error)}"
