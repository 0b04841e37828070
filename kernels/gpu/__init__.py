"""Triton kernels and their launchers, for CUDA and ROCm devices; imported on first use there, never on a CPU.

Each has its reference, with the same signature, in the module of the same operation one folder up.
"""
