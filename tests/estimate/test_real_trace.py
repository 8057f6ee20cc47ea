"""Models that read values are traced on a few real samples, with the result that a complete batch would have."""

import pytest
import torch
from training import MODELS, make_model

from ddp_lab.estimate.copies import fake_copy, fake_mode, real_copy
from ddp_lab.estimate.real_trace import trace_values
from ddp_lab.estimate.trace import trace

BATCH = 48


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("name", ["lenet", "narrow", "vit"])
def test_few_real_samples_give_the_record_of_a_complete_batch(name, precision):
    model, (_, channels, size) = make_model(name, 0), MODELS[name]
    sizes = {path: tensor.shape for path, tensor in model.named_parameters()}
    with fake_mode():
        copied = fake_copy(model, sizes, None).train()
        images = torch.empty(BATCH, channels, size, size)
        expected, wanted = trace(copied, list(copied.parameters()), images, precision == "bf16")
    before = [tensor.clone() for tensor in model.state_dict().values()]
    found, output = trace_values(
        lambda: real_copy(model, sizes, None).train(),
        torch.empty(BATCH, channels, size, size, device="meta"),
        precision == "bf16",
    )
    assert (output.shape, output.stride(), output.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
    assert found.forward_peak == pytest.approx(expected.forward_peak, rel=0.01)
    assert found.backward_peak == pytest.approx(expected.backward_peak, rel=0.01)
    assert found.saved == pytest.approx(expected.saved, rel=0.01)
    assert (found.input, found.output, found.gradients) == (expected.input, expected.output, expected.gradients)
    for one, other in ((found.forward, expected.forward), (found.backward, expected.backward)):
        assert [each.kind for each in one] == [each.kind for each in other]
        assert sum(each.flops for each in one) == pytest.approx(sum(each.flops for each in other), rel=1e-6)
        assert sum(each.nbytes for each in one) == pytest.approx(sum(each.nbytes for each in other), rel=0.01)
    assert all(map(torch.equal, before, model.state_dict().values())), "the trace changes a copy"
