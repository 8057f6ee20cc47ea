"""What keeps a run from being lost: checkpoints, the watchdog, preemption, the run directory. No arithmetic here."""
