import sys

import pytest
import torch
from configs import CONF, config
from omegaconf import OmegaConf

from ddp_lab.config.check import check
from ddp_lab.config.errors import ConfigError
from ddp_lab.launchers.recorded_config import to_record
from ddp_lab.models.make import build_model
from ddp_lab.run.build_data import make_source
from ddp_lab.run.build_model import model_spec
from scripts import configuration

OPTIMIZER = "optimizer._target_=torch.optim."
TRACKERS = (
    "must be none, or one or several of tensorboard, wandb, mlflow and import paths of classes"
)
TRACKER = "tracker_options"
LINES = f"{TRACKER}.own_trackers.Lines"
GROUPS = ["data", "model", "strategy", "task", "loss", "optimizer", "scheduler", "experiment"]
OPTIONS = [(group, path.stem) for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))]
# of the tests of models, data, and tasks
OTHERS = {
    "own",
    "torchvision",
    "timm",
    "transformers",
    "tensors",
    "text",
    "hf",
    "gpt",
    "gpt2",
    "default",
}
OPTIONS = [
    (group, name) for group, name in OPTIONS if name not in OTHERS and not name.startswith("vit_")
]


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_passes_the_check_and_its_data_and_model_are_made(group, option):
    cfg = config(f"{group}={option}")
    check(cfg)
    assert callable(make_source(OmegaConf.to_container(cfg.data, resolve=True), cfg.seed).load)
    model = build_model(
        model_spec(cfg.model, {"in_channels": 3, "image_size": 28, "num_classes": 10})
    )
    assert model(torch.randn(2, 3, 28, 28)).shape == (2, 10)


def test_recorded_config_keeps_references_and_resolves_resolvers(monkeypatch):
    monkeypatch.setenv("SOMEWHERE", "/far")
    cfg = config(
        "data=mnist", "data.root=${oc.env:SOMEWHERE}", "optimizer.momentum=${warmup_epochs}"
    )
    record = OmegaConf.create(to_record(cfg))
    monkeypatch.delenv("SOMEWHERE")
    assert OmegaConf.to_container(record, resolve=True) == OmegaConf.to_container(record) | {
        "data": {**record.data, "dataset": {**record.data.dataset, "root": "/far"}},
        "optimizer": {**record.optimizer, "momentum": 0},
    }
    record.data.root = "/near"
    assert record.data.dataset.root == "/near"


