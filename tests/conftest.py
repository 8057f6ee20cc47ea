import pytest
import torch
import torch.distributed as dist


@pytest.fixture(autouse=True)
def no_process_group_leaks():
    yield
    leaked = dist.is_initialized()
    if leaked:
        dist.destroy_process_group()
    assert not leaked, "the test left a process group open"


@pytest.fixture(autouse=True)
def need_gpus(request):
    """`@pytest.mark.gpu(n)` skips where fewer than n GPUs are visible."""
    marker = request.node.get_closest_marker("gpu")
    if marker and torch.cuda.device_count() < marker.args[0]:
        pytest.skip(f"needs {marker.args[0]} GPUs, {torch.cuda.device_count()} are visible")
