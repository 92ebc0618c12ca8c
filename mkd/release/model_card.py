"""The README.md of an exported student: its head for the hub, figures, command, and what was not checked."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import yaml

from mkd.families.vision import WITH_IMAGES
from mkd.human import counted
from mkd.release.model_licence import FENCE, LICENCE_KEYS, Licence, find_licence
from mkd.release.training_record import COMMAND, PROCESSES, VERSIONS, SourceModel, TrainingRecord, versions

VALID, TASKS = "valid", "tasks"  # splits of evaluations
LABELS = {
    "loss": "loss of the run",
    "ce_loss": "cross entropy, nats per token",
    "perplexity": "perplexity",
    "kd_loss": "divergence from the teacher, nats per token",
    "top1_agreement": "top-1 agreement with the teacher",
    "gap_closed": "share of the initial divergence that is gone",
    "teacher_ce": "cross entropy of the teacher, nats per token",
}
"""Metric of held-out text -> its name in the table, in this order. Other metrics have their keys."""
COUNTERS = ("iteration", "consumed_samples", "consumed_tokens", "consumed_prompts", "split")
PARALLEL = re.compile(r"parallel\.([a-z]+)(_model)?_parallel_size")
BATCH = ("seq_length", "micro_batch_size", "global_batch_size")
ALWAYS_UNCHECKED = (
    "Safety, bias, and whether its statements are true.",
    "Whether the terms of the teacher, the student and the text allow what you plan to do.",
    "The export in a server: `mkd serve-check FOLDER` compares its log-probabilities with mkd's.",
)


def title_of(folder: Path, repository: str | None = None) -> str:
    """Return the title of a card: the name on the hub, else that of the folder, of RUN/hf that of the run."""
    folder = folder.resolve()
    return repository or (folder.parent.name if folder.name == "hf" else folder.name)


@dataclass(frozen=True)
class ModelCard:
    """The card of one export."""

    name: str  # of the model
    record: TrainingRecord  # of the run, up to the exported iteration
    model: Path  # folder with the config.json of the exported model
    iteration: int | None = None  # that was exported; None: the last one of the record
    commands: Sequence[tuple[str, str]] = ()  # what was done with the export: title, command

    def text(self) -> str:
        """Return the card in Markdown, with its YAML head."""
        sections = [self._head(), f"# {self.name}", self._summary()]
        sections += ["## Figures", *self._figures(), "## How it was trained", *self._training()]
        sections += ["## Use", *self._use(), "## Not checked", self._unchecked(), "## Licence"]
        return "\n\n".join([*sections, self._licences()])

    @property
    def _models(self) -> list[SourceModel]:
        student = self.record.student
        return [*([student] if student else []), *self.record.teachers]

    @property
    def _sees_images(self) -> bool:
        try:
            config = json.loads((self.model / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return config.get("model_type") in WITH_IMAGES

    @property
    def _step(self) -> int | None:
        last = self.record.last_step.get("iteration")
        return self.iteration if self.iteration is not None else last

    def _head(self) -> str:
        student, data_sets = self.record.student, [*dict.fromkeys(self.record.data_sets())]
        head: dict[str, Any] = {}
        if student is not None and student.hub_id:
            head["base_model"] = [student.hub_id]
        head["library_name"] = "transformers"
        head["pipeline_tag"] = "image-text-to-text" if self._sees_images else "text-generation"
        licence = self._licence()
        head |= {key: licence.entries[key] for key in LICENCE_KEYS if licence and key in licence.entries}
        head |= {"datasets": data_sets} if data_sets else {}
        head["tags"] = [*(["knowledge-distillation"] if self.record.teachers else []), "mkd", "megatron-core"]
        return f"{FENCE}\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}{FENCE}"

    def _licence(self) -> Licence | None:
        """Return the licence that the student's folder names, else the first of the teachers'."""
        found = (find_licence(model) for model in self._models)
        return next((licence for licence in found if licence.is_stated), None)

    def _summary(self) -> str:
        student, teachers = self.record.student, self.record.teachers
        if not self.record.records:
            return "A model in the format of transformers, exported by mkd. Its training left no record here."
        learned = "trained from" if not teachers else "distilled from"
        sources = " and ".join(f"{one.shown}" for one in teachers) or "text alone"
        start = f", starting from {student.shown}" if student else ""
        tokens = self.record.last_step.get("consumed_tokens")
        size = f", {counted(tokens, 'token')}" if isinstance(tokens, int) else ""
        steps = f" in {counted(self._step, 'step')}{size}" if self._step is not None else ""
        return f"A student {learned} {sources}{start}{steps}, by mkd."

    def _figures(self) -> Iterator[str]:
        """Yield tables of held-out text, of held-out tasks and of the last training step."""
        for split, title in ((VALID, "Held-out text"), (TASKS, "Held-out tasks")):
            found = self.record.evaluations(split)
            if found:
                yield f"{title}:"
                yield _table(split, [*map(_with_perplexity, found)])
        last = self.record.last_step
        if last:
            yield f"Training, the log interval that ends with step {last['iteration']}:"
            shown = {key: last[key] for key in LABELS if isinstance(last.get(key), (int, float))}
            shown["tokens seen, padding included"] = last.get("consumed_tokens")
            yield _rows(("metric", "value"), ((LABELS.get(key, key), _number(v)) for key, v in shown.items()))
        if not self.record.records:
            yield "The folder of the checkpoint has no metrics."

    def _training(self) -> Iterator[str]:
        record, rows = self.record, []
        for role, model in [("student", record.student), *(("teacher", one) for one in record.teachers)]:
            if model is not None:
                rows.append((role if role == "student" else f"teacher {model.role}", model.shown))
        sizes = ((PARALLEL.fullmatch(path), one.value) for path, one in record.settings.items())
        degrees = [f"{match.group(1)} {value}" for match, value in sizes if match]
        if PROCESSES in record.plan:
            rows.append(("processes", str(record.plan[PROCESSES])))
        rows += [("parallel sizes", ", ".join(degrees))] if degrees else []
        batch = [f"{name} {record.value(f'training.{name}')}" for name in BATCH if record.settings]
        rows += [("batch", ", ".join(batch))] if batch else []
        rows += [("device", str(record.plan["device"]))] if "device" in record.plan else []
        rows.append(("versions", _versions(record.plan.get(VERSIONS))))
        exporter = _versions(versions())
        rows += [("versions of the export", exporter)] if exporter != rows[-1][1] else []
        yield _rows(("", ""), rows)
        if words := record.plan.get(COMMAND):
            yield "Command:"
            yield _fenced("mkd train " + shlex.join(map(_without_folders, words)), "bash")
        if record.loss_card:
            yield _fenced(record.loss_card.rstrip())
        if record.given:
            yield "<details><summary>Settings that were given</summary>"
            yield _fenced("\n".join(f"{path}: {_setting(value)}" for path, value in record.given.items()))
            yield "</details>"
        yield "Of absolute paths the last part is shown."

    def _use(self) -> Iterator[str]:
        code = "AutoModelForImageTextToText" if self._sees_images else "AutoModelForCausalLM"
        lines = [
            f"from transformers import AutoTokenizer, {code}",
            "",
            f'model = {code}.from_pretrained("FOLDER")',
        ]
        yield _fenced("\n".join([*lines, 'tokenizer = AutoTokenizer.from_pretrained("FOLDER")']), "python")
        yield "Score it with lm-evaluation-harness:"
        yield _fenced("lm_eval --model hf --model_args pretrained=FOLDER --tasks hellaswag", "bash")
        for title, command in self.commands:
            yield f"{title}:"
            yield _fenced(command, "bash")

    def _unchecked(self) -> str:
        missing = []
        if not self.record.evaluations(VALID):
            missing.append("Held-out text: the run evaluated none.")
        if not self.record.evaluations(TASKS):
            missing.append("Tasks and benchmarks: the run scored none.")
        return "\n".join(f"- {line}" for line in (*missing, *ALWAYS_UNCHECKED))

    def _licences(self) -> str:
        chosen = self._licence()
        if chosen is None:
            text = "Neither the student's nor a teacher's folder names a licence, so this card names none."
        else:
            text = f"The licence in the head of this card is that of {chosen.model.shown}."
        rows = [(model.role, model.shown, str(find_licence(model))) for model in self._models]
        return text + (f"\n\n{_rows(('model', 'name', 'its terms'), rows)}" if rows else "")


def _table(split: str, records: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of all finite figures of one or two evaluations."""
    last = records[-1]
    keys = [key for key in LABELS if key in last] if split == VALID else []
    keys += [key for key in last if key not in (*keys, *COUNTERS)]
    steps = [one["iteration"] for one in records]
    heads = [f"after step {step}" if step else "before training" for step in steps]
    rows = []
    for key in keys:
        values = [one.get(key) for one in records]
        if all(isinstance(value, (int, float)) and math.isfinite(value) for value in values):
            label = LABELS.get(key, f"`{key}`") if split == VALID else f"`{key}`"
            rows.append((label, *map(_number, values)))
    return _rows(("metric", *heads), rows)


def _with_perplexity(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record of held-out text with the perplexity of its cross entropy."""
    entropy = record.get("ce_loss")
    if not isinstance(entropy, float) or entropy > 700:  # whose exponential is infinite
        return dict(record)
    return {**record, "perplexity": math.exp(entropy)}


def _number(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else "not recorded"


def _versions(found: Any) -> str:
    if not isinstance(found, dict):
        return "not recorded"
    return ", ".join(f"{package} {version}" for package, version in found.items())


def _setting(value: Any) -> str:
    values = value if isinstance(value, list) else [value]
    shown = [_without_folders(one) if isinstance(one, str) else one for one in values]
    return json.dumps(shown if isinstance(value, list) else shown[0], ensure_ascii=False)


def _without_folders(word: str) -> str:
    """Return the last part of an absolute path, also after `--flag=`; any other word as it is."""
    head, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    return f"{head}{equals}{PurePath(value).name}" if PurePath(value).is_absolute() else word


def _fenced(text: str, language: str = "") -> str:
    return f"```{language}\n{text}\n```"


def _rows(head: Sequence[str], rows: Iterator[Sequence[str]] | Sequence[Sequence[str]]) -> str:
    lines = [tuple(head), ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
