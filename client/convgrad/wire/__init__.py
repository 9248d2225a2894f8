"""Tensor codecs: npy, safetensors and the three JSON forms, both ways.

Every refusal is a MalformedRequest whose sentence names the tensor and what was wrong with it.
"""
