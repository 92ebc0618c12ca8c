"""The arithmetic of rounded weights and activations. It knows neither models nor files.

number_grids.py     the nearest number of a format: integers, E4M3, E2M1
rounded_matrix.py   matrices in groups with a scale each: rounded in place, or as codes and scales
rounded_inputs.py   activations, with the gradient of the exact ones
stored_matrix.py    codes and scales as compressed-tensors stores them, and back
"""
