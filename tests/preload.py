"""What the ranks of the tests need, imported once in the process that they are forked from."""

import hydra  # noqa: F401
import sklearn.datasets  # noqa: F401
import torch
import torch.distributed.checkpoint.state_dict
import torch.distributed.rendezvous
import torch.utils.tensorboard
import torchvision  # noqa: F401
import worlds  # noqa: F401

parameter = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([parameter], lr=1.0)
optimizer.step()  # torch imports some of itself only here
