"""The loss card: the objective of a run as a short text, with its numbers and settings of other engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mkd.config.divergence import DivergenceSettings
from mkd.config.models import teacher_names
from mkd.config.schema import Config, KDConfig, TeacherConfig
from mkd.kinds.averaged.averaged_teachers import follows_student, weights_text
from mkd.kinds.kind import CardTerm, Row, TeacherCard
from mkd.kinds.known_kinds import KINDS, card_term, teacher_card
from mkd.kinds.placed.known_places import rounding
from mkd.plan.models.model_shape import ModelShape

_MASK = (
    "the next token of the same document: in conversations only tokens of assistant turns, after a prompt "
    "only tokens of the completion, never padding"
)
_NORMALISER = (
    "sums over the global batch divided once by its number of loss tokens, counted over all ranks and "
    "micro-batches before the first forward"
)
_COMBINATIONS = {
    "weighted_sum": "sum of weight x KD of each teacher, {weights}",
    "average": "one divergence to the weighted mean of the teachers' probabilities",
    "select": "in each pack, KD of the teacher with the lowest cross entropy there",
    "route": "in each record, sum of weight x KD of the teachers of its tag, {weights} divided by their sum",
}


@dataclass(frozen=True)
class Term:
    """The loss of one teacher."""

    temperature: float
    scaling: str  # squared or none
    divergence: DivergenceSettings
    card: TeacherCard = TeacherCard()  # of its kind

    @property
    def scale(self) -> float:
        """s(T), the factor on the divergence."""
        return self.temperature**2 if self.scaling == "squared" else 1.0

    def formula(self) -> str:
        text = self.card.divergence.replace("{}", self.divergence.formula())
        what = "T^2" if self.scaling == "squared" else "no T^2"
        return f"{self.scale:g} x {text}; p = softmax(logits / T), T = {self.temperature:g} ({what})"

    @classmethod
    def of(cls, kd: KDConfig, teacher: TeacherConfig | None) -> Term:
        """Return the term of a teacher, whose own settings override those of `kd`."""
        own = teacher.temperature if teacher else None
        return cls(
            temperature=kd.kd_temperature if own is None else own,
            scaling=kd.kd_temperature_scaling,
            divergence=DivergenceSettings.from_config(kd, teacher),
            card=teacher_card(teacher) if teacher else TeacherCard(),
        )


def loss_card(
    config: Config,
    student: ModelShape,
    teachers: Sequence[ModelShape],  # those that run; a stored one has no shape
    notes: Sequence[str] = (),  # for each teacher, what its files say
) -> str:
    """Return the card."""
    rows = [*_formula(config, student)]
    if config.kd.kd_ratio > 0:
        rows += _teachers(config, student, teachers, notes)
        rows += _elsewhere(config, student, teachers)
    width = max(len(label) for label, _ in rows)
    return "\n".join(["loss card", *(f"  {label:{width}}  {text}" for label, text in rows)])


def _formula(config: Config, student: ModelShape) -> Iterator[Row]:
    ratio, data = config.kd.kd_ratio, card_term(config) or _cross_entropy(config, student)
    terms = [f"{weight:g} {name}" for name, weight in ((data.name, 1 - ratio), ("KD", ratio)) if weight]
    terms += [name for name, weight in _balance_losses(config).items() if weight]
    yield "loss", f"{' + '.join(terms)}, nats per {data.unit}"
    yield from data.rows
    yield "mask", data.mask or _MASK
    for kind in KINDS:
        yield from kind.text_rows(config)
    others = dict.fromkeys(text for one in config.teachers if (text := teacher_card(one).normaliser))
    yield "normaliser", data.normaliser or "; ".join([_NORMALISER, *others])
    yield from data.elsewhere
    yield from _experts(config)
    for kind in KINDS:
        yield from kind.student_rows(config)


def _cross_entropy(config: Config, student: ModelShape) -> CardTerm:
    text = f"-ln p_s(next token), over the student's {student.vocab_size} vocabulary rows, T = 1"
    return CardTerm("CE", (("CE", text),) if config.kd.kd_ratio < 1 else ())


def _balance_losses(config: Config) -> dict[str, float]:
    """Return the losses of the student's routers: name -> coefficient."""
    return {"balance": config.training.moe_aux_loss_coeff, "z": config.training.moe_z_loss_coeff}


def _experts(config: Config) -> Iterator[Row]:
    coefficients, rate = _balance_losses(config), config.training.moe_router_bias_update_rate
    if coefficients["balance"]:
        text = f"{coefficients['balance']:g} x load of the experts by document, summed over layers; even is 1"
        yield "balance", text
    if coefficients["z"]:
        yield "z", f"{coefficients['z']:g} x (logsumexp of a router's logits)^2, summed over layers"
    if rate:
        text = f"every update moves the bias of an expert by {rate:g} towards an even load, without a loss"
        yield "expert bias", text


