"""The modules that test processes need, imported once by the server that they are forked from."""

import matplotlib.backends.backend_agg
import matplotlib.pyplot  # noqa: F401
import preload_rank  # noqa: F401
import pytest  # noqa: F401
import sklearn.datasets
import sklearn.metrics  # noqa: F401
import timm  # noqa: F401
import torch._export.passes.replace_autocast_with_hop_pass
import torch._inductor.compile_fx
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
import torch.export._trace
import torch.fx.experimental.validator  # noqa: F401
import torchmetrics  # noqa: F401
import torchvision.transforms.v2  # noqa: F401
import training  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401
import worlds  # noqa: F401
from tensorboard.backend.event_processing import event_accumulator  # noqa: F401
