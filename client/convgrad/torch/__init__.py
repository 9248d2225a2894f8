"""PyTorch: gradients of convolution and pooling by convgrad, in one line.

::

    import convgrad.torch

    convgrad.torch.use(convgrad.torch.Local())   # kernels in this process, on the tensors' device
    loss.backward()                              # the model stays unchanged

`use` computes the backward passes of all convolutions and poolings, and the double backward passes
of convolutions, on a backend: from the call on or, as a context manager, within a ``with`` block.
There are two backends:

`Local`
    Runs the kernels in this process, on CUDA or CPU tensors without copying them, on PyTorch's
    current stream and with memory from its allocator. Needs the extra ``service``, and for CUDA
    ``cuda13`` or ``cuda12``.
`Remote`
    Calls a convgrad server, for programs without a GPU.

These functions compute forward and backward on the backend that `use` was given, or else on
`Local`:

=============================================  =====================================================
`conv1d`, `conv2d`, `conv3d`                   as in ``torch.nn.functional``
`conv_transpose1d` to `conv_transpose3d`       the same, with ``output_padding``
`max_pool1d`, `max_pool2d`, `max_pool3d`       the same; the backward pass is deterministic
`avg_pool1d` to `avg_pool3d`                   the same
`adaptive_avg_pool1d`, `adaptive_max_pool1d`   the same, up to 3d
`max_unpool1d` to `max_unpool3d`               the same
`separable_conv1d` to `separable_conv3d`       a depthwise and a pointwise convolution, as one
`conv1d_input`, `conv1d_weight` to 3d          as in ``torch.nn.grad``
`convolution_backward`                         as ``torch.ops.aten.convolution_backward``
=============================================  =====================================================

`nn` has modules that call these functions; ``nn.replace(model)`` converts those of a model.

The functions take float16, bfloat16, float32 and float64, unbatched inputs, ``padding="same"``, and
``channels_last`` tensors without a conversion; they work under autocast, ``torch.compile``,
gradient checkpointing and CUDA graphs, and have second derivatives. `report` lists which layers
were computed by which kernel, and which were left to PyTorch. `layers_of` lists a model's layers,
for a server to warm up or to tune.

float32 convolutions use TF32 where PyTorch's would (``torch.backends.cudnn.allow_tf32``) on a
GPU, and true float32 elsewhere.
"""

from __future__ import annotations

from convgrad.torch import nn
from convgrad.torch._backends import Backend, Geometry, Operation, Runner
from convgrad.torch._functional import (
    conv1d,
    conv2d,
    conv3d,
    conv_transpose1d,
    conv_transpose2d,
    conv_transpose3d,
    max_pool1d,
    max_pool2d,
    max_pool3d,
)
from convgrad.torch._grad import (
    conv1d_input,
    conv1d_weight,
    conv2d_input,
    conv2d_weight,
    conv3d_input,
    conv3d_weight,
    convolution_backward,
)
from convgrad.torch._local import Local
from convgrad.torch._model_layers import layers_of
from convgrad.torch._pool_functional import (
    adaptive_avg_pool1d,
    adaptive_avg_pool2d,
    adaptive_avg_pool3d,
    adaptive_max_pool1d,
    adaptive_max_pool2d,
    adaptive_max_pool3d,
    avg_pool1d,
    avg_pool2d,
    avg_pool3d,
    max_unpool1d,
    max_unpool2d,
    max_unpool3d,
)
from convgrad.torch._remote import Remote
from convgrad.torch._report import Report, report
from convgrad.torch._separable import separable_conv1d, separable_conv2d, separable_conv3d
from convgrad.torch._use import use

__all__ = [
    "Backend",
    "Geometry",
    "Local",
    "Operation",
    "Remote",
    "Report",
    "Runner",
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
    "adaptive_max_pool1d",
    "adaptive_max_pool2d",
    "adaptive_max_pool3d",
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "conv1d",
    "conv1d_input",
    "conv1d_weight",
    "conv2d",
    "conv2d_input",
    "conv2d_weight",
    "conv3d",
    "conv3d_input",
    "conv3d_weight",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "convolution_backward",
    "layers_of",
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "max_unpool1d",
    "max_unpool2d",
    "max_unpool3d",
    "nn",
    "report",
    "separable_conv1d",
    "separable_conv2d",
    "separable_conv3d",
    "use",
]
