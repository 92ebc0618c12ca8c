"""`ModelShape`: everything about a dense decoder that its Hugging Face `config.json` says, without torch.

The one place that reads the spellings of Hugging Face configurations; models, converters and plans work from the result.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from mkd.errors import CheckpointError, MkdError, UsageError

FAMILIES = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "phi3": "phi3",
}
"""Hugging Face `model_type` -> mkd family. SmolLM2 is `llama`, Phi-4 (dense) is `phi3`."""

DEFAULTS = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096, "max_position_embeddings": 32768},
    "qwen3": {
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_position_embeddings": 32768,
        "head_dim": 128,
    },
    "phi3": {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
}
"""What transformers takes for a key that config.json lacks, where the families differ. A key that is null has no default."""

SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
OPTIONAL_SIZES = (
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "sliding_window",
)
NUMBERS = (
    "rms_norm_eps",
    "initializer_range",
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
)
SWITCHES = ("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window", "is_causal")


@dataclass(frozen=True)
class Kind:
    """Of a value of config.json."""

    must_be: str
    holds: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _list_of(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(holds, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


KINDS = {  # of every key that is read, in config.json itself or in its rope parameters
    **dict.fromkeys(
        (*SIZES, *OPTIONAL_SIZES), Kind("a whole number above 0", lambda v: type(v) is int and v > 0)
    ),
    **dict.fromkeys(NUMBERS, Kind("a finite number above 0", _is_number)),
    **dict.fromkeys(SWITCHES, Kind("true or false", lambda v: isinstance(v, bool))),
    **dict.fromkeys(
        ("short_factor", "long_factor"), Kind("a list of finite numbers above 0", _list_of(_is_number))
    ),
    **dict.fromkeys(("model_type", "hidden_act", "rope_type", "type"), Kind("a text", _is_text)),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), Kind("an object", lambda v: isinstance(v, Mapping))),
    "layer_types": Kind("a list of texts", _list_of(_is_text)),
    "max_window_layers": Kind("a whole number of 0 or more", lambda v: type(v) is int and v >= 0),
}


@dataclass(frozen=True)
class RopeShape:
    """Rotary position embedding. `kind` is `default`, `linear`, `llama3` or `longrope`."""

    theta: float
    rotary_dim: int  # leading channels of each head that are rotated
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    attention_factor: float = 1.0  # multiplies cos and sin


@dataclass(frozen=True)
class ModelShape:
    """Sizes and switches of one dense decoder-only model."""

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int  # key/value heads
    head_dim: int
    vocab_size: int  # rows of the embedding on disk: the truth about the vocabulary
    max_position_embeddings: int = field(
        compare=False
    )  # a limit that is given, not one that the weights have
    norm_epsilon: float
    rope: RopeShape
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None  # tokens a query sees, itself included; None: all earlier ones
    initializer_range: float = field(default=0.02, compare=False)
    hf_config: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_attention_heads // self.num_query_groups

    def padded_query_groups(self, tensor_parallel: int) -> int:
        """Key/value heads after padding to a multiple of `tensor_parallel`.

        A padded group has zero projections, so that it contributes nothing and its gradient is exactly zero.
        """
        return -(-self.num_query_groups // tensor_parallel) * tensor_parallel

    def padded_vocab_size(self, tensor_parallel: int, divisible_by: int = 128) -> int:
        """Vocabulary rows after padding to a multiple of `divisible_by * tensor_parallel` (Megatron's rule)."""
        multiple = divisible_by * tensor_parallel
        return -(-self.vocab_size // multiple) * multiple

    def differences(self, other: ModelShape) -> list[str]:
        """What makes the same weights another model under `other`, as `name ours instead of theirs`; [] if nothing does."""
        ours, theirs = self._facts(), other._facts()
        return [
            f"{name} {_brief(ours[name])} instead of {_brief(theirs[name])}"
            for name in ours
            if ours[name] != theirs[name]
        ]

    def _facts(self) -> dict[str, Any]:
        """Name -> value of all that is compared, those of the position embedding one by one."""
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.compare}
        return values | {f"rope.{name}": value for name, value in asdict(values.pop("rope")).items()}

    @classmethod
    def from_hf_dir(cls, directory: str | Path) -> ModelShape:
        """Read `directory/config.json`. Raises `CheckpointError` when it is missing or not JSON."""
        path = Path(directory) / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} does not exist",
                "a Hugging Face model folder holds config.json beside its .safetensors files",
                "pass the folder that save_pretrained() or a hub download made",
                code="model-config-not-found",
            ) from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"{path} is not valid JSON: {error}",
                "",
                "download or write it again",
                code="model-config-not-json",
            ) from None
        if not isinstance(config, dict):
            raise CheckpointError(
                f"{path} is not a JSON object",
                "",
                "download or write it again",
                code="model-config-not-object",
            )
        return cls.from_hf_config(config, source=str(path))

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any], source: str = "config.json") -> ModelShape:
        """Translate a Hugging Face configuration.

        Raises `UsageError` for a model that mkd cannot run exactly, `CheckpointError` for a key that is missing or has a value
        of a wrong kind, and for heads that the key/value heads do not divide. null counts as not given.
        """
        model_type = config.get("model_type")
        given = _without_nulls(
            {**DEFAULTS.get(model_type if isinstance(model_type, str) else "", {}), **config}
        )
        _check_kinds(given, source)
        if model_type not in FAMILIES:
            raise UsageError(
                f"{source}: model_type {model_type!r} is not supported",
                f"mkd knows {', '.join(sorted(FAMILIES))} (SmolLM2 is llama, dense Phi-4 is phi3)",
                "use a model of one of these families",
                code="model-type-not-supported",
            )
        try:
            return cls._read(FAMILIES[model_type], given, hf_config=dict(config))
        except KeyError as error:
            do = "download or write it again"
            raise CheckpointError(
                f"{source}: key {error} is missing or null",
                f"a {model_type} model needs it",
                do,
                code="model-config-key-missing",
            ) from None
        except MkdError as error:
            raise error.located(source) from None

    @classmethod
    def _read(cls, family: str, config: Mapping[str, Any], hf_config: Mapping[str, Any]) -> ModelShape:
        if config.get("hidden_act", "silu") not in ("silu", "swish"):
            raise UsageError(
                f"hidden_act {config['hidden_act']!r} is not supported",
                "mkd's MLP is SwiGLU (silu)",
                code="activation-not-supported",
            )
        if not config.get("is_causal", True):
            raise UsageError(
                "is_causal false is not supported",
                "mkd's attention never looks at later tokens",
                code="bidirectional-not-supported",
            )
        heads = config["num_attention_heads"]
        groups = config.get("num_key_value_heads") or heads
        if heads % groups:
            raise CheckpointError(
                f"num_attention_heads {heads} is no multiple of num_key_value_heads {groups}",
                "as many query heads share each key/value head",
                "download or write it again",
                code="head-groups-not-divisible",
            )
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        attention_bias = config.get("attention_bias", False)
        return cls(
            family=family,
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            ffn_hidden_size=config["intermediate_size"],
            num_attention_heads=heads,
            num_query_groups=groups,
            head_dim=head_dim,
            vocab_size=config["vocab_size"],
            max_position_embeddings=config.get("max_position_embeddings", 2048),
            norm_epsilon=config.get("rms_norm_eps", 1e-6),
            rope=read_rope(config, head_dim, family),
            tie_word_embeddings=config.get("tie_word_embeddings", False),
            qkv_bias=family == "qwen2" or (family in ("llama", "qwen3") and attention_bias),
            attention_output_bias=family in ("llama", "qwen3") and attention_bias,
            mlp_bias=family == "llama" and config.get("mlp_bias", False),
            qk_norm=family == "qwen3",
            sliding_window=_sliding_window(family, config),
            initializer_range=config.get("initializer_range", 0.02),
            hf_config=hf_config,
        )


