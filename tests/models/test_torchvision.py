"""Models of torchvision: `model=torchvision model.name=...`."""

import hashlib
import re

import pytest
import torch
from configs import config
from launches import SMALL, main_in_world, only_run
from torch import nn
from worlds import run_world

from ddp_lab.config.check import check
from ddp_lab.config.errors import ConfigError, NodeError
from ddp_lab.models.make import build_model, make_model
from ddp_lab.models.torchvision_models import download, find_weights, rename, torchvision_model
from ddp_lab.models.trial import Trial
from ddp_lab.run.build_model import model_spec
from ddp_lab.strategies.units import find_units
from ddp_lab.world.runtime import Runtime

TARGET = "ddp_lab.models.torchvision_models.torchvision_model"


def on_meta(name: str, **options) -> nn.Module:
    with torch.device("meta"):
        return torchvision_model(
            **{"in_channels": 3, "image_size": 224, "num_classes": 7, "name": name, **options}
        )


def made(name: str, image_size: int, in_channels: int = 3) -> nn.Module:
    shape = {"in_channels": in_channels, "image_size": image_size, "num_classes": 7}
    trial = Trial(torch.rand(2, in_channels, image_size, image_size), lambda logits: None)
    return make_model(
        model_spec({"_target_": TARGET, "name": name}, shape), Runtime("cpu"), 0, trial
    ).model


def names() -> list[str]:
    from torchvision import models

    return models.list_models(module=models)


@pytest.mark.slow
def test_every_model_has_the_classes_and_channels_of_the_data():
    for name in names():
        if re.search(r"(16|32|128)gf", name):
            # RegNet reads tensors in its constructor, so it is made on the CPU: the small ones are
            # enough
            continue
        with torch.device("cpu" if name.startswith("regnet") else "meta"):
            model = torchvision_model(1, 224, 7, name)
        # the head's weight, and its bias
        assert sum(tensor.size(0) == 7 for tensor in model.parameters()) in (1, 2), name
        first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
        assert first.weight.size(1) == first.in_channels == first.groups == 1, name


def test_grey_images_give_the_same_logits_as_three_equal_channels():
    torch.manual_seed(0)
    colour = made("squeezenet1_1", 32).eval()
    torch.manual_seed(0)
    grey = made("squeezenet1_1", 32, in_channels=1).eval()
    images = torch.rand(2, 1, 32, 32)
    assert torch.allclose(grey(images), colour(images.expand(-1, 3, -1, -1)), atol=1e-6)


@pytest.mark.parametrize(
    ("name", "image_size", "in_channels", "message"),
    [
        (
            "resnet50d",
            32,
            3,
            "resnet50d: must be one of torchvision's 8. classification models, for example "
            "resnet50,",
        ),
        (
            "resnet18",
            32,
            2,
            "resnet18: expects images of 3 channels, or of 1 \\(grey\\), got 2. Use such images, "
            "or model=own",
        ),
        (
            "vit_b_16",
            30,
            3,
            "vit_b_16: does not accept 30x30 pixels: Input shape indivisible by patch size",
        ),
        ("maxvit_t", 50, 3, "maxvit_t: does not accept 50x50 pixels: "),
        ("squeezenet1_1", 8, 3, "squeezenet1_1: failed for images of 3x8x8 .* they are too small"),
    ],
)
def test_unknown_names_channels_and_sizes_are_refused(name, image_size, in_channels, message):
    with pytest.raises(ConfigError, match=f"^model.name={message}"):
        made(name, image_size, in_channels)


def test_options_of_the_constructor_are_passed():
    assert on_meta("resnet18", zero_init_residual=True).layer1[0].bn2.weight is not None
    with pytest.raises(
        ConfigError,
        match=r"model.name=resnet18: does not accept 224x224 pixels, colour=red: .*unexpected",
    ):
        on_meta("resnet18", colour="red")
    check(config("model=torchvision", "model.name=vgg11", "+model.dropout=0.3"))
    with pytest.raises(ConfigError, match=r"model\.name: is missing; it must be a string"):
        check(config("model=torchvision"))


