"""What each stage of a pipeline gets and returns, for a micro-batch of any shape and dtype."""

from collections.abc import Callable

import torch

from ddp_lab.config.errors import ConfigError
from ddp_lab.models.boundaries import Boundaries, Form
from ddp_lab.models.chain import Chain
from ddp_lab.models.outputs import require_samples
from ddp_lab.strategies.schedules import PipelinePlan
from ddp_lab.world.device import half_dtype

# The form of what a rank holds, for the number of the block before which it is, and the form of the
# complete activation.
OwnPart = Callable[[int, Form], Form]


class StageForms:
    """The forms of the activations between the stages of a pipeline.

    Every rank computes all of them from the inputs, which the ranks of a pipeline have in common,
    so that nothing is sent for it, and all of them refuse the same inputs.

    Args:
        chain: the complete model. It may be changed afterwards.
        plan: of the pipeline.
        samples: size of a full batch of the pipeline.
        precision: float32, in which activations are sent as they are; or bf16 or fp16, in which
            those between the stages are sent.
        own_part: of an activation, where ranks share it; None: every rank has all of it.

    Raises:
        ConfigError: the chain does not support samples of its `input_shape`, or cannot be cut where
            the plan does.
    """

    def __init__(
        self,
        chain: Chain,
        plan: PipelinePlan,
        samples: int,
        precision: str,
        own_part: OwnPart | None = None,
    ):
        self.plan = plan
        self.own_part = own_part
        self.sent_dtype = half_dtype(precision)
        self.outside = torch.get_default_dtype()
        size = -(-samples // plan.num_microbatches)
        example = Form((size, *chain.input_shape), chain.input_dtype or self.outside)
        self.boundaries = Boundaries(chain, self._as_computed(example))
        self.of(example)

    def of(self, inputs: Form) -> list[Form]:
        """Return the form of the inputs, the activation before each other stage, and the outputs.

        Args:
            inputs: of a micro-batch.

        Raises:
            ConfigError: the model does not support them, or returns outputs of other samples, or an
                activation between two stages has no gradient.
        """
        activations = self.boundaries.of(self._as_computed(inputs))
        require_samples(activations[-1].shape, inputs.shape[0])
        if self.own_part is not None:
            activations = [self.own_part(index, form) for index, form in enumerate(activations)]
        between = [
            self._between(part.start, activations[part.start]) for part in self.plan.parts.parts[1:]
        ]
        outputs = activations[-1]
        if self.sent_dtype is not None:
            outputs = Form(outputs.shape, self.outside)
        return [inputs, *between, outputs]

    def _between(self, start: int, form: Form) -> Form:
        """Return the form of what is sent to the stage that begins with block number `start`."""
        if not form.dtype.is_floating_point and not form.dtype.is_complex:
            raise ConfigError(
                f"strategy.cut: the model cannot be cut before {self.plan.parts.names[start]}, "
                f"because it gets {form}, which has no gradient. Name other blocks in strategy.cut"
            )
        return form if self.sent_dtype is None else Form(form.shape, self.sent_dtype)

    def _as_computed(self, inputs: Form) -> Form:
        """Return the form with which shapes are computed.

        The meta device has no autocast, which would cast half precision.
        """
        is_half = inputs.dtype in (torch.bfloat16, torch.float16)
        if self.sent_dtype is not None and is_half:
            return Form(inputs.shape, self.outside)
        return inputs