def _brief(value: Any) -> str:
    return textwrap.shorten(str(value), 40, placeholder=" ...")


def _without_nulls(config: Mapping[str, Any]) -> dict[str, Any]:
    given = {key: value for key, value in config.items() if value is not None}
    return {
        key: _without_nulls(value) if isinstance(value, Mapping) else value for key, value in given.items()
    }


def _check_kinds(config: Mapping[str, Any], source: str) -> None:
    """Raises CheckpointError for a value that is not of the kind of its key."""
    for name, value in config.items():
        kind = KINDS.get(name)
        if kind is not None and not kind.holds(value):
            raise CheckpointError(
                f"{source}: {name} is {value!r}",
                f"it must be {kind.must_be}",
                "download or write it again",
                code="model-config-value-not-valid",
            )
        if name in ("rope_parameters", "rope_scaling"):
            _check_kinds(value, f"{source}: {name}")


def _sliding_window(family: str, config: Mapping[str, Any]) -> int | None:
    """The window of every layer. A mistral model that names the kinds of its layers is what transformers calls ministral."""
    window = config.get("sliding_window")
    if family == "llama" or not window:
        return None
    kinds = config.get("layer_types") if family in ("mistral", "qwen2", "qwen3") else None
    if family in ("qwen2", "qwen3"):
        if not config.get("use_sliding_window", False):
            return None
        layers = range(config["num_hidden_layers"])
        first = config.get("max_window_layers", 28)
        kinds = kinds or ["sliding_attention" if layer >= first else "full_attention" for layer in layers]
    if not kinds or all(kind == "sliding_attention" for kind in kinds):
        return int(window)
    if all(kind == "full_attention" for kind in kinds):
        return None
    raise UsageError(
        "this model mixes full and sliding-window attention layers",
        "mkd uses one attention window for all layers",
        "if seq-length stays below the window, let config.json name full_attention for all of layer_types",
        code="mixed-attention-not-supported",
    )


