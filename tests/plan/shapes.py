"""Define shapes and configurations for plans: Qwen3-8B teaches Qwen3-1.7B, packs of 8,192 tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mkd.config.load import load_config
from mkd.config.schema import Config, TeacherConfig
from mkd.plan.facts import RunFacts
from mkd.plan.footprint.activations import Activations
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.parallel_sizes import Sizes
from mkd.plan.times.cost import DOCUMENT_LENGTH, PairCost, pair_cost
from mkd.plan.times.layer_time import Rates, WorkTime
from tests.run_facts import facts_of

SEQ_LENGTH = 8192


def qwen3(num_layers: int, hidden: int, ffn: int, heads: int, tied: bool) -> ModelShape:
    return ModelShape.from_hf_config(
        dict(
            model_type="qwen3",
            num_hidden_layers=num_layers,
            hidden_size=hidden,
            intermediate_size=ffn,
            head_dim=128,
            num_attention_heads=heads,
            num_key_value_heads=8,
            vocab_size=151936,
            tie_word_embeddings=tied,
        )
    )


STUDENT = qwen3(28, 2048, 6144, 16, tied=True)
TEACHER = qwen3(36, 4096, 12288, 32, tied=False)


def qwen3_moe(num_layers: int, hidden: int, ffn: int, heads: int, **more) -> ModelShape:
    return ModelShape.from_hf_config(
        dict(
            model_type="qwen3_moe",
            num_hidden_layers=num_layers,
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            moe_intermediate_size=ffn,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=True,
            head_dim=128,
            num_attention_heads=heads,
            num_key_value_heads=4,
            vocab_size=151936,
        )
        | more
    )


MOE_STUDENT = qwen3_moe(48, 2048, 768, 32)  # Qwen3-30B-A3B
MOE_TEACHER = qwen3_moe(94, 4096, 1536, 64)  # Qwen3-235B-A22B


def gpt_oss(num_layers: int, num_experts: int) -> ModelShape:
    return ModelShape.from_hf_config(
        dict(
            model_type="gpt_oss",
            num_hidden_layers=num_layers,
            num_local_experts=num_experts,
            hidden_size=2880,
            intermediate_size=2880,
            num_attention_heads=64,
            vocab_size=201088,
        )
    )


DEEPSEEK_V3 = ModelShape.from_hf_config(
    dict(
        model_type="deepseek_v3",
        num_hidden_layers=61,
        hidden_size=7168,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        first_k_dense_replace=3,
        n_routed_experts=256,
        num_experts_per_tok=8,
        n_shared_experts=1,
        n_group=8,
        topk_group=4,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        num_attention_heads=128,
        num_key_value_heads=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        vocab_size=129280,
    )
)

QWEN3_5_9B = ModelShape.from_hf_config(
    dict(
        model_type="qwen3_5_text",
        num_hidden_layers=32,
        hidden_size=4096,
        intermediate_size=12288,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=248320,
    )
)


def config(*argv: str | int) -> Config:
    """Return the configuration of these flags, in bf16."""
    return load_config(
        ["--teacher-hf", "t", "--bf16", "--seq-length", str(SEQ_LENGTH), *map(str, argv)]
    ).config


def several(*teachers: dict, **kd) -> Config:
    """Return a configuration in bf16 with `TeacherConfig` fields of each teacher."""
    settings = config()
    sources = tuple(TeacherConfig(**{"hf": f"t{index}"} | fields) for index, fields in enumerate(teachers))
    return replace(settings, teachers=sources, kd=replace(settings.kd, **kd))


def equal_layers(num_layers: int, teachers: tuple[tuple[int, float], ...], head_ms: float) -> PairCost:
    """Return a cost of 1 + 2 ms for each student layer; of teachers (number of layers, ms of each)."""
    frozen = tuple((WorkTime(ms, 0.0),) * number for number, ms in teachers)
    return PairCost((WorkTime(1.0, 2.0),) * num_layers, frozen, head_ms)


def student_activations(*flags) -> Activations:
    settings = config(*flags)
    return Activations(settings, STUDENT, 2, SEQ_LENGTH, Sizes.of(settings.parallel))


def cost_of(
    settings: Config,
    student: ModelShape,
    teachers: Sequence[ModelShape],
    num_stages: int,
    document_length: int = DOCUMENT_LENGTH,
    rates: Rates | None = None,
) -> PairCost:
    """Return the cost of a micro-batch."""
    facts = facts_of(settings, 1, student, teachers, document_length=document_length)
    return pair_cost(facts.pair, num_stages, rates)


def trained(
    settings: Config,
    student: ModelShape = STUDENT,
    teachers: Sequence[ModelShape] = (TEACHER,),
    microbatches: int = 8,
    data_parallel: int = 1,
    layouts: Sequence[str] = (),  # of the student and of teachers; of others as the settings say
    **more,
) -> RunFacts:
    """Return the facts of a run with so many micro-batches on each of so many replicas."""
    parallel, training = settings.parallel, settings.training
    replica = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    replica *= parallel.context_parallel_size
    packs = training.micro_batch_size * microbatches * data_parallel
    settings = replace(settings, training=replace(training, global_batch_size=packs))
    models = [
        replace(one, pipeline_layout=text)
        for one, text in zip((settings.student, *settings.teachers), layouts, strict=False)
    ]
    if models:
        teachers_left = settings.teachers[len(models) - 1 :]
        settings = replace(settings, student=models[0], teachers=(*models[1:], *teachers_left))
    return facts_of(settings, replica * data_parallel, student, teachers, **more)
