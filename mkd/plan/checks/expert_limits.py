"""Check that the experts of every model can be spread over the processes, and settings of experts."""

from __future__ import annotations

from collections.abc import Iterator

from mkd.config.schema import Config, TrainingConfig
from mkd.errors import UsageError
from mkd.plan.checks.no_effect import no_effect
from mkd.plan.facts import RunFacts
from mkd.plan.layout import STUDENT_FLAG
from mkd.plan.models.model_shape import ModelShape
from mkd.plan.models.planned_models import PlannedModel
from mkd.plan.parallel_sizes import model_sizes

STUDENT = "--expert-model-parallel-size"
RECOMPUTED = ("core_attn", "moe", "mixer")  # parts that selective recomputation knows


def check_expert_settings(facts: RunFacts) -> Iterator[UsageError]:
    """Check settings of experts that need no model."""
    config = facts.config
    expert_tensor = config.parallel.expert_tensor_parallel_size
    if expert_tensor > 1:
        what = f"expert-tensor-parallel-size {expert_tensor} is not supported"
        why = "every expert is whole on its process"
        do = f"remove it, and raise {STUDENT} instead"
        yield UsageError(what, why, do, code="remove-flag")
    modules, granularity = config.training.recompute_modules, config.training.recompute_granularity
    for unknown in (one for one in modules if one not in RECOMPUTED):
        what = f"recompute-modules: {unknown!r} is not a known value"
        yield UsageError(what, "", f"use {' or '.join(RECOMPUTED)}", code="value-unknown")
    if modules != type(config.training)().recompute_modules and granularity != "selective":
        why, student = "only selective recomputation reads it", facts.student
        is_dense = student is not None and student.moe is None and "moe" in modules
        do = "remove it" if is_dense else "add --recompute-granularity selective"
        yield no_effect(f"recompute-modules {' '.join(modules)}", why, do)


def check_experts(facts: RunFacts) -> Iterator[UsageError]:
    """Check expert parallelism against the experts and the processes of each model."""
    for model in facts.models:
        if model.shape.moe is None:
            yield from _dense(facts.config, model)
        else:
            yield from _spread(facts, model, model.shape.moe.num_experts)
    if facts.student is not None:
        yield from _settings_of_experts(facts.config.training, facts.student)
        has_mixers = any(layer.mixer for layer in facts.student.layers)
        if "mixer" in facts.config.training.recompute_modules and not has_mixers:
            yield no_effect("recompute-modules mixer", "the student has no mixers", "remove it")


def _settings_of_experts(training: TrainingConfig, student: ModelShape) -> Iterator[UsageError]:
    """Check that the student has what settings of its experts change."""
    settings = {
        f"{name.replace('_', '-')} {getattr(training, name)}": getattr(training, name)
        for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate")
    }
    settings["recompute-modules moe"] = "moe" in training.recompute_modules
    if student.moe is None:
        for setting in (name for name, is_given in settings.items() if is_given):
            yield no_effect(setting, "the student has no experts", "remove it")
    elif training.moe_router_bias_update_rate and not student.moe.correction_bias:
        setting = f"moe-router-bias-update-rate {training.moe_router_bias_update_rate}"
        why = "the routers of the student have no bias that corrects the choice of experts"
        yield no_effect(setting, why, "balance the load with --moe-aux-loss-coeff")


def _dense(config: Config, model: PlannedModel) -> Iterator[UsageError]:
    is_student = model.teacher is None
    settings = config.parallel if model.teacher is None else config.teachers[model.teacher]
    given = settings.expert_model_parallel_size
    if given is not None and given > 1:
        what = f"{model.expert_flag.removeprefix('--')} {given}, but the {model.role} has no experts"
        why = "there is nothing to spread over these processes"
        do = "remove it" + ("; a teacher's is --teacher-expert-model-parallel-size" if is_student else "")
        yield UsageError(what, why, do, code="remove-flag")


def _spread(facts: RunFacts, model: PlannedModel, num_experts: int) -> Iterator[UsageError]:
    config, parallel = facts.config, facts.config.parallel
    student_has_experts = facts.student is not None and facts.student.moe is not None
    size = model_sizes(config, model.shape, model.teacher).expert
    of_stage, rest = divmod(facts.world_size, parallel.pipeline_model_parallel_size)
    fitting = [n for n in range(1, num_experts + 1) if num_experts % n == 0 and of_stage % n == 0]
    inherits = model.teacher is not None and not config.teachers[model.teacher].expert_model_parallel_size
    given = STUDENT if inherits else model.expert_flag  # name the flag that the user gave
    flag = given.removeprefix("--")
    sizes = " or ".join(map(str, fitting[-3:]))
    use = f"use {given} {sizes}"
    if inherits:
        own = f"{model.expert_flag} {sizes}"
        use = f"{use}, or give the {model.role} its own: {own}" if student_has_experts else f"use {own}"
    if num_experts % size:
        what = f"the {model.role}'s {num_experts} experts are not divisible by {flag} {size}"
        why = "every process holds the same number of experts"
        yield UsageError(what, why, use, code="model-not-divisible")
    elif not rest and of_stage % size and not (inherits and student_has_experts):  # reported of the student
        what = f"{of_stage} processes of a pipeline stage are not divisible by {flag} {size}"
        why = "the tensor, context and data-parallel processes of a stage share its experts"
        yield UsageError(what, why, use, code="world-not-divisible")
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        what = f"the {model.role} has experts, and tensor-model-parallel-size is "
        what += f"{parallel.tensor_model_parallel_size} without sequence-parallel"
        why = "every tensor-parallel process would route the same tokens"
        yield UsageError(what, why, "add --sequence-parallel", code="add-flag")


def require_expert_layers(facts: RunFacts) -> None:
    """Raise UsageError if the distributed optimizer could not save a pipeline rank without experts.

    Megatron keeps an optimizer for experts on every rank, and cannot save one without parameters. Beside
    adapters all experts are frozen, and no rank has one.
    """
    student, layout = facts.pair.student, facts.layouts.student
    distributed = facts.config.parallel.use_distributed_optimizer
    if student.moe is None or facts.config.lora.is_on or not distributed:
        return
    for rank in range(layout.pipeline_parallel):
        parts = [layout.for_rank(rank, virtual) for virtual in range(layout.virtual_stages)]
        layers = [layer for first, count in parts for layer in student.layers[first : first + count]]
        if all(layer.is_dense for layer in layers):
            what = f"pipeline rank {rank} has {len(layers)} layers of the student, none of them with experts"
            why = "the distributed optimizer cannot save the empty optimizer of its experts"
            do = f"give it a layer with experts ({STUDENT_FLAG}), or remove --use-distributed-optimizer"
            raise UsageError(what, why, do, code="layout-not-valid")
