"""The time of a step.

hardware.py          the machine that plans assume
collectives.py       the collectives of tensor, context and expert parallelism
layer_time.py        the time of a micro-batch in each layer of a model
cost.py              the time of a micro-batch on each pipeline stage
bubble.py            the time that ranks wait in a step
prefetch.py          teacher forwards ahead of the student
prefetch_search.py   the search for an order, as ranks choose in simulated time
update_time.py       the time of the optimizer's update
replica_time.py      the time of gradients and weights between replicas
"""
