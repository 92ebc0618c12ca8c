"""Check that a teacher whose layers come one after another gives the same bits, with two on the device."""

from __future__ import annotations

import pytest
import torch

from tests.models.streamed import stream_loaded, to_megatron
from tests.models.test_hf_parity import load_model, pack
from tests.tiny_models import make_model
from tools.benchmarks.measure import Arm, peak_bytes

LENGTHS, NUM_LAYERS = (23, 1, 40), 5  # an odd number: a layer's slot alternates between micro-batches


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("residency") / "teacher", "qwen3", num_hidden_layers=NUM_LAYERS)


def row(seed, device):
    """Return the arguments of a model for one pack of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(307, (1, sum(LENGTHS)), generator=generator).to(device)
    return tokens, torch.arange(sum(LENGTHS), device=device)[None]


def run(model, seed):
    device = model.decoder.final_layernorm.weight.device
    return model(*row(seed, device), packed_seq_params=pack(LENGTHS, 0)).clone()


def host_against_device(folder, tp):
    """Return (on the device, on the host) of everything that must agree.

    That is: outputs of four micro-batches, keys, peak memory (bytes).
    """
    results = []
    for on_host in (False, True):
        model = load_model(folder, tp, sequence_parallel=tp > 1).requires_grad_(False)
        names = {name: parameter.data.clone() for name, parameter in model.named_parameters()}
        if on_host:
            stream_loaded([model], torch.device("cpu"))
        with torch.no_grad():
            outputs = [run(model, seed) for seed in (1, 2, 3, 2)]
            forward = Arm("forward", lambda model=model: run(model, 4))
            # gloo frees messages at any time
            peak = peak_bytes(forward, torch.device("cpu")) if tp == 1 else 0
        after = dict(model.named_parameters())
        assert all(torch.equal(after[name], before) for name, before in names.items())
        results.append((outputs, list(model.state_dict()), peak))
        destroy_groups()
    return results


def destroy_groups():
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("tp", [1, 2])
def test_outputs_are_the_same_bits_and_the_forward_allocates_no_more(tp, folder, ranks):
    for device, host in ranks.run(host_against_device, tp, folder, tp):
        assert all(torch.equal(one, other) for one, other in zip(device[0], host[0], strict=True))
        assert not torch.equal(host[0][0], host[0][1]) and torch.equal(host[0][1], host[0][3])
        assert device[1:] == host[1:]


def where_weights_are(folder, peers):
    """Return what each layer call used: its slot, and True if the next layer was already being copied.

    Return also the copies of a micro-batch, and bytes.
    """
    model = load_model(folder, 1).requires_grad_(False)
    layers = list(model.decoder.layers)
    sizes = [sum(parameter.nbytes for parameter in layer.parameters()) for layer in layers]
    weights = [layer.mlp.linear_fc1.weight.detach().clone() for layer in layers]
    resident = [
        parameter.data_ptr() for name, parameter in model.named_parameters() if ".layers." not in name
    ]
    stream = stream_loaded([model], torch.device("cpu"), torch.distributed.group.WORLD if peers else None)
    assert resident == [
        parameter.data_ptr() for name, parameter in model.named_parameters() if ".layers." not in name
    ]
    buffers = [slot.buffer for slot in stream._slots]
    calls = []

    def slots(layer):
        """Return the buffers that hold the layer's parameters; -1: neither."""
        return {
            next((i for i, b in enumerate(buffers) if 0 <= p.data_ptr() - b.data_ptr() < b.nbytes), -1)
            for p in layer.parameters()
        }

    for index, layer in enumerate(layers):
        following = weights[(index + 1) % NUM_LAYERS]

        def record(module, args, layer=layer, following=following):
            (slot,) = slots(layer)
            other = packed_like(buffers[1 - slot], layer)
            calls.append((slot, any(torch.equal(tensor, following) for tensor in other)))

        layer.mlp.register_forward_pre_hook(record)
    with torch.no_grad():
        run(model, 1)
        before = sum(buffer._version for buffer in buffers)
        run(model, 2)
        copies = sum(buffer._version for buffer in buffers) - before  # every write counts one
    return (calls, copies, [slots(layer) for layer in layers], sizes, stream.kept_bytes, stream.device_bytes)


def packed_like(buffer, layer):
    from mkd.models.placed.residency import layer_parameters
    from mkd.platform.host_memory import packed_views

    return packed_views(buffer, layer_parameters(layer))


@pytest.mark.parametrize("peers", [0, 3])
def test_two_layers_are_on_the_device_and_the_next_one_comes_early(peers, folder, ranks):
    """Each of the peers keeps the same share of every layer, also if layers do not divide by their number."""
    parts = peers or 1
    for calls, copies, afterwards, sizes, kept_bytes, device_bytes in ranks.run(
        where_weights_are, parts, folder, peers
    ):
        assert [slot for slot, _ in calls] == [(calls[0][0] + i) % 2 for i in range(2 * NUM_LAYERS)]
        # An all-gather writes each part.
        assert all(next_is_there for _, next_is_there in calls) and copies == NUM_LAYERS * parts
        assert afterwards == [{-1}] * NUM_LAYERS
        assert sum(sizes) <= kept_bytes * parts <= 1.05 * sum(sizes)
        assert device_bytes == 2 * parts * kept_bytes / NUM_LAYERS


