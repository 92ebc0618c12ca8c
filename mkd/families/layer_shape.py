"""`LayerShape`: everything that may differ from one decoder layer to the next."""

from __future__ import annotations

from dataclasses import dataclass

from mkd.families.mixer_shape import MixerShape

WIDEST_HEAD = 256
"""Channels of the widest head that Transformer Engine's attention to packs takes, and flash attention."""

QUICK_GELU_GAIN = 1.702
"""Factor of x in the sigmoid of the activation `quick_gelu`, x sigmoid(1.702 x)."""


@dataclass(frozen=True)
class RopeShape:
    """Rotary position embedding.

    `kind` is `default`, `linear`, `llama3`, `yarn`, `longrope` or `proportional`.
    """

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
    beta_fast: float = 32.0  # full turns within the original context above which YaRN keeps a frequency
    beta_slow: float = 1.0  # full turns below which YaRN divides a frequency by `factor`
    truncate: bool = True  # YaRN rounds its bounds outwards to whole channel pairs
    sections: tuple[int, ...] = ()  # channel pairs that turn by time, height and width; (): one position
    interleaved_sections: bool = False  # they alternate from the first pair on
    interleaved: bool = False  # the two channels of a pair are neighbours, not half a head apart
    turning_pairs: int = 0  # of a proportional rope: the other channel pairs do not turn
    # Queries at position p are multiplied by 1 + query_growth ln(1 + floor(p / original positions)).
    query_growth: float = 0.0

    @property
    def is_plain_rotation(self) -> bool:
        """True if fused kernels can rotate: without a factor, by one row of angles for a position."""
        plain = self.kind != "longrope" and self.attention_factor == 1.0
        return plain and not self.sections and not self.interleaved


