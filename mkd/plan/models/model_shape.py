"""`ModelShape`: everything about a decoder that its Hugging Face `config.json` says, without torch.

Models, converters and plans use it. `mkd/families` holds what differs from one family to another.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from mkd.errors import CheckpointError, MkdError, UsageError, raise_all
from mkd.families.config_values import check_kinds, further_problems, without_nulls
from mkd.families.family import Family
from mkd.families.layer_shape import LayerShape, MoEShape, RopeShape
from mkd.families.mixer_shape import mixer_facts
from mkd.families.registry import FAMILIES
from mkd.families.unread_keys import unread_keys
from mkd.families.vision import (
    VISION_FAMILIES,
    refuse_known,
    refuse_text_model,
    saved_text,
    text_config,
    with_sections,
)
from mkd.families.vision_shape import VisionFamily, VisionShape
from mkd.file_start import content_of_file
from mkd.plan.models.other_folders import not_a_model

AGAIN = "download or write it again"
ADAPTER_FILE = "adapter_config.json"  # of PEFT
ATTENTION_SWITCHES = ("qk_norm", "output_gate")


@dataclass(frozen=True)
class ModelShape:
    """Sizes and switches of one decoder-only model; what may differ between layers is in `layers`."""

    family: str  # key of `mkd.families.registry.FAMILIES`
    layers: tuple[LayerShape, ...]
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int  # key/value heads
    head_dim: int  # channels of a query head
    vocab_size: int  # rows of the embedding on disk, which define the vocabulary
    max_position_embeddings: int = field(compare=False)  # a stated limit; no weight depends on it
    norm_epsilon: float
    tie_word_embeddings: bool = False
    zero_centered_norms: bool = False  # every norm multiplies by 1 + weight
    embedding_scale: float = 1.0  # factor of the embeddings, rounded to their dtype
    attention_scale: float | None = None  # factor of the attention scores; None: 1 / sqrt(head_dim)
    logits_divisor: float = 1.0  # the head's product divided by it is the logits
    logits_cap: float | None = None  # logits z are cap tanh(z / cap); None: they are not bounded
    vision: VisionShape | None = None  # tower in front of the decoder; None: text alone
    initializer_range: float = field(default=0.02, compare=False)
    hf_config: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_attention_heads // self.num_query_groups

    @property
    def value_dim(self) -> int:
        """Channels of a value head."""
        mla = self.common("mla")
        return self.head_dim if mla is None else mla.v_head_dim

    @property
    def sliding_windows(self) -> tuple[int, ...]:
        """The distinct window sizes of the layers, ascending; () if all attention is full."""
        return tuple(sorted({layer.sliding_window for layer in self.layers if layer.sliding_window}))

    @property
    def moe(self) -> MoEShape | None:
        """The experts of the layers that have some, the same in each; None for a dense model."""
        kinds = {layer.moe for layer in self.layers if layer.moe}
        assert len(kinds) <= 1, f"layers differ in their experts: {kinds}"
        return kinds.pop() if kinds else None

    @property
    def num_experts(self) -> int:
        """Experts of a layer that has some; 0 for a dense model."""
        return self.moe.num_experts if self.moe else 0

    @property
    def ropes(self) -> tuple[RopeShape, ...]:
        """The distinct position embeddings of the layers, in the order in which they occur."""
        return tuple(dict.fromkeys(layer.rope for layer in self.layers if layer.rope))

    def common(self, name: str) -> Any:
        """Return the field `name` that all layers share. Megatron takes it once per model.

        Of a switch of attention, only layers with attention count, if there are some. Of the width of MLPs,
        only layers with MLPs do.
        """
        layers = self.layers
        if name in ATTENTION_SWITCHES:
            layers = tuple(layer for layer in layers if layer.has_attention) or layers
        elif name == "ffn_hidden_size":
            layers = tuple(layer for layer in layers if layer.has_mlp) or layers
        values = {getattr(layer, name) for layer in layers}
        assert len(values) == 1, f"layers differ in {name}: {values}"
        return values.pop()

    def for_layer(self, layer: LayerShape) -> ModelShape:
        """Return the model with the heads of `layer`: itself, unless the layer has heads of its own."""
        heads = layer.heads
        if heads is None:
            return self
        return replace(
            self,
            num_attention_heads=heads.num_attention_heads,
            num_query_groups=heads.num_query_groups,
            head_dim=heads.head_dim,
        )

    def padded_query_groups(self, tensor_parallel: int) -> int:
        """Return the key/value heads, padded to a multiple of `tensor_parallel` by groups of zeros."""
        return -(-self.num_query_groups // tensor_parallel) * tensor_parallel

    def padded_vocab_size(self, tensor_parallel: int, divisible_by: int = 128) -> int:
        """Return the rows, padded to a multiple of `divisible_by * tensor_parallel` as by Megatron."""
        multiple = divisible_by * tensor_parallel
        return -(-self.vocab_size // multiple) * multiple

    def differences(self, other: ModelShape) -> list[str]:
        """List each setting, as `name ours instead of theirs`, by which `other` is another model.

        If only some layers differ, it names the first of them.
        """
        ours, theirs = self._facts(), other._facts()
        differing = (name for name in ours if ours[name] != theirs[name])
        found = [f"{name} {_brief(ours[name])} instead of {_brief(theirs[name])}" for name in differing]
        return found + _layer_differences(self.layers, other.layers)

    def _facts(self) -> dict[str, Any]:
        """Return name -> value of everything that is compared outside the layers."""
        facts = {one.name: getattr(self, one.name) for one in fields(self) if one.compare}
        del facts["layers"]
        return {"family": facts.pop("family"), "num_layers": self.num_layers, **facts}

    @classmethod
    def from_hf_dir(cls, directory: str | Path) -> ModelShape:
        """Read `directory/config.json`. Raises `CheckpointError` if it is missing or not JSON."""
        path = Path(directory) / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            if (Path(directory) / ADAPTER_FILE).is_file():
                raise adapter_error(directory, f"{ADAPTER_FILE} is there, and no config.json") from None
            why = "a Hugging Face model folder holds config.json beside its .safetensors files"
            raise not_a_model(Path(directory), f"{path} does not exist", why) from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            content = content_of_file(path)
            what, do = (f"{path} is {content.what}", content.do) if content else ("", AGAIN)
            what = what or f"{path} is not valid JSON: {error}"
            raise CheckpointError(what, "", do, code="model-config-not-valid") from None
        if not isinstance(config, dict):
            raise CheckpointError(f"{path} is not a JSON object", "", AGAIN, code="model-config-not-valid")
        return cls.from_hf_config(config, source=str(path))

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any], source: str = "config.json") -> ModelShape:
        """Translate a Hugging Face configuration; null counts as not given.

        Raises `UsageError` for a model that mkd cannot run exactly. Raises `CheckpointError` for a key that
        is missing or has a value of a wrong kind, and if the key/value heads do not divide the heads.
        """
        model_type = config.get("model_type")
        check_kinds(without_nulls({"model_type": model_type}), source)
        refuse_known(model_type, source)
        if isinstance(model_type, str) and model_type in VISION_FAMILIES:
            return cls._read_with_images(VISION_FAMILIES[model_type], config, source)
        family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
        if family is None:  # its keys may have values of any kind
            what = f"{source}: model_type {model_type!r} is not supported"
            why = f"mkd knows {', '.join(sorted(FAMILIES))} (SmolLM2 is llama, dense Phi-4 is phi3)"
            nested = config.get("text_config")
            text = str(nested.get("model_type")) if isinstance(nested, Mapping) else None
            do = "use a model of one of these families" + (
                f", or {saved_text(text)}" if text in FAMILIES else ""
            )
            raise UsageError(what, why, do, code="model-type-not-supported")
        given = without_nulls({**family.defaults, **config})
        check_kinds(given, source)
        try:
            return cls._read(family, given, hf_config=dict(config))
        except KeyError as error:
            what = f"{source}: key {error} is missing or null"
            why = f"a {model_type} model needs it"
            raise CheckpointError(what, why, AGAIN, code="model-config-not-valid") from None
        except MkdError as error:
            others = further_problems(error, given, lambda rest: cls._read(family, rest, hf_config={}))
            raise_all([one.located(source) for one in (error, *others)])
            raise AssertionError("one problem is raised") from None

    def unread_keys(self) -> list[str]:
        """Return `KEY VALUE` of keys in config.json that look as if they had an effect, and have none."""
        family, config = FAMILIES[self.family], dict(self.hf_config)
        if config.get("model_type") != self.family:  # the text model of one with images
            return []
        read = partial(self._read, family, hf_config={})
        return list(unread_keys(config, family.defaults, read))

    @classmethod
    def _read_with_images(cls, family: VisionFamily, config: Mapping[str, Any], source: str) -> ModelShape:
        """Read the text model as one of its own, and the tower beside it, if mkd runs the tower."""
        given = without_nulls(config)
        if family.read_vision is None:
            check_kinds(given, source)
            return replace(cls.from_hf_config(text_config(family, given), source), hf_config=dict(config))
        check_kinds(given | {"vision_config": given.get("vision_config")}, source)
        check_kinds(given["vision_config"], f"{source}: vision_config")
        shape = cls.from_hf_config(text_config(family, given), source)
        refuse_text_model(family, shape.family, source)
        try:
            vision = family.read_vision(given)
            layers = (
                replace(one, rope=one.rope and with_sections(family, one.rope, given)) for one in shape.layers
            )
            return replace(shape, layers=tuple(layers), vision=vision, hf_config=dict(config))
        except KeyError as error:
            what = f"{source}: key {error} is missing or null"
            why = f"a {family.model_type} model needs it"
            raise CheckpointError(what, why, AGAIN, code="model-config-not-valid") from None
        except MkdError as error:
            raise error.located(source) from None

    @classmethod
    def _read(cls, family: Family, config: Mapping[str, Any], hf_config: Mapping[str, Any]) -> ModelShape:
        if not config.get("is_causal", True):
            what = "is_causal false is not supported"
            why = "mkd's attention never looks at later tokens"
            raise UsageError(what, why, "use a causal model", code="model-feature-not-supported")
        heads = config["num_attention_heads"]
        groups = config.get("num_key_value_heads") or heads
        if heads % groups:
            what = f"num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}"
            why = "each key/value head is shared by the same number of query heads"
            raise CheckpointError(what, why, AGAIN, code="model-config-not-valid")
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        common = cls(
            family=family.model_type,
            layers=family.read_layers(config, head_dim),
            hidden_size=config["hidden_size"],
            num_attention_heads=heads,
            num_query_groups=groups,
            head_dim=head_dim,
            vocab_size=config["vocab_size"],
            max_position_embeddings=config.get("max_position_embeddings", 2048),
            norm_epsilon=config.get("rms_norm_eps", 1e-6),
            tie_word_embeddings=config.get("tie_word_embeddings", False),
            initializer_range=config.get("initializer_range", 0.02),
            hf_config=hf_config,
        )
        return replace(common, **family.read_model(config))


def _layer_differences(ours: tuple[LayerShape, ...], theirs: tuple[LayerShape, ...]) -> list[str]:
    """List the fields that differ, for the layers that both have; of each field only the first difference."""
    found: dict[str, str] = {}
    counts: dict[str, int] = {}
    for index, pair in enumerate(zip(ours, theirs, strict=False)):
        mine, other = map(_layer_facts, pair)
        for name in mine:
            if mine[name] != other[name]:
                text = f"{name} {_brief(mine[name])} instead of {_brief(other[name])}"
                found.setdefault(name, f"layer {index}: {text}")
                counts[name] = counts.get(name, 0) + 1
    common = min(len(ours), len(theirs))
    return [
        text.partition(": ")[2] if counts[name] == common and _is_uniform(name, ours, theirs) else text
        for name, text in found.items()
    ]


def _is_uniform(name: str, *models: tuple[LayerShape, ...]) -> bool:
    return all(len({_layer_facts(layer)[name] for layer in layers}) == 1 for layers in models)


def _layer_facts(layer: LayerShape) -> dict[str, Any]:
    """Return name -> value of a layer's fields, those of rope, mixer and experts one by one.

    A layer without one of these has None for each of its fields.
    """
    values = {one.name: getattr(layer, one.name) for one in fields(layer)}
    moe, rope, mixer = values.pop("moe"), values.pop("rope"), values.pop("mixer")
    values |= {f"rope.{one.name}": rope and getattr(rope, one.name) for one in fields(RopeShape)}
    values |= {f"mixer.{name}": value for name, value in mixer_facts(mixer).items()}
    return values | {f"moe.{one.name}": moe and getattr(moe, one.name) for one in fields(MoEShape)}


def _brief(value: Any) -> str:
    return textwrap.shorten(str(value), 40, placeholder=" ...")


def adapter_error(folder: str | Path, why: str) -> CheckpointError:
    """Return the error for a folder that PEFT has saved."""
    return CheckpointError(
        f"{folder} is an adapter, not a model",
        why,
        "merge it, save the tokenizer beside it, and name that folder: peft.AutoPeftModelForCausalLM"
        ".from_pretrained(ADAPTER).merge_and_unload().save_pretrained(FOLDER)",
        code="hf-adapter",
    )
