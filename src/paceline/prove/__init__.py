"""Is it so: the runtime's own code on fake ranks, counted byte for byte.

`paceline.prove.proof` and `paceline.prove.compare` import no torch and may be used anywhere; the
rest runs in a helper process, `python -m paceline.prove`.
"""
