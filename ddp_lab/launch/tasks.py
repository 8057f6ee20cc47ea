"""Several tasks of srun or mpirun that are not ranks: each would train a run or start ranks of its own, all in one place."""

import os
import sys
from collections.abc import Mapping

from ddp_lab.launch.command import REFUSED
from ddp_lab.world.process import env_int

# The number of tasks, and which one this is. SLURM_NTASKS is set in the shells of sbatch and salloc, too.
TASKS = {
    "SLURM_STEP_NUM_TASKS": ("srun", "SLURM_PROCID"),
    "OMPI_COMM_WORLD_SIZE": ("mpirun", "OMPI_COMM_WORLD_RANK"),
    "PMI_SIZE": ("mpirun", "PMI_RANK"),
}


def refuse_tasks(options: Mapping[str, str]) -> None:
    """Check that this process is not one of several tasks, unless it is a rank, or each task starts the ranks of a machine.

    Args:
        options: of the launch of ranks.

    Raises:
        SystemExit: It is, with exit code 2. The first task reports it.
    """
    if "RANK" in os.environ:
        return
    several = options.get("nnodes", "1").split(":")[-1] != "1"  # machines
    for variable, (program, number) in TASKS.items():
        tasks = env_int(variable, 1)
        allowed = env_int("SLURM_STEP_NUM_NODES", tasks) if program == "srun" else tasks
        if tasks > (allowed if several else 1):
            if env_int(number, 0) == 0:
                line = f"ddp-lab train --nproc {tasks} OVERRIDES"
                print(
                    f"error: {program} started {tasks} tasks ({variable}={tasks}), which are not ranks: each would train a run "
                    f"or start ranks of its own. On one machine start one task: `{line}`. On several, start one task on each: "
                    "`ddp-lab train --nproc N --nnodes M --rdzv-endpoint HOST:PORT OVERRIDES`, or use `ddp-lab submit`",
                    file=sys.stderr,
                )
            sys.exit(REFUSED)
