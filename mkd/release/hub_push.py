"""Upload an export to the Hugging Face hub, and find out before a run whether that will be allowed.

New repositories are private. The hub keeps the former files of a repository in its history.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkd.checkpoint.hf.hf_folder import OTHER_WEIGHTS, SHARD_FILE, model_files
from mkd.errors import CheckpointError, MkdError, UsageError, first_line
from mkd.release.card_file import is_own_text
from mkd.release.model_licence import CARD
from mkd.run_command import quoted

if TYPE_CHECKING:
    from huggingface_hub import HfApi

FLAG = "--push-to-hub"
LOG_IN = "log in with a token that may write (hf auth login, or HF_TOKEN), or leave out " + FLAG
WRITES = ("write", "admin", "contributor")
OLD_WEIGHTS = ["*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "*.bin.index.json"]


@dataclass(frozen=True)
class HubRepository:
    """A repository of models, `NAME` (of the user) or `USER_OR_ORGANISATION/NAME`."""

    name: str
    endpoint: str | None = None  # of the hub; None: the one of HF_ENDPOINT, else huggingface.co

    @property
    def _api(self) -> HfApi:
        from huggingface_hub import HfApi

        return HfApi(endpoint=self.endpoint)

    def problem(self, reads: Sequence[str] = (), overwrite: bool = False) -> MkdError | None:
        """Return why an upload would fail, or replace something; None if it will be allowed.

        `reads` are the models that the run reads.
        """
        try:
            self._check(reads, overwrite)
        except MkdError as error:
            return error
        return None

    def _check(self, reads: Sequence[str], overwrite: bool) -> None:
        from huggingface_hub import get_token
        from huggingface_hub.constants import HF_HUB_OFFLINE
        from huggingface_hub.utils import validate_repo_id

        with _hub_errors(f"{FLAG} {self.name}"):
            validate_repo_id(self.name)
            if HF_HUB_OFFLINE or get_token() is None:
                what = "HF_HUB_OFFLINE is set" if HF_HUB_OFFLINE else "no token of the hub is found"
                raise UsageError(
                    f"{FLAG} {self.name}: {what}", "the upload needs it", LOG_IN, code="hub-login"
                )
            account = self._api.whoami()
            name = self._full_name(account)
            if name in reads:
                raise UsageError(
                    f"{FLAG} {name} is a model that this run reads",
                    "the student would take its place",
                    "choose another name",
                    code="names-equal",
                )
            files = self._files(name)
            _check_token(name, account)
            if files is None:
                _check_namespace(name, account)
                return
            self._check_write(name)
            has_weights = any(SHARD_FILE.fullmatch(one) or OTHER_WEIGHTS.fullmatch(one) for one in files)
            if has_weights and not overwrite and not self._has_own_card(name, files):
                raise UsageError(
                    f"{FLAG} {name} holds a model that is not an export of mkd",
                    "its files would be replaced",
                    "choose another name, or give --overwrite",
                    code="already-exists",
                )

    def push(self, folder: Path) -> str:
        """Upload the model in `folder` and return the address of the commit. Raises CheckpointError.

        A card on the hub that mkd has not written, or that was edited, stays.
        """
        api, again = self._api, f"hf upload {self.name} {quoted(folder)}"
        try:
            name = str(api.create_repo(self.name, private=True, exist_ok=True).repo_id)
            files = self._files(name) or []
            names = [f"{path.name}/*" if path.is_dir() else path.name for path in model_files(folder)]
            names += [CARD] if CARD not in files or self._has_own_card(name, files) else []
            commit = api.upload_folder(
                repo_id=name,
                folder_path=folder,
                allow_patterns=names,
                delete_patterns=OLD_WEIGHTS,
                commit_message="Export of mkd",
            )
        except Exception as error:  # each network library has its own classes of errors
            raise CheckpointError(
                f"the upload to {self.name} failed: {first_line(error)}",
                f"the export is complete in {folder}",
                f"remove the cause, and upload it: {again}",
                code="after-export-failed",
            ) from error
        return str(commit.commit_url)

    def _full_name(self, account: Mapping[str, Any]) -> str:
        return self.name if "/" in self.name else f"{account.get('name')}/{self.name}"

    def _files(self, name: str) -> list[str] | None:
        """Return the files of the repository; None if there is none that the token can see."""
        from huggingface_hub.errors import RepositoryNotFoundError

        try:
            return list(self._api.list_repo_files(name))
        except RepositoryNotFoundError:
            return None

    def _check_write(self, name: str) -> None:
        """Ask the hub for the right to write, where its library can."""
        from huggingface_hub.errors import HfHubHTTPError

        try:
            with suppress(TypeError, AttributeError):  # an older library has no such question
                self._api.auth_check(name, write=True)
        except HfHubHTTPError as error:
            raise _no_right(name, first_line(error)) from error

    def _has_own_card(self, name: str, files: Sequence[str]) -> bool:
        """Return True if the card on the hub was written by mkd and not changed."""
        if CARD not in files:
            return False
        with tempfile.TemporaryDirectory() as folder:
            path = self._api.hf_hub_download(name, CARD, local_dir=folder)
            return is_own_text(Path(path).read_bytes().decode("utf-8", errors="replace"))


@contextmanager
def _hub_errors(what: str) -> Iterator[None]:
    """Turn errors of the hub's library in the block into those of mkd."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        yield
    except MkdError:
        raise
    except HFValidationError as error:
        do = "give NAME or ORGANISATION/NAME"
        raise UsageError(
            f"{what} is not a name of the hub", first_line(error), do, code="value-not-valid"
        ) from error
    except Exception as error:  # each network library has its own classes of errors
        why = first_line(error)
        if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
            raise UsageError(f"{what}: the hub refuses the token", why, LOG_IN, code="hub-login") from error
        do = f"try again later, or export without {FLAG}"
        raise UsageError(f"{what}: the hub cannot be asked", why, do, code="hub-unreachable") from error


def _check_token(name: str, account: Mapping[str, Any]) -> None:
    """Raise UsageError if the token may not write to the repository."""
    token = account.get("auth", {}).get("accessToken", {})
    role = token.get("role")
    if role == "read":
        what = f"{FLAG} {name}: the token {token.get('displayName', '')} may only read".replace("  ", " ")
        raise UsageError(what, "an upload writes", LOG_IN, code="hub-login")
    if role != "fineGrained":
        return
    rights = token.get("fineGrained", {})
    entities = {name, name.partition("/")[0]}
    scoped = [one for one in rights.get("scoped", ()) if one.get("entity", {}).get("name") in entities]
    granted = {right for one in scoped for right in one.get("permissions", ())} | {*rights.get("global", ())}
    if "repo.write" not in granted:
        what, why = f"{FLAG} {name}: the fine-grained token may not write there", "an upload writes"
        raise UsageError(what, why, LOG_IN, code="hub-login")


def _check_namespace(name: str, account: Mapping[str, Any]) -> None:
    """Raise UsageError if the account may not make a repository of this name."""
    owner = name.partition("/")[0]
    roles = {one.get("name"): one.get("roleInOrg") for one in account.get("orgs", ())}
    if owner == account.get("name"):
        return
    if owner not in roles:
        raise _no_right(name, f"{account.get('name')} is not a member of {owner}")
    if roles[owner] is not None and roles[owner] not in WRITES:
        raise _no_right(name, f"the role of {account.get('name')} in {owner} is {roles[owner]}")


def _no_right(name: str, why: str) -> UsageError:
    what = f"{FLAG} {name}: there is no right to write"
    return UsageError(what, why, "choose a name of your own, or ask the owner", code="hub-login")
