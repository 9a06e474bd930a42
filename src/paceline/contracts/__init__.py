"""JSON contracts that other tools speak: two formats of a plan, its phases, and four skills.

No other package but `cli/` imports this one.
"""
