"""Check optimizer state on the host: the same bits as on the device, and checkpoints for either."""

from __future__ import annotations

import gc
import hashlib

import pytest
import torch

from tests.models.test_hf_parity import pack
from tests.ranks import skip_unless_gpus_take
from tests.tiny_models import make_model

LENGTHS, STEPS = (23, 1, 40), 4
TP2, DISTRIBUTED, BF16 = ("--tensor-model-parallel-size", "2"), ("--use-distributed-optimizer",), ("--bf16",)
LAYOUTS = {
    "one process": (1, ()),
    "TP2 bf16": (2, TP2 + BF16),
    "DP2 distributed": (2, DISTRIBUTED),
    "DP2 distributed bf16": (2, DISTRIBUTED + BF16),
    "TP2 distributed bf16": (2, TP2 + DISTRIBUTED + BF16),
}
PARTS = "TP2 bf16", "DP2 distributed bf16"  # covered as parts of another layout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("optimizer_residency")
    make_model(folder / "student", "qwen3", num_hidden_layers=2)
    return folder


def build(folder, flags):
    """Return (context, DDP-wrapped model parts, optimizer, contents of a checkpoint) of a student alone."""
    from mkd.checkpoint.distributed import TrainingState
    from mkd.checkpoint.hf.hf_reader import HFCheckpoint
    from mkd.checkpoint.hf.hf_weights import load_hf_weights
    from mkd.config.load import load_config
    from mkd.models.builder import build_model_parts, join_stages
    from mkd.models.transformer_config import ModelOptions
    from mkd.parallel.context import ParallelContext
    from mkd.plan.layout import PipelineLayout
    from mkd.plan.models.model_shape import ModelShape
    from mkd.plan.parallel_sizes import Sizes
    from mkd.platform import detect
    from mkd.train.optimizer import build_optimizer, wrap_stages

    student = folder / "student"
    argv = [
        "--student-hf",
        str(student),
        "--lr",
        "1e-2",
        "--clip-grad",
        "0.1",
        "--train-iters",
        str(STEPS),
        *flags,
    ]
    config = load_config(
        [*argv, "--data-path", "none", "--seq-length", "64", "--global-batch-size", "2"]
    ).config
    context = ParallelContext.create(detect(), Sizes(tensor=config.parallel.tensor_model_parallel_size))
    shape = ModelShape.from_hf_dir(student)
    options = ModelOptions(
        dtype=torch.bfloat16 if config.training.bf16 else torch.float32,
        deterministic=config.training.deterministic_mode,
    )
    models = build_model_parts(shape, PipelineLayout.even(shape.num_layers, 1), options, context)
    source = HFCheckpoint(student)
    load_hf_weights(models[0], shape, source, context)
    chunks = wrap_stages(join_stages(models), config, context)
    optimizer = build_optimizer(chunks, config, context)
    return context, chunks, optimizer, TrainingState(models, optimizer.optimizer, optimizer.scheduler)


def one_step(context, chunks, optimizer, step, loss_sum=1.0):
    """Run forward and backward of a loss on this step's tokens, and an update; return the gradient norm.

    Tokens also depend on the data-parallel rank.
    """
    from mkd.models.stage import StageInput

    generator = torch.Generator().manual_seed(10 * step + context.dp_rank)
    tokens = torch.randint(307, (1, sum(LENGTHS)), generator=generator).to(context.device)
    positions = torch.arange(sum(LENGTHS), device=context.device)[None]
    optimizer.zero_grad()
    documents = pack(LENGTHS, 0, context.platform.transformer_engine, context.device)
    hidden = chunks[0](StageInput(tokens, positions, documents)).hidden
    chunks[0].module.student.logits(hidden).float().square().mean().backward()
    chunks[0].module.config.finalize_model_grads_func(chunks, None)
    return optimizer.update(loss_sum)


def state_of(optimizer):
    """Return all moments and fp32 main parameters of this rank."""
    tensors = []
    for inner in optimizer.optimizer.chained_optimizers:
        for parameter, moments in inner.optimizer.state.items():
            tensors += [moments["exp_avg"], moments["exp_avg_sq"]]
            tensors.append(parameter.data)
    return tensors


def digest(chunks, optimizer):
    """Return the SHA-256 of parameters and optimizer state, and AdamW's steps."""
    content = hashlib.sha256()
    for tensor in [*(parameter.data for parameter in chunks[0].parameters()), *state_of(optimizer)]:
        content.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    inners = optimizer.optimizer.chained_optimizers
    return content.hexdigest(), [
        float(s.get("step", 0)) for inner in inners for s in inner.optimizer.state.values()
    ]


def train(folder, flags, load=None, save=None, until=STEPS):
    """Train from `load` (a name in `folder`) or from scratch until a step, and save.

    Return gradient norms and a digest.
    """
    from mkd.checkpoint.distributed import load_checkpoint, save_checkpoint
    from mkd.checkpoint.folders import TrainingPosition, find_checkpoint

    context, chunks, optimizer, state = build(folder, flags)
    first = 0
    if load is not None:
        with optimizer.state_on_device():
            first = load_checkpoint(find_checkpoint(folder / load), state, context).iteration
    norms = [one_step(context, chunks, optimizer, step) for step in range(first, until)]
    if save is not None:
        with optimizer.state_on_device():
            save_checkpoint(folder / save, state, TrainingPosition(until), context, None)
    return norms, digest(chunks, optimizer)


