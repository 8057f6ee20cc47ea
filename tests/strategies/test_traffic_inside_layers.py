"""The traffic of tensor parallelism that docs/strategies.md promises, counted."""

import pytest
from traffic import SAMPLES, traffic

BLOCKS = 2  # of the small ViT
PAIRS = 2 * BLOCKS  # of layers: those of attention and those of the MLP
WIDTH = 16
TOKENS = SAMPLES * 16 * WIDTH  # numbers: 16 tokens for each sample
# Numbers of one sample that LeNet's layers get and return.
INPUTS = {"conv1": 28 * 28, "conv2": 20 * 13 * 13, "fc1": 50 * 4 * 4, "fc2": 128}
OUTPUTS = {"conv1": 20 * 26 * 26, "conv2": 50 * 9 * 9, "fc1": 128, "fc2": 10}


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("case", ["tp", "mesh tp=2"])
def test_tensor_parallelism_sums_the_tokens_twice_for_each_pair_of_layers(
    case, accumulate, monkeypatch
):
    sent, _, _ = traffic(monkeypatch, case, 2, accumulate=accumulate, name="vit")
    assert sent.elements == {"all_reduce": 2 * PAIRS * TOKENS}
    assert sent.calls == {"all_reduce": accumulate * 2 * PAIRS}


@pytest.mark.parametrize("accumulate", [1, 4])
def test_replicas_of_tp_sum_their_shards_of_the_gradients_once_in_a_step(accumulate, monkeypatch):
    """On CPUs one more number is summed: whether a parameter was not used on some rank."""
    sent, strategy, size = traffic(monkeypatch, "tp tp=2", 4, accumulate=accumulate, name="vit")
    pairs = 2 * PAIRS * TOKENS
    replicated = sum(
        parameter.numel()
        for parameter in strategy.module.parameters()
        if not hasattr(parameter, "full_tensor")
    )
    replicated_or_half = replicated + (size - replicated) // 2
    assert 0 < replicated < size
    assert sent.elements == {"all_reduce": pairs + replicated_or_half + 1}
    assert sent.calls == {"all_reduce": accumulate * 2 * PAIRS + 2}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_sequence_parallelism_sends_as_much_and_the_tokens_once_at_both_ends(
    accumulate, monkeypatch
):
    """An all_reduce of n is an all_gather and a reduce_scatter of n.

    The tokens are gathered after the last block, and their gradient before the first one. Each rank
    has seen some of the tokens, so the gradients of what is not divided are summed: in each block
    those of two normalizations and of the biases of two layers.
    """
    replicated = BLOCKS * (2 * 2 * WIDTH + 2 * WIDTH)
    case = "mesh tp=2 sequence_parallel=true"
    sent, _, _ = traffic(monkeypatch, case, 2, accumulate=accumulate, name="vit")
    assert sent.elements == {
        "all_gather": 2 * PAIRS * TOKENS + 2 * TOKENS,
        "reduce_scatter": 2 * PAIRS * TOKENS,
        "all_reduce": replicated,
    }
    assert sent.calls["all_reduce"] == 1


@pytest.mark.parametrize("accumulate", [1, 2])
def test_layer_by_layer_gathers_each_output_and_sums_the_gradient_of_each_input(
    accumulate, monkeypatch
):
    """Each rank computes half of the channels or units of each layer of LeNet.

    The images need no gradient.
    """
    sent, strategy, _ = traffic(monkeypatch, "tp", 2, accumulate=accumulate)
    assert list(strategy.layers) == ["conv1.0", "conv2.0", "fc1.1", "fc2"]
    outputs = sum(OUTPUTS.values())
    inputs = sum(INPUTS.values()) - INPUTS["conv1"]
    assert sent.elements == {"all_gather": SAMPLES * outputs, "all_reduce": SAMPLES * inputs}
    assert sent.calls == {"all_gather": accumulate * 4, "all_reduce": accumulate * 3}
