"""Experts of frozen models whose weights stay numbers of 8 or 4 bits.

number_codes.py   matrices as codes and scales, and back; inputs in FP8
coded_kernels.py  Triton kernels of both, and of products of all experts
coded_product.py  rows of tokens times the matrices of all experts, with or without these kernels
coded_experts.py  the experts of one process
coded_weights.py  a teacher whose experts get codes while their weights are read
"""