@dataclass(frozen=True)
class MLAShape:
    """Multi-head latent attention: queries, and keys with values, come from narrow latents.

    Each head has `qk_nope_head_dim` channels without positions and `qk_rope_head_dim` with them. All heads
    share the latter of the key. Source: DeepSeek-V2 (2024), section 2.1.
    """

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None  # None: queries are projected directly
    interleaved_rope: bool = True  # rotated channels are neighbours, not half a head apart
    norm_epsilon: float = 1e-6  # of the latents' norms

    @property
    def qk_head_dim(self) -> int:
        """Channels of a query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def has_direct_query(self) -> bool:
        """True if queries have no latent."""
        return self.q_lora_rank is None


@dataclass(frozen=True)
class HeadsShape:
    """Sizes of a layer's attention where they are not the model's."""

    num_attention_heads: int
    num_query_groups: int  # key/value heads
    head_dim: int  # channels of a head

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_attention_heads // self.num_query_groups

    @property
    def is_wide(self) -> bool:
        """True if Transformer Engine's attention does not take heads of this size; mkd's own does."""
        return self.head_dim > WIDEST_HEAD


@dataclass(frozen=True)
class MoEShape:
    """A mixture of experts: a router sends each token to `top_k` of the experts, which are MLPs."""

    num_experts: int
    top_k: int  # experts of a token
    ffn_hidden_size: int  # width of the gate and of the up projection of an expert
    scores: str = "softmax"  # how logits become scores: `softmax` or `sigmoid`
    normalizes_top_k: bool = True  # the scores of a token's experts are divided by their sum
    scaling_factor: float = 1.0  # multiplies the scores at last
    num_groups: int = 1  # groups of experts ...
    top_groups: int = 1  # ... of which a token reaches this many
    shared_ffn_hidden_size: int = 0  # width of the MLP that every token passes beside its experts; 0: none
    shared_gate: bool = False  # the output of that MLP is multiplied by a sigmoid, one number a token
    correction_bias: bool = False  # a bias takes part in the choice of experts, not in their weights
    # MLP and experts have norms of their inputs and outputs; the router normalises and scales its input, and
    # scales each expert's weights.
    inner_norms: bool = False
    biases: bool = False  # the router's product and both products of each expert have a bias
    is_gated: bool = True  # experts, shared ones too, have gates, as `LayerShape.is_gated`
    latent_size: int = 0  # channels of the projection of a token that its experts see; 0: the hidden state

    @property
    def mlp_matrices(self) -> int:
        """Matrices of an expert."""
        return 2 + self.is_gated

    def expert_width(self, hidden_size: int) -> int:
        """Return the channels that enter and leave an expert."""
        return self.latent_size or hidden_size

    def matrix_elements(self, hidden_size: int, experts: int) -> int:
        """Return the matrix elements of so many experts, of shared ones, of the router and of projections."""
        routed = experts * self.expert_width(hidden_size) * self.ffn_hidden_size
        every = self.num_experts + self.shared_gate + 2 * self.latent_size
        return self.mlp_matrices * (routed + hidden_size * self.shared_ffn_hidden_size) + hidden_size * every


@dataclass(frozen=True)
class LayerShape:
    """A decoder layer: attention or a mixer, and an MLP, each with norms and a residual connection.

    Layers of some models have only one of the two.
    """

    # Width of the gate and of the up projection. Not read in a layer with experts; 0: the layer has no MLP.
    ffn_hidden_size: int
    # None: attention does not see positions. Not read in a layer with a mixer.
    rope: RopeShape | None
    activation: str = "silu"  # of the MLP: `silu`, `gelu_tanh`, `quick_gelu`, `squared_relu`, `xielu`
    # MLPs multiply the activation of a gate by an up projection. False: they have no gates, and the
    # activation is that of the up projection.
    is_gated: bool = True
    mlp_limit: float | None = None  # before it gates are clamped above, up projections on both sides
    up_offset: float = 0.0  # added to the up projection, which multiplies the activation
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm of every query and key head before the rotation
    qk_norm_turned: bool = False  # the same behind the rotation
    # RMSNorm of a token's queries, and of its keys, over all heads before the rotation: their channels.
    joint_qk_norm: tuple[int, int] | None = None
    pre_norms: bool = True  # RMSNorm in front of attention and MLP
    post_norms: bool = False  # RMSNorm of the output of attention and MLP before the residual addition
    sliding_window: int | None = None  # tokens that a query sees, itself included; None: all earlier ones
    attention_sinks: bool = False  # each head has a learned logit that takes part in every softmax
    output_gate: bool = False  # attention's output is multiplied by a sigmoid; queries and gates alternate
    heads: HeadsShape | None = None  # None: those of the model
    shared_key_value: bool = False  # values are the keys before their norm
    value_norm: bool = False  # RMSNorm of every value head, without a weight
    output_scale: bool = False  # a stored number, which is not trained, multiplies the layer's output
    mla: MLAShape | None = None  # None: grouped-query attention
    mixer: MixerShape | None = None  # in place of attention; None: attention
    mixes_tokens: bool = True  # False: the layer has neither attention nor a mixer, only an MLP
    moe: MoEShape | None = None  # experts in place of the MLP
    residual_scale: float = 1.0  # factor of the outputs of attention and MLP in the residual addition

    def __post_init__(self) -> None:
        assert self.moe is None or self.moe.is_gated == self.is_gated, "Megatron has one kind of MLP a model"

    @property
    def has_attention(self) -> bool:
        """True if the layer has attention, not a mixer in its place."""
        return self.mixer is None and self.mixes_tokens

    @property
    def has_mlp(self) -> bool:
        """True if the layer has an MLP or experts."""
        return self.moe is not None or self.ffn_hidden_size > 0

    @property
    def has_dense_mlp(self) -> bool:
        """True if the layer has an MLP that every token passes."""
        return self.moe is None and self.ffn_hidden_size > 0

    @property
    def is_transformer_layer(self) -> bool:
        """True if the layer has attention and then an MLP or experts."""
        return self.has_attention and self.has_mlp

    @property
    def mlp_matrices(self) -> int:
        """Matrices of the MLP: gate, if there are gates, up and down projection."""
        return 2 + self.is_gated

    @property
    def is_dense(self) -> bool:
        """True if the layer has no experts."""
        return self.moe is None

    @property
    def has_shared_experts(self) -> bool:
        """True if every token passes an MLP beside its experts."""
        return self.moe is not None and self.moe.shared_ffn_hidden_size > 0

    @property
    def has_shared_gate(self) -> bool:
        """True if a gate multiplies the output of the MLP beside the experts."""
        return self.moe is not None and self.moe.shared_gate

    @property
    def has_inner_norms(self) -> bool:
        """True if experts, and the MLP beside them, have norms of their own."""
        return self.moe is not None and self.moe.inner_norms

    @property
    def has_expert_latents(self) -> bool:
        """True if experts see a projection of their tokens."""
        return self.moe is not None and self.moe.latent_size > 0

    @property
    def has_correction_bias(self) -> bool:
        """True if a bias takes part in the choice of experts."""
        return self.moe is not None and self.moe.correction_bias
