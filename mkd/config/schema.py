"""Interim."""
from __future__ import annotations
from dataclasses import dataclass, field

@dataclass
class StudentConfig:
    hf: str|None=None; load: str|None=None; pipeline_layout: str|None=None
@dataclass
class TeacherConfig:
    name: str|None=None; hf: str|None=None; load: str|None=None; weight: float=1.0; pipeline_layout: str|None=None
@dataclass
class ParallelConfig:
    tensor_model_parallel_size:int=1; pipeline_model_parallel_size:int=1; num_virtual_stages_per_pipeline_rank:int|None=None
    sequence_parallel:bool=False; use_distributed_optimizer:bool=False; overlap_grad_reduce:bool=False; overlap_param_gather:bool=False; distributed_timeout_minutes:float=10
@dataclass
class KDConfig:
    kd_ratio: float=0.5; kd_temperature: float=1.0; kd_temperature_scaling: str="squared"; kd_divergence: str="forward_kl"
@dataclass
class TrainingConfig:
    train_iters:int=10; micro_batch_size:int=1; global_batch_size:int|None=None; seq_length:int=2048; bf16:bool=False; seed:int=1234; eval_interval:int|None=None; eval_iters:int=10; exit_interval:int|None=None; recompute_granularity:str|None=None; recompute_method:str|None=None; recompute_num_layers:int|None=None; deterministic_mode:bool=False
@dataclass
class DataConfig:
    data_path: str|None=None; valid_data_path: str|None=None; split: str="100,0,0"; tokenizer_type:str="HuggingFaceTokenizer"; tokenizer_model:str|None=None; pack:str="bfd"; overlong:str="split"; append_eod:bool=True; num_workers:int=0; data_cache_path:str|None=None; shuffle:bool=True
@dataclass
class OptimizerConfig:
    lr:float=1e-4; min_lr:float=0.0; lr_decay_style:str="cosine"; lr_decay_iters:int|None=None; lr_warmup_iters:int=0; lr_warmup_fraction:float|None=None; lr_wsd_decay_iters:int|None=None; lr_wsd_decay_style:str="exponential"; weight_decay:float=0.01; clip_grad:float=1.0; adam_beta1:float=0.9; adam_beta2:float=0.999; adam_eps:float=1e-8
@dataclass
class CheckpointConfig:
    save:str|None=None; load:str|None=None; save_interval:int|None=None; ckpt_step:int|None=None; export_hf:str|None=None
@dataclass
class LogConfig:
    log_interval:int=1; log_dir:str|None=None; name:str="kd"; tensorboard_dir:str|None=None
@dataclass
class Config:
    student: StudentConfig=field(default_factory=StudentConfig); teachers: list=field(default_factory=list); parallel: ParallelConfig=field(default_factory=ParallelConfig); kd: KDConfig=field(default_factory=KDConfig); training: TrainingConfig=field(default_factory=TrainingConfig); data: DataConfig=field(default_factory=DataConfig); optimizer: OptimizerConfig=field(default_factory=OptimizerConfig); checkpoint: CheckpointConfig=field(default_factory=CheckpointConfig); log: LogConfig=field(default_factory=LogConfig); dry_run: bool=False