def read_rope(config: Mapping[str, Any], head_dim: int, family: str) -> RopeShape:
    """Read `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (older, and first if there are both).

    Only phi3 rotates a part of its heads: the other families' models pass over `partial_rotary_factor`.
    """
    scaling = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    kind = {"su": "longrope"}.get(kind, kind)
    fraction = scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor")
    fraction = float(fraction or 1.0) if family == "phi3" else 1.0
    base = dict(theta=theta, rotary_dim=int(head_dim * fraction), kind=kind)
    if kind == "default":
        return RopeShape(**base)
    if kind == "linear":
        return RopeShape(**base, factor=float(scaling["factor"]))
    if kind == "llama3":
        return RopeShape(
            **base,
            factor=float(scaling["factor"]),
            low_freq_factor=float(scaling["low_freq_factor"]),
            high_freq_factor=float(scaling["high_freq_factor"]),
            original_max_position_embeddings=_original_positions(config, scaling),
        )
    if kind == "longrope":
        return _long_rope(config, scaling, base)
    raise UsageError(
        f"rope type {kind!r} is not supported",
        "mkd reproduces default, linear, llama3 and longrope position embeddings exactly",
        "use a model with one of these, or remove the rope scaling for sequences below its original length",
        code="rope-not-supported",
    )


def _original_positions(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> int:
    """Positions before the scaling. The model's own key comes before that of its rope parameters, as in transformers."""
    name = "original_max_position_embeddings"
    return config.get(name) or scaling.get(name) or config["max_position_embeddings"]


def _long_rope(config: Mapping[str, Any], scaling: Mapping[str, Any], base: dict[str, Any]) -> RopeShape:
    """LongRoPE (Ding et al. 2024, https://arxiv.org/abs/2402.13753) as Phi-3 configurations spell it."""
    for name in ("short_factor", "long_factor"):
        if len(scaling[name]) != base["rotary_dim"] // 2:
            raise CheckpointError(
                f"the rope parameters have {len(scaling[name])} numbers of {name}",
                f"each belongs to two of the {base['rotary_dim']} channels of a head that are rotated",
                "download config.json or write it again",
                code="rope-lengths-differ",
            )
    original = _original_positions(config, scaling)
    factor = float(scaling.get("factor") or config["max_position_embeddings"] / original)
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeShape(
        **base,
        factor=factor,
        original_max_position_embeddings=original,
        short_factor=tuple(float(x) for x in scaling["short_factor"]),
        long_factor=tuple(float(x) for x in scaling["long_factor"]),
        attention_factor=float(attention_factor),
    )