def test_units_of_fsdp_are_the_blocks_of_a_model():
    resnet = on_meta("resnet18")
    vit = on_meta("vit_b_16")
    blocks = [
        block
        for layer in (resnet.layer1, resnet.layer2, resnet.layer3, resnet.layer4)
        for block in layer
    ]
    assert find_units(resnet) == [*blocks, resnet.conv1, resnet.bn1, resnet.fc]
    assert find_units(vit) == [*vit.encoder.layers, vit.conv_proj, vit.encoder, vit.heads]
    mobile = on_meta("mobilenet_v3_small")
    assert find_units(mobile) == [*mobile.features, mobile.classifier]


def test_names_in_torchvision_files_are_adapted_and_auxiliary_classifiers_left_out():
    state = {
        "features.denseblock1.denselayer1.norm.1.weight": 1,
        "fc.weight": 2,
        "aux1.conv.weight": 3,
        "AuxLogits.fc.bias": 4,
    }
    assert rename(state) == {"features.denseblock1.denselayer1.norm1.weight": 1, "fc.weight": 2}
    for name in ("densenet121", "googlenet", "inception_v3"):
        state = on_meta(name).state_dict()
        assert rename(state).keys() == state.keys()


def test_weights_are_downloaded_once_if_their_hash_is_that_of_their_name(tmp_path):
    digits = hashlib.sha256(b"weights").hexdigest()[:8]
    cache = tmp_path / "cache"
    source = tmp_path / f"net-{digits}.pth"
    wrong = tmp_path / "net-0123abcd.pth"
    source.write_bytes(b"weights")
    assert download(source.as_uri(), cache, "V1") == str(cache / source.name)
    source.unlink()
    assert download(source.as_uri(), cache, "V1") == str(cache / source.name), (
        "it was downloaded again"
    )
    remedy = (
        f"Download {wrong.as_uri()} elsewhere and copy it to {cache}/{wrong.name}, or set "
        "model.weights to a file"
    )
    for reason in ("No such file", "invalid hash value"):
        with pytest.raises(
            NodeError, match=f"V1: is not on .* and could not be downloaded .*{reason}.* {remedy}"
        ):
            download(wrong.as_uri(), cache, "V1")
        wrong.write_bytes(b"other")
    assert [path.name for path in cache.iterdir()] == [source.name]


def test_unknown_weights_of_torchvision_are_refused():
    names = "IMAGENET1K_V1, IMAGENET1K_V2, DEFAULT"
    with pytest.raises(
        ConfigError,
        match=f"model.weights=V9: must be the path of a file, or one of .* for resnet50: {names}$",
    ):
        find_weights("resnet50", "V9")


@pytest.mark.slow
def test_torchvision_model_trains_from_weights_of_other_classes(tmp_path):
    shape = {"in_channels": 3, "image_size": 32, "num_classes": 5}
    torch.save(
        build_model(model_spec({"_target_": TARGET, "name": "squeezenet1_1"}, shape)).state_dict(),
        tmp_path / "five.pth",
    )
    data = [
        *SMALL[:3],
        "data.dataset.image_size=32",
        "batch_size=24",
        "epochs=1",
        "strategy=ddp",
        f"runs_dir={tmp_path}/runs",
    ]
    chosen = ["model=torchvision", "model.name=squeezenet1_1", f"model.weights={tmp_path}/five.pth"]
    run_world(2, main_in_world, *data, *chosen)
    log = (only_run(tmp_path / "runs") / "train.log").read_text()
    assert (
        log.count(
            "classifier.1.weight, classifier.1.bias: initialised anew, for 10 classes instead of 5"
        )
        == 1
    )
    assert "epoch 1: train loss " in log
