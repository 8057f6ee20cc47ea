"""Recovery from failures: the watchdog, preemption, the run directory. No arithmetic here."""
