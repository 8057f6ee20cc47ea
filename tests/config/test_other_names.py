"""Names of other programs for keys and values: the message has what there is here."""

import pytest
from configs import config
from launches import SMALL, launch, refusal_in_world
from omegaconf import OmegaConf

from ddp_lab.config.check import check
from ddp_lab.config.errors import ConfigError
from ddp_lab.config.other_names import ADVICE, INSTEAD, NAMES, RENAMED, VALUES
from ddp_lab.config.overrides import check_overrides, find_groups

MISTAKES = {
    "max_epochs=5": "max_epochs=5: there is no such key. Use epochs=5; ddp-lab train --help",
    "num_epochs=5": "num_epochs=5: there is no such key. Use epochs=5",
    "lr=0.1": "lr=0.1: there is no such key. Use optimizer.lr=0.1",
    "+learning_rate=0.1": "learning_rate=0.1: there is no such key. Use optimizer.lr=0.1",
    "optimizer.learning_rate=1": "learning_rate=1: there is no such key. Use optimizer.lr=1",
    "gradient_accumulation_steps=4": "there is no such key. Use accumulate=4",
    "lr_find=true": "lr_find=true: there is no such key. Nothing finds a learning rate before the "
    "run. Use a sweep",
    "fp16=true": "fp16=true: there is no such key. Use precision=bf16 or precision=fp16, mixed",
    "amp=true": "Use precision=bf16",
    "nproc=4": "Start ranks with `ddp-lab train --nproc N strategy=ddp`",
    "gradient_checkpointing=true": "Use checkpoint_activations=block",
    "dataset=cifar10": "dataset=cifar10: there is no such key. Use data=cifar10",
    "lr_scheduler=cosine": "Use scheduler=cosine",
    "per_device_train_batch_size=8": "Use scaling=weak",
    "precision=fp8": "precision=fp8: must be float32 or bf16 or fp16. 8-bit floats are not supp",
    "precision=16": "precision=16: must be float32 or bf16 or fp16. Use fp16, which",
    "precision=bf16-mixed": "precision=bf16-mixed: must be float32 or bf16 or fp16. Use bf16",
    "precision=int8": "precision=int8: must be float32 or bf16 or fp16\n",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_name_of_another_program_is_answered_with_what_there_is(line):
    code, errors = refusal_in_world(line)
    assert (code, errors.count("error: ")) == (2, 1), errors
    assert MISTAKES[line] in errors


def test_name_of_another_program_is_one_message_of_several_ranks():
    code, output = launch("python -m ddp_lab train --nproc 2 strategy=ddp max_epochs=5")
    assert (code, output.count("Use epochs=5; ")) == (2, 1), output


def test_keys_that_are_advised_exist():
    groups = find_groups(None)
    cfg = config("strategy=ddp", "data=tokens", "data.root=x")
    missing = [
        key
        for key in RENAMED
        if key not in groups and OmegaConf.select(cfg, key, default="none") == "none"
    ]
    assert not missing


def test_no_known_name_is_a_key_or_has_two_meanings():
    cfg = config("data=tokens", "data.root=x")
    assert not [name for name in {**NAMES, **ADVICE} if OmegaConf.select(cfg, name) is not None]
    assert not NAMES.keys() & ADVICE.keys()
    for table in (RENAMED, INSTEAD):
        names = [name for text in table.values() for name in text.split()]
        assert len(names) == len({*names})


@pytest.mark.parametrize("name", [*NAMES, *ADVICE])
def test_every_known_name_is_answered(name):
    with pytest.raises(ConfigError) as error:
        check_overrides([f"{name}=3"])
    advice = f"Use {NAMES[name]}=3" if name in NAMES else ADVICE[name]
    assert str(error.value).startswith(f"{name}=3: there is no such key. {advice}; ")


@pytest.mark.parametrize("value", VALUES["precision"])
def test_every_known_value_is_answered(value):
    cfg = config(f"precision={value}")
    with pytest.raises(ConfigError, match=r"must be float32 or bf16 or fp16\. .*[Uu]se "):
        check(cfg)


BUDGETS = {
    "max_steps=0": "max_steps=0: must be an integer of at least 1 or null",
    "max_tokens=0": "max_tokens=0: must be an integer of at least 1 or null",
    "max_minutes=0": "max_minutes=0: must be a number above 0 or null",
    "epochs=0": "epochs=0: must be an integer of at least 1 or null",
    "epochs=null": "epochs=null: the run would have no end. Set epochs, or one of max_steps, ",
    "max_tokens=1000": "max_tokens=1000: the samples of this dataset are no tokens. Use max_steps",
    "max_tokens=1000 max_steps=3": "max_tokens=1000: the samples of this dataset are no tokens",
    "max_steps=3 warmup_steps=3": "warmup_steps=3: must be less than the length of the run, 3 "
    "steps",
    "warmup_steps=3 warmup_epochs=1": "warmup_steps=3: warmup_epochs=1 is set, too. Use one of",
    "max_steps=3 epochs=1 num_steps=4": "num_steps=4: there is no such key. Use max_steps=4",
}


@pytest.mark.parametrize("line", BUDGETS)
def test_budgets_that_contradict_are_one_message(line):
    code, errors = refusal_in_world(f"{' '.join(SMALL)} device=cpu {line}")
    assert (code, errors.count("error: ")) == (2, 1), errors
    assert BUDGETS[line] in errors
