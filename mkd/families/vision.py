"""The families with images by their Hugging Face `model_type`. Their text models are those of the registry.

SmolVLM and Idefics3 cut an image into tiles of one size; Qwen's towers take images of any size, and give
tokens three rotary positions. transformers' own modules are the towers (see `mkd/models/vision`). Of Gemma 4
mkd runs the text model alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from mkd.errors import CheckpointError, UsageError
from mkd.families.family import HFConfig
from mkd.families.layer_shape import RopeShape
from mkd.families.vision_shape import VisionFamily, VisionShape

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "gemma3": "the tokens of an image attend to each other both ways, mkd's attention is causal",
        "qwen2_vl": "mkd knows the tower of Qwen2.5-VL and Qwen3-VL",
        "llama4": "mkd does not know the attention and the tower of Llama 4",
    }
)

WITH_KNOWN_TEXT = {"gemma3": "gemma3_text"}  # those of REFUSED whose text model mkd runs
SAVE_TEXT = (
    "import transformers as hf; m = hf.AutoModelForImageTextToText.from_pretrained('DIR', dtype='auto'); "
    "t = hf.AutoModelForCausalLM.from_config(m.config.get_text_config(), dtype=m.dtype); "
    "t.model.load_state_dict(m.get_decoder().state_dict()); head = m.get_output_embeddings(); "
    "t.set_output_embeddings(head); "
    "t.config.tie_word_embeddings = head.weight is m.get_input_embeddings().weight; "
    "t.save_pretrained('NEW'); hf.AutoTokenizer.from_pretrained('DIR').save_pretrained('NEW')"
)
"""Python that saves the text model of one with images, whose weights have other names there."""

TEXT_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # of models whose `text_config` names its family
_ACTIVATIONS = """gelu gelu_10 gelu_accurate gelu_fast gelu_new gelu_python gelu_pytorch_tanh hardswish
laplace leaky_relu linear mish quick_gelu relu relu2 relu6 sigmoid silu swish tanh"""
TOWER_ACTIVATIONS = tuple(_ACTIVATIONS.split())  # those of transformers that have no weights
_TILES = {"vision_model.": "vision_model.", "connector.": "connector."}


def _check_activation(vision: HFConfig) -> None:
    """Raise `UsageError` for an activation that transformers does not have."""
    name = vision.get("hidden_act", "gelu")
    if name not in TOWER_ACTIVATIONS:
        what = f"vision_config: hidden_act {name!r} is not supported"
        why = f"transformers' towers know {', '.join(TOWER_ACTIVATIONS)}"
        do = "download config.json again, or use a model with one of these"
        raise UsageError(what, why, do, code="model-feature-not-supported")


def _check_sizes(width: int, num_heads: int, depth: int = 0, deepstack: Sequence[int] = ()) -> None:
    """Raise `CheckpointError` for heads that do not divide the width, and for features of missing blocks."""
    do = "download config.json again"
    if num_heads < 1 or width % num_heads:
        what = f"vision_config: {num_heads} heads do not divide the width {width}"
        raise CheckpointError(what, "each head takes as many channels", do, code="model-config-not-valid")
    missing = [block for block in deepstack if not 0 <= block < depth]
    if missing:
        what = f"vision_config: deepstack_visual_indexes has {missing[0]}, the tower has {depth} blocks"
        raise CheckpointError(what, "features come after these blocks", do, code="model-config-not-valid")


def read_tiles(config: HFConfig) -> VisionShape:
    """Read SmolVLM's and Idefics3's tower; the keys that transformers completes have its values."""
    defaults = dict(hidden_size=1152, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=16)
    vision = defaults | dict(num_channels=3, image_size=224, patch_size=32) | dict(config["vision_config"])
    _check_activation(vision)
    _check_sizes(vision["hidden_size"], vision["num_attention_heads"])
    side, patch, merge = vision["image_size"], vision["patch_size"], config.get("scale_factor", 2)
    if side % (patch * merge):
        what = f"image_size {side} is not a multiple of patch_size {patch} x scale_factor {merge}"
        do = "download config.json or write it again"
        raise CheckpointError(
            what, "tiles are cut into squares of patches", do, code="model-config-not-valid"
        )
    return VisionShape(
        family=config["model_type"],
        image_token_id=config.get("image_token_id", 128257),
        depth=vision["num_hidden_layers"],
        hidden_size=vision["hidden_size"],
        ffn_hidden_size=vision["intermediate_size"],
        num_heads=vision["num_attention_heads"],
        patch_size=patch,
        channels=vision["num_channels"],
        frames=1,
        merge=merge,
        image_size=side,
        num_positions=(side // patch) ** 2,
    )


def read_qwen(config: HFConfig) -> VisionShape:
    """Read the tower of Qwen2.5-VL, Qwen3-VL or Qwen3.5; that of the last gives layers no features."""
    kind = config["model_type"]
    is_newer, has_deepstack = kind != "qwen2_5_vl", kind.startswith("qwen3_vl")
    defaults: dict[str, Any] = dict(
        hidden_size=3584, depth=32, num_heads=16, intermediate_size=3420, patch_size=14
    )
    defaults |= dict(window_size=112, fullatt_block_indexes=(7, 15, 23, 31))
    if is_newer:
        defaults = dict(hidden_size=1152, depth=27, num_heads=16, intermediate_size=4304, patch_size=16)
        defaults |= dict(num_position_embeddings=2304)
        defaults |= dict(deepstack_visual_indexes=(8, 16, 24)) if has_deepstack else {}
    common = dict(spatial_merge_size=2, temporal_patch_size=2, in_channels=3)
    vision: dict[str, Any] = defaults | common | dict(config["vision_config"])
    _check_activation(vision)
    deepstack = vision["deepstack_visual_indexes"] if has_deepstack else ()
    _check_sizes(vision["hidden_size"], vision["num_heads"], vision["depth"], deepstack)
    return VisionShape(
        family=kind,
        image_token_id=config.get("image_token_id", 248056 if kind.startswith("qwen3_5") else 151655),
        depth=vision["depth"],
        hidden_size=vision["hidden_size"],
        ffn_hidden_size=vision["intermediate_size"],
        num_heads=vision["num_heads"],
        patch_size=vision["patch_size"],
        channels=vision["in_channels"],
        frames=vision["temporal_patch_size"],
        merge=vision["spatial_merge_size"],
        gated_mlp=not is_newer,
        num_positions=vision["num_position_embeddings"] if is_newer else 0,
        window_size=0 if is_newer else vision["window_size"],
        full_attention_blocks=() if is_newer else tuple(vision["fullatt_block_indexes"]),
        deepstack=len(deepstack),
    )


GEMMA4_TOWERS = "model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio."
_QWEN_TEXT = dict(num_key_value_heads=None, max_position_embeddings=32768)
_ALL = (
    *(
        VisionFamily(
            name,
            None,
            "model.text_model.",
            {f"model.{start}": own for start, own in _TILES.items()},
            ("connector.",),
            read_tiles,
            {"model_type": "llama", "rms_norm_eps": 1e-5},
        )
        for name in ("smolvlm", "idefics3")
    ),
    VisionFamily(
        "qwen2_5_vl",
        "qwen2",
        "model.",
        {"visual.": "visual."},
        ("visual.merger.",),
        read_qwen,
        _QWEN_TEXT | {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_key_value_heads": 8},
        ties_by_text=True,
        module_prefix="model.language_model.",  # files keep the names of before transformers 4.52
    ),
    *(
        VisionFamily(
            name,
            text_family,
            "model.language_model.",
            {"model.visual.": "visual."},
            ("visual.merger.", "visual.deepstack_merger_list."),
            read_qwen,
            defaults,
            sections=(24, 20, 20),
            interleaved_sections=True,
        )
        for name, text_family, defaults in (
            ("qwen3_vl", "qwen3", _QWEN_TEXT | {"rope_theta": 5e5, "max_position_embeddings": 128000}),
            ("qwen3_vl_moe", "qwen3_vl_moe_text", {}),
        )
    ),
    *(
        VisionFamily(
            name,
            f"{name}_text",
            "model.language_model.",
            {"model.visual.": "visual."},
            ("visual.merger.",),
            read_qwen,
            {},
            sections=(11, 11, 10),
            interleaved_sections=True,
        )
        for name in ("qwen3_5", "qwen3_5_moe")
    ),
    VisionFamily(
        "gemma4",
        "gemma4_text",
        "model.language_model.",
        {start: start for start in GEMMA4_TOWERS},
        (),
        None,
        {},
        ties_by_default=True,
    ),
)
VISION_FAMILIES = MappingProxyType({one.model_type: one for one in _ALL})
TEXT_ALONE = tuple(one.model_type for one in _ALL if one.read_vision is None)
WITH_IMAGES = tuple(sorted(VISION_FAMILIES.keys() - set(TEXT_ALONE)))


def saved_text(text_family: str | None) -> str:
    """Return how a user makes a model of the text alone, for an error."""
    return f'its text model ({text_family}), which this saves from DIR in NEW: python -c "{SAVE_TEXT}"'


def refuse_known(model_type: object, source: str) -> None:
    """Raise `UsageError` for a model with images that mkd knows by name and cannot run."""
    why = REFUSED.get(model_type) if isinstance(model_type, str) else None
    if why is not None:
        what = f"{source}: model_type {model_type!r} is not supported"
        do = f"use a model of {', '.join(WITH_IMAGES)}"
        if model_type in WITH_KNOWN_TEXT:
            do += f", or {saved_text(WITH_KNOWN_TEXT[model_type])}"
        raise UsageError(what, why, do, code="model-type-not-supported")


def refuse_text_model(family: VisionFamily, text_family: str, source: str) -> None:
    """Raise `UsageError` for a text model of a family that mkd has not proved behind a tower."""
    if family.text_family is None and text_family not in TEXT_FAMILIES:
        what = f"{source}: a model with images whose text model is of {text_family} is not supported"
        why = f"its text model may be of {', '.join(TEXT_FAMILIES)}; others treat embeddings in another way"
        do = f"use a published model of {', '.join(WITH_IMAGES)}"
        raise UsageError(what, why, do, code="model-type-not-supported")


def text_config(family: VisionFamily, config: HFConfig) -> dict[str, Any]:
    """Return the text model's configuration as that of a model of its own.

    `config` has no nulls. Old hub files of Qwen2.5-VL have the text model's keys beside `vision_config`.
    Raises `CheckpointError` for another model without `text_config`.
    """
    own = config.get("text_config")
    if own is None and not family.ties_by_text:
        what = f"text_config is missing or null in config.json of a {family.model_type} model"
        why, do = "the sizes of the text model are there", "download or write it again"
        raise CheckpointError(what, why, do, code="model-config-not-valid")
    given = dict(own if own is not None else config)
    text = dict(family.text_defaults) | given
    text["model_type"] = family.text_family or text["model_type"]
    tied = config.get("tie_word_embeddings", family.ties_by_default)
    text["tie_word_embeddings"] = tied or (family.ties_by_text and given.get("tie_word_embeddings", False))
    if family.text_family is not None and family.read_vision is not None:
        text["rope_parameters"] = _plain_rope(text)
        text.pop("rope_scaling", None)
    if family.text_family in TEXT_FAMILIES:
        text.pop("layer_types", None)  # full attention, or Qwen's windows by their own switch
    return {name: value for name, value in text.items() if value is not None}


def _rope_object(text: HFConfig) -> dict[str, Any]:
    return dict(text.get("rope_scaling") or text.get("rope_parameters") or {})


def _plain_rope(text: HFConfig) -> dict[str, Any]:
    """Return the rope as a text model has it: `mrope` is the default rope with three positions."""
    rope = _rope_object(text)
    if "rope_theta" in text:
        rope.setdefault("rope_theta", text["rope_theta"])
    kind = rope.pop("type", None) or rope.get("rope_type", "default")
    rope["rope_type"] = "default" if kind in ("mrope", "default") else kind
    return {name: value for name, value in rope.items() if not name.startswith("mrope_")}


def with_sections(family: VisionFamily, rope: RopeShape, config: HFConfig) -> RopeShape:
    """Return `rope` with the channel pairs of a head that turn by time, height and width.

    `config` is the whole configuration. Raises `CheckpointError` unless the sections make up half a head.
    """
    if family.text_family is None:
        return rope
    text = config.get("text_config") or config
    sections = tuple(_rope_object(text).get("mrope_section", family.sections))
    if len(sections) != 3 or sum(sections) != rope.rotary_dim // 2:
        what = f"mrope_section {list(sections)} does not make up {rope.rotary_dim // 2} channel pairs"
        why = "every channel pair of a head turns by one of three positions"
        raise CheckpointError(what, why, "download config.json again", code="model-config-not-valid")
    return replace(rope, sections=sections, interleaved_sections=family.interleaved_sections)