def virtual_stages(folder):
    """Return outputs of one rank's two model parts, in an interleaved schedule's order and out of order."""
    from mkd.checkpoint.hf.hf_reader import HFCheckpoint
    from mkd.checkpoint.hf.hf_weights import load_hf_weights
    from mkd.models.builder import build_model_parts
    from mkd.models.transformer_config import ModelOptions
    from mkd.parallel.context import ParallelContext
    from mkd.plan.layout import PipelineLayout
    from mkd.plan.models.model_shape import ModelShape
    from mkd.plan.parallel_sizes import Sizes
    from mkd.platform import detect

    context = ParallelContext.create(detect(), Sizes(pipeline=2), virtual_stages=2)
    shape = ModelShape.from_hf_dir(folder)
    chunks = build_model_parts(shape, PipelineLayout((1, 2, 1, 1), 2, 2), ModelOptions(), context)
    for chunk in chunks:
        load_hf_weights(chunk, shape, HFCheckpoint(folder), context, chunk.first_layer)
        chunk.eval().requires_grad_(False)

    def outputs():
        for seed, index in enumerate((0, 0, 1, 1, 0, 1, 0)):
            generator = torch.Generator().manual_seed(seed)
            chunks[index].set_input_tensor(
                torch.randn(sum(LENGTHS), 1, shape.hidden_size, generator=generator)
            )
            yield chunks[index](*row(seed, "cpu"), packed_seq_params=pack(LENGTHS, 0)).clone()

    with torch.no_grad():
        expected = list(outputs())
        stream_loaded(chunks, context.device)
        return [torch.equal(one, other) for one, other in zip(expected, outputs(), strict=True)]


def test_chunks_of_one_teacher_share_the_buffers(folder, ranks):
    assert ranks.run(virtual_stages, 2, folder) == [[True] * 7] * 2


def load_by_layers(folder, checkpoint, peers):
    """Return (largest bytes while the model is built and loaded, bound on them, bytes of the whole model).

    Return also True if the outputs equal those of the whole model.
    """
    from mkd.checkpoint.folders import find_checkpoint
    from mkd.checkpoint.hf.hf_reader import HFCheckpoint
    from mkd.config.models import TeacherConfig
    from mkd.models.transformer_config import ModelOptions
    from mkd.parallel.context import ParallelContext
    from mkd.plan.layout import PipelineLayout
    from mkd.plan.models.model_shape import ModelShape
    from mkd.platform import detect
    from mkd.resolve.model_source import ModelSource
    from mkd.run.build_models import build_teacher_parts

    context, shape = ParallelContext.create(detect()), ModelShape.from_hf_dir(folder)
    load = find_checkpoint(checkpoint) if checkpoint else None
    source = ModelSource(shape, folder, None if load else HFCheckpoint(folder), load)
    built, peaks = [], []
    for settings in (TeacherConfig(), TeacherConfig(residency="peers", peers=peers)):

        def build(settings=settings):
            layout = PipelineLayout.even(shape.num_layers, 1)
            parts = build_teacher_parts(source, settings, layout, ModelOptions(), context)
            built.append(parts[0].eval().requires_grad_(False))

        peaks.append(peak_bytes(Arm("build", build), context.device))
    layers = [sum(parameter.nbytes for parameter in layer.parameters()) for layer in built[0].decoder.layers]
    whole = sum(parameter.nbytes for parameter in built[0].parameters())
    bound = whole - sum(layers) + sum(layers) / peers + 2 * max(layers)
    with torch.no_grad():
        outputs = [run(model, 1) for model in built]
    return peaks, bound, whole, torch.equal(*outputs)


@pytest.mark.parametrize("is_megatron", [False, True], ids=["hf", "megatron"])
def test_the_whole_teacher_is_never_in_memory(is_megatron, ranks, tmp_path):
    """There are parts of all layers, two whole ones, and what is being read, as for a whole teacher."""
    folder = make_model(tmp_path / "teacher", "qwen3", num_hidden_layers=16)
    checkpoint = tmp_path / "megatron" if is_megatron else None
    if is_megatron:
        ranks.run(to_megatron, 1, folder, checkpoint)
    for (device, peers), bound, whole, is_equal in ranks.run(load_by_layers, 2, folder, checkpoint, 2):
        assert is_equal and bound < 0.7 * whole <= 0.7 * device
        assert bound <= peers <= bound + (device - whole) + 0.01 * whole, f"{bound} of {whole} wanted"
