"""The schema of a run: one dataclass per section. Each field has the help text of its flag and YAML key.

`Config()` holds the defaults. A field is a flag of the same name (`--seq-length`) and a YAML key
(`seq_length`). Fields of the student, the first teacher and its cross-tokenizer settings carry their
section's name (`--student-hf`, `--xtoken-loss`). A help text starts with a verb or a noun. Where the default
is None, it ends with what applies then: `(default: ...)`.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, fields, replace

from mkd.config.divergence import KDDivergence
from mkd.config.field import option
from mkd.config.layout_settings import ParallelConfig
from mkd.config.models import LIVE, TEACHER_COMBINATIONS, StudentConfig, TeacherConfig, XTokenConfig
from mkd.config.run_files import CheckpointConfig, DataConfig, LogConfig
from mkd.config.self_teacher import SelfTeacherSettings
from mkd.config.split import parse_split
from mkd.config.training_settings import OptimizerConfig, TrainingConfig
from mkd.errors import UsageError
from mkd.kinds.judged.pair_losses.dpo import DPO
from mkd.kinds.judged.pair_losses.pair_loss import PairLoss
from mkd.kinds.judged.pair_losses.simpo import SimPO
from mkd.kinds.judged.reward_settings import RewardConfig
from mkd.kinds.lora.lora_settings import LoRAConfig
from mkd.kinds.rounded.rounding_settings import RoundingConfig
from mkd.kinds.routed.route_settings import RouteSettings
from mkd.kinds.sampled.rollout_settings import RolloutConfig
from mkd.kinds.weighted.weight_settings import WeightConfig

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "KDConfig",
    "LogConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RewardConfig",
    "RolloutConfig",
    "StudentConfig",
    "TeacherConfig",
    "TrainingConfig",
    "XTokenConfig",
]


@dataclass(frozen=True)
class KDConfig(RouteSettings, KDDivergence):
    """The objective: (1 - kd_ratio) x cross entropy + kd_ratio x divergence from the teacher."""

    kd_ratio: float = option(
        0.5,
        "weight of distillation in the loss, 0 to 1. 0 is plain training and never loads the teacher, whose "
        "settings have no effect; training at 1 computes no cross entropy",
    )
    kd_temperature: float = option(
        1.0,
        "divisor of both models' logits before the divergence. Above 1 the teacher's small probabilities "
        "count more",
    )
    kd_temperature_scaling: str = option(
        "squared",
        "factor on the divergence: squared (temperature squared, which keeps the gradient's size) or none",
        choices=("squared", "none"),
    )
    teacher_combination: str = option(
        "weighted_sum",
        "way to combine several teachers. weighted_sum: sum of their divergences, weights normalised to 1. "
        "average: one divergence from the weighted mean of their probabilities (student's tokenizer only). "
        "select: for each pack the teacher with the lowest cross entropy of the same text. route: for each "
        "record the teachers of its tag, and no other teacher runs",
        choices=TEACHER_COMBINATIONS,
    )
    teacher_weighting: str = option(
        "static",
        "source of a weighted_sum's weights. static: the configuration. Otherwise each pack has "
        "softmax(ln(weight) - score) over the teachers. The score, a mean over student tokens, is the "
        "teacher's cross entropy (ce), its entropy, or 1 - its highest probability (confidence)",
        choices=("static", "ce", "entropy", "confidence"),
    )
    teacher_weighting_temperature: float = option(
        1.0, "divisor of the scores of --teacher-weighting. Below 1 the best teacher gets more of the weight"
    )
    kd_fp32_logits: bool = option(
        False,
        "compute the training loss's logits in fp32 under --bf16. Rounding errors of the gradient are ten "
        "times smaller. A block of logits takes twice the memory, the loss about a tenth more time. "
        "Evaluation always has fp32 logits",
    )

    @property
    def averages_teachers(self) -> bool:
        """True if one divergence compares the student with the mean of all teachers."""
        return self.teacher_combination == "average"

    @property
    def selects_teacher(self) -> bool:
        """True if each pack has the loss of its best teacher alone."""
        return self.teacher_combination == "select"

    @property
    def weighs_packs(self) -> bool:
        """True if the weights of several teachers differ from pack to pack."""
        return self.selects_teacher or self.teacher_weighting != "static"


@dataclass(frozen=True)
class Config(SelfTeacherSettings):
    """All settings of a run."""

    student: StudentConfig = StudentConfig()
    teachers: tuple[TeacherConfig, ...] = ()
    parallel: ParallelConfig = ParallelConfig()
    kd: KDConfig = KDConfig()
    training: TrainingConfig = TrainingConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    dpo: DPO = DPO()
    simpo: SimPO = SimPO()
    grpo: RewardConfig = RewardConfig()
    weighted: WeightConfig = WeightConfig()
    lora: LoRAConfig = LoRAConfig()
    rounding: RoundingConfig = RoundingConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    device_memory_gib: float | None = option(
        None,
        "memory of one GPU in GiB (an 80 GB one has 79.1, an H200 139.8). The plan then says whether the "
        "run fits, and what to change if not (default: not checked)",
    )
    dry_run: bool = option(
        False,
        "check flags, models, tokenizers, layout, disk and the first records of the data; print the plan; "
        "load nothing. Only a run itself reads all of the data and compares its settings with those of "
        "--load",
    )

    @property
    def needs_models(self) -> bool:
        """True if the loss compares the student with other models."""
        return self.kd.kd_ratio > 0 or (self.pair_loss is not None and self.pair_loss.needs_reference)

    @property
    def why_no_models(self) -> str:
        """The cause of `needs_models` being False."""
        return "--kd-ratio is 0" if self.pair_loss is None else f"{self.pair_loss.title} has no reference"

    @property
    def starts_alike(self) -> bool:
        """True if nothing sets a student apart from a teacher that it starts from."""
        moves = (self.rounding.student_rounding, self.student.load, self.rollout.is_on, self.pair_loss)
        return not any(moves)

    @property
    def pair_losses(self) -> tuple[PairLoss, ...]:
        """Losses of preference pairs that are on: one in a run without problems, or none."""
        sections = (getattr(self, one.name) for one in fields(self))
        return tuple(one for one in sections if isinstance(one, PairLoss) and one.beta is not None)

    @property
    def pair_loss(self) -> PairLoss | None:
        """Loss of preference pairs; None if the run has none."""
        return next(iter(self.pair_losses), None)

    def with_evaluation(self) -> Config:
        """Return the configuration; if it holds data out without an interval, with one as long as the run."""
        training, valid = self.training, bool(self.data.valid_data_path)
        with suppress(UsageError):  # reported by the checks
            valid = valid or parse_split(self.data.split).validation > 0
        if not valid or training.eval_interval is not None or not training.train_iters:
            return self
        return replace(self, training=replace(training, eval_interval=training.train_iters))

    def with_reference(self) -> Config:
        """Return the configuration; if it needs a reference and has none, with the initial student.

        A single teacher that names no model says where this reference is, and in which precision.
        """
        initial = self.student.hf or self.student.load
        pair_loss = self.pair_loss
        needs_reference = pair_loss.needs_reference if pair_loss else self.grpo.is_on and self.needs_models
        given = self.teachers or (TeacherConfig(),)
        is_named = len(given) > 1 or given[0].is_given or given[0].weights == LIVE
        if is_named or not (needs_reference and initial):
            return self
        return replace(self, teachers=(replace(given[0], hf=self.student.hf, load=self.student.load),))


PAIR_LOSSES = tuple(type(one.default) for one in fields(Config) if isinstance(one.default, PairLoss))
"""Classes of all losses of preference pairs."""