def test_help_names_every_strategy():
    template = OmegaConf.load(CONF / "hydra/help/ddp_lab.yaml").template
    listed = template.split("Strategies\n")[1].split("\n\n")[0]
    names = [line.split()[0] for line in listed.splitlines()]
    assert sorted(names) == sorted(option for group, option in OPTIONS if group == "strategy")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=-1", "seed=-1: must be an integer from 0 to"),
        ("epochs=0", "epochs=0: must be an integer of at least 1"),
        ("batch_size=null", "batch_size=null: must be an integer of at least 1"),
        (
            "scheduler=multi_step scheduler.milestones=[0]",
            "scheduler.milestones=[0]: must be a list, each a number above 0",
        ),
        ("device=gpu", "device=gpu: must be auto or mps or cpu, cuda or cuda:N"),
        ("precision=fp8", "precision=fp8: must be float32 or bf16"),
        ("name=a/b", "name=a/b: must be a plain directory name"),
        ("resume=3", "resume=3: must be auto, never or the path of an existing checkpoint"),
        (
            "data=folder data.image_size=null",
            "data.image_size=null: must be an integer of at least 1",
        ),
        ("data.std=[0]", "data.std=[0]: must be a list, each a number above 0"),
        ("optimizer.lr=nan", "optimizer.lr=nan: must be a number above 0"),
        ("optimizer.momentum=1", "optimizer.momentum=1: must be a number from 0 to below 1"),
        (
            "optimizer.nesterov=true optimizer.momentum=0",
            f"{OPTIMIZER}SGD: ValueError: Nesterov momentum requires a momentum",
        ),
        (
            "strategy=scratch strategy.algorithm=magic",
            "strategy.algorithm=magic: must be star or per_tensor or flat or ",
        ),
        (
            "strategy=split strategy.devices=[tpu]",
            "strategy.devices=['tpu']: must be null or a list, each cpu, cuda or cuda:N",
        ),
        (
            "strategy=pipeline strategy.schedule=zigzag",
            "strategy.schedule=zigzag: must be gpipe or 1f1b or interleaved1f1b or "
            "interleavedzerobubble",
        ),
        (
            "strategy=pipeline strategy.cut=fc1",
            "strategy.cut=fc1: must be null or a list, each the name of a block",
        ),
        (
            "strategy=mesh strategy.schedule=interleavedzerobubble",
            "strategy.schedule=interleavedzerobubble: must be gpipe or 1f1b or interleaved1f1b",
        ),
        ("+colour=red", "colour=red: there is no such key"),
        (
            "+strategy.colour=red",
            "strategy.colour=red: there is no such key; allowed: strategy.find_unused_parameters",
        ),
        (
            "model=book_resnet18 ~model.init_std",
            "model.init_std: is missing; it must be a number above 0 or null",
        ),
        ("~seed", "seed: is missing; it must be an integer from 0"),
        (
            "strategy._target_=ddp_lab.nothing",
            "strategy._target_=ddp_lab.nothing: must be the name of a class or function",
        ),
        ("max_grad_norm=inf", "max_grad_norm=inf: must be a number above 0 or null"),
        ("checkpoint.keep=1", "checkpoint.keep=1: must be an integer of at least 2"),
        ("compile=fast", "compile=fast: must be true or false or auto"),
        (
            "inject=crash",
            "inject=crash: must be of the form KIND@rank=R,step=S, KIND one of crash, raise,",
        ),
        (
            "optimizer=adamw +optimizer.betas=[a,b]",
            f"{OPTIMIZER}AdamW: TypeError: '<=' not supported between instances of 'float' and "
            "'str'; it was given lr=",
        ),
        (
            "optimizer=adamw +optimizer.foreach=true +optimizer.fused=true",
            f"{OPTIMIZER}AdamW: RuntimeError: `fused` and `foreach` cannot be `True` together; it "
            "was given lr=0.001, ",
        ),
        *(
            (
                f"{OPTIMIZER}{name} ~optimizer.momentum ~optimizer.nesterov{more}",
                f"{OPTIMIZER}{name}: {why}",
            )
            for name, more, why in (
                (
                    "SparseAdam",
                    " ~optimizer.weight_decay",
                    "RuntimeError: SparseAdam does not support dense gradients",
                ),
                ("Muon", "", "ValueError: Muon only supports 2D parameters"),
            )
        ),
        (
            f"{OPTIMIZER}LBFGS ~optimizer.momentum ~optimizer.nesterov ~optimizer.weight_decay",
            "optimizer: the step of LBFGS needs the argument closure, by which it would compute "
            "the loss several times",
        ),
        (
            "loss=own loss._target_=own_losses.scaled +loss.scale=big",
            "loss.scale=big: must be a number",
        ),
        (
            "loss=own loss._target_=own_losses.Focal +loss.reduction=sum",
            "loss.reduction=sum: there is no such key",
        ),
        ("tracker=wanb", f"tracker=wanb: {TRACKERS}"),
        ("tracker=[none,wandb]", f"tracker=['none', 'wandb']: {TRACKERS}"),
        ("tracker=[wandb,wandb]", f"tracker=['wandb', 'wandb']: {TRACKERS}"),
        (
            "tracker=nowhere.Tracker",
            "tracker=nowhere.Tracker: must be the name of a class or function that Python can "
            "import",
        ),
        (
            "tracker=own_trackers.Incomplete",
            "tracker=own_trackers.Incomplete: the class has no method log_media and no finish; a "
            "tracker has log_metrics, log_",
        ),
        (f"tracker=own_trackers.Lines +{LINES}.file=1", f"{LINES}.file=1: must be a string"),
        (
            f"tracker=own_trackers.Lines +{LINES}.fil=a",
            f"{LINES}.fil=a: there is no such key; did you mean {LINES}.file?",
        ),
        (
            f"+{TRACKER}.wanb.project=a",
            f"{TRACKER}.wanb={{'project': 'a'}}: there is no such key; did you mean "
            f"{TRACKER}.wandb?",
        ),
        (
            f"tracker=wandb {TRACKER}.wandb.mode=of",
            f"{TRACKER}.wandb.mode=of: must be online or offline or disabled or null",
        ),
        ("epochs=0 ~data.root", "data.root: is missing"),
        ("strategy._target_=ddp_lab.nothing optimizer.lr=0", "optimizer.lr=0: must be"),
    ],
)
def test_invalid_override_is_reported_with_key_and_allowed_values(override, message):
    with pytest.raises(ConfigError) as error:
        check(config(*override.split(" ")))
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_missing_package_of_a_tracker_is_refused_with_its_extra(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError) as error:
        check(config(f"tracker={package}"))
    message = (
        f"tracker={package}: needs the package {package}. Use pip install 'ddp_lab[{package}]', or "
        "tracker=none"
    )
    assert str(error.value) == message


def test_configuration_document_is_up_to_date():
    written = configuration.FILE.read_text()
    assert written == configuration.render(), (
        "docs/configuration.md is out of date: run `python scripts/configuration.py`"
    )
