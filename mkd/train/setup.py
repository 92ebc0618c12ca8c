"""The wiring: from a configuration to a `Run`. The only file that knows all the parts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from mkd.checkpoint.distributed import TrainingPosition, TrainingState, find_checkpoint, load_checkpoint
from mkd.checkpoint.hf_reader import HFCheckpoint, check_hf_checkpoint, load_hf_weights, resolve_hf
from mkd.config.schema import Config
from mkd.config.validate import validate
from mkd.data.build import open_datasets
from mkd.data.loader import EvalStream, TrainStream
from mkd.data.tokenizer import Tokenizer, load_tokenizer
from mkd.errors import CheckpointError, ErrorList, UsageError
from mkd.log.writers import JsonlWriter, MetricLogger, TensorBoardWriter
from mkd.models.builder import build_chunks, common_padded_vocab_size, pair_stages
from mkd.models.language_model import LanguageModel
from mkd.models.transformer_config import ModelOptions
from mkd.parallel.context import ParallelContext
from mkd.parallel.pipeline import PairCommunicator
from mkd.plan.batch import BatchPlan
from mkd.plan.layout import PipelineLayout
from mkd.plan.model_shape import ModelShape
from mkd.platform import Platform
from mkd.train.loop import Run
from mkd.train.optimizer import build_optimizer, wrap_stages
from mkd.train.report import Reporter
from mkd.train.schedule import PipelineSchedule
from mkd.train.step import Engine


@dataclass(frozen=True)
class ModelSource:
    """Where one model comes from: its shape and small files, and its weights."""

    shape: ModelShape
    assets: Path  # folder with config.json and tokenizer files
    hf: HFCheckpoint | None  # weights of a Hugging Face folder ...
    load: Path | None  # ... or of a Megatron checkpoint folder


@dataclass(frozen=True)
class Plan:
    """What is known before any process talks to another: models, batch, layouts. All checked."""

    config: Config
    student: ModelSource
    teacher: ModelSource | None  # None when kd_ratio is 0: it would never run
    batch: BatchPlan
    virtual_stages: int
    student_layout: PipelineLayout
    teacher_layout: PipelineLayout | None
