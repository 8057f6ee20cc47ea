"""The arguments of a TrainJob: what Kubernetes makes of them is what the user has given."""

import re

import pytest

from ddp_lab.launchers.schedulers import trainjob

ENVIRONMENT = {"HOME": "/root", "X": "y"}


def expand(argument: str) -> str:
    """Return an argument as a container gets it, by the rules of Kubernetes.

    $$ becomes a dollar sign, $(NAME) the value of a variable that is set; anything else is
    unchanged.
    https://kubernetes.io/docs/tasks/inject-data-application/define-command-argument-container/
    """

    def replace(match: re.Match) -> str:
        if match[0] == "$$":
            return "$"
        return ENVIRONMENT.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", replace, argument)


@pytest.mark.parametrize(
    ("argument", "sent"),
    [
        ("runs_dir=/a/$(HOME)", "runs_dir=/a/$$(HOME)"),
        ("runs_dir=/a/$X", "runs_dir=/a/$$X"),
        ("runs_dir=$$(HOME)", "runs_dir=$$$$(HOME)"),
        ("runs_dir=${oc.env:HOME}/$", "runs_dir=$${oc.env:HOME}/$$"),
        ("optimizer.lr=0.1", "optimizer.lr=0.1"),
    ],
)
def test_dollar_signs_reach_the_container_as_they_were_given(argument, sent):
    manifest = trainjob("mine", 1, 0, 1, None, [argument])
    last = manifest["spec"]["trainer"]["args"][-1]
    assert last == sent
    assert expand(last) == argument
