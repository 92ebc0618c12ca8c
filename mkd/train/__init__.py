"""One optimizer step, and what is done with its result.

step.py                          the step; read this first
schedule.py                      Megatron's pipeline schedule runs all micro-batches through all stages
stage_inputs.py                  the inputs of the stages, made from a micro-batch
teacher_prefetch.py              teacher forwards ahead of the student, in the gaps of its pipeline
remote_states.py                 teachers on processes of their own: the student's end
state_server.py                  the teacher's end
objective.py, teachers/          the loss of one micro-batch: the cross entropy and the teachers
sums.py                          the sums that micro-batches report, and the means made of them
expert_monitor.py                counts, balance losses and load of the student's experts
optimizer.py                     Megatron's DDP and optimizer around the student
optimizer_residency.py           the optimizer's state in host memory between updates
moving_average.py                a teacher whose weights average the student's
input_rounding.py                the inputs of a rounded student's matrices, and their calibration
layer_graphs.py                  which decoder layers run as CUDA graphs
report.py, teacher_idle.py        metrics records and progress lines; how busy teachers' own processes are
nonfinite.py, spikes.py          steps that went wrong or stand out, and their samples
"""
