"""Tensor codecs: npy, safetensors and the three JSON forms.

Invalid input raises a MalformedRequest that names the tensor and the fault.
"""
