"""Functions on tensors, each kernel beside its reference. Imports nothing of ours."""
