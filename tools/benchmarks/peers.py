"""Losses of other projects, from their installed source; a missing project is skipped by name.

Their packages import far more than a loss needs (data sets, trainers, quantisation). The needed definitions
are therefore taken out of the installed file and run unchanged, without importing the package.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from abc import ABCMeta
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor

LogitsLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(student logits [n, v], teacher logits [n, v], labels [n], -100 where no loss) -> mean over loss rows."""

IGNORED = -100


class PeerMissing(Exception):
    """Raised with the name of a project that cannot be compared with, and the reason."""


def installed_file(package: str, file: str) -> Path:
    """Return the path of `file` in an installed package without importing it. Raises PeerMissing."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise PeerMissing(f"{package}: not installed, skipped")
    path = Path(spec.submodule_search_locations[0]) / file
    if not path.is_file():
        raise PeerMissing(f"{package}: this version has no {file}, skipped")
    return path


def load_source(
    path: Path, names: tuple[str, ...] = (), given: Mapping[str, object] | None = None
) -> ModuleType:
    """Run a source file without its package; `given` replaces what its imports would bring.

    Relative imports are left out, and others all of whose names are given.

    With `names`, run only these top-level definitions; `Class.method` takes a static method out of its class.
    Raises PeerMissing for a name that does not exist.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if names:
        tree.body = [_definition(tree, path, name) for name in names]
    else:
        tree.body = [node for node in tree.body if not _is_given(node, given or {})]
    module = ModuleType(f"mkd_bench_peer_{path.stem}")
    module.__file__ = str(path)
    module.__dict__.update(given or {})
    sys.modules[module.__name__] = module  # compilers look a function's module up
    # The module inherits `from __future__ import annotations` of this file, because its annotations name
    # types that are not imported.
    exec(compile(tree, str(path), "exec"), module.__dict__)
    return module


def _is_given(node: ast.stmt, given: Mapping[str, object]) -> bool:
    if not isinstance(node, ast.ImportFrom) or node.module == "__future__":
        return False
    return bool(node.level) or all(one.name in given for one in node.names)


def _definition(tree: ast.Module, path: Path, name: str) -> ast.stmt:
    body: list[ast.stmt] = tree.body
    for part in name.split("."):
        found = [node for node in body if getattr(node, "name", None) == part]
        if not found:
            raise PeerMissing(f"{path.name}: this version has no {name}, skipped")
        body = getattr(found[0], "body", [])
    definition = found[0]
    if "." in name:
        definition.decorator_list = []  # @staticmethod has no meaning outside the class
    return definition


def find(loaders: Mapping[str, Callable[[], object]]) -> tuple[dict[str, object], list[str]]:
    """Return everything that loads, by name, and a note for each peer that does not."""
    found, notes = {}, []
    for name, loader in loaders.items():
        try:
            found[name] = loader()
        except PeerMissing as missing:
            notes.append(str(missing))
    return found, list(dict.fromkeys(notes))


def trl_jsd(beta: float) -> LogitsLoss:
    """Load TRL's GKD loss: forward KL at beta 0, reverse KL at 1, JSD between them."""
    path = installed_file("trl", "experimental/gkd/gkd_trainer.py")
    given = dict(torch=torch, F=torch.nn.functional)
    loss = load_source(path, ("GKDTrainer.generalized_jsd_loss",), given).generalized_jsd_loss

    def call(student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
        return loss(student, teacher, labels, beta=beta, num_items_in_batch=(labels != IGNORED).sum())

    return call


def trl_chunked() -> Callable:
    """Load TRL's chunked head: both hidden states and heads -> (divergence [n], entropy [n])."""
    has_triton = importlib.util.find_spec("triton") is not None
    common = dict(is_triton_available=lambda: has_triton)  # of newer versions of transformers
    logprob = load_source(installed_file("trl", "kernels/chunked_logprob.py"), given=common)
    names = (
        "_BLOCK_SIZE",
        "_MM_OUT_DTYPE",
        "_addmm_fp32",
        "_jit",
        "_torch_transform",
        "_transform",
        "_use_triton",
    )
    if missing := [name for name in names if not hasattr(logprob, name)]:
        raise PeerMissing(f"chunked_logprob.py: this version has no {missing[0]}, skipped")
    given = common | {name: getattr(logprob, name) for name in names}
    # the real function without DeepSpeed ZeRO-3 does the same
    given["maybe_gather_lm_head_ctx"] = lambda *parameters: nullcontext()
    path = installed_file("trl", "kernels/chunked_divergence.py")
    return load_source(path, given=given).ChunkedDivergenceFunction.apply


def modelopt_kl() -> LogitsLoss:
    """Load ModelOpt's Megatron loss, on one tensor-parallel rank."""
    path = installed_file("modelopt", "torch/distill/plugins/megatron.py")
    given = dict(
        torch=torch,
        nn=torch.nn,
        F=torch.nn.functional,
        Tensor=Tensor,
        ABCMeta=ABCMeta,
        _Loss=torch.nn.modules.loss._Loss,
    )
    loss = load_source(path, ("BaseLoss", "LogitsKLLoss"), given).LogitsKLLoss(
        SimpleNamespace(tensor_model_parallel_size=1)
    )

    def call(student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
        per_token, *_ = loss(student.unsqueeze(1), teacher.unsqueeze(1))
        mask = labels != IGNORED
        return (per_token.flatten() * mask).sum() / mask.sum()

    return call


def automodel_kd(chunk_size: int = 0) -> LogitsLoss:
    """Load NeMo Automodel's loss over `chunk_size` rows at a time; 0 means all."""
    loss = load_source(installed_file("nemo_automodel", "components/loss/kd_loss.py")).KDLoss(
        chunk_size=chunk_size
    )
    return lambda student, teacher, labels: loss(student, teacher, labels)


def _liger(module: str) -> ModuleType:
    if importlib.util.find_spec("liger_kernel") is None:
        raise PeerMissing("liger_kernel: not installed, skipped")
    if not torch.cuda.is_available():
        raise PeerMissing("liger_kernel: its kernels need a GPU, skipped")
    return importlib.import_module(f"liger_kernel.{module}")


def liger_kl() -> LogitsLoss:
    """Load Liger's KL kernel over log-probabilities, which torch computes in fp32."""
    loss = _liger("transformers.kl_div").LigerKLDIVLoss(reduction="sum", log_target=True)

    def call(student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
        student, teacher = (logits.log_softmax(-1, dtype=torch.float32) for logits in (student, teacher))
        return loss(student, teacher) / labels.numel()

    return call


def liger_jsd(beta: float) -> LogitsLoss:
    loss = _liger("transformers.jsd").LigerJSD(beta=beta)

    def call(student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
        student, teacher = (logits.log_softmax(-1, dtype=torch.float32) for logits in (student, teacher))
        return loss(student, teacher, labels)

    return call


def liger_fused_jsd(beta: float) -> Callable:
    """Load Liger's Triton head.

    Its arguments: student hidden, its weight, teacher hidden, its weight, labels. It returns the mean loss.
    """
    return _liger("transformers.fused_linear_jsd").LigerFusedLinearJSD(jsd_beta=beta)


def liger_chunked_jsd(beta: float, chunk_size: int, compiled: bool = True) -> Callable:
    """Load Liger's chunked head with the same arguments; distillation loss only."""
    return _liger("chunked_loss.jsd_loss").LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta, chunk_size=chunk_size, compiled=compiled
    )
