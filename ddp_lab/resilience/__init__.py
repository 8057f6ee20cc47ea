"""Recovery from failures: checkpoints, the watchdog, preemption, the run directory. No arithmetic here."""
