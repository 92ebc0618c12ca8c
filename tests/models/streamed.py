"""Load layers of teachers to where their residency keeps them, and make a checkpoint to load from."""

from __future__ import annotations


def stream_loaded(parts, device, group=None):
    """Return the stream of model parts that have weights: on the host, or split over a group.

    The layers leave the device one after another.
    """
    from mkd.models.placed.residency import stream_from_host, stream_from_peers

    stream = stream_from_host(parts, device) if group is None else stream_from_peers(parts, device, group)
    for part in parts:
        for layer in part.decoder.layers:
            with stream.loading(layer):
                pass
    return stream


def to_megatron(folder, checkpoint):
    """Convert a Hugging Face folder on this single rank; the pool wants to leave a process group."""
    import torch.distributed as dist

    from mkd.convert import hf_to_mcore

    hf_to_mcore.run(str(folder), checkpoint, None, 1, 1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
