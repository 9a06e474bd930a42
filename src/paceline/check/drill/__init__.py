"""What a drill proves: the ledger, the oracle, the fault matrix and random schedules."""
