from dataclasses import dataclass
@dataclass
class BatchPlan:
    micro_batch_size:int; global_batch_size:int
    @classmethod
    def from_config(cls,c,w): return cls(c.training.micro_batch_size,c.training.global_batch_size)
    def equation(self): return ""
