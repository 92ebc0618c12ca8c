"""Benchmark sampling: tokens/s beside transformers, memory beside the plan, and its share of a step.

Each figure is printed as soon as it is known, so that a run that is cut off has the first ones.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from mkd.config.load import load_config
from mkd.kinds.sampled.sampler.decoding import sample_completions
from mkd.kinds.sampled.sampler.rollouts import Request, Sampling
from mkd.models.builder import build_model_parts
from mkd.models.language_model import LanguageModel
from mkd.models.transformer_config import ModelOptions
from mkd.parallel.context import ParallelContext
from mkd.plan.footprint.sampling_memory import cache_bytes, sampling_bytes
from mkd.plan.layout import PipelineLayout
from mkd.platform import Platform
from tools.benchmarks.benchmark_report import Report, Requirement, Skipped
from tools.benchmarks.machine import Machine
from tools.benchmarks.random_engine import PairSettings, parallel_context, random_engine
from tools.benchmarks.shapes import config_of, shape_of
from tools.benchmarks.step_benchmark import step_of
from tools.benchmarks.synthetic_documents import ChatLengths, full_pack

GIB = 2**30
OFF_TOKENS = 32  # sampled by rows that are not graphs: their rate is known after a few
CONTINUOUS_TOKENS = 64  # sampled by generate_batch, which is faster with few: its keys are short
WANTED_RATIO = 2.0  # of transformers' tokens/s


@dataclass(frozen=True)
class DecodeCase:
    """The completions to sample."""

    batch: int
    prompt_tokens: int
    new_tokens: int

    def requests(self, vocab_size: int, seed: int) -> list[Request]:
        random = np.random.default_rng(seed)
        prompts = random.integers(1, vocab_size, size=(self.batch, self.prompt_tokens))
        return [Request(number, 0, ids) for number, ids in enumerate(prompts)]


def benchmark(machine: Machine, platform: Platform, settings: PairSettings, case: DecodeCase) -> Report:
    """Print the figures, and return the requirement on tokens/s."""
    with parallel_context(platform, settings) as context:
        model = _student(settings.student, machine, context)
        requests = case.requests(model.shape.vocab_size, machine.seed)
        short = replace(case, new_tokens=min(OFF_TOKENS, case.new_tokens))
        rates = {}
        rates["rows of free shapes"] = _rate(model, context, requests, short, machine, "off")
        kind = "graphs" if machine.is_cuda else "plain"
        _rate(model, context, requests, case, machine, kind)  # kernels are compiled, work spaces made
        rates[f"rows of fixed shapes, {kind}"] = _rate(model, context, requests, case, machine, kind)
        ours = max(rates.values())
        _memory(model, context, requests, case, machine, settings)
        del model
        _free()
        share = _share_of_step(machine, settings, context, case, case.batch * case.new_tokens / ours)
        print(share, flush=True)
        _free()
        theirs = _transformers(settings.student, machine, requests, case)
    if theirs is None:
        return Report([Skipped("R24", "transformers' generate_batch does not run here")])
    return Report([Requirement("R24", ours / theirs, "of transformers' tokens/s", ">=", WANTED_RATIO)])


def _student(name: str, machine: Machine, context: ParallelContext) -> LanguageModel:
    """Return the student alone, with random weights."""
    shape = shape_of(name)
    layout = PipelineLayout((shape.num_layers,), 1, 1)
    (part,) = build_model_parts(shape, layout, ModelOptions(dtype=machine.dtype), context)
    generator = torch.Generator(context.device).manual_seed(machine.seed)
    with torch.no_grad():
        for parameter in part.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=shape.initializer_range, generator=generator)
    return part


def _sample(model, context, requests, case: DecodeCase, machine: Machine, kind: str) -> float:
    """Return the seconds of one phase. Without stop tokens every completion has its full length."""
    sampling = Sampling(
        case.new_tokens, frozenset(), model.shape.vocab_size, slots=case.batch, seed=machine.seed
    )
    _wait(machine)
    start = time.perf_counter()
    found = sample_completions([model], context, requests, sampling, 1, fixed_rows=kind)
    _wait(machine)
    assert sum(len(one.ids) for one in found) == case.batch * case.new_tokens
    return time.perf_counter() - start


def _rate(model, context, requests, case: DecodeCase, machine: Machine, kind: str) -> float:
    seconds = _sample(model, context, requests, case, machine, kind)
    rate = case.batch * case.new_tokens / seconds
    what = f"{case.batch} x {case.new_tokens} tokens after {case.prompt_tokens}"
    print(f"mkd, {kind}: {rate:.0f} tokens/s ({what}, {seconds:.1f} s with prompts and captures)", flush=True)
    return rate


def _memory(model, context, requests, case: DecodeCase, machine: Machine, settings: PairSettings) -> None:
    """Print the peak memory of a phase beside the plan's keys, values and logits."""
    flags = ["--seq-length", str(case.prompt_tokens + case.new_tokens)]
    config = load_config([*settings.argv(machine.dtype, 1), *flags]).config
    element = torch.finfo(machine.dtype).bits // 8
    cache = cache_bytes(config, case.batch, model.shape, model.shape.layers, element)
    logits = sampling_bytes(case.batch, model.shape.padded_vocab_size(1))
    text = f"plan: keys and values {cache / GIB:.2f} GiB, logits {logits / GIB:.2f} GiB"
    if machine.is_cuda:
        _free()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        _sample(model, context, requests, case, machine, "graphs")
        peak, left = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
        ratio = peak / (cache + logits)
        text += f"; measured peak {peak / GIB:.2f} GiB ({ratio:.3f} of it), left behind {left / GIB:.3f} GiB"
    print(text, flush=True)


