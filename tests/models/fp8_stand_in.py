"""FP8 recipes for CPUs: they round as Transformer Engine does, and multiply in full precision."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode

E4M3_MAX = 448.0
BLOCK = 128


class RoundedWeight(torch.Tensor):
    """A weight whose values are read from FP8 numbers and scales at every use."""

    @staticmethod
    def __new__(cls, recipe, dtype, data, scales):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=dtype, device=data.device)

    def __init__(self, recipe, dtype, data, scales):
        self.recipe, self.fp8, self.scales = recipe, data, scales

    def values(self):
        return rounded(self.fp8, self.scales).to(self.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def values(tensor):
            assert tensor.recipe.is_running, "the layers run outside of the FP8 context"
            return tensor.values()

        args, kwargs = torch.utils._pytree.tree_map_only(cls, values, (args, kwargs or {}))
        return function(*args, **kwargs)


class StandInRecipe:
    """`Fp8Recipe` without Transformer Engine: the activations are not rounded."""

    def __init__(self, name):
        self.name, self.is_running = name, False

    def scales_shape(self, weight):
        if self.name == "tensorwise":
            return (1,)
        rows, columns = (-(-size // BLOCK) for size in weight.shape)
        return rows, -(-columns // 4) * 4

    def quantised(self, weight, data, scales):
        largest = weight.float().abs()
        if self.name == "tensorwise":
            scales.copy_(largest.max() / E4M3_MAX)
        else:
            scales.zero_()
            for row in range(0, weight.shape[0], BLOCK):
                for column in range(0, weight.shape[1], BLOCK):
                    block = largest[row : row + BLOCK, column : column + BLOCK]
                    scales[row // BLOCK, column // BLOCK] = block.max() / E4M3_MAX
        values = (weight.float() / spread(scales, weight.shape)).to(torch.float8_e4m3fn)
        data.copy_(values.view(torch.uint8))
        return RoundedWeight(self, weight.dtype, data, scales)

    @contextmanager
    def running(self):
        self.is_running = True
        yield
        self.is_running = False


def spread(scales, shape):
    """Return the scale of every weight."""
    if scales.numel() == 1:
        return scales
    of_rows = scales.repeat_interleave(BLOCK, 0)[: shape[0]]
    return of_rows.repeat_interleave(BLOCK, 1)[:, : shape[1]].clamp(min=1e-30)


def rounded(data, scales):
    """Return the values of FP8 numbers, fp32."""
    return data.view(torch.float8_e4m3fn).float() * spread(scales, data.shape)


def rounded_activations(x, name):
    """Round the input of a linear layer, [t, 1, h], as the recipe of that name does."""
    values = x.float()
    blocks = values.unflatten(-1, (-1, BLOCK)) if name == "blockwise" and x.shape[-1] % BLOCK == 0 else values
    largest = blocks.abs().amax(-1, keepdim=True) if name == "blockwise" else blocks.abs().max()
    scales = largest.clamp(min=1e-30) / E4M3_MAX
    if name == "blockwise":  # scales are powers of two there
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    return ((blocks / scales).to(torch.float8_e4m3fn).float() * scales).reshape(x.shape).to(x.dtype)


def round_activations(model, name):
    """Let all linear layers of a model in FP8 round their input, too."""
    from mkd.models.placed.fp8_weights import LINEARS

    for layer in model.decoder.layers:
        for linear in LINEARS:
            layer.get_submodule(linear).register_forward_pre_hook(
                lambda module, args: (rounded_activations(args[0], name), *args[1:])
            )


@contextmanager
def stand_in_recipes():
    """Let teachers in FP8 be built on this machine."""
    from mkd.models.placed import fp8_weights
    from mkd.platform import fp8_support

    replaced = [(fp8_weights, "fp8_recipe", StandInRecipe)]
    replaced += [(fp8_support, "fp8_problems", lambda recipes, role="teacher": ())]
    before = [getattr(module, name) for module, name, _ in replaced]
    for module, name, value in replaced:
        setattr(module, name, value)
    yield
    for (module, name, _), value in zip(replaced, before, strict=True):
        setattr(module, name, value)


class RoundedProducts(TorchFunctionMode):
    """Rounds both factors of every product with a weight, [t, 1, h] x [h, n]; gradients are as without."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.matmul and args[0].dim() == 3 and args[1].dim() == 2:
            args = tuple(rounded_activations(one, self.name) for one in args)
        return function(*args, **(kwargs or {}))


@contextmanager
def stand_in_students(calls=None):
    """Let students in FP8 be built on this machine; `calls` gets the name of the recipe for each layer."""
    from mkd.models import fp8_layers
    from mkd.platform import fp8_support

    def rounding(recipe):
        def enter():
            if calls is not None:
                calls.append(recipe)
            return RoundedProducts(recipe)

        return enter

    before = fp8_layers.training_rounding, fp8_support.fp8_problems
    fp8_layers.training_rounding, fp8_support.fp8_problems = rounding, lambda recipes, role="teacher": ()
    try:
        yield
    finally:
        fp8_layers.training_rounding, fp8_support.fp8_problems = before