def _teachers(
    config: Config, student: ModelShape, teachers: Sequence[ModelShape], notes: Sequence[str]
) -> Iterator[Row]:
    kd, settings, names = config.kd, config.teachers, teacher_names(config.teachers)
    if len(settings) > 1:
        score = f"{kd.teacher_weighting} / {kd.teacher_weighting_temperature:g}"
        weights = "static" if score.startswith("static") else f"in each pack softmax(ln weight - {score})"
        yield "KD", _COMBINATIONS[kd.teacher_combination].format(weights=f"weights {weights}")
    total = sum(one.weight for one in settings)
    vocabularies = [_vocabulary(*pair, student) for pair in zip(settings, teachers, strict=False)]
    # If all vocabularies are the same, one line for all.
    vocabularies = vocabularies if len(set(vocabularies)) > 1 else vocabularies[:1]
    for index, (teacher, name) in enumerate(zip(settings, names, strict=True)):
        term = Term.of(kd, None if kd.averages_teachers else teacher)
        label = f"KD {name}" if len(settings) > 1 else "KD"
        share = f"weight {teacher.weight / total:.4g}: " if len(settings) > 1 else ""
        note = "".join(notes[index : index + 1])
        details = teacher_card(teacher).details + weights_text(teacher)
        yield label, share + term.formula() + details + note + rounding(teacher)
        if index < len(vocabularies) > 1:
            yield f"vocabulary {name}", vocabularies[index]
    if len(vocabularies) == 1:
        yield "vocabulary", vocabularies[0]


def _vocabulary(teacher: TeacherConfig, shape: ModelShape, student: ModelShape) -> str:
    sizes = student.vocab_size, shape.vocab_size
    both = f"student {sizes[0]} rows, teacher {sizes[1]}"
    if text := teacher_card(teacher).vocabulary:
        return f"{both} {text}"
    if sizes[0] == sizes[1]:
        return f"all {sizes[0]} rows of both models"
    return f"{both}: the first {min(sizes)}, both softmaxes renormalised there"


def _elsewhere(config: Config, student: ModelShape, teachers: Sequence[ModelShape]) -> Iterator[Row]:
    """Yield settings of other engines with the same objective, or why there are none.

    Sources: ModelOpt `modelopt/torch/distill/plugins/megatron.py` (KL without T^2, `(1 - alpha) lm + alpha
    kd`), NeMo Automodel `nemo_automodel/components/loss/kd_loss.py` (forward KL times T^2, `(1 - kd_ratio) ce
    + kd_ratio kd`), TRL `GKDTrainer` (generalized JSD, no cross entropy). In `GKDTrainer`, `beta` is the
    weight of the teacher in the mixture, and the temperature is the one of sampling.
    """
    ratio, term = config.kd.kd_ratio, Term.of(config.kd, config.teachers[0])
    names, divergence = ("ModelOpt", "NeMo Automodel", "TRL GKD"), term.divergence.resolved()
    reason = _without_counterpart(config, student, teachers)
    if reason:
        yield "same in other engines", f"nothing: {reason}"
        return
    settings: tuple[str, ...] = (
        "kd_loss_alpha: {:.6g}, logit_kl_temperature: {:g}",
        "kd_ratio: {:.6g}, KDLoss temperature: {:g}",
    )
    if config.rollout.is_on:  # these two train on stored text
        settings = ()
    for name, scale, text in zip(names, (1.0, term.temperature**2), settings, strict=False):
        if divergence.name == "forward_kl":
            share, factor = rescaled(ratio, term.scale, scale)
            times = "" if abs(factor - 1) < 1e-12 else f"; this loss is {factor:.6g} x that one"
            yield f"same in {name}", text.format(share, term.temperature) + times
        else:
            yield f"same in {name}", f"nothing: its configuration has forward KL only, not {divergence.name}"
    beta = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": divergence.parameter}.get(divergence.name)
    if ratio < 1:
        text = "nothing: it has no cross entropy"
    elif beta is None:
        text = f"nothing: it has no {divergence.name}"
    elif term.temperature != 1:
        text = "nothing: its loss is at T = 1"
    else:
        lmbda = f"lmbda={config.rollout.on_policy_fraction:g}"  # the share of batches that it samples
        text = f"GKDConfig({lmbda}, beta={beta:g}), which divides by the tokens of each micro-batch"
    yield f"same in {names[2]}", text


def rescaled(ratio: float, scale: float, other_scale: float) -> tuple[float, float]:
    """Return (share of KD, factor) for an engine that scales the divergence D differently.

    It scales D by `other_scale`, mkd by `scale`: (1 - ratio) CE + ratio scale D = factor ((1 - share) CE +
    share other_scale D).
    """
    ce, kd = 1 - ratio, ratio * scale / other_scale
    return kd / (ce + kd), ce + kd


def _without_counterpart(config: Config, student: ModelShape, teachers: Sequence[ModelShape]) -> str | None:
    """Return why no other engine has this objective; None if one may."""
    if (data := card_term(config)) is not None and data.without_counterpart:
        return data.without_counterpart
    if any(_balance_losses(config).values()):
        return "the balance losses of experts are by document here"
    if len(config.teachers) > 1:
        return "one teacher only"
    if follows_student(config.teachers[0]):
        return "their teachers are frozen"
    if reason := teacher_card(config.teachers[0]).without_counterpart:
        return reason
    if any(shape.vocab_size != student.vocab_size for shape in teachers):
        return "both models must have vocabularies of one size"
    return None
