"""Find the one cause of many differences between a folder's tensors and its config.json.

One wrong number in config.json, or a prefix of all names, would otherwise be hundreds of problems.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from itertools import product
from typing import Any

from mkd.checkpoint.hf.hf_quantised import TensorHeader
from mkd.checkpoint.hf.hf_renamed import of_another_program, renamed
from mkd.errors import CheckpointError
from mkd.families.weight_rules import EMBEDDING, LAYER_TENSOR, LM_HEAD
from mkd.plan.models.model_shape import adapter_error

FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
ROOTS = "model.", "backbone."  # starts of the names of a decoder's tensors
MANY = 3  # tensors that must differ in the same way
EXPERT = re.compile(r"\.experts\.(\d+)\.")
COUNTS = {  # keys of config.json
    LAYER_TENSOR: ("layers_block_type", "hybrid_override_pattern", "num_hidden_layers"),
    EXPERT: ("num_experts", "num_local_experts", "n_routed_experts"),
}
WRAPPERS = {
    "module": "DistributedDataParallel",
    "_orig_mod": "torch.compile",
    "base_model.model": "PEFT",
    "model": "a module that has the model as `model`",
}
WRAPPED_LAYERS = {
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing of torch",
    "base_layer": "PEFT",
    "_orig_mod": "torch.compile",
    "module": "a wrapper such as DistributedDataParallel",
}
SAVE_WHOLE = "save it with model.save_pretrained(DIR) from the AutoModelForCausalLM itself"

Shapes = Mapping[str, tuple[int, ...]]  # name -> shape


def common_causes(
    place: str,
    config: Mapping[str, Any],
    expected: Shapes,
    headers: Mapping[str, TensorHeader],
    is_sharded: bool,
) -> list[CheckpointError]:
    """Return the causes that explain several differences each; [] if there are none."""
    found = {name: header.shape for name, header in headers.items()}
    if any(".lora_A." in name for name in found):
        return [adapter_error(place, "it holds the tensors of a LoRA adapter, beside those that it changes")]
    prefix = _prefix(place, expected, found, is_sharded)
    if prefix is not None:
        return [prefix]
    inserted = _inserted(place, expected, found)
    if inserted is not None:
        return [inserted]
    stored = Counter(one.dtype for name, one in headers.items() if one.dtype not in FLOAT_DTYPES)
    if sum(stored.values()) >= MANY:
        return [_quantised(place, stored, "quantization_config" in config)]
    others = renamed(place, expected, found, is_sharded)
    if others is not None:
        return [others]
    causes, numbers = [], set()
    for pattern, keys in COUNTS.items():
        wanted, there = _largest(pattern, expected), _largest(pattern, found)
        if there and wanted != there and len(expected.keys() ^ found.keys()) >= MANY:
            key = next((one for one in keys if one in config), keys[0])
            thing = "layers" if pattern is LAYER_TENSOR else "experts"
            what = f"{place}: config.json says {wanted} {thing} ({key}), the weights have {there}"
            causes.append(_of_another(what))
            numbers.add((wanted, there))
    causes += _sizes(place, config, expected, found, numbers)
    foreign = None if causes else of_another_program(place, config.get("model_type"), expected, found)
    return causes if foreign is None else [foreign]


def _prefix(place: str, expected: Shapes, found: Shapes, is_sharded: bool) -> CheckpointError | None:
    """Return the error for names that all have a prefix too much or too little.

    Shards are not to be renamed, because their index has the names too.
    """
    rules: Counter[tuple[str, str]] = Counter()
    for name in found.keys() - expected.keys():
        starts = [0, *(match.end() for match in re.finditer(r"\.", name))]
        for cut in (name[:start] for start in starts):
            rest = name.removeprefix(cut)
            added = next((one for one in ("", *ROOTS) if one + rest in expected), None)
            if added is not None:
                rules[cut, added] += 1
                break
    if not rules:
        return None
    (cut, added), count = rules.most_common(1)[0]
    if count < max(MANY, len(expected) // 2):
        return None
    name = min(one for one in found if one.startswith(cut) and added + one.removeprefix(cut) in expected)
    should = added + name.removeprefix(cut)
    parts = [f"have the prefix {cut!r}"] if cut else []
    parts += [f"lack the prefix {added!r}"] if added else []
    why = [f"{WRAPPERS.get(cut.rstrip('.'), 'a wrapper')} adds {cut!r}"] if cut else []
    why += ["AutoModel saves the model without its head, and without this prefix"] if added else []
    lacks_head = LM_HEAD in expected and cut + LM_HEAD not in found
    if lacks_head:
        why.append(f"{LM_HEAD} is not there either")
    return CheckpointError(
        f"{place}: {count} tensor names {' and '.join(parts)}: {name} should be {should}",
        "; ".join(why),
        SAVE_WHOLE
        if lacks_head or is_sharded
        else f"{SAVE_WHOLE}, or rename the tensors: {_renaming(cut, added, found)}",
        code="hf-tensor-prefix",
    )


def _inserted(place: str, expected: Shapes, found: Shapes) -> CheckpointError | None:
    """Return the error for names that have the same part too much inside, None if few have one."""
    missing, parts = expected.keys() - found.keys(), Counter[str]()
    example: dict[str, tuple[str, str]] = {}
    for name in sorted(found.keys() - expected.keys()):
        pieces = name.split(".")
        for place_of, length in product(range(1, len(pieces)), (1, 2)):
            whole = ".".join(pieces[:place_of] + pieces[place_of + length :])
            if whole in missing:
                part = ".".join(pieces[place_of : place_of + length])
                parts[part] += 1
                example.setdefault(part, (name, whole))
                break
    part, count = (parts.most_common(1) or [("", 0)])[0]
    if count < MANY:
        return None
    name, whole = example[part]
    return CheckpointError(
        f"{place}: {count} tensor names have {part!r} inside: {name} should be {whole}",
        f"{WRAPPED_LAYERS.get(part, 'a wrapper of layers')} adds it",
        "save the model without the wrapper, with model.save_pretrained(DIR): "
        "a PEFT model after merge_and_unload(), FSDP with its full state dict",
        code="hf-tensor-prefix",
    )


def _renaming(cut: str, added: str, found: Shapes) -> str:
    """Return the Python that gives the tensors of a file their names."""
    rule = f"n.removeprefix({cut!r})" if cut else "n"
    if added:
        head = cut + LM_HEAD
        rule = f"{rule} if n == {head!r} else {added!r} + {rule}" if head in found else f"{added!r} + {rule}"
    read = "safetensors.torch.load_file(FILE)"
    return f"safetensors.torch.save_file({{{rule}: t for n, t in {read}.items()}}, FILE)"


def _quantised(place: str, stored: Counter[str], is_described: bool) -> CheckpointError:
    """Return the error for tensors of these dtypes, which config.json does not describe."""
    count, kinds = sum(stored.values()), ", ".join(sorted(stored))
    lacks = "they have no scales beside them" if is_described else "config.json has no quantization_config"
    return CheckpointError(
        f"{place}: {count} tensors are stored as {kinds}, and {lacks}",
        "their values cannot be known",
        "download the model again, or use the original checkpoint of this model",
        code="hf-quantisation-not-supported",
    )


def _sizes(
    place: str,
    config: Mapping[str, Any],
    expected: Shapes,
    found: Shapes,
    explained: Collection[tuple[int, int]],  # numbers (in config.json, in the weights) that need no error
) -> Iterator[CheckpointError]:
    """Yield an error for each size that differs in the same way in several tensors, or in the embedding."""
    differing: dict[tuple[int, int], list[str]] = {}
    for name in expected.keys() & found.keys():
        pairs = set(zip(expected[name], found[name], strict=False)) if expected[name] != found[name] else ()
        for wanted, there in pairs:
            if wanted != there and (wanted, there) not in explained:
                differing.setdefault((wanted, there), []).append(name)
    for (wanted, there), names in sorted(differing.items(), key=lambda item: -len(item[1])):
        keys = sorted(key for key, value in config.items() if type(value) is int and value == wanted)
        if len(names) >= MANY or EMBEDDING in names:
            says = f" ({' or '.join(keys)})" if keys else ""
            what = (
                f"{place}: {len(names)} of its tensors have {there} where config.json says {wanted}{says}: "
                f"{min(names)} and others"
            )
            yield _of_another(what)


def _of_another(what: str) -> CheckpointError:
    why = "the file and config.json belong to different models, or one of them was edited"
    do = "copy config.json from the folder that the weights come from, or download both again"
    return CheckpointError(what, why, do, code="hf-config-of-other-weights")


def _number(pattern: re.Pattern[str], name: str) -> int | None:
    match = pattern.search(name)
    return None if match is None else int(match[1])


def _largest(pattern: re.Pattern[str], names: Shapes) -> int:
    """Return how many layers or experts the names have."""
    numbers = [number for number in (_number(pattern, name) for name in names) if number is not None]
    return max(numbers, default=-1) + 1