def _transformers(name: str, machine: Machine, requests: list[Request], case: DecodeCase) -> float | None:
    """Return tokens/s of continuous batching, None if it does not run here; print it and `generate` too."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.for_model(**config_of(name))
    torch.manual_seed(machine.seed)
    with torch.device(machine.device):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=machine.dtype).eval()
    prompts = [one.ids.tolist() for one in requests]
    settings = dict(do_sample=True, top_k=0, top_p=1.0, temperature=1.0, pad_token_id=0, use_cache=True)
    chosen = GenerationConfig(**settings, max_new_tokens=case.new_tokens)
    few = GenerationConfig(**settings, max_new_tokens=min(CONTINUOUS_TOKENS, case.new_tokens))
    rows = torch.tensor(prompts, device=machine.device)

    def static() -> int:
        with torch.no_grad():
            return model.generate(rows, generation_config=chosen).shape[1] * len(rows) - rows.numel()

    def continuous() -> int:
        found = model.generate_batch(prompts, generation_config=few)
        return sum(len(one.generated_tokens) for one in found.values())

    _timed("transformers generate", static, machine, calls=1)
    if not machine.is_cuda:  # on a CPU its first call takes minutes
        return None
    return _timed(f"transformers generate_batch, {few.max_new_tokens} each", continuous, machine, calls=2)


def _timed(name: str, run: Callable[[], int], machine: Machine, calls: int) -> float | None:
    """Print and return the tokens/s of the fastest call; None if one fails."""
    try:
        best = 0.0
        for _ in range(calls):
            _wait(machine)
            start = time.perf_counter()
            tokens = run()
            _wait(machine)
            best = max(best, tokens / (time.perf_counter() - start))
    except Exception as error:  # another library: its failure is a result
        print(f"{name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        return None
    print(f"{name}: {best:.0f} tokens/s", flush=True)
    return best


def _share_of_step(
    machine: Machine, settings: PairSettings, context: ParallelContext, case: DecodeCase, sampling_s: float
) -> str:
    """Return the share of sampling in a step of these completions, from the time of one pack."""
    engine, plan = random_engine(settings, machine, context)
    vocab = min(plan.student.shape.vocab_size, plan.teachers[0].shape.vocab_size)
    length = case.prompt_tokens + case.new_tokens
    random = np.random.default_rng(machine.seed)
    batch = full_pack(settings.seq_length, vocab, ChatLengths(length, length), random).to(context.device)
    run = step_of(engine, [batch])
    times = []
    for _ in range(3):
        _wait(machine)
        start = time.perf_counter()
        run()
        _wait(machine)
        times.append(time.perf_counter() - start)
    packs = -(-case.batch * length // settings.seq_length)
    training_s = min(times) * packs
    share = sampling_s / (sampling_s + training_s)
    pair = f"{settings.student} <- {settings.teacher}"
    return (
        f"{pair}: sampling {sampling_s:.1f} s, training {packs} packs {training_s:.1f} s, share {share:.3f}"
    )


def _wait(machine: Machine) -> None:
    if machine.is_cuda:
        torch.cuda.synchronize()


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
