"""One node of a job before it is started: what it has, whom it reaches, what it is set to.

`facts.py` says what is kept, `probe.py` gets it; both import little, and torch never. What it means
for a job is judged in `check/preflight/`, so that recorded facts of other machines are tests.
"""
