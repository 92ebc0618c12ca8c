"""Teachers by the tag of a record: each record has the loss of the teachers of its tag, and no other runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mkd.config.data_files import data_paths
from mkd.config.schema import Config
from mkd.config.tag_rules import TagRules, equal_names, wrong_pairs
from mkd.data.records.wanted import ANY_RECORDS, WantedRecords
from mkd.errors import UsageError
from mkd.kinds.kind import NOTHING, Kind, Row
from mkd.kinds.routed.tag_shares import TagShares
from mkd.plan.checks.no_effect import no_effect
from mkd.plan.facts import RunFacts
from mkd.plan.models.planned_teachers import Teacher
from mkd.plan.work import Work


class Routed(Kind):
    """Runs whose records have tags."""

    of_teachers = True

    def problems(self, facts: RunFacts) -> Iterator[UsageError]:
        config, rules = facts.config, TagRules.of(facts.config)
        if rules is None:
            yield from _unread(config)
            return
        yield from wrong_pairs(config)
        of_agents = config.rollout.is_on and config.rollout.rollout_source == "records"  # have a key `tag`
        if not (config.kd.tag_key or config.data.data_tags or of_agents):
            what, why = "teacher-combination is route, but records have no tags", "a tag chooses the teachers"
            do = "give --tag-key KEY, or --data-tags PATH=TAG"
            yield UsageError(what, why, do, code="add-flag")
        known = {*data_paths([], config.data), *config.rollout.prompt_data_path}
        for path in rules.files.keys() - known:
            what, why = f"data-tags has the path {path}", "it is none of the paths of the data"
            yield UsageError(what, why, f"write it as {' or '.join(sorted(known))}", code="value-unknown")
        for tag in rules.weights:
            if not rules.taught_by(tag):
                what, why = f"tag-weights has the tag {tag}, which no teacher has", "nobody would teach it"
                do = "add the tag to a teacher, or give one teacher no tags: it takes what no other names"
                yield UsageError(what, why, do, code="add-flag")
        yield from equal_names(rules, rules.named)
        yield from _refused(facts)

    def records(self, config: Config) -> WantedRecords:
        key = config.kd.tag_key
        return ANY_RECORDS if key is None or TagRules.of(config) is None else WantedRecords(tag=key)

    def text_rows(self, config: Config) -> Iterator[Row]:
        rules = TagRules.of(config)
        if rules is None:
            return
        tags = "; ".join(f"{name} {_shown(own)}" for name, own in rules.teachers.items())
        where = f"key {config.kd.tag_key}" if config.kd.tag_key else "tag of the file"
        yield "tags", f"{where}; {tags}"
        if rules.weights:
            total = sum(rules.weights.values())
            shares = ", ".join(f"{tag} {weight / total:.4g}" for tag, weight in rules.weights.items())
            yield "tag weights", f"{shares}: KD of each tag is a mean over its own loss tokens"
        yield "forwards", _forwards(config)

    def work(self, config: Config) -> Work:
        found = TagShares.of(config)
        if found is None:
            return Work()
        is_shared = found.has_one_teacher_each and not found.rules.weights
        is_shared &= all(one.xtoken is None for one in config.teachers)
        return Work(one_head_pass=is_shared, lines=(lambda _: f"teachers by tag: {_forwards(config)}",))

    def forward_share(self, facts: RunFacts, number: int, teacher: Teacher) -> float:
        found = TagShares.of(facts.config)
        if found is None:
            return 1.0
        block = 1 if facts.config.teachers[number].stand_in else in_step_of(teacher)
        in_step = max(1, block // facts.sizes.row)  # replicas
        packs = in_step * facts.config.training.micro_batch_size
        return found.of_teacher(facts.teacher_names[number], packs, facts.batch.global_batch_size)

    def identity(self, config: Config) -> Mapping[str, object]:
        rules = TagRules.of(config)
        return NOTHING if rules is None else {"data.tags": dict(sorted(rules.files.items()))}


def in_step_of(teacher: Teacher) -> int:
    """Return how many neighbouring processes of a stage exchange a teacher's weights or tokens."""
    return teacher.sizes.weight_shards * teacher.place.processes


def _forwards(config: Config) -> str:
    """Return the expected share of packs for which each teacher runs, and where it is from."""
    found = TagShares.of(config)
    assert found is not None, "the run has tags"
    shares = ", ".join(f"{name} {found.of_teacher(name):.3g}" for name in found.rules.teachers)
    tags = ", ".join(f"{tag or 'others'} {share:.3g}" for tag, share in found.shares.items())
    return f"share of the packs for which each runs: {shares}; of tags: {tags} ({found.source})"


def _shown(tags: tuple[str, ...]) -> str:
    return f"teaches {', '.join(tags)}" if tags else "teaches what no other names"


def _unread(config: Config) -> Iterator[UsageError]:
    """Yield settings that nothing reads without routes."""
    why = "only --teacher-combination route reads it" if config.kd.kd_ratio else "--kd-ratio is 0"
    if config.kd.kd_ratio and len(config.teachers) < 2:
        why = "tags choose between teachers, and there is only one"
    has_choice = config.kd.kd_ratio and len(config.teachers) > 1
    do = "add --teacher-combination route" if has_choice else "remove it"
    if config.kd.tag_key is not None:
        yield no_effect(f"tag-key {config.kd.tag_key}", why, do)
    for name, values in (("tag-weights", config.kd.tag_weights), ("data-tags", config.data.data_tags)):
        if values:
            yield no_effect(f"{name} {' '.join(values)}", why, do)
    for index, teacher in enumerate(config.teachers):
        if teacher.tags:
            yield no_effect(f"teachers[{index}].tags {' '.join(teacher.tags)}", why, do)


def _refused(facts: RunFacts) -> Iterator[UsageError]:
    """Yield what does not go together with tags, besides contexts (see Contexts)."""
    config, given = facts.config, "teacher-combination is route"
    do = "remove one of them"
    if config.pair_loss is not None:
        what = f"{given}, but {config.pair_loss.flag[2:]} is {config.pair_loss.beta}"
        yield UsageError(what, "a reference has no tags", do, code="exclude-each-other")
