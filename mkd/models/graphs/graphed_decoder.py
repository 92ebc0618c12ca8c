"""The decoder layers of a model part, which run as CUDA graphs where they can."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from typing import Protocol

import torch
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor, nn

from mkd.models.graphs.bounds import Bounds, filled
from mkd.models.graphs.capture import first_cause
from mkd.models.graphs.graph_memory import GraphMemory, SlotPass
from mkd.models.graphs.layer_input import LayerInput
from mkd.models.graphs.passes import ForwardPass, Sections, TrainingPass
from mkd.models.graphs.sections import cut, whole, why_uncut
from mkd.models.mixers.mixer import Mixer
from mkd.models.moe.layer import ExpertLayer
from mkd.models.packed import PackedDocuments

LOG = logging.getLogger("mkd")
MOST_BOUNDS = 8  # different bounds with graphs; packs with others run without
MOST_SEEN = 256  # bounds that are remembered to notice that they come again


class ParameterSync(Protocol):
    """The work of DDP for parameters whose modules and hooks do not run."""

    def before_forward(self) -> None:
        """Wait until the parameters have their values."""

    def after_backward(self, parameters: Collection[nn.Parameter]) -> None:
        """Say that the gradients of a micro-batch are complete for these parameters."""


@dataclass
class GraphedDecoder:
    """Takes the place of a decoder: runs a pack as graphs, or hands it to the decoder itself.

    A pack's bounds decide. The first pack of any bounds runs without graphs: libraries choose kernels and
    make their work spaces. So do packs of bounds beyond the first MOST_BOUNDS that come twice, rows of single
    tokens, and the student in evaluation. If a graph cannot be made, everything continues without, after one
    warning.

    The kernels of experts and of mixers are compiled when they are first used. So a model with these that is
    trained needs a backward before, too. So does any model that is pipelined: its first
    backward would be recorded before libraries have chosen their kernels.
    """

    decoder: TransformerBlock
    name: str  # of the model, in messages
    angles: Callable[[PackedDocuments], Tensor]  # rotary embedding
    memory: GraphMemory  # all parts of a process share it
    sync: ParameterSync | None = None  # None: the model is frozen
    is_on: bool = True
    recomputes: bool = False  # packs without graphs, whose activations do not fit beside the graphs
    cuts_at_experts: bool = False  # also where the host need not wait for them
    most_layers: int | None = None  # in a graph; None: as many as possible
    is_pipelined: bool = False  # the first backward comes after several packs
    _seen: set[Bounds] = field(default_factory=set)  # once
    _graphed: set[Bounds] = field(default_factory=set)  # twice
    _compiled: set[int] = field(default_factory=set)  # tokens of packs whose backward has run
    _frozen: dict[Bounds, ForwardPass] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._is_trained = any(one.requires_grad for one in self.decoder.parameters())
        experts = [layer.mlp for layer in self.decoder.layers if isinstance(layer.mlp, ExpertLayer)]
        mixers = any(isinstance(module, Mixer) for module in self.decoder.modules())
        self._compiles_backward = self._is_trained and (bool(experts) or mixers or self.is_pipelined)
        waits = bool(experts) and (self.cuts_at_experts or any(one.host_waits for one in experts))
        self.sections: Sections = [whole(self.decoder)]
        if waits and (why := why_uncut(self.decoder)) is not None:
            LOG.warning("%s runs without CUDA graphs: %s", self.name, why)
            self.is_on = False
        elif waits or self.most_layers is not None:
            self.sections = cut(self.decoder, waits, self.most_layers)

    @property
    def bounds(self) -> list[Bounds]:
        """Bounds that have graphs."""
        trained = {
            bounds for slot in self.memory.slots for part, bounds in slot.passes if part is self.decoder
        }
        return sorted({*self._frozen, *trained}, key=str)

    def __call__(self, hidden: Tensor | None, tokens: int, packed: PackedDocuments) -> Tensor:
        """Run the layers on one pack of `tokens` tokens: [t(/tp), 1, h] -> the same shape.

        `hidden` is None on later stages, whose decoder holds its input.
        """
        bounds = Bounds.of(packed, tokens)
        takes = self._takes(packed)
        has_room = takes and self._has_room(bounds)  # counted as by processes whose graphs could be made
        if not (has_room and self.is_on):
            lacks_graphs = not takes or bounds not in self._graphed
            return self._eager(hidden, self.angles(packed), packed, lacks_graphs)
        packed = filled(packed, bounds)
        received = self.decoder.input_tensor if hidden is None else hidden
        given = LayerInput(received, self.angles(packed), packed)
        has_compiled = self._has_compiled(tokens, received)
        if bounds in self._graphed and has_compiled:
            graphs = self._made(bounds, given)
            if graphs is not None:
                return graphs.run(given)
            self.decoder.set_input_tensor(received)  # a capture may have set its own
        return self._eager(hidden, given.angles, packed, bounds not in self._graphed)

    def release(self) -> None:
        """Drop all graphs, and make no more."""
        self.is_on = False
        self._frozen.clear()
        self.memory.release()

    def _takes(self, packed: PackedDocuments) -> bool:
        """Return True if the pack has a form that graphs can have, and the model runs as they do."""
        has_gradient = torch.is_grad_enabled()
        fits_mode = has_gradient and self.decoder.training if self._is_trained else not has_gradient
        by_row = (packed.token_positions, packed.positions, packed.query_factors)
        is_pack = packed.cu_seqlens_q is packed.cu_seqlens_q_padded and all(one is None for one in by_row)
        return fits_mode and is_pack

    def _has_room(self, bounds: Bounds) -> bool:
        """Return True if packs of these bounds are graphed, or may be from the next one on."""
        if bounds in self._graphed:
            return True
        if len(self._graphed) == MOST_BOUNDS:
            return False
        if bounds in self._seen:
            self._graphed.add(bounds)
        elif len(self._seen) < MOST_SEEN:
            self._seen.add(bounds)
        return True

    def _has_compiled(self, tokens: int, received: Tensor) -> bool:
        """Return True if kernels that are compiled when they are first used have run for packs like this.

        If not, and the pack runs without graphs, they will have once backward has reached `received`.
        """
        if not self._compiles_backward or tokens in self._compiled:
            return True
        if received.requires_grad:
            received.register_hook(lambda gradient: self._compiled.add(tokens))
        return False

    def _made(self, bounds: Bounds, given: LayerInput) -> ForwardPass | SlotPass | None:
        """Return the graphs for a pack. If there are none, make them; None if they cannot be made."""
        try:
            return (
                self._training_pass(bounds, given) if self._is_trained else self._forward_pass(bounds, given)
            )
        except Exception as error:  # of torch, NCCL or Transformer Engine: a run continues without graphs
            in_full = LOG.isEnabledFor(logging.DEBUG)
            LOG.warning(
                "%s continues without CUDA graphs: %s", self.name, first_cause(error), exc_info=in_full
            )
            self.is_on = False
            self._frozen.clear()
            self.memory.drop(self.decoder)
            self.memory.renew_scratch()
            return None

    def _forward_pass(self, bounds: Bounds, given: LayerInput) -> ForwardPass:
        if bounds not in self._frozen:
            self._frozen[bounds] = ForwardPass(self.sections, given, self.memory)
            LOG.info("CUDA graph of %s: packs of %s", self.name, bounds)
        return self._frozen[bounds]

    def _training_pass(self, bounds: Bounds, given: LayerInput) -> SlotPass:
        if self.sync is not None:
            self.sync.before_forward()
        slot, key = self.memory.free_slot(given.hidden), (self.decoder, bounds)
        graphs = slot.passes.get(key)
        if graphs is None or not graphs.fits():
            after = self.sync.after_backward if self.sync else None
            layers = self.decoder, self.sections
            graphs = slot.passes[key] = TrainingPass(*layers, given, slot, self.memory, after)
            LOG.info("CUDA graphs of %s: packs of %s", self.name, bounds)
        return graphs

    def _eager(
        self, hidden: Tensor | None, angles: Tensor, packed: PackedDocuments, lacks_graphs: bool
    ) -> Tensor:
        """Run a pack without graphs. `lacks_graphs` False: those of other processes run this one as graphs.

        Then its backward must not compute the layers again, because collectives are part of that.
        """
        keeps_activations = self._is_trained and torch.is_grad_enabled()
        if not self.is_on and self.recomputes:  # slots that were in use when the graphs were dropped
            self.memory.drop(self.decoder)
        again = self.recomputes and lacks_graphs and keeps_activations
        with recomputed(self.decoder) if again else nullcontext():
            return self.decoder(
                hidden_states=hidden, attention_mask=None, rotary_pos_emb=angles, packed_seq_params=packed
            )


@contextmanager
def recomputed(decoder: TransformerBlock) -> Iterator[None]:
    """Let forwards in the block keep the input of each layer alone; backward computes the rest again."""
    before = decoder.config
    decoder.config = copy(before)
    decoder.config.recompute_granularity, decoder.config.recompute_method = "full", "uniform"
    decoder.config.recompute_num_layers = 1
    try:
        yield
    finally:
        decoder.config = before
