from mkd.config.schema import *
from dataclasses import fields, dataclass
@dataclass
class LoadedConfig:
    config: Config
def load_config(argv):
    c=Config(); i=0
    while i<len(argv):
        n=argv[i][2:].replace('-','_')
        if n.startswith('student_'): s,n=c.student,n[8:]
        elif n.startswith('teacher_'):
            if not c.teachers: c.teachers.append(TeacherConfig())
            s,n=c.teachers[0],n[8:]
        else:
            s=next(s for s in (c.parallel,c.kd,c.training,c.data,c.optimizer,c.checkpoint,c.log) if hasattr(s,n))
        t=str({f.name:f.type for f in fields(s)}[n])
        if t.startswith('bool'): setattr(s,n,True); i+=1
        else: setattr(s,n,(float if t.startswith('float') else int if t.startswith('int') else str)(argv[i+1])); i+=2
    return LoadedConfig(c)
def format_config(l): return str(l.config)
def save_config(l,p): pass
