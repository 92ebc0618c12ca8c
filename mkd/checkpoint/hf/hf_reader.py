"""Open a Hugging Face folder and read slices of the tensors in its `.safetensors` files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from mkd.checkpoint.finite import is_finite, not_finite
from mkd.checkpoint.hf.hf_assets import INDEX_FILE, SINGLE_FILE
from mkd.checkpoint.hf.hf_folder import is_planned
from mkd.checkpoint.hf.hf_names import Cut
from mkd.checkpoint.hf.hf_quantised import MXFP4, FP8Blocks, TensorHeader, find_quantised, logical_headers
from mkd.checkpoint.hf.hf_stacked import read_stacks
from mkd.checkpoint.hf.hf_tower import TOWER, DiskNames
from mkd.checkpoint.one_value import one_value, unfilled_embedding
from mkd.errors import CheckpointError, MkdError, collect_error, raise_all
from mkd.families.weight_rules import EMBEDDING, SCALARS
from mkd.file_start import content_of_file
from mkd.plan.models.model_shape import ADAPTER_FILE, adapter_error
from mkd.plan.models.other_folders import not_a_model

TRUSTED_FOLDERS = "MKD_TRUSTED_FOLDERS"  # environment: folders that links of a model's files may lead into
SAFE_NAME = re.compile(r"(?!\.)[^/\\\0]*\.safetensors", re.DOTALL)
DERIVED_TENSOR = re.compile(r".*\.rotary_emb\.inv_freq")  # old exporters stored what config.json says


def contained_file(directory: Path, name: str) -> Path:
    """Return `directory/name` if its file belongs to that folder or to the same model of a hub cache.

    Links are followed. In a hub cache the folder is `models--org--name/snapshots/<revision>` and its files
    are links to `models--org--name/blobs/<hash>`. Any other link could make a downloaded folder expose a
    private file, unless it leads into a folder that the user trusts: see TRUSTED_FOLDERS.
    """
    home = directory.resolve()
    if home.parent.name == "snapshots" and home.parent.parent.name.startswith("models--"):
        home = home.parent.parent
    path = directory / name
    target = path.resolve()
    trusted = [Path(one).resolve() for one in os.environ.get(TRUSTED_FOLDERS, "").split(os.pathsep) if one]
    if not any(target.is_relative_to(one) for one in (home, *trusted)):
        raise CheckpointError(
            f"{path} is a link to {target}, outside the model's folder",
            "a downloaded model must not read other files of this machine",
            f"if you trust that place, set the environment variable {TRUSTED_FOLDERS}={target.parent} "
            f"(several folders with {os.pathsep!r} between them), or copy the file. A link of the whole "
            "folder works too, and so does a folder of the hub's cache",
            code="hf-link-outside-folder",
        )
    return path


def _in_model(name: str, header: TensorHeader) -> TensorHeader:
    """Return the header of a tensor as models have it."""
    return replace(header, shape=(1,)) if name.endswith(SCALARS) and not header.shape else header


WHY_OTHER = "weights are read from safetensors"


class HFCheckpoint:
    """The tensors of a model folder: one `model.safetensors`, or shards with an index.

    Opening it reads headers only; `bytes_read` counts the data read from disk since. Quantised tensors appear
    under the names and shapes that they have when dequantised, and single experts in place of stacks (see
    `hf_stacked.py`). Tensors of a vision tower are in `tower`, and the text tensors beside it have the names
    of a model of text alone (see `hf_tower.py`). Raises `CheckpointError`s for a folder that is incomplete,
    damaged, not to be trusted, or quantised in a format that mkd does not read.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self.bytes_read = 0
        self.unfilled: dict[str, float] = {}  # matrices of one value, of those that were read
        weight_map = self._weight_map()
        self.is_sharded = weight_map is not None
        self._refuse_adapter_beside()
        self._files = self._open_files(sorted(set(weight_map.values())) if weight_map else [SINGLE_FILE])
        self._stored = self._read_headers(weight_map)
        quantised = find_quantised(self.directory, self._stored)
        self.names = DiskNames.of_folder(self.directory)
        headers, experts = read_stacks(self.directory, logical_headers(self._stored, quantised), quantised)
        self._derived = quantised | experts
        renamed = {self.names.ours(name): _in_model(name, one) for name, one in headers.items()}
        self.headers = {name: one for name, one in renamed.items() if not name.startswith(TOWER)}
        self.tower = {name: one for name, one in renamed.items() if name.startswith(TOWER)}

    def read(self, tensor: str, cut: Cut) -> Tensor:
        """Return a part of a tensor, on the CPU.

        It has the dtype on disk; FP8 values become fp32, MXFP4 values bf16. Raises `CheckpointError` if it
        is not finite.
        """
        stored = self.names.on_disk(tensor)
        derived = self._derived.get(stored)
        part = derived.read(self._read_stored, cut) if derived else self._read_stored(stored, cut)
        if not is_finite(part):
            names = derived.stored if derived else (stored,)
            raise not_finite(self._file_of(names[0]), " with ".join(names), part)
        if tensor not in self.unfilled and one_value(part) is not None:
            self._keep_unfilled(tensor)
        return part

    def _keep_unfilled(self, tensor: str) -> None:
        """Keep the value of a matrix if it has one everywhere; raise `CheckpointError` for the embedding."""
        value = one_value(self.read_whole(tensor))
        if value is not None and tensor == EMBEDDING:
            raise unfilled_embedding(self._file_of(self.names.on_disk(tensor)), tensor, value)
        if value is not None:
            self.unfilled[tensor] = value

    def _file_of(self, stored: str) -> str:
        return str(self.directory / self._stored[stored].file)

    def read_codes(self, tensor: str, cut: Cut) -> tuple[Tensor, Tensor]:
        """Return codes and scales of a part of a quantised tensor, see `FP8Blocks` and `MXFP4`.

        Raises `CheckpointError` for a tensor that is not stored so, and for elements that are not numbers.
        """
        derived = self._derived.get(self.names.on_disk(tensor))
        if not isinstance(derived, FP8Blocks | MXFP4):
            what = f"{self.directory}: {tensor} is not quantised"
            why = "config.json says so of the experts, whose weights are to stay as they are stored"
            do = "use --teacher-precision bf16, or fp8 with --teacher-fp8-recipe tensorwise"
            raise CheckpointError(what, why, do, code="hf-quantisation-not-supported")
        codes, scales = derived.read_codes(self._read_stored, cut)
        if not derived.is_finite(codes, scales):
            file = str(self.directory / self._stored[derived.stored[0]].file)
            raise not_finite(file, " with ".join(derived.stored), derived.read(self._read_stored, cut))
        return codes, scales

    def read_whole(self, tensor: str) -> Tensor:
        """Return a whole tensor, on the CPU; unlike in `read`, its values are not checked."""
        stored = self.names.on_disk(tensor)
        cut, derived = (slice(None),) * len(self.headers[tensor].shape), self._derived.get(stored)
        return derived.read(self._read_stored, cut) if derived else self._read_stored(stored, cut)

    def _read_stored(self, tensor: str, cut: Cut) -> Tensor:
        file = self._files[self._stored[tensor].file]
        if self._stored[tensor].shape:
            part = file.get_slice(tensor)[cut]
        else:
            part = file.get_tensor(tensor)
            part = part[None][cut] if cut else part
        self.bytes_read += part.numel() * part.element_size()
        return part

    def _weight_map(self) -> dict[str, str] | None:
        """Return tensor name -> file name; None for a single file, which takes precedence over an index."""
        if (self.directory / SINGLE_FILE).exists():
            return None
        if not (self.directory / INDEX_FILE).exists():
            raise self._no_weights()
        path = contained_file(self.directory, INDEX_FILE)
        try:
            weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            entries = list(weight_map.items())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"{path} is not an index of safetensors shards: {error!r}"
            why = 'it must hold {"weight_map": {tensor name: file name}}'
            raise CheckpointError(what, why, "download it again", code="hf-files-damaged") from None
        if not entries:
            raise CheckpointError(
                f"{path} lists no tensors", "", "download it again", code="hf-files-damaged"
            )
        unsafe = [one for one in entries if not (isinstance(one[1], str) and SAFE_NAME.fullmatch(one[1]))]
        raise_all([_unsafe_entry(path, tensor, file) for tensor, file in unsafe])
        return weight_map

    def _refuse_adapter_beside(self) -> None:
        """Raise CheckpointError if an adapter lies beside the weights: transformers would add it."""
        names = ("adapter_model.safetensors", "adapter_model.bin")
        beside = next((name for name in names if (self.directory / name).is_file()), None)
        if beside and (self.directory / ADAPTER_FILE).is_file():
            raise CheckpointError(
                f"{self.directory} holds a model, and beside it an adapter: {beside}",
                f"transformers would add it to the base that {ADAPTER_FILE} names, mkd would leave it out",
                "merge it (merge_and_unload() of peft) and name the merged model, or move the files of the "
                "adapter to another folder",
                code="hf-adapter",
            )

    def _no_weights(self) -> CheckpointError:
        if (self.directory / ADAPTER_FILE).is_file():
            return adapter_error(self.directory, f"{ADAPTER_FILE} is there, and no weights of a model")
        pickles = sorted(path.name for path in self.directory.glob("pytorch_model*.bin"))
        if pickles:
            return CheckpointError(
                f"{self.directory} holds {pickles[0]} but no .safetensors file",
                "loading a .bin file can run code that is hidden in it, so mkd reads safetensors only",
                "convert it: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)",
                code="hf-not-safetensors",
            )
        if is_planned(self.directory):
            return CheckpointError(
                f"{self.directory} is a student that is planned, and not cut yet",
                "`mkd init` has written its config.json, and no weights",
                "cut it with `mkd make-student`: the command stands at the beginning of run.yaml",
                code="hf-weights-missing",
            )
        what = f"{self.directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}"
        return not_a_model(self.directory, what, "the weights of a Hugging Face model are in these files")

    def _open_files(self, names: list[str]) -> dict[str, safe_open]:
        problems: list[MkdError] = []
        files = {name: collect_error(problems, partial(self._open, name)) for name in names}
        if problems:
            others = [one for name in names if (one := content_of_file(self.directory / name))]
            alike = len(problems) == len(others) > 1 and len(set(others)) == 1
            if alike:  # a folder that was cloned without its large files
                what = f"{self.directory}: each of its {len(others)} files of weights is {others[0].what}"
                raise CheckpointError(what, WHY_OTHER, others[0].do, code="hf-files-damaged")
        raise_all(problems)
        return files

    def _open(self, name: str) -> safe_open:
        path = self.directory / name
        try:
            return safe_open(contained_file(self.directory, name), framework="pt", device="cpu")
        except FileNotFoundError:
            why, do = f"{INDEX_FILE} lists it", "download the model again"
            raise CheckpointError(f"{path} is missing", why, do, code="hf-files-damaged") from None
        except (SafetensorError, OSError, RuntimeError) as error:  # RuntimeError: a loop of links
            what, why = f"{path} cannot be opened: {error}", "the file is damaged, cut short or not readable"
            do = "download it again"
            if content := content_of_file(path):
                what, why, do = f"{path} is {content.what}", WHY_OTHER, content.do
            raise CheckpointError(what, why, do, code="hf-files-damaged") from None

    def _read_headers(self, weight_map: dict[str, str] | None) -> dict[str, TensorHeader]:
        stored = {name: set(file.keys()) for name, file in self._files.items()}
        if weight_map is None:
            weight_map = dict.fromkeys(sorted(stored[SINGLE_FILE]), SINGLE_FILE)
        raise_all([*self._index_problems(weight_map, stored)])
        headers = {}
        for tensor, file in weight_map.items():
            data = self._files[file].get_slice(tensor)
            headers[tensor] = TensorHeader(file, tuple(data.get_shape()), data.get_dtype())
        return headers

    def _index_problems(
        self,
        weight_map: Mapping[str, str],
        stored: Mapping[str, set[str]],  # file -> its tensors
    ) -> Iterator[CheckpointError]:
        """Yield tensors that are not where the index says, and tensors that it does not list."""
        for tensor, file in weight_map.items():
            if tensor not in stored[file]:
                what, why = f"{self.directory / file} has no tensor {tensor}", f"{INDEX_FILE} lists it there"
                yield CheckpointError(what, why, "download both again", code="hf-files-damaged")
        for file, tensors in stored.items():
            for tensor in sorted(name for name in tensors if weight_map.get(name) != file):
                if DERIVED_TENSOR.fullmatch(tensor):
                    continue
                listed = f"lists it in {weight_map[tensor]}" if tensor in weight_map else "does not list it"
                what = f"{self.directory / file} has tensor {tensor}, and {INDEX_FILE} {listed}"
                do = "download both again, or save the model again with save_pretrained()"
                yield CheckpointError(what, "it would be left out", do, code="hf-files-damaged")


def _unsafe_entry(path: Path, tensor: str, file: object) -> CheckpointError:
    return CheckpointError(
        f"{path}: weight_map sends tensor {tensor} to {file!r}",
        "it must be the plain name of a .safetensors file in the same folder; a path could lead anywhere",
        "do not use this checkpoint unless you know who made it",
        code="untrusted-files",
    )
