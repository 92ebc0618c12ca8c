"""CUDA graphs of decoder layers: the GPU does not wait for the CPU, which starts kernels one by one.

bounds.py           document borders of fixed size, for packs of any borders
capture.py          record work as a graph: memory, random states, errors
layer_input.py      what the layers of a part read
sections.py         the layers in sections: graphs, and what runs without between them
stand_ins.py        leaves with which layers compute while a graph is recorded
graph_memory.py     memory that all graphs of a process share
passes.py           one forward, or one forward and backward, as graphs with their tensors
graphed_decoder.py  which packs run as graphs: takes the decoder's place
"""
