"""How many CPUs a process may use."""

from pathlib import Path

import pytest

from ddp_lab.world.cpus import cpu_quota


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2.5),
        # the smallest limit of all groups around it counts
        (
            {
                "proc/self/cgroup": "0::/job/step\n",
                "sys/fs/cgroup/job/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/job/step/cpu.max": "800000 100000\n",
            },
            4.0,
        ),
        # the path of the host, which a container does not see
        (
            {
                "proc/self/cgroup": "0::/../pod\n",
                "sys/fs/cgroup/cpu.max": "100000 50000\n",
            },
            2.0,
        ),
        # version 1
        (
            {
                "proc/self/cgroup": "5:memory:/a\n4:cpu,cpuacct:/a\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
    ],
)
def test_quota_is_that_of_the_cgroups(files, expected, tmp_path):
    for name, text in files.items():
        path: Path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert cpu_quota(tmp_path) == expected