@pytest.mark.parametrize(
    "layout", [pytest.param(one, marks=[pytest.mark.slow] * (one in PARTS)) for one in LAYOUTS]
)
def test_training_and_resuming_are_bitwise(layout, folder, ranks):
    """This also holds if one kind of residency saves and the other loads."""
    world, device = LAYOUTS[layout]
    host = (*device, "--optimizer-residency", "host")
    expected = ranks.run(train, world, folder, device)
    assert ranks.run(train, world, folder, host) == expected
    ranks.run(train, world, folder, host, None, layout, STEPS // 2)
    for resumed in (host, device):
        assert_goes_on(ranks.run(train, world, folder, resumed, layout), expected)


def assert_goes_on(results, expected):
    """Check that every rank made the second half of the steps of `expected`, and ended with the same bits."""
    for result, whole in zip(results, expected, strict=True):
        assert result == (whole[0][STEPS // 2 :], whole[1])


def train_with_te(*arguments):
    """Call `train` deterministically, with Megatron's optimizer for installed Transformer Engine."""
    from megatron.core.optimizer import Adam

    from mkd.platform import make_deterministic

    assert Adam.__module__.startswith("transformer_engine"), "nothing that is worth testing here"
    make_deterministic()
    return train(*arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_and_resuming_are_bitwise_with_te(layout, folder, gpu_ranks):
    """FusedAdam keeps its step in the parameter group; torch's AdamW keeps one per parameter."""
    world, flags = LAYOUTS[layout]
    skip_unless_gpus_take(world)
    device = (*flags, "--deterministic-mode")
    host = (*device, "--optimizer-residency", "host")
    expected = gpu_ranks.run(train_with_te, world, folder, device)
    gpu_ranks.run(train_with_te, world, folder, device, None, f"{layout} te", STEPS // 2)
    for resumed in (device, host):
        assert_goes_on(gpu_ranks.run(train_with_te, world, folder, resumed, f"{layout} te"), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("flags", [(), DISTRIBUTED])
def test_cpus_and_gpus_go_on_from_each_other(flags, folder, ranks, gpu_ranks):
    """GPUs have other layers and another Adam, which counts its steps elsewhere.

    Settings of that Adam are not carried over.
    """
    cpu, gpu = (ranks, train), (gpu_ranks, train_with_te)
    expected = grad_norms(*cpu, folder, flags)
    for name, (first, then) in {f"cpu, gpu {flags}": (cpu, gpu), f"gpu, cpu {flags}": (gpu, cpu)}.items():
        norms = grad_norms(*first, folder, flags, None, name, STEPS // 2) + grad_norms(
            *then, folder, flags, name
        )
        assert norms == pytest.approx(expected, rel=1e-3), name


def grad_norms(pool, function, *arguments):
    ((updates, _),) = pool.run(function, 1, *arguments)
    return [update.grad_norm for update in updates]


def places(folder, flags):
    """Return where the state is.

    (bytes at home, bytes expected, moved during an update, back after a refused update)
    """
    context, chunks, optimizer, _ = build(folder, (*flags, "--optimizer-residency", "host"))
    one_step(context, chunks, optimizer, 0)
    num_parameters = sum(parameter.numel() for parameter in chunks[0].parameters())
    moved = {id(home) for home in optimizer.residency._homes.values()}

    def at_home():
        homes = {home.data_ptr() for home in optimizer.residency._homes.values()}
        return [tensor.data_ptr() in homes for tensor in state_of(optimizer)]

    between = at_home()
    with optimizer.state_on_device():
        inside = at_home()
    before = digest(chunks, optimizer)
    assert not one_step(context, chunks, optimizer, 1, loss_sum=float("nan")).agreed.finite
    unchanged = digest(chunks, optimizer) == before and at_home() == between
    assert moved == {id(home) for home in optimizer.residency._homes.values()}, "memory was allocated anew"
    return optimizer.residency.host_bytes / num_parameters, between, inside, unchanged


@pytest.mark.parametrize("flags, bytes_a_parameter", [((), 8), (BF16, 12), (DISTRIBUTED + BF16, 12)])
def test_state_is_on_the_host_between_updates(flags, bytes_a_parameter, folder, ranks):
    """The host holds moments, and with bf16 the main parameters.

    In fp32 the optimizer works on the model's own parameters, which stay on the device.
    """
    ((nbytes, between, inside, unchanged),) = ranks.run(places, 1, folder, flags)
    assert nbytes == bytes_a_parameter
    assert between == [True, True, bytes_a_parameter == 12] * (len(between) // 3) and not any(inside)
    assert unchanged


def memory_on_gpu(folder, residency):
    """Return bytes allocated between updates, optimizer state, gradient norms and the digest."""
    from mkd.platform import make_deterministic

    make_deterministic()
    gc.collect()  # left in reference cycles by earlier calls
    before = torch.cuda.memory_allocated()
    flags = (*DISTRIBUTED, *BF16, "--deterministic-mode", "--optimizer-residency", residency)
    context, chunks, optimizer, _ = build(folder, flags)
    norms = [one_step(context, chunks, optimizer, step) for step in range(STEPS)]
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated() - before
    places = {tensor.device.type for tensor in state_of(optimizer)}
    return (
        allocated,
        sum(tensor.nbytes for tensor in state_of(optimizer)),
        places,
        norms,
        digest(chunks, optimizer),
    )


@pytest.mark.gpu
def test_the_device_is_free_of_it_between_updates(folder, gpu_ranks):
    (device,), (host,) = (
        gpu_ranks.run(memory_on_gpu, 1, folder, residency) for residency in ("device", "host")
    )
    assert (device[2], host[2]) == ({"cuda"}, {"cpu"})
    assert device[3:] == host[3:]
    assert device[0] - host[0] >= host[1], (device[:2], host[:2])
